"""Pins pass@k and majority@k in evaluation.json and in the registry: the numbers per prompt, compared by prompt.

Without it a promoted model could be shown with the pass@k of another one.
"""

import pytest

from rollouts.tasks.candidate import render_comparison
from rollouts.tasks.measures import compare_measures, describe_measures

BEFORE = {"samples_per_prompt": 2, "num_right": [0, 1, 0, 2] * 10, "majority": [0.0, 0.5, 0.0, 1.0] * 10}
AFTER = {"samples_per_prompt": 2, "num_right": [1, 2, 0, 2] * 10, "majority": [0.5, 1.0, 0.0, 1.0] * 10}


def test_a_candidate_has_its_measures_beside_those_of_its_baseline() -> None:
    measures = compare_measures(BEFORE, AFTER)
    assert list(measures) == ["pass@1", "pass@2", "majority@2"]
    assert (measures["pass@2"]["against_mean"], measures["pass@2"]["mean"]) == (0.5, 0.75)
    assert measures["pass@2"]["difference"] == pytest.approx(0.25)
    assert measures["pass@2"]["p_value"] < 0.01 and measures["pass@2"]["difference_low"] > 0
    table = render_comparison(
        "small-2",
        {**measures["pass@1"], "against": "small-1", "measures": measures, "sentence": "It is better."},
    )
    assert "| small-2, pass@2 | 0.750 |" in table and "| small-1, pass@2 | 0.500 |" in table


def test_an_evaluation_by_hand_describes_one_model_or_two() -> None:
    alone = describe_measures({"model": AFTER}, None)
    assert alone["pass@2"]["models"]["model"]["mean"] == 0.75 and alone["pass@2"]["comparison"] is None
    both = describe_measures({"baseline": BEFORE, "model": AFTER}, ("baseline", "model"))
    assert both["majority@2"]["comparison"]["difference"] == pytest.approx(0.25)


@pytest.mark.parametrize("older", [{}, {"scores": [1.0]}])
def test_scores_of_one_completion_have_no_measures(older: dict[str, object]) -> None:
    assert compare_measures(older, AFTER) == {} and compare_measures(AFTER, older) == {}
    assert describe_measures({"baseline": older, "model": AFTER}, ("baseline", "model")) == {}
