"""Batches from a plain function, which is called once for each.

Without it who writes such a function finds out by a batch that never comes, or one that nobody graded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.errors import ConfigError, EngineError, EnvironmentUnavailableError, RewardError
from rollouts_core.rewards import RewardFn
from rollouts_core.rollout.plain_rollouts import generate_rollout_batches
from rollouts_core.types import RolloutBatch, Sample, Status
from tests.rollouts_core.make import make_prompts
from tests.rollouts_core.rollout.test_rollout import CONFIG, answer_with, block, reward_by_place


def test_plain_functions_give_batches_without_end() -> None:
    def answer_now(samples: Sequence[Sample], *, suffix: str) -> list[Sample]:
        return [answer_with(sample, f"ok{suffix}") for sample in samples]

    config = CONFIG.model_copy(update={"generate_fn": answer_now})
    batches = generate_rollout_batches(DataBuffer(make_prompts(4)), config, suffix="!")
    first, second = next(batches), next(batches)
    assert [group[0].group_index for group in first.groups + second.groups] == [0, 1, 2, 3, 4, 5]
    assert first.samples[0].response == "ok!"
    assert second.metadata["epoch_id"] == 1


async def reward_by_place_later(sample: Sample) -> float:
    await asyncio.sleep(0)
    return float(sample.index)


@pytest.mark.parametrize("reward_fn", [reward_by_place, reward_by_place_later])
def test_plain_batches_are_also_graded_where_an_event_loop_runs_as_in_a_notebook(reward_fn: RewardFn) -> None:
    config = CONFIG.model_copy(
        update={"generate_fn": lambda samples: list(map(answer_with, samples)), "reward_fn": reward_fn}
    )

    async def run_cell() -> RolloutBatch:
        return next(generate_rollout_batches(DataBuffer(make_prompts(4)), config))

    batch = asyncio.run(run_cell())
    assert batch.rewards == [sample.index for sample in batch.samples]


def test_a_coroutine_function_is_refused_where_only_plain_ones_work() -> None:
    with pytest.raises(ConfigError, match="use AsyncRolloutManager"):
        next(generate_rollout_batches(DataBuffer(make_prompts(4)), CONFIG))


def test_a_sample_that_failed_ends_plain_batches() -> None:
    def fail(samples: Sequence[Sample]) -> list[Sample]:
        return [replace(sample, status=Status.FAILED) for sample in samples]

    config = CONFIG.model_copy(update={"generate_fn": fail})
    with pytest.raises(EnvironmentUnavailableError, match="got no usable completion"):
        next(generate_rollout_batches(DataBuffer(make_prompts(8)), config))


def test_a_sample_that_was_broken_off_is_asked_for_again() -> None:
    """Graded and trained on as it was, a part of a completion would be a wrong one."""

    def answer_half(samples: Sequence[Sample]) -> list[Sample]:
        status = Status.COMPLETED if samples[-1].response else Status.ABORTED
        return [replace(answer_with(sample, f"{sample.response}half"), status=status) for sample in samples]

    config = CONFIG.model_copy(update={"generate_fn": answer_half})
    batch = next(generate_rollout_batches(DataBuffer(make_prompts(4)), config))
    assert {(sample.response, sample.status) for sample in batch.samples} == {("halfhalf", Status.COMPLETED)}


def test_a_function_that_breaks_everything_off_ends_plain_batches() -> None:
    def break_off(samples: Sequence[Sample]) -> list[Sample]:
        return [replace(sample, status=Status.ABORTED) for sample in samples]

    config = CONFIG.model_copy(update={"generate_fn": break_off})
    with pytest.raises(EngineError, match="returned interrupted samples for one batch 1000 times"):
        next(generate_rollout_batches(DataBuffer(make_prompts(4)), config))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda samples: None, "a NoneType: expected a list of Sample"),
        (lambda samples: [Sample(index=i % 2) for i in range(6)], "no sample for 4 of 6 places, 0 of group 1"),
        (lambda samples: samples[:3], "no sample for 3 of 6 places, 1 of group 1 first"),
        (lambda samples: [*samples, samples[3]], "two samples for one place: if each"),
    ],
)
def test_samples_that_would_share_the_baseline_of_another_prompt_end_plain_batches(
    broken: Callable[[Sequence[Sample]], list[Sample]], message: str
) -> None:
    config = CONFIG.model_copy(update={"generate_fn": broken})
    with pytest.raises(RewardError, match=rf"^generation function \S*<lambda> on prompt 'p\d' returned {message}"):
        next(generate_rollout_batches(DataBuffer(make_prompts(4)), config))


def test_a_reward_that_does_not_return_ends_plain_batches_too() -> None:
    config = CONFIG.model_copy(update={"generate_fn": list, "reward_fn": block, "reward_timeout_s": 0.1})
    with pytest.raises(RewardError, match=r":block on prompt 'p\d': it did not return within 0.1 s; it was in block"):
        next(generate_rollout_batches(DataBuffer(make_prompts(4)), config))


def test_a_generation_that_does_not_return_ends_plain_batches_too() -> None:
    config = CONFIG.model_copy(update={"generate_fn": block, "generate_timeout_s": 0.1})
    with pytest.raises(RewardError, match=r":block on prompt 'p\d': it did not return within 0.1 s; it was in block"):
        next(generate_rollout_batches(DataBuffer(make_prompts(4)), config))
