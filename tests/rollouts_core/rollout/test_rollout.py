"""Batches of rollouts: which groups get into one, in which order, and what happens to the others.

Without these tests a batch could depend on who finished first, a failing reward could hang or vanish, and a filter
could spin for ever, all without an error.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import (
    FilterConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    name_of_function,
)
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.errors import (
    ConfigError,
    DataError,
    RewardError,
)
from rollouts_core.filters import FilterDecision
from rollouts_core.rl import describe_rollouts
from rollouts_core.rollout.generate import build_pending_group, create_engine_generate_fn, sampling_seed
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.resolve import GenerateFn
from rollouts_core.rollout.schedule_replay import Schedule
from rollouts_core.types import RolloutBatch, Sample, Status, VersionSpan
from tests.rollouts_core.make import make_prompts
from tests.rollouts_core.served_engine import served_engine


def answer_with(sample: Sample, response: str = "ok") -> Sample:
    return replace(
        sample,
        response=response,
        tokens=[7, 8, 9],
        loss_mask=[0, 1, 1],
        rollout_log_probs=[0.0, -0.1, -0.2],
        status=Status.COMPLETED,
    )


async def answer_late_groups_first(group: Sequence[Sample]) -> list[Sample]:
    await asyncio.sleep(0.01 / (1 + group[0].group_index))
    return [answer_with(sample) for sample in group]


async def answer_at_once(group: Sequence[Sample]) -> list[Sample]:
    return [answer_with(sample) for sample in group]


def reward_by_place(sample: Sample) -> float:
    return float(sample.index)


CONFIG = RolloutConfig(
    batch_size=3, n_samples_per_prompt=2, generate_fn=answer_late_groups_first, reward_fn=reward_by_place
)


def generate(config: RolloutConfig, *, num_prompts: int = 8) -> tuple[AsyncRolloutManager, RolloutBatch]:
    manager = AsyncRolloutManager(DataBuffer(make_prompts(num_prompts)), config)

    async def generate_one() -> RolloutBatch:
        async with manager:
            return await manager.generate_batch()

    return manager, asyncio.run(generate_one())


def test_a_batch_is_ordered_by_group_whoever_finishes_first() -> None:
    _, batch = generate(CONFIG)
    assert [(s.group_index, s.index) for s in batch.samples] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert batch.rewards == [0.0, 1.0] * 3
    assert batch.response_lengths == [2] * 6


def test_the_id_of_a_prompt_goes_before_a_field_of_the_row_with_its_name() -> None:
    prompt = replace(make_prompts(1)[0], id="prompts-1", metadata={"prompt_id": "mine", "level": 3})
    [sample] = build_pending_group(prompt, group_index=0, size=1)
    assert sample.metadata == {"prompt_id": "prompts-1", "level": 3, "answer": prompt.answer}


def test_dropped_groups_are_replaced_and_counted_by_reason() -> None:
    def drop_even(group: Sequence[Sample]) -> FilterDecision:
        return FilterDecision(group[0].group_index % 2 == 1, "even")

    _, batch = generate(CONFIG.model_copy(update={"filter_fn": drop_even}))
    assert all(s.group_index % 2 == 1 for s in batch.samples)
    assert len(batch.groups) == 3
    assert batch.metadata["drops"]["even"] == batch.metadata["num_dropped_groups"] >= 2
    assert describe_rollouts(batch)["dropped/even"] == batch.metadata["drops"]["even"]


def test_what_a_filter_drops_counts_in_the_reward_before_it() -> None:
    """Without it a policy that solves ever more prompts seems to get worse: those are the ones that are dropped."""

    def drop_solved(group: Sequence[Sample]) -> bool:
        return group[0].group_index != 1

    def reward(sample: Sample) -> float | None:
        solved_by = {1: 1.0, 2: None}  # the one is dropped, the other kept without a score
        return solved_by.get(sample.group_index, float(sample.index))

    settings = {"filter_fn": drop_solved, "reward_fn": reward, "generate_fn": answer_at_once}
    _, batch = generate(CONFIG.model_copy(update=settings))
    assert [group[0].group_index for group in batch.groups] == [0, 2, 3]
    metrics = describe_rollouts(batch)
    assert metrics["reward"] == 0.5
    assert metrics["reward_unfiltered"] == (0.0 + 1.0 + 1.0 + 1.0 + 0.0 + 1.0) / 6
    assert "reward_unfiltered" not in describe_rollouts(generate(CONFIG)[1])


def test_filters_of_the_settings_all_have_to_keep_a_group() -> None:
    filters = ({"name": "reasonable_length", "settings": {"max_tokens": 3}}, {"name": "any_success"})
    _, batch = generate(RolloutConfig.model_validate({**CONFIG.model_dump(), "filters": filters}))
    assert batch.metadata["drops"] == {}
    short = ({"name": "any_success"}, {"name": "reasonable_length", "settings": {"max_tokens": 1}})
    with pytest.raises(DataError, match=r"dropped: \{'unreasonable_length': \d+\}"):
        generate(RolloutConfig.model_validate({**CONFIG.model_dump(), "filters": short}))


def test_a_setting_that_a_filter_does_not_take_is_named_with_those_that_it_takes() -> None:
    filters = (FilterConfig(name="reasonable_length", settings={"longest": 9}),)
    with pytest.raises(ConfigError, match="reasonable_length takes no setting 'longest'; it takes min_tokens, max_tok"):
        generate(CONFIG.model_copy(update={"filters": filters}))


def test_the_buffer_filter_chooses_among_groups_that_were_given_up() -> None:
    """Two batches of one group; of the two that the first gave up, the later one is chosen, the other waits."""
    seen = []

    def take_last(groups: Sequence[Sequence[Sample]], num_wanted: int) -> list[Sequence[Sample]]:
        seen.append(([group[0].group_index for group in groups], num_wanted))
        return list(groups[-1:])

    async def first_answers(group: Sequence[Sample]) -> list[Sample]:
        if group[0].group_index not in (0, 2):
            await asyncio.sleep(3600)
        return [answer_with(sample) for sample in group]

    settings = {"generate_fn": first_answers, "buffer_filter_fn": take_last, "batch_size": 1, "over_sampling_factor": 3}
    manager = AsyncRolloutManager(DataBuffer(make_prompts(8)), CONFIG.model_copy(update=settings))
    batches = [asyncio.run(manager.generate_batch()) for _ in range(2)]
    assert [batch.samples[0].group_index for batch in batches] == [0, 2]
    assert seen == [([], 3), ([1, 2], 3)]
    assert sorted({sample.group_index for sample in manager.partial_samples}) == [1, 3, 4], "none was lost"


def test_a_buffer_filter_that_returns_something_else_is_named() -> None:
    def invent(groups: Sequence[Sequence[Sample]], num_wanted: int) -> list[Sequence[Sample]]:
        return [[Sample(group_index=77)]]

    with pytest.raises(RewardError, match=r"buffer filter .*invent on 0 groups .*some of the given groups"):
        generate(CONFIG.model_copy(update={"buffer_filter_fn": invent}))


def test_a_filter_that_drops_everything_ends_with_a_sentence() -> None:
    def drop_all(group: Sequence[Sample]) -> FilterDecision:
        return FilterDecision(False, "zero_std_0")

    with pytest.raises(DataError, match=r"only 0 of 3 groups passed the filter after 4 refills.*zero_std_0"):
        generate(CONFIG.model_copy(update={"filter_fn": drop_all, "max_refills": 4}))


@pytest.mark.parametrize(("num_published", "num_kept_tokens"), [(2, 3), (3, 3), (4, 0)])
def test_tokens_that_were_kept_are_given_up_when_they_are_too_old(num_published: int, num_kept_tokens: int) -> None:
    """Those of version 0 may be two publications behind: in use up to version 2, the third publication."""
    asked = []

    async def note_tokens(group: Sequence[Sample]) -> list[Sample]:
        asked.append([len(sample.tokens) for sample in group])
        return [answer_with(sample) for sample in group]

    partial = [
        replace(answer_with(sample), status=Status.ABORTED, policy_versions=(VersionSpan(0, 1, 3),))
        for sample in build_pending_group(make_prompts(1)[0], group_index=0, size=2)
    ]
    settings = {"generate_fn": note_tokens, "batch_size": 1, "over_sampling_factor": 2.0, "max_partial_staleness": 2}
    manager = AsyncRolloutManager(DataBuffer(make_prompts(8)), CONFIG.model_copy(update=settings))
    manager.data_buffer.get_prompts(1)
    manager.load_state_dict({"partial_samples": [sample.to_json() for sample in partial]})
    for version in range(num_published):
        manager.weights_published(version)
    batch = asyncio.run(manager.generate_batch())
    assert asked[0] == [num_kept_tokens] * 2
    assert batch.metadata["drops"] == ({} if num_kept_tokens else {"stale": 1})


def test_groups_that_have_finished_take_the_place_of_one_that_turns_out_too_old() -> None:
    """That of the first group shows only in its answer, as where conversations go on from earlier weights."""

    async def answer_by_version(group: Sequence[Sample]) -> list[Sample]:
        version = 0 if group[0].group_index == 0 else 2
        return [replace(answer_with(sample), policy_versions=(VersionSpan(version, 1, 3),)) for sample in group]

    settings = {"generate_fn": answer_by_version, "over_sampling_factor": 2.0, "max_partial_staleness": 1}
    manager = AsyncRolloutManager(DataBuffer(make_prompts(8)), CONFIG.model_copy(update=settings))
    for version in range(3):
        manager.weights_published(version)
    batch = asyncio.run(asyncio.wait_for(manager.generate_batch(), 30))
    assert [group[0].group_index for group in batch.groups] == [1, 2, 3]
    assert batch.metadata["drops"] == {"stale": 1}


def test_a_prompt_that_was_broken_off_before_its_first_token_is_of_no_version() -> None:
    """Else what the next weights say behind it counts as older than it is, and is given up."""

    async def begin_then_answer(group: Sequence[Sample]) -> list[Sample]:
        if not group[0].tokens:
            begun = [replace(each, tokens=[7], loss_mask=[0.0], rollout_log_probs=[0.0]) for each in group]
            return [replace(each, status=Status.ABORTED) for each in begun]
        answered = [answer_with(sample) for sample in group]
        return [replace(each, policy_versions=(*each.policy_versions, VersionSpan(8, 1, 3))) for each in answered]

    manager = AsyncRolloutManager(
        DataBuffer(make_prompts(8)), CONFIG.model_copy(update={"generate_fn": begin_then_answer})
    )
    manager.weights_published(7)
    batch = asyncio.run(manager.generate_batch())
    assert {sample.policy_versions for sample in batch.samples} == {(VersionSpan(8, 1, 3),)}


def test_what_a_function_says_nothing_about_is_of_the_version_that_it_began_with() -> None:
    manager = AsyncRolloutManager(DataBuffer(make_prompts(8)), CONFIG)
    manager.weights_published(7)
    batch = asyncio.run(manager.generate_batch())
    assert {sample.policy_versions for sample in batch.samples} == {(VersionSpan(7, 1, 3),)}


def test_groups_asked_for_but_not_used_begin_the_next_batch() -> None:
    async def first_answers_last_hangs(group: Sequence[Sample]) -> list[Sample]:
        if group[0].group_index >= 3:
            await asyncio.sleep(3600)
        return [answer_with(sample) for sample in group]

    config = CONFIG.model_copy(update={"generate_fn": first_answers_last_hangs, "over_sampling_factor": 2.0})
    manager, batch = generate(config)
    assert [group[0].group_index for group in batch.groups] == [0, 1, 2]
    assert {sample.group_index for sample in manager.partial_samples} == {3, 4, 5}
    restored = AsyncRolloutManager(manager.data_buffer, CONFIG)
    restored.load_state_dict(manager.state_dict())
    assert restored.partial_samples == manager.partial_samples
    next_batch = asyncio.run(restored.generate_batch())
    assert [group[0].group_index for group in next_batch.groups] == [3, 4, 5]


class CountsGroups:
    """A generate function of a user's that gives what it counts with as its state, and goes on to count in it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"seen": []}

    async def __call__(self, group: Sequence[Sample]) -> list[Sample]:
        self.state["seen"].append(group[0].group_index)
        return [answer_with(sample) for sample in group]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


def test_a_state_that_was_given_for_a_checkpoint_is_not_that_of_later_groups() -> None:
    """It is written while the next step is generated: a run that goes on would count the groups of that one twice."""

    async def state_after_one_of_two_batches() -> dict[str, Any]:
        manager = AsyncRolloutManager(DataBuffer(make_prompts(8)), CONFIG, generate_fn=CountsGroups())
        async with manager:
            await manager.generate_batch()
            state = manager.state_dict()
            await manager.generate_batch()
            return state

    assert asyncio.run(state_after_one_of_two_batches())["generation"] == {"seen": [0, 1, 2]}


# The second number is one more than the refills that a batch may have.
@pytest.mark.parametrize("num_cancelled", [1, 3])
@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_batch_that_was_cancelled_can_be_asked_for_again(num_cancelled: int, is_awaited: bool) -> None:
    """Also at once, while the groups of the call that was cancelled are still being ended."""
    asked: list[int] = []

    async def run() -> list[int]:
        may_answer = asyncio.Event()

        async def answer_when_allowed(group: Sequence[Sample]) -> list[Sample]:
            asked.append(group[0].group_index)
            await may_answer.wait()
            return [answer_with(sample) for sample in group]

        config = CONFIG.model_copy(update={"generate_fn": answer_when_allowed, "max_refills": 1})
        async with AsyncRolloutManager(DataBuffer(make_prompts(8)), config) as manager:
            cancelled = []
            for number in range(num_cancelled):
                cancelled.append(asyncio.create_task(manager.generate_batch()))
                while len(asked) < 3 * (number + 1):
                    await asyncio.sleep(0)
                cancelled[-1].cancel()
                if is_awaited:
                    await asyncio.wait(cancelled)
            may_answer.set()
            batch = await asyncio.wait_for(manager.generate_batch(), 60)
            await asyncio.wait(cancelled)
            assert all(call.cancelled() for call in cancelled)
            return [group[0].group_index for group in batch.groups]

    assert asyncio.run(run()) == [0, 1, 2]
    assert set(asked) == {0, 1, 2}


class BrokenOffSlowly:
    """Answers for three groups, keeps the others waiting, and does not come to an end of breaking them off."""

    def __init__(self) -> None:
        self.is_open = True
        self.is_breaking_off = anyio.Event()

    async def __call__(self, group: Sequence[Sample]) -> list[Sample]:
        if group[0].group_index > 2:
            await anyio.sleep_forever()
        return [answer_with(sample) for sample in group]

    async def break_off(self) -> None:
        self.is_open = False
        self.is_breaking_off.set()
        await anyio.sleep_forever()

    def go_on(self) -> None:
        self.is_open = True


def test_a_batch_that_was_cancelled_while_others_were_broken_off_leaves_the_engines_open() -> None:
    """Else whatever is asked of them next waits for ever."""

    async def run() -> bool:
        policy = BrokenOffSlowly()
        config = CONFIG.model_copy(update={"over_sampling_factor": 2.0, "max_partial_staleness": 1})
        async with AsyncRolloutManager(DataBuffer(make_prompts(8)), config, generate_fn=policy) as manager:
            async with anyio.create_task_group() as calls:
                calls.start_soon(manager.generate_batch)
                await policy.is_breaking_off.wait()
                calls.cancel_scope.cancel()
            return policy.is_open

    assert asyncio.run(run())


def test_a_reward_that_raises_ends_the_batch_and_names_function_and_prompt() -> None:
    def broken_reward(sample: Sample) -> float:
        raise ZeroDivisionError("no baseline")

    with pytest.raises(RewardError, match=r"broken_reward on prompt 'p\d' raised ZeroDivisionError: no baseline"):
        generate(CONFIG.model_copy(update={"reward_fn": broken_reward}))


def test_an_async_reward_is_awaited() -> None:
    async def slow_reward(sample: Sample) -> float:
        await asyncio.sleep(0)
        return 0.5

    _, batch = generate(CONFIG.model_copy(update={"reward_fn": slow_reward}))
    assert set(batch.rewards) == {0.5}


def test_what_a_reward_changes_in_the_metadata_of_a_sample_is_of_no_other_one() -> None:
    """Else it would grade the second completion of a prompt, and every later epoch, by what the first left."""

    def use_up_numbers(sample: Sample) -> float:
        assert isinstance(sample.metadata, dict)
        sample.metadata["place"] = sample.index
        return float(sum(sample.metadata["numbers"].pop() for _ in range(2)))

    prompts = [replace(prompt, metadata={"numbers": [3, 4]}) for prompt in make_prompts(3)]
    manager = AsyncRolloutManager(DataBuffer(prompts), CONFIG.model_copy(update={"reward_fn": use_up_numbers}))
    for _ in range(2):
        batch = asyncio.run(manager.generate_batch())
        assert batch.rewards == [7.0] * 6
        assert [sample.metadata["place"] for sample in batch.samples] == [0, 1] * 3


def score_first_of_group(sample: Sample) -> float | None:
    """A judge that answers for one sample of a group only."""
    return 1.0 if sample.index == 0 else None


@pytest.mark.parametrize("filter_fn", ["", "any_success"])
def test_samples_that_could_not_be_scored_are_in_the_batch_with_nan_for_a_reward(filter_fn: str) -> None:
    _, batch = generate(CONFIG.model_copy(update={"reward_fn": score_first_of_group, "filter_fn": filter_fn}))
    assert [sample.reward for sample in batch.samples] == [1.0, None] * 3
    assert [None if math.isnan(reward) else reward for reward in batch.rewards] == [1.0, None] * 3
    json.dumps(batch.to_json(), allow_nan=False)


def test_groups_without_any_score_are_dropped_by_filters_of_rewards_under_their_own_reason() -> None:
    def judge_of_odd_groups(sample: Sample) -> float | None:
        return float(sample.index) if sample.group_index % 2 else None

    config = CONFIG.model_copy(update={"reward_fn": judge_of_odd_groups, "filter_fn": "reward_nonzero_std"})
    _, batch = generate(config)
    assert all(group[0].group_index % 2 for group in batch.groups)
    assert set(batch.metadata["drops"]) == {"unscored"}


def test_seeds_differ_between_samples_and_repeat_between_runs() -> None:
    seeds = {sampling_seed(seed, group, index) for seed in range(3) for group in range(20) for index in range(8)}
    assert len(seeds) == 3 * 20 * 8
    assert sampling_seed(1, 2, 3) == sampling_seed(1, 2, 3)
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("role", ["generate_fn", "filter_fn"])
def test_a_users_function_that_raises_ends_the_batch_and_is_named(role: str) -> None:
    def broken_function(group: Sequence[Sample]) -> list[Sample]:
        raise KeyError("score")

    with pytest.raises(RewardError, match=r"broken_function on prompt 'p\d' raised KeyError"):
        generate(CONFIG.model_copy(update={role: broken_function}))


async def answer_at_random(group: Sequence[Sample]) -> list[Sample]:
    await asyncio.sleep(secrets.randbelow(8) / 1000)
    return [answer_with(sample) for sample in group]


def keep_two_of_three(group: Sequence[Sample]) -> FilterDecision:
    return FilterDecision(group[0].group_index % 3 != 0, "third")


BY_TIMING = CONFIG.model_copy(
    update={"generate_fn": answer_at_random, "filter_fn": keep_two_of_three, "over_sampling_factor": 2.0}
)


def generate_several(config: RolloutConfig, orders: Sequence[Schedule]) -> tuple[list[RolloutBatch], object]:
    """Four batches, the first of which follow `orders`; and where manager and prompts then are."""
    data_buffer = DataBuffer(make_prompts(8))
    manager = AsyncRolloutManager(data_buffer, config)
    manager.replay(orders)

    async def loop() -> list[RolloutBatch]:
        return [await manager.generate_batch() for _ in range(4)]

    return asyncio.run(loop()), (manager.state_dict(), data_buffer.state_dict())


def test_a_logged_order_makes_the_same_batches_again_whoever_finishes_first() -> None:
    batches, end = generate_several(BY_TIMING, [])
    orders = [Schedule(batch.metadata["completed"]) for batch in batches]
    for _ in range(5):
        again, end_again = generate_several(BY_TIMING, orders)
        assert [batch.to_json() for batch in again] == [batch.to_json() for batch in batches]
        assert end_again == end


def test_an_order_of_an_earlier_batch_leaves_the_later_ones_to_timing() -> None:
    batches, _ = generate_several(BY_TIMING, [Schedule([5, 4, 2])])
    assert batches[0].metadata["completed"] == [5, 4, 2]
    assert [group[0].group_index for group in batches[0].groups] == [2, 4, 5]
    assert all(len(batch.groups) == 3 for batch in batches)


def test_an_order_that_cannot_be_followed_is_left_loudly(caplog: pytest.LogCaptureFixture) -> None:
    batches, _ = generate_several(BY_TIMING, [Schedule([5, 99, 2]), Schedule([7])])
    assert batches[0].metadata["completed"][0] == 5
    assert [len(batch.groups) for batch in batches] == [3, 3, 3, 3]
    assert (
        len([r for r in caplog.records if "group 99, the next group of the recorded schedule" in r.getMessage()]) == 1
    )


async def generate_despite(
    trouble: Literal["cancelled", "failed"], manager: AsyncRolloutManager, groups: Sequence[int]
) -> list[RolloutBatch]:
    """A batch for each of `groups`, whose grading cancels the call, or fails it; then the call is made again."""

    async def generate_one(troubled: int) -> RolloutBatch:
        is_time = asyncio.Event()

        async def grade(sample: Sample) -> float:
            if sample.group_index == troubled and not is_time.is_set():
                is_time.set()
                if trouble == "failed":
                    raise OSError("the judge is away")
                await asyncio.sleep(3600)
            return vary_by_text(sample)

        call = asyncio.create_task(manager.generate_batch(grade))
        await is_time.wait()
        if trouble == "cancelled":
            call.cancel()
        with pytest.raises(RewardError if trouble == "failed" else asyncio.CancelledError):
            await call
        return await manager.generate_batch(grade)

    async with manager:
        return [await generate_one(group) for group in groups]


def vary_by_text(sample: Sample) -> float:
    return len(set(sample.response)) / 8


@pytest.mark.parametrize("trouble", ["cancelled", "failed"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_call_that_was_cancelled_or_failed_takes_nothing_from_the_schedule(
    quickstart_dir: Path,
    base_model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    trouble: Literal["cancelled", "failed"],
    place: int,
) -> None:
    """On the embedded engine: the same groups, tokens, drops and cursor as without it, wherever in the schedule."""
    config = RolloutConfig(
        batch_size=3,
        n_samples_per_prompt=2,
        over_sampling_factor=2.0,
        filter_fn=keep_two_of_three,
        reward_fn=vary_by_text,
        sampling=SamplingConfig(max_new_tokens=8),
    )
    prompts = load_prompts_from_jsonl(quickstart_dir / "prompts.jsonl")

    async def generate_undisturbed(manager: AsyncRolloutManager) -> list[RolloutBatch]:
        return [await manager.generate_batch() for _ in range(3)]

    def run(
        generate_all: Callable[[AsyncRolloutManager], Awaitable[list[RolloutBatch]]], orders: Sequence[Schedule]
    ) -> tuple[list[RolloutBatch], object]:
        with served_engine(Path(base_model.path)) as (engine, _):
            generate_fn = create_engine_generate_fn([engine], tokenizer, config)
            manager = AsyncRolloutManager(DataBuffer(prompts), config, generate_fn=generate_fn)
            manager.replay(orders)
            batches = anyio.run(generate_all, manager)
            return batches, (manager.state_dict(), manager.data_buffer.state_dict())

    first, _ = run(generate_undisturbed, [])
    orders = [Schedule(batch.metadata["completed"]) for batch in first]
    again, end = run(generate_undisturbed, orders)
    groups = [order.completed[place] for order in orders]
    troubled, troubled_end = run(lambda manager: generate_despite(trouble, manager, groups), orders)
    assert [batch.to_json() for batch in troubled] == [batch.to_json() for batch in again]
    assert troubled_end == end


def test_where_timing_decides_nothing_no_order_is_kept() -> None:
    _, batch = generate(CONFIG)
    assert "completed" not in batch.metadata


def test_a_failure_of_a_group_that_the_log_has_not_reached_does_not_come_first() -> None:
    async def fail_first_group(group: Sequence[Sample]) -> list[Sample]:
        if group[0].group_index == 0:
            raise OSError("unused in the first attempt")
        await asyncio.sleep(0.01)
        return [answer_with(sample) for sample in group]

    config = BY_TIMING.model_copy(update={"generate_fn": fail_first_group, "filter_fn": ""})
    manager = AsyncRolloutManager(DataBuffer(make_prompts(8)), config)
    manager.replay([Schedule([3, 2, 1])])
    batch = asyncio.run(manager.generate_batch())
    assert batch.metadata["completed"] == [3, 2, 1]


def test_a_reward_that_does_not_return_ends_the_batch_and_names_the_prompt() -> None:
    async def wait_for_ever(sample: Sample) -> float:
        await asyncio.sleep(3600)
        return 1.0

    with pytest.raises(RewardError, match=r"wait_for_ever on prompt 'p\d': it did not return within 0.05 s"):
        generate(CONFIG.model_copy(update={"reward_fn": wait_for_ever, "reward_timeout_s": 0.05}))


def block(given: object) -> float:
    """A user's function that never waits, for a sample or a group."""
    while True:
        pass


def test_a_filter_that_does_not_return_ends_the_batch_and_names_the_prompt() -> None:
    with pytest.raises(RewardError, match=r"filter function .*:block on prompt 'p\d': it did not return within 0.1 s"):
        generate(CONFIG.model_copy(update={"filter_fn": block, "reward_timeout_s": 0.1}))


async def wait_for_samples(group: list[Sample]) -> list[Sample]:
    """A user's function that waits for something that never comes."""
    await asyncio.sleep(3600)
    return group


@pytest.mark.parametrize("generate_fn", [block, wait_for_samples])
def test_a_generation_that_does_not_return_ends_the_batch_and_names_the_prompt(generate_fn: GenerateFn) -> None:
    config = CONFIG.model_copy(update={"generate_fn": generate_fn, "generate_timeout_s": 0.1})
    name = name_of_function(generate_fn)
    with pytest.raises(
        RewardError, match=rf"generation function {name} on prompt 'p\d': it did not return within 0.1 s"
    ):
        generate(config)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda group: None, r"a NoneType: expected a list of Sample"),
        (lambda group: ["ok", "ok"], r"a list with a str in it: expected a list of Sample"),
        (lambda group: [], r"no sample for 2 of 2 places, 0 first: make each sample from a given sample"),
        (lambda group: [answer_with(group[1])], r"no sample for 1 of 2 places, 0 first"),
        (lambda group: [answer_with(Sample(index=i)) for i in range(2)], r"a sample of group 0 for group 1: make"),
        (lambda group: [answer_with(replace(group[0], index=i)) for i in range(3)], r"a sample for the place 2, which"),
        (lambda group: [answer_with(each) for each in (*group, group[0])], r"two samples for one place: if each"),
    ],
)
def test_what_a_generation_function_must_not_return_is_named(broken: GenerateFn, message: str) -> None:
    def answer_wrongly(group: Sequence[Sample]) -> Any:  # Any: what nobody may return
        return broken(group) if group[0].group_index == 1 else [answer_with(sample) for sample in group]

    expected = rf"^generation function \S*answer_wrongly on prompt 'p\d' returned {message}"
    with pytest.raises(RewardError, match=expected):
        generate(CONFIG.model_copy(update={"generate_fn": answer_wrongly}))


def test_what_several_rewards_gave_is_among_the_metrics_of_the_step() -> None:
    rewards = (RewardConfig(name=reward_by_place, weight=2.0), RewardConfig(name="exact_match"))
    _, batch = generate(CONFIG.model_copy(update={"reward_fn": "", "rewards": rewards}))
    assert batch.rewards == [0.0, 2.0] * 3
    metrics = describe_rollouts(batch)
    name = "reward/tests.rollouts_core.rollout.test_rollout:reward_by_place"
    assert (metrics[name], metrics["reward/exact_match"], metrics["reward_error_share"]) == (0.5, 0.0, 0.0)
