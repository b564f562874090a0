"""Pins pass@k and majority@n against their definitions, and that their intervals count prompts, not completions.

Without it a table of pass@k could not be compared with those of papers, and eight completions of a prompt could pass
for eight prompts.
"""

import itertools
import json
import random
import statistics
from dataclasses import asdict, replace

import pytest

from rollouts_core.comparison import compare_paired, estimate_mean
from rollouts_core.config import EvaluationConfig, RewardConfig, RolloutConfig
from rollouts_core.environments.arithmetic import ArithmeticEnvironment
from rollouts_core.environments.math import MathEnvironment
from rollouts_core.environments.multiple_choice import MultipleChoiceEnvironment
from rollouts_core.errors import RewardError
from rollouts_core.evaluate import outcomes_by_prompt
from rollouts_core.pass_rates import majority_at_n, measures_of, pass_at_k, shown_ks
from rollouts_core.rollout.resolve import resolve_vote_fn
from rollouts_core.types import Sample, Status


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_right_one(num_samples: int) -> None:
    for num_right, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        completions = [i < num_right for i in range(num_samples)]
        choices = [any(chosen) for chosen in itertools.combinations(completions, k)]
        assert pass_at_k(num_samples, num_right, k) == pytest.approx(statistics.fmean(choices), abs=1e-12)


def test_pass_at_k_is_right_on_average_and_the_plain_share_is_not() -> None:
    """With a chance of 0.3 per completion, one of 4 is right with 1 - 0.7**4; 1 - (1 - c/n)**4 says less."""
    rng = random.Random(0)
    counts = [sum(rng.random() < 0.3 for _ in range(8)) for _ in range(20_000)]
    truth = 1 - 0.7**4
    assert statistics.fmean(pass_at_k(8, c, 4) for c in counts) == pytest.approx(truth, abs=0.01)
    assert statistics.fmean(1 - (1 - c / 8) ** 4 for c in counts) < truth - 0.03


def test_many_completions_do_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)
    assert pass_at_k(10_000, 9_999, 2) == 1.0


@pytest.mark.parametrize(
    ("votes", "is_right", "score"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["7", "8", "8"], [True, False, False], 0.0),
        (["7", "8"], [True, False], 0.5),
        (["7", "8", "9", None], [True, False, False, False], 1 / 3),
        ([None, None, "7"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
        (["7", "7"], [True, False], 0.5),
    ],
)
def test_the_majority_is_the_most_frequent_answer_and_ties_are_drawn(
    votes: list[str | None], is_right: list[bool], score: float
) -> None:
    assert majority_at_n(votes, is_right) == pytest.approx(score)


def test_the_shown_k_are_powers_of_two_and_all() -> None:
    assert (shown_ks(2), shown_ks(8), shown_ks(10)) == ([1, 2], [1, 2, 4, 8], [1, 2, 4, 8, 10])


def test_intervals_are_over_prompts_and_not_over_completions() -> None:
    """All 16 completions of a prompt agree, so they tell no more than one completion."""
    right = [1.0] * 12 + [0.0] * 28
    entry = {"samples_per_prompt": 16, "num_right": [16 * int(each) for each in right]}
    for values in measures_of(entry).values():
        assert values == right
        assert asdict(estimate_mean(values)) == asdict(estimate_mean(right))
    assert compare_paired([0.0] * 40, measures_of(entry)["pass@16"]).p_value == pytest.approx(2**-12, abs=1e-3)


def test_one_completion_and_older_records_have_no_measures() -> None:
    assert measures_of({"scores": [1.0]}) == {}
    assert measures_of({"samples_per_prompt": 1, "num_right": [1]}) == {}


def completion(group: int, text: str, reward: float, *, answer: str = "7", status: Status = Status.COMPLETED) -> Sample:
    return Sample(
        prompt="2+5=?", response=text, reward=reward, group_index=group, status=status, metadata={"answer": answer}
    )


def test_outcomes_count_right_completions_and_votes_per_prompt() -> None:
    samples = [
        completion(0, r"\boxed{7}", 1.0), completion(0, r"it is \boxed{7.0}", 1.0), completion(0, r"\boxed{8}", 0.0),
        completion(1, r"\boxed{7}", 1.0), completion(1, r"\boxed{9}", 0.0), completion(1, r"#### 9", 0.0),
    ]  # fmt: skip
    evaluation = EvaluationConfig(samples_per_prompt=3, temperature=1.0)
    outcomes = outcomes_by_prompt(samples, evaluation, MathEnvironment().vote)
    assert outcomes == {"samples_per_prompt": 3, "num_right": [2, 1], "majority": [1.0, 0.0]}
    assert json.loads(json.dumps(outcomes)) == outcomes
    assert outcomes_by_prompt(samples, evaluation, None) == {"samples_per_prompt": 3, "num_right": [2, 1]}
    assert [list(values) for values in measures_of(outcomes).values()] == [
        pytest.approx([2 / 3, 1 / 3]), pytest.approx([1.0, 2 / 3]), [1.0, 1.0], [1.0, 0.0]
    ]  # fmt: skip


def test_a_graded_completion_is_right_from_the_set_reward_on() -> None:
    samples = [completion(0, "a", 0.6), completion(0, "b", 0.4)]
    evaluation = EvaluationConfig(samples_per_prompt=2, temperature=1.0)
    assert outcomes_by_prompt(samples, evaluation, None)["num_right"] == [0]
    loose = evaluation.model_copy(update={"pass_reward": 0.5})
    assert outcomes_by_prompt(samples, loose, None)["num_right"] == [1]


def test_an_invalid_completion_does_not_vote_and_a_vote_that_raises_is_a_sentence() -> None:
    samples = [completion(0, ":7", 1.0), completion(0, ":8", 0.0, status=Status.INVALID)]
    evaluation = EvaluationConfig(samples_per_prompt=2, temperature=1.0)
    assert outcomes_by_prompt(samples, evaluation, ArithmeticEnvironment().vote)["majority"] == [1.0]
    named = [replace(sample, metadata={"prompt_id": "p7"}) for sample in samples]
    with pytest.raises(RewardError, match=r"the vote of the environment on prompt 'p7' raised ZeroDivisionError"):
        outcomes_by_prompt(named, evaluation, lambda sample: str(1 / 0))


@pytest.mark.parametrize(
    ("settings", "text", "vote"),
    [
        ({"environment": "math"}, r"so \boxed{1,000.0}", "1000"),
        ({"environment": "arithmetic"}, "7+5=12:12", "12"),
        ({"environment": "arithmetic"}, "nothing", None),
        ({"environment": "multiple_choice"}, "The answer is B", "B"),
        ({"reward_fn": "last_number"}, "it is 1,000.50", "1000.5"),
        ({"reward_fn": "last_number"}, "it is -0", "0"),
        ({"reward_fn": "exact_match"}, " yes ", "yes"),
        ({"environment": "math", "rewards": (RewardConfig(), RewardConfig(name="exact_match"))}, r"\boxed{3}", "3"),
    ],
)
def test_votes_of_built_in_rewards_are_final_answers(settings: dict[str, object], text: str, vote: str | None) -> None:
    vote_fn = resolve_vote_fn(RolloutConfig.model_validate(settings))
    assert vote_fn is not None and vote_fn(completion(0, text, 0.0)) == vote


def test_an_answer_that_is_graded_as_right_votes_for_the_reference() -> None:
    for environment, text, answer in (
        (MathEnvironment(), r"\boxed{1{,}000}", "1000"),
        (ArithmeticEnvironment(), "1+1=2:2", "2"),
        (MultipleChoiceEnvironment(), r"\boxed{(c)}", "C"),
    ):
        sample = completion(0, text, 0.0, answer=answer)
        assert environment.grade(sample) == 1.0 and environment.vote(sample) == answer


def test_a_reward_without_votes_has_no_majority() -> None:
    assert resolve_vote_fn(RolloutConfig.model_validate({"environment": "code"})) is None
    assert resolve_vote_fn(RolloutConfig(reward_fn=len)) is None
