"""Pins generation ahead of the trainer: how far ahead it is, which groups a batch gets, and that none is lost.

Without it generation runs away from the trainer, a batch is trained on that is older than allowed, or a prompt is lost
or trained on twice when a run is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from pydantic import ValidationError

from rollouts_core.config import RolloutConfig
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.errors import DataError, EnvironmentUnavailableError, RewardError
from rollouts_core.filters import FilterDecision
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.schedule_replay import Schedule
from rollouts_core.types import RolloutBatch, Sample, Status, VersionSpan
from tests.rollouts_core.make import make_prompts


def reward_by_place(sample: Sample) -> float:
    return float(sample.index)


TRAINING_S = 0.1
"""Long enough for all groups under way to finish, also on a crowded machine."""
CONFIG = RolloutConfig(batch_size=3, n_samples_per_prompt=2, reward_fn=reward_by_place, max_staleness=2)


class SlowPolicy:
    """Answers at its own pace with its version, and remembers which groups it was asked for."""

    def __init__(self, *, is_held: bool = False) -> None:
        self.version = 0
        self.asked: list[int] = []
        self.may_answer = asyncio.Event()
        if not is_held:
            self.may_answer.set()

    async def __call__(self, group: Sequence[Sample]) -> list[Sample]:
        self.asked.append(group[0].group_index)
        version = self.version
        await self.may_answer.wait()
        await asyncio.sleep(0.001 * (3 - group[0].group_index % 3))
        return [answer(sample, version) for sample in group]


def answer(sample: Sample, version: int) -> Sample:
    return replace(
        sample,
        tokens=[7, 8, 9],
        loss_mask=[0, 1, 1],
        rollout_log_probs=[0.0, -0.1, -0.2],
        status=Status.COMPLETED,
        policy_versions=(VersionSpan(version, 1, 3),),
    )


def indices_of(batch: RolloutBatch) -> list[int]:
    return [group[0].group_index for group in batch.groups]


def manager_of(policy: SlowPolicy, **settings: object) -> AsyncRolloutManager:
    config = CONFIG.model_copy(update=settings)
    return AsyncRolloutManager(DataBuffer(make_prompts(8)), config, generate_fn=policy)


async def train(manager: AsyncRolloutManager, policy: SlowPolicy, *, num_steps: int) -> list[RolloutBatch]:
    """Batches, with a publication after each."""
    batches = []
    for _ in range(num_steps):
        batches.append(await manager.generate_batch())
        policy.version += 1
        manager.weights_published(policy.version)
    return batches


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_so_many_batches_are_alive_while_the_trainer_trains_and_one_more_while_it_waits(max_staleness: int) -> None:
    async def run() -> list[int]:
        policy = SlowPolicy()
        asked = []
        async with manager_of(policy, max_staleness=max_staleness) as manager:
            for _ in range(4):
                await manager.generate_batch()
                asked.append(len(policy.asked))
                await asyncio.sleep(TRAINING_S)
                assert len(policy.asked) == asked[-1], "a group was started while the trainer trains"
        return asked

    assert asyncio.run(run()) == [3 * (max_staleness + 1 + batch) for batch in range(4)]


def test_a_batch_gets_the_oldest_groups_whoever_finishes_first() -> None:
    async def run() -> list[list[int]]:
        policy = SlowPolicy()
        async with manager_of(policy) as manager:
            return [indices_of(batch) for batch in await train(manager, policy, num_steps=4)]

    assert asyncio.run(run()) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_the_state_does_not_tell_who_finished_first() -> None:
    async def run() -> list[int]:
        policy = SlowPolicy()
        async with manager_of(policy) as manager:
            await manager.generate_batch()
            await asyncio.sleep(TRAINING_S)
            return [sample["group_index"] for sample in manager.state_dict()["ready_samples"]]

    assert asyncio.run(run()) == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8]


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_no_batch_is_older_than_the_bound(max_staleness: int) -> None:
    async def run() -> list[dict[str, float]]:
        policy = SlowPolicy()
        async with manager_of(policy, max_staleness=max_staleness) as manager:
            manager.weights_published(0)
            return [batch.metadata["staleness"] for batch in await train(manager, policy, num_steps=6)]

    staleness = asyncio.run(run())
    assert [each["staleness_max"] for each in staleness] == [min(step, max_staleness) for step in range(6)]
    assert staleness[-1]["stale_token_share"] == (max_staleness > 0)


def test_groups_that_became_too_old_are_generated_again_and_counted() -> None:
    async def run() -> tuple[RolloutBatch, list[int]]:
        policy = SlowPolicy()
        async with manager_of(policy, max_staleness=1) as manager:
            manager.weights_published(0)
            await manager.generate_batch()
            await asyncio.sleep(TRAINING_S)
            for version in (1, 2):  # two publications in one step: more than the gate reckons with
                policy.version = version
                manager.weights_published(version)
            return await manager.generate_batch(), policy.asked

    batch, asked = asyncio.run(run())
    assert indices_of(batch) == [3, 4, 5]
    assert {span.version for sample in batch.samples for span in sample.policy_versions} == {2}
    assert batch.metadata["drops"] == {"stale": 3}
    assert sorted(asked) == [0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8]


def test_a_policy_that_is_always_too_old_ends_with_a_sentence() -> None:
    async def run() -> None:
        policy = SlowPolicy()
        policy.version = -1
        async with manager_of(policy, max_staleness=1) as manager:
            for version in range(3):
                manager.weights_published(version)
            await manager.generate_batch()

    with pytest.raises(DataError, match=r"dropped: \{'stale': \d+\}"):
        asyncio.run(run())


def test_a_generate_function_that_tells_no_version_is_taken_at_the_oldest_it_can_be() -> None:
    async def silent(group: Sequence[Sample]) -> list[Sample]:
        return [replace(answer(sample, 0), policy_versions=()) for sample in group]

    async def run() -> list[float]:
        manager = AsyncRolloutManager(DataBuffer(make_prompts(8)), CONFIG, generate_fn=silent)
        async with manager:
            policy = SlowPolicy()
            manager.weights_published(0)
            batches = await train(manager, policy, num_steps=4)
        return [batch.metadata["staleness"]["staleness_max"] for batch in batches]

    assert asyncio.run(run()) == [0, 1, 2, 2]


def test_a_dropped_group_is_replaced_while_the_trainer_trains() -> None:
    def drop_fifth(group: Sequence[Sample]) -> FilterDecision:
        return FilterDecision(group[0].group_index != 4, "fifth")

    async def run() -> tuple[list[list[int]], dict[str, int]]:
        policy = SlowPolicy()
        async with manager_of(policy, max_staleness=1, filter_fn=drop_fifth) as manager:
            first = await manager.generate_batch()
            await asyncio.sleep(TRAINING_S)
            assert 6 in policy.asked
            second = await manager.generate_batch()
            return [indices_of(first), indices_of(second)], first.metadata["drops"] | second.metadata["drops"]

    batches, drops = asyncio.run(run())
    assert batches == [[0, 1, 2], [3, 5, 6]]
    assert drops == {"fifth": 1}


@pytest.mark.parametrize("pause_s", [0.0, 0.0015, 0.0025, 0.02])
def test_a_stop_at_any_moment_loses_no_prompt_and_takes_none_twice(pause_s: float) -> None:
    """What was ready stays ready; what was under way is generated."""

    async def run() -> list[int]:
        policy = SlowPolicy()
        stopped = manager_of(policy)
        async with stopped:
            before = [indices_of(await stopped.generate_batch()) for _ in range(2)]
            await asyncio.sleep(pause_s)
            state, cursor = stopped.state_dict(), stopped.data_buffer.state_dict()
        resumed = manager_of(policy)
        resumed.data_buffer.load_state_dict(cursor)
        resumed.load_state_dict(state)
        async with resumed:
            after = [indices_of(await resumed.generate_batch()) for _ in range(3)]
        return [index for batch in before + after for index in batch]

    assert asyncio.run(run()) == list(range(15))


@pytest.mark.parametrize(("is_regraded", "rewards"), [(False, [0.0, 1.0] * 3), (True, [5.0] * 6)])
def test_what_was_ready_is_not_generated_again_but_graded_again_where_that_is_asked_for(
    is_regraded: bool, rewards: list[float]
) -> None:
    async def run() -> tuple[list[int], list[float]]:
        policy = SlowPolicy()
        async with manager_of(policy) as stopped:
            await stopped.generate_batch()
            await asyncio.sleep(TRAINING_S)
            state, cursor = stopped.state_dict(), stopped.data_buffer.state_dict()
        policy.asked.clear()
        resumed = manager_of(policy, reward_fn=lambda sample: 5.0)
        resumed.data_buffer.load_state_dict(cursor)
        resumed.load_state_dict(state, is_regraded=is_regraded)
        async with resumed:
            batch = await resumed.generate_batch()
        return policy.asked, batch.rewards

    assert asyncio.run(run()) == ([9, 10, 11], rewards)


def test_a_group_that_was_broken_off_is_asked_for_again_with_its_tokens() -> None:
    handed_in: list[list[int]] = []

    async def break_off_once(group: Sequence[Sample]) -> list[Sample]:
        handed_in.append(group[0].tokens)
        return [answer(s, 0) if s.tokens else replace(answer(s, 0), status=Status.ABORTED) for s in group]

    async def run() -> RolloutBatch:
        manager = AsyncRolloutManager(DataBuffer(make_prompts(8)), CONFIG, generate_fn=break_off_once)
        async with manager:
            return await manager.generate_batch()

    assert {sample.status for sample in asyncio.run(run()).samples} == {Status.COMPLETED}
    assert handed_in.count([]) == handed_in.count([7, 8, 9]) == 9


def test_an_error_ends_the_batch_and_leaves_nothing_running() -> None:
    ended: list[int] = []

    async def fail_third(group: Sequence[Sample]) -> list[Sample]:
        if group[0].group_index == 2:
            raise OSError("gone")
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(group[0].group_index)
        return []

    async def run() -> None:
        async with AsyncRolloutManager(DataBuffer(make_prompts(8)), CONFIG, generate_fn=fail_third) as manager:
            await manager.generate_batch()

    with pytest.raises(RewardError, match=r"fail_third on prompt 'p.' raised OSError: gone"):
        asyncio.run(run())
    assert sorted(ended) == [0, 1, 3, 4, 5, 6, 7, 8]


def test_a_batch_that_failed_can_be_asked_for_again_and_loses_no_group() -> None:
    """What finished before the failure was told is neither lost nor generated again."""
    asked: list[int] = []

    async def fail_first_once(group: Sequence[Sample]) -> list[Sample]:
        asked.append(group[0].group_index)
        if asked.count(0) == 1 and group[0].group_index == 0:
            raise OSError("gone")
        return [answer(sample, 0) for sample in group]

    async def run() -> list[int]:
        async with AsyncRolloutManager(DataBuffer(make_prompts(8)), CONFIG, generate_fn=fail_first_once) as manager:
            with pytest.raises(RewardError, match="gone"):
                await manager.generate_batch()
            return indices_of(await asyncio.wait_for(manager.generate_batch(), 60))

    assert asyncio.run(run()) == [0, 1, 2]
    assert asked == [*range(9), 0]


def test_an_error_of_the_trainer_arrives_as_itself_and_stops_generation() -> None:
    async def run() -> None:
        policy = SlowPolicy(is_held=True)
        async with manager_of(policy) as manager:
            waiting = asyncio.create_task(manager.generate_batch())
            await asyncio.sleep(0.01)
            waiting.cancel()
            raise ZeroDivisionError("training broke")

    with pytest.raises(ZeroDivisionError, match="training broke"):
        asyncio.run(run())


def test_the_time_that_generation_waits_for_the_trainer_is_measured() -> None:
    async def run() -> tuple[float, float]:
        policy = SlowPolicy()
        async with manager_of(policy, max_staleness=1) as manager:
            await manager.generate_batch()
            manager.take_idle_s()
            await asyncio.sleep(0.2)
            trained = manager.take_idle_s()
            policy.may_answer.clear()
            waiting = asyncio.create_task(manager.generate_batch())
            await asyncio.sleep(0.2)
            waited = manager.take_idle_s()
            policy.may_answer.set()
            await waiting
        return trained, waited

    trained, waited = asyncio.run(run())
    assert trained > 0.15
    assert waited < 0.1


def test_generating_ahead_needs_an_open_manager() -> None:
    with pytest.raises(AssertionError, match="use `async with manager`"):
        asyncio.run(manager_of_closed().generate_batch())


def manager_of_closed() -> AsyncRolloutManager:
    async def never(group: Sequence[Sample]) -> list[Sample]:
        raise AssertionError("asked")

    return AsyncRolloutManager(DataBuffer(make_prompts(8)), CONFIG, generate_fn=never)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_staleness": 1, "over_sampling_factor": 1.5}, "over_sampling_factor 1.5 has an effect only with"),
        ({"max_staleness": 1, "max_partial_staleness": 2}, "max_partial_staleness 2 has an effect only with"),
        ({"max_partial_staleness": 2}, "set over_sampling_factor above 1, or a filter"),
        ({"in_flight": "continue", "engine": {"kind": "vllm"}}, 'set in_flight = "finish" or "abort"'),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RolloutConfig.model_validate(settings)


def test_groups_that_an_outage_dropped_are_dropped_again_when_the_schedule_is_followed() -> None:
    """Else a resumed run would train on a group that the run which it continues never saw."""

    def batches(schedules: Sequence[Schedule], *, outage_of: int) -> tuple[list[RolloutBatch], list[int]]:
        asked: list[int] = []

        async def generate(group: Sequence[Sample]) -> list[Sample]:
            asked.append(group[0].group_index)
            if group[0].group_index == outage_of:
                raise EnvironmentUnavailableError("the sandbox is away")
            return [answer(sample, 0) for sample in group]

        async def run() -> list[RolloutBatch]:
            config = CONFIG.model_copy(update={"max_staleness": 0})
            manager = AsyncRolloutManager(DataBuffer(make_prompts(8)), config, generate_fn=generate)
            manager.replay(schedules)
            async with manager:
                return [await manager.generate_batch() for _ in range(2)]

        return asyncio.run(run()), asked

    first, _ = batches([], outage_of=1)
    schedules = [Schedule(b.metadata.get("completed", ()), b.metadata.get("unavailable", ())) for b in first]
    assert schedules[0].unavailable == [1]
    again, asked = batches(schedules, outage_of=-1)
    assert [batch.to_json() for batch in again] == [batch.to_json() for batch in first]
    assert 1 not in asked


def test_what_an_outage_dropped_before_a_restart_is_not_waited_for_after_it() -> None:
    """Else it is begun again after every pause, only to be dropped unseen, until no time for pauses is left."""

    async def fail_the_first(group: Sequence[Sample]) -> list[Sample]:
        if group[0].group_index == 0:
            raise EnvironmentUnavailableError("the sandbox is away")
        return [answer(sample, 0) for sample in group]

    async def run(manager: AsyncRolloutManager) -> RolloutBatch:
        async with manager:
            return await asyncio.wait_for(manager.generate_batch(), timeout=10)

    # One group of the last 50 may be dropped: a second one is an outage.
    config = CONFIG.model_copy(update={"max_staleness": 0, "max_environment_failure_share": 0.02})
    manager = AsyncRolloutManager(DataBuffer(make_prompts(8)), config, generate_fn=fail_the_first)
    manager.replay([Schedule(completed=[0, 1, 2, 3], unavailable=[1])])
    batch = asyncio.run(run(manager))
    assert indices_of(batch) == [2, 3, 4]
    assert (batch.metadata["unavailable"], "paused_s" in batch.metadata) == ([0, 1], False)
