"""Pins the rewards that ship, and that a reward that fails is an error and never a 0.

Without it a crash in a user's reward function would teach the policy that its answers are wrong.
"""

import asyncio
import math
import signal
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rollouts_core.config import RewardConfig, RolloutConfig
from rollouts_core.environments import ArithmeticEnvironment
from rollouts_core.errors import RewardError
from rollouts_core.rewards import REWARDS, TERMS, WeightedRewards, compute_reward, grade_group, grade_sample
from rollouts_core.rollout.resolve import resolve_reward_fn
from rollouts_core.types import Sample, Status

SAMPLE = Sample(response="x", metadata={"prompt_id": "p7", "answer": "2"})


def grade_with(outcome: Any) -> Sample:
    """The sample as graded by a function that returns `outcome`."""
    return asyncio.run(grade_sample(SAMPLE, lambda sample: outcome))


async def count_letters(sample: Sample) -> float:
    """A user's reward that waits for something."""
    await asyncio.sleep(0)
    return float(len(sample.response))


def divide_by_zero(sample: Sample) -> float:
    """A user's reward with a mistake."""
    return 1 / 0


async def divide_by_zero_later(sample: Sample) -> float:
    """A user's coroutine with a mistake."""
    return 1 / 0


def leave(sample: Sample) -> float:
    """A user's reward that ends the program."""
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("name", "response", "answer", "reward"),
    [
        ("exact_match", " Paris\n", "Paris", 1.0),
        ("exact_match", "paris", "Paris", 0.0),
        ("exact_match", "", "", 1.0),
        ("last_number", "3 apples and 4 make 7.", "7", 1.0),
        ("last_number", "7 is 3 and 4", "7", 0.0),
        ("last_number", "It costs 1,234.50", "1234.5", 1.0),
        ("last_number", "-3", "3", 0.0),
        ("last_number", "so −3", "-3", 1.0),
        ("last_number", "so −3", "3", 0.0),
        ("last_number", "12,345,678,901,234,567,890.0", "12345678901234567890", 1.0),
        ("last_number", "12345678901234567891", "12345678901234567890", 0.0),
        ("last_number", "9" * 400, "8" * 400, 0.0),
        ("last_number", "x is 1,2", "2", 1.0),
        ("last_number", "x is 12,34", "1234", 0.0),
        ("last_number", "1,00,000 rupees", "100000", 1.0),
        ("last_number", "expected an Objective, found 7", "7", 1.0),
        ("last_number", "pages 3-5", "5", 1.0),
        ("last_number", "p = .5", "0.5", 1.0),
        ("last_number", "p = .5", "5", 0.0),
        ("last_number", "none", "7", 0.0),
        ("last_number", "7", "none", 0.0),
        ("last_number", "so #### 18", "9 * 2 = 18\n#### 18", 1.0),
    ],
)
def test_a_reward_that_ships(name: str, response: str, answer: str, reward: float) -> None:
    assert REWARDS[name](Sample(response=response, metadata={"answer": answer})) == reward


@pytest.mark.parametrize("outcome", [1, 0.5, True, -3, np.float32(0.5), np.int64(2), Fraction(1, 2)])
def test_any_finite_number_is_a_reward(outcome: Any) -> None:
    graded = grade_with(outcome)
    assert graded.reward == float(outcome)
    assert type(graded.reward) is float


@pytest.mark.parametrize("outcome", [torch.tensor(0.5), np.bool_(True)])
def test_what_float_makes_a_number_is_said_to_need_that(outcome: Any) -> None:
    with pytest.raises(RewardError, match=r"return a finite number \(convert it with float\(\.\.\.\)\)"):
        grade_with(outcome)


@pytest.mark.parametrize(
    "outcome",
    [math.nan, math.inf, -math.inf, "1", [1.0], {}, 1j, np.float32("nan"), 10**400, pytest.param(10**5000, id="long")],
)
def test_anything_else_is_an_error_that_names_function_and_prompt(outcome: Any) -> None:
    with pytest.raises(RewardError, match=r"test_rewards:.* on prompt 'p7' returned .*: return a finite number"):
        grade_with(outcome)


@pytest.mark.parametrize("reward_fn", [divide_by_zero, divide_by_zero_later])
def test_a_function_that_raises_is_an_error_that_names_function_and_prompt(reward_fn: Any) -> None:
    with pytest.raises(RewardError, match=rf"{reward_fn.__name__} on prompt 'p7' raised ZeroDivisionError") as caught:
        asyncio.run(grade_sample(SAMPLE, reward_fn))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_function_that_leaves_the_program_is_an_error() -> None:
    with pytest.raises(RewardError, match="raised SystemExit: 3"):
        asyncio.run(grade_sample(SAMPLE, leave))


def test_cancelling_is_no_failure_of_the_function() -> None:
    async def cancel_itself(sample: Sample) -> float:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(grade_sample(SAMPLE, cancel_itself))


def test_none_leaves_the_sample_without_a_reward() -> None:
    async def judge(sample: Sample) -> float | None:
        return None

    graded = asyncio.run(grade_sample(replace(SAMPLE, reward=0.5), judge))
    assert graded == SAMPLE
    assert grade_with(None).reward is None


def test_a_coroutine_function_is_waited_for() -> None:
    assert asyncio.run(grade_sample(SAMPLE, count_letters)).reward == 1.0


def test_grading_changes_nothing_but_the_reward() -> None:
    graded = grade_with(1.0)
    assert SAMPLE.reward is None
    assert (graded.response, graded.metadata) == (SAMPLE.response, SAMPLE.metadata)


def test_the_environment_decides_where_there_is_one() -> None:
    sample = Sample(response=":2", reward=0.25, metadata={"answer": "2"}, status=Status.COMPLETED)
    assert compute_reward(sample, ArithmeticEnvironment()) == 1.0
    assert compute_reward(sample) == 0.25


def test_without_environment_and_reward_there_is_an_error() -> None:
    with pytest.raises(RewardError, match="no reward and no environment"):
        compute_reward(Sample())


def hang(sample: Sample) -> float:
    """A user's reward with a loop that does not end."""
    while True:
        pass


async def wait_for_ever(sample: Sample) -> float:
    """A user's reward that waits for what never comes."""
    await asyncio.sleep(3600)
    return 1.0


@pytest.mark.parametrize("reward_fn", [hang, wait_for_ever])
def test_a_function_that_does_not_return_is_an_error_that_names_function_and_prompt(reward_fn: Any) -> None:
    others_s, _ = signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        with pytest.raises(RewardError, match=rf"{reward_fn.__name__} on prompt 'p7': it did not return within 0.1 s"):
            asyncio.run(grade_sample(SAMPLE, reward_fn, timeout_s=0.1))
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] < 60, "a timer of somebody else goes on"
    finally:
        signal.setitimer(signal.ITIMER_REAL, others_s)


def give_two(sample: Sample) -> float:
    return 2.0


def test_several_rewards_are_added_with_their_weights_and_counted() -> None:
    rewards = WeightedRewards([("two", 0.5, give_two), ("letters", -1.0, count_letters)])
    graded = asyncio.run(grade_group([SAMPLE, replace(SAMPLE, response="xyz")], rewards))
    assert [sample.reward for sample in graded] == [0.0, -2.0]
    assert [sample.metadata[TERMS] for sample in graded] == [{"two": 2.0, "letters": n} for n in (1.0, 3.0)]
    assert rewards.take_metrics() == {"reward/two": 2.0, "reward/letters": 2.0, "reward_error_share": 0.0}
    assert rewards.take_metrics() == {}


def test_the_mean_of_a_term_is_over_the_samples_that_were_scored() -> None:
    rewards = WeightedRewards([("two", 1.0, lambda sample: 2.0 if sample.response else None)])
    graded = asyncio.run(grade_group([Sample(response="x"), Sample(), Sample(response="x"), Sample()], rewards))
    assert [sample.reward for sample in graded] == [2.0, None, 2.0, None]
    assert [TERMS in sample.metadata for sample in graded] == [True, False, True, False]
    assert rewards.take_metrics() == {"reward/two": 2.0, "reward_error_share": 0.0}


def test_the_share_of_errors_counts_every_sample_that_was_asked_for() -> None:
    def score_or_fail(sample: Sample) -> float | None:
        return None if not sample.response else 1.0 / len(sample.response.strip())

    rewards = WeightedRewards([("inverse", 1.0, score_or_fail)])
    for response in ("x", "", ""):
        asyncio.run(grade_sample(Sample(response=response), rewards))
    with pytest.raises(RewardError):
        asyncio.run(grade_sample(Sample(response=" "), rewards))
    assert rewards.take_metrics() == {"reward/inverse": 1.0, "reward_error_share": 0.25}


def test_a_term_that_fails_is_named_and_counted_and_never_a_zero() -> None:
    rewards = WeightedRewards([("two", 1.0, give_two), ("broken", 0.0, divide_by_zero)])
    with pytest.raises(RewardError, match=r"divide_by_zero on prompt 'p7' raised ZeroDivisionError") as caught:
        asyncio.run(grade_sample(SAMPLE, rewards))
    assert str(caught.value).count("on prompt") == 1
    assert rewards.take_metrics() == {"reward_error_share": 1.0}


def test_rewards_are_taken_from_the_settings() -> None:
    config = RolloutConfig(
        environment="math",
        rewards=(RewardConfig(weight=2.0), RewardConfig(name="last_number", weight=0.5), RewardConfig(name=give_two)),
    )
    sample = Sample(response="#### 7", metadata={"answer": "7"}, status=Status.COMPLETED)
    assert asyncio.run(grade_sample(sample, resolve_reward_fn(config))).reward == 4.5
    assert config.reward_names == ("math", "last_number", "tests.rollouts_core.test_rewards:give_two")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "http"}, 'the kind "http" needs url'),
        ({"kind": "judge", "url": "http://x"}, 'the kind "judge" needs model'),
        ({"kind": "classifier"}, 'the kind "classifier" needs model'),
        ({"kind": "reward_model", "model": "m"}, 'the kind "reward_model" needs url'),
        ({"kind": "classifier", "model": "m", "label": "good"}, 'label is a setting of the kind "reward_model"'),
        ({"kind": "http", "url": "10.0.0.7:9000"}, "url '10.0.0.7:9000' is not the address of a service: write it as"),
        ({"kind": "http", "url": "http://10.0.0.7:90000"}, "is not the address of a service"),
        ({"kind": "http", "url": "https://me:secret@judge/x"}, r"(?s)url.*contains a user or password"),
        ({"kind": "http", "url": "https://me:secret@judge:x/"}, r"(?s)url.*contains a user or password"),
    ],
)
def test_a_reward_without_what_its_kind_needs_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence) as refused:
        RewardConfig(**settings)
    assert "secret" not in refused.value.errors()[0]["msg"]


def test_one_reward_function_beside_several_rewards_is_refused() -> None:
    with pytest.raises(ValueError, match="reward_fn and rewards exclude each other"):
        RolloutConfig(reward_fn="exact_match", rewards=(RewardConfig(),))
