"""Pins that what models are compared on can show a difference: enough rows, once each.

Without it a run ends with a verdict that nothing could have changed, or that copies of rows made.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.checks.compared_rows import (
    check_num_rows,
    check_other_rows,
    check_promotion,
    warn_of_repeated_rows,
)
from rollouts_core.comparison import compare_paired
from rollouts_core.config import Config, DataConfig, EvaluationConfig
from rollouts_core.errors import ConfigError, DataError
from tests.rollouts_core.checks.configurations import with_rollout


@pytest.mark.parametrize("max_p_value", [0.01, 0.05, 0.2, 1.0])
def test_so_few_rows_that_no_difference_could_count_are_refused(max_p_value: float) -> None:
    """Without it RL runs for days, and its verdict was certain before it began."""
    enough = max(1, math.ceil(-math.log2(max_p_value)))
    assert compare_paired([0.0] * (enough + 1), [1.0] * (enough + 1)).p_value < max_p_value
    check_num_rows(enough, max_p_value, source="data.heldout", setting="evaluation.max_p_value")
    if max_p_value < 1:
        assert compare_paired([0.0] * (enough - 1), [1.0] * (enough - 1)).p_value > max_p_value
        with pytest.raises(ConfigError, match=rf"data\.heldout has only {enough - 1} rows .* provide {enough} rows or"):
            check_num_rows(enough - 1, max_p_value, source="data.heldout", setting="evaluation.max_p_value")


def test_a_p_value_that_no_comparison_has_is_refused() -> None:
    least = compare_paired([0.0] * 50, [1.0] * 50).p_value
    check_num_rows(50, least, source="data.heldout", setting="evaluation.max_p_value")
    with pytest.raises(ConfigError, match=r"max_p_value 4\.9995e-05 accepts no result: .* below 0\.0001; raise it"):
        check_num_rows(50, least / 2, source="data.heldout", setting="evaluation.max_p_value")


def with_heldout_rows(tmp_path: Path, num_rows: int, **rollout: Any) -> Config:  # Any: settings of every type
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}", "answer": "{number}"}}\n' for number in range(num_rows)))
    config = with_rollout(**(rollout or {"environment": "math"}))
    return config.model_copy(update={"data": config.data.model_copy(update={"heldout": str(path)})})


def test_rows_that_can_never_show_a_better_model_are_refused_and_others_say_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.heldout has only 6 rows .* retrain\.max_p_value .* provide 7 rows"):
        check_promotion(with_heldout_rows(tmp_path, 6), margin=0.0, max_p_value=0.01)
    [sentence] = check_promotion(with_heldout_rows(tmp_path, 7), margin=0.0, max_p_value=0.01)
    assert "at least 7 of 7 held-out prompts" in sentence
    [sentence] = check_promotion(with_heldout_rows(tmp_path, 200), margin=0.05, max_p_value=0.01)
    assert "at least 20 of 200 held-out prompts right that the other model gets wrong" in sentence
    assert check_promotion(with_heldout_rows(tmp_path, 1), margin=5.0, max_p_value=1.0) == [], "everything counts"


def test_of_a_long_file_only_the_rows_that_are_compared_count(tmp_path: Path) -> None:
    config = with_heldout_rows(tmp_path, 200)
    few = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"max_prompts": 6})})
    with pytest.raises(ConfigError, match=r"data\.heldout has only 6 rows"):
        check_promotion(few, margin=0.0, max_p_value=0.01)


def test_held_out_rows_that_are_there_twice_are_told(tmp_path: Path) -> None:
    """Without it a file that was appended to itself makes noise look like an improvement."""
    config = with_heldout_rows(tmp_path, 10)
    assert warn_of_repeated_rows(config) == []
    heldout = Path(config.data.heldout)
    once = heldout.read_text()
    heldout.write_text(once + '{"id": "another", "answer": "9", "prompt": "9"}\n{"prompt": "9", "answer": "10"}\n')
    [warning] = warn_of_repeated_rows(config)
    assert warning.startswith("data.heldout: 1 of 12 rows are duplicates of an earlier row (row 11 is row 10). Each")
    heldout.write_text(once * 2)
    [warning] = warn_of_repeated_rows(config)
    assert "10 of 20 rows" in warning and "(row 11 is row 1, row 12 is row 2, row 13 is row 3, ...)" in warning
    compared = config.evaluation.model_copy(update={"max_prompts": 10})
    assert warn_of_repeated_rows(config.model_copy(update={"evaluation": compared})) == [], "not compared on"


def test_demonstrations_that_say_the_same_are_the_same_whatever_else_their_rows_hold(tmp_path: Path) -> None:
    """Without it an id per row hides that the rows that choose a checkpoint also grade it."""
    selection, heldout = tmp_path / "selection.jsonl", tmp_path / "heldout.jsonl"
    selection.write_text('{"id": 1, "prompt": "1+1", "completion": "2"}\n{"id": 2, "text": "three"}\n')
    heldout.write_text('{"id": 3, "prompt": "1+1", "completion": "3"}\n{"id": 4, "text": "four", "source": "a"}\n')
    check_other_rows(DataConfig(selection=str(selection), heldout=str(heldout)))
    with heldout.open("a") as file:
        file.write('{"id": 5, "text": "four", "source": "b"}\n{"id": 6, "prompt": "1+1", "response": "2"}\n')
    with pytest.raises(DataError, match=r"heldout\.jsonl, row 4 is also row 1 of .*selection\.jsonl"):
        check_other_rows(DataConfig(selection=str(selection), heldout=str(heldout)))
    config = with_rollout(environment="math").model_copy(
        update={
            "data": DataConfig(heldout=str(heldout)),
            "evaluation": EvaluationConfig(metric="loss"),
        }
    )
    [warning] = warn_of_repeated_rows(config)
    assert warning.startswith("data.heldout: 1 of 4 rows are duplicates of an earlier row (row 3 is row 2)")


def test_a_margin_that_rewards_cannot_differ_by_is_refused_only_where_that_is_known(tmp_path: Path) -> None:
    assert check_promotion(with_heldout_rows(tmp_path, 50), margin=0.99, max_p_value=0.01)
    with pytest.raises(ConfigError, match=r"retrain\.margin 1 would never promote a model: rewards are between 0"):
        check_promotion(with_heldout_rows(tmp_path, 50), margin=1.0, max_p_value=0.01)
    for rewards in ({"reward_fn": "my.module:reward"}, {"rewards": [{"weight": 5.0}]}, {"environment": "my:World"}):
        assert check_promotion(with_heldout_rows(tmp_path, 50, **rewards), margin=1.0, max_p_value=0.01) == []
