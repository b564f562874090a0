"""Generate, grade and filter groups of completions until a batch is full; optionally several batches ahead of the
trainer.

A group is all samples of one prompt.

    DataBuffer -> pending groups -> generate_fn -> reward_fn -> filter_fn --keep--> ready -> batch, ordered by group
                       ^                                           |
                       +----------- request more <-----drop--------+

Groups are never selected by reward, because that would bias the gradient. Generation is limited only by the number of
live groups (running or ready):

    max_staleness 0    One batch is generated while the trainer waits, and nothing while it trains. A batch takes the
                       groups that finish first. The unfinished groups are cancelled and start the next batch: from
                       their prompts or, with max_partial_staleness, from the tokens generated so far. If over-sampling
                       or a filter makes the batch depend on timing, the batch's metadata records the order of the
                       groups. A manager that replays this order makes the same batch again.
    max_staleness S    S batches are generated while the trainer trains, and one more while it waits. A batch takes the
                       oldest live groups, so timing decides nothing unless a filter drops groups. A group is at most S
                       weight publications old when it is trained on.

One group: `finish_group.py`. Replayed order: `schedule_replay.py`. Outages: `outage.py`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from rollouts_core.config import RolloutConfig, name_of_function
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.errors import DataError, RewardError, RolloutsError
from rollouts_core.filters import scored_rewards
from rollouts_core.rewards import RewardFn, take_reward_metrics
from rollouts_core.rollout.finish_group import GroupFinisher, dropped_for_outage
from rollouts_core.rollout.generate import Group, build_pending_group
from rollouts_core.rollout.outage import OutageWatch
from rollouts_core.rollout.resolve import (
    GenerateFn,
    Interruptible,
    ReportsVersions,
    Resumable,
    resolve_buffer_filter_fn,
    resolve_filter_fn,
    resolve_generate_fn,
    resolve_reward_fn,
)
from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.rollout.schedule_replay import FinishedGroup, Schedule, ScheduleReplay
from rollouts_core.rollout.staleness import PublishedVersions
from rollouts_core.rollout.validity import InvalidWatch
from rollouts_core.system.time_limits import interrupt_after
from rollouts_core.types import RolloutBatch, Sample, group_samples, sample_from_json
from rollouts_core.user_code.failures import describe_raised

logger = logging.getLogger(__name__)

BREAK_OFF_TIMEOUT_S = 30.0
"""Time limit for engines to interrupt running requests at the end of a batch, seconds.

Tokens of requests that take longer are lost."""
STALE = "stale"
"""Drop reason of a group whose tokens were too old to train on. The group is generated again."""


@dataclass(slots=True)
class _Tally:
    """Counters for the metadata of the next batch. Each batch starts with new counters."""

    num_asked: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    """Number of dropped groups by reason."""
    completed: list[int] = field(default_factory=list)
    """Indices of the groups that were kept or dropped, in this order."""
    unavailable: list[int] = field(default_factory=list)
    """Indices of groups that were dropped because an environment or a reward was unavailable."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of all kept and dropped groups, one per trajectory."""
    paused_s: float = 0.0
    """Seconds in which an outage paused generation."""


class AsyncRolloutManager:
    """Generates batches of groups concurrently from the prompts of a `DataBuffer`.

    Use it with `async with`. On exit, running groups are cancelled and moved to `partial_samples`.

    Args:
        generate_fn: generates completions; default: the function that `config` names.
        reward_fn: grades completions; default: the reward that `config` names.
        num_tokens: a sample is invalid if the policy sampled a token id of at least this number.

    Raises:
        ConfigError: a function named in the configuration does not exist.
    """

    def __init__(
        self,
        data_buffer: DataBuffer,
        config: RolloutConfig,
        *,
        generate_fn: GenerateFn | None = None,
        reward_fn: RewardFn | None = None,
        num_tokens: int | None = None,
    ) -> None:
        self.data_buffer = data_buffer
        self.config = config
        self.generate_fn = generate_fn or resolve_generate_fn(config)
        function: object = self.generate_fn
        self._resumable = function if isinstance(function, Resumable) else None
        self._versions = function if isinstance(function, ReportsVersions) else None
        is_kept = config.max_partial_staleness > 0
        self._interruptible = function if is_kept and isinstance(function, Interruptible) else None
        self.reward_fn = reward_fn or resolve_reward_fn(config)
        self.filter_fn = resolve_filter_fn(config)
        self._finisher = GroupFinisher(config, self.generate_fn, self.filter_fn, num_tokens=num_tokens)
        self.buffer_filter_fn = resolve_buffer_filter_fn(config)
        self.partial_samples: list[Sample] = []
        """Samples of cancelled groups, with the tokens generated so far. The next batch requests these groups first."""
        self.published = PublishedVersions(config.max_token_age + 2)
        """The most recently published weight versions."""
        self._under_way: dict[int, Group] = {}
        """Groups that were requested but neither kept nor dropped yet, by index."""
        self._begun: set[int] = set()
        """Indices of groups in `_under_way` with a task, running or finished."""
        self._ready: dict[int, Group] = {}
        self._calls = anyio.Lock(fast_acquire=True)
        self._running = AsyncExitStack()
        self._tasks: TaskGroup | None = None
        self._changed = anyio.Event()
        self._num_wanted = 0
        self._tally = _Tally()
        self._failure: RolloutsError | None = None
        self._outage = OutageWatch(config)
        self._invalid = InvalidWatch()
        self._is_paused = False
        self._schedules: deque[Schedule] = deque()
        self._order = ScheduleReplay()
        self._timing_decides = not config.max_staleness and (
            self.filter_fn is not None or _round_size(config) > config.batch_size
        )
        self._grade = self.reward_fn
        self._idle_s = 0.0
        self._idle_since: float | None = None

    async def __aenter__(self) -> Self:
        if self.config.max_staleness:
            await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stop()
        finally:
            self._give_up_under_way()

    async def generate_batch(self, reward_fn: RewardFn | None = None) -> RolloutBatch:
        """Return the next `config.batch_size` groups that pass the filter, ordered by group index.

        The trainer must call this only after it has trained on the previous batch, and published its weights if a
        publication was due. A call that is cancelled or raises an error loses nothing: the next call continues with the
        same groups and returns the same batch. Concurrent calls run one after another.

        Args:
            reward_fn: grades the groups of this call; default: the manager's reward.

        Raises:
            RewardError, EngineError: generating or grading a group failed. The other groups are stopped.
            DataError: the filter dropped so many groups that `max_refills` was reached, or too many samples are
                invalid.
        """
        async with self._calls:
            self._grade = reward_fn or self.reward_fn
            if self.config.max_staleness:
                assert self._tasks, (
                    "with max_staleness, groups are generated between calls of generate_batch: use `async with manager`"
                )
                return self._take_batch(await self._wait_for_batch())
            await self._start()
            try:
                indices = await self._wait_for_batch()
                if self._interruptible:
                    with anyio.move_on_after(BREAK_OFF_TIMEOUT_S):
                        await self._interruptible.break_off()
            finally:
                try:
                    await self._stop()
                finally:  # `_stop` raises if this call was cancelled
                    if self._interruptible:
                        self._interruptible.go_on()
            self._give_up_under_way()
            return self._take_batch(indices)

    async def generate_batches(self, reward_fn: RewardFn | None = None) -> AsyncIterator[RolloutBatch]:
        """Yield batches of `generate_batch` without end."""
        while True:
            yield await self.generate_batch(reward_fn)

    def weights_published(self, version: int) -> None:
        """Note that the engines serve this weight version from now on."""
        self.published.add(version)

    def take_idle_s(self) -> float:
        """Seconds since the previous call of this method in which no group ran, because generation waited for the
        trainer."""
        now = perf_counter()
        idle_s = self._idle_s + (now - self._idle_since if self._idle_since is not None else 0.0)
        self._idle_s = 0.0
        self._idle_since = now if self._idle_since is not None else None
        return idle_s

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """Live groups as JSON values: unfinished groups with their tokens so far, and finished groups for the next
        batch."""
        # With max_staleness above 0, batches take groups by index, so the order in which groups finish does not matter.
        order = sorted if self.config.max_staleness else list
        under_way = [sample for index in order(self._under_way) for sample in self._under_way[index]]
        return {
            "partial_samples": [sample.to_json() for sample in (*self.partial_samples, *under_way)],
            "ready_samples": [sample.to_json() for index in order(self._ready) for sample in self._ready[index]],
            "published": list(self.published.versions),
            # A copy, because the next groups change the state while the checkpoint is written.
            **({"generation": deepcopy(self._resumable.state_dict())} if self._resumable else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, is_regraded: bool = False) -> None:  # Any: JSON
        """Restore the groups from the result of `state_dict`.

        Args:
            is_regraded: grade and filter the finished groups again, because settings of rewards or filters may have
                changed.
        """
        self.partial_samples = [sample_from_json(record) for record in state["partial_samples"]]
        ready = [sample_from_json(record) for record in state.get("ready_samples", ())]
        if is_regraded:
            self.partial_samples, ready = [*ready, *self.partial_samples], []
        self._ready = {group[0].group_index: group for group in group_samples(ready)}
        self.published = PublishedVersions(self.published.num_kept, state.get("published", ()))
        if self._resumable and "generation" in state:
            self._resumable.load_state_dict(state["generation"])

    def replay(self, schedules: Sequence[Schedule]) -> None:
        """Make the next batches follow recorded schedules, one per batch, so that they equal the batches of an earlier
        run.

        Args:
            schedules: `completed` and `unavailable` from the metadata of the earlier batches.
        """
        self._schedules = deque(schedules)
        self._order = self._next_order()

    async def _start(self) -> None:
        self._tasks = await self._running.enter_async_context(anyio.create_task_group())

    async def _stop(self) -> None:
        """Cancel all group tasks. Unfinished groups stay in `_under_way` and are started again later."""
        if self._tasks is None:
            return
        self._num_wanted = 0  # a group that finishes during the stop is neither kept nor dropped
        self._is_paused = False
        self._tasks.cancel_scope.cancel()
        try:
            await self._running.aclose()
        finally:  # runs even if this task was cancelled; all group tasks have ended here
            self._tasks = None
            self._order.forget(self._begun)
            self._begun.clear()
            self._idle_since = perf_counter()

    def _give_up_under_way(self) -> None:
        """Move unfinished groups to `partial_samples`, so that the next batch starts with them."""
        for index, group in self._under_way.items():
            # If the settings allow no old tokens, the group is generated from its prompt with the next weights.
            self.partial_samples.extend(group if self.config.max_token_age else self._pending_group(index))
        self._under_way = {}

    def _next_order(self) -> ScheduleReplay:
        return ScheduleReplay(self._schedules.popleft() if self._schedules else None)

    async def _wait_for_batch(self) -> list[int]:
        """Wait until all groups of the next batch are ready. Returns the indices of these groups."""
        ahead = self.config.batch_size * self.config.max_staleness
        self._num_wanted = ahead + self.config.batch_size
        self._ask_for_groups()
        self._look_at_finished()  # also keeps or drops groups that finished after the last call failed
        # lets group tasks start their requests before the trainer continues, even if a batch is ready
        await anyio.lowlevel.checkpoint()
        while (indices := self._next_batch()) is None or self._ask_again_for_stale(indices):
            if self._failure is not None:
                failure, self._failure = self._failure, None
                self._tally.num_asked = len(self._under_way)
                raise failure
            if indices is None:
                self._changed = anyio.Event()
                await self._changed.wait()
        self._num_wanted = ahead
        return indices

    def _next_batch(self) -> list[int] | None:
        """Indices of the next batch's groups; None until all groups of this batch are ready."""
        alive = sorted({*self._ready, *self._under_way}) if self.config.max_staleness else list(self._ready)
        chosen = alive[: self.config.batch_size]
        is_full = len(chosen) == self.config.batch_size and all(index in self._ready for index in chosen)
        return chosen if is_full and self._failure is None else None

    def _ask_again_for_stale(self, indices: Sequence[int]) -> bool:
        """Request ready groups again if their tokens are too old to train on. Returns False if no group was too old.

        Groups that finished after the batch was full replace the removed groups.

        Args:
            indices: indices of the groups for the next batch.
        """
        stale = [i for i in indices if self.published.oldest(self._ready[i]) > self.config.max_token_age]
        for index in stale:
            del self._ready[index]
            self._tally.drops[STALE] += 1
            self.partial_samples.extend(self._pending_group(index))
        if stale:
            self._ask_for_groups()
            self._look_at_finished()
        return bool(stale)

    def _take_batch(self, indices: Sequence[int]) -> RolloutBatch:
        groups = [self._ready.pop(index) for index in sorted(indices)]
        samples = [sample for group in groups for sample in group]
        tally, self._tally = self._tally, _Tally()
        schedule = {"completed": tally.completed, "unavailable": tally.unavailable}
        is_scheduled = self._timing_decides or (tally.unavailable and not self.config.max_staleness)
        metadata: dict[str, Any] = {  # Any: JSON
            "epoch_id": self.data_buffer.epoch_id,
            "num_dropped_groups": tally.drops.total(),
            "drops": dict(tally.drops),
            **(schedule if is_scheduled else {}),
            **({"reward_unfiltered": fmean(tally.rewards)} if self.filter_fn and tally.rewards else {}),
            **({"paused_s": tally.paused_s} if tally.paused_s else {}),
            **({"reward_metrics": counted} if (counted := take_reward_metrics(self._grade)) else {}),
            **({"staleness": self.published.describe(samples)} if self.published.versions else {}),
        }
        if self._order.was_left:
            self._schedules.clear()
        self._order = self._next_order()
        return convert_to_batch(samples, metadata=metadata)

    def _ask_for_groups(self) -> None:
        """Request groups until enough groups are live, and start a task for each requested group without a task."""
        limit = self.config.max_refills * _round_size(self.config) + self._num_wanted
        while (num_missing := self._num_wanted - len(self._ready) - len(self._under_way)) > 0:
            if self._is_paused or self._failure:
                return
            num_groups = num_missing if self.config.max_staleness else _round_size(self.config)
            if self._tally.num_asked >= limit:
                self._failure = _too_few_groups(len(self._ready), self._tally.drops, self.config)
                return
            try:
                groups = self._next_groups(num_groups)
            except RewardError as error:
                self._failure = error
                return
            self._tally.num_asked += num_groups
            self._under_way |= {group[0].group_index: group for group in groups}
        self._begin_groups()

    def _begin_groups(self) -> None:
        """Start a task for each requested group without a task: new groups, and groups stopped by a pause or a
        cancelled call."""
        assert self._tasks, "the manager must be open"
        if self._is_paused or self._failure:
            return
        for index in [index for index in self._under_way if index not in self._begun]:
            if self._idle_since is not None:
                self._idle_s += perf_counter() - self._idle_since
                self._idle_since = None
            self._under_way[index] = self._renewed_if_stale(self._under_way[index])
            self._begun.add(index)
            self._tasks.start_soon(self._finish_group, self._under_way[index], self._grade)

    def _next_groups(self, num_groups: int) -> list[Group]:
        """The next groups to request: cancelled groups first, then groups of new prompts."""
        given_up = self._take_given_up(num_groups)
        first_index = self.data_buffer.num_drawn
        num_drawn = len(self.data_buffer.get_prompts(max(0, num_groups - len(given_up))))
        return [*given_up, *(self._pending_group(first_index + i) for i in range(num_drawn))]

    def _take_given_up(self, num_wanted: int) -> list[Group]:
        """Remove the cancelled groups that the buffer filter selects, and return them. Without a buffer filter, all
        cancelled groups are selected."""
        given_up = [self._renewed_if_stale(group) for group in group_samples(self.partial_samples)]
        chosen = given_up if self.buffer_filter_fn is None else self._choose(given_up, num_wanted)
        taken = {group[0].group_index for group in chosen}
        self.partial_samples = [sample for group in given_up for sample in group if sample.group_index not in taken]
        return chosen

    def _choose(self, given_up: list[Group], num_wanted: int) -> list[Group]:
        assert self.buffer_filter_fn is not None, "without a filter all groups are taken"
        try:
            with interrupt_after(self.config.reward_timeout_s):
                chosen = self.buffer_filter_fn(given_up, num_wanted)
                indices = dict.fromkeys(group[0].group_index for group in chosen)
            by_index = {group[0].group_index: group for group in given_up}
            return [by_index[index] for index in indices]
        except Exception as error:
            raise RewardError(
                f"buffer filter {name_of_function(self.buffer_filter_fn)} on {len(given_up)} groups "
                f"{describe_raised(error)}: it must return some of the given groups"
            ) from error

    def _renewed_if_stale(self, group: Group) -> Group:
        """Return the cancelled group, without its tokens if they are too old to train on."""
        versions = self._versions.versions_of(group) if self._versions else ()
        ages = [self.published.oldest(group), *map(self.published.staleness_of, versions)]
        if max(ages) <= self.config.max_token_age:
            return group
        self._tally.drops[STALE] += 1
        if self._versions:
            self._versions.forget(group)
        return self._pending_group(group[0].group_index)

    def _pending_group(self, index: int) -> Group:
        size = self.config.n_samples_per_prompt
        return build_pending_group(self.data_buffer.prompt_of(index), group_index=index, size=size)

    async def _finish_group(self, group: Group, grade: RewardFn) -> None:
        index = group[0].group_index

        def note(generated: Group) -> None:
            self._under_way[index] = generated

        if index in self._order.unavailable:
            finished = dropped_for_outage(group, "an outage dropped this group in the recorded schedule")
        else:
            finished = await self._finisher.finish(group, grade, version=self._newest_version, note=note)
        self._order.add(finished)
        self._look_at_finished()

    @property
    def _newest_version(self) -> int | None:
        """The weight version that the engines serve now; None if no version was published."""
        return self.published.versions[-1] if self.published.versions else None

    def _look_at_finished(self) -> None:
        """Keep or drop finished groups until the next batch is full. A replayed schedule decides their order."""
        while self._failure is None and self._num_wanted and (self.config.max_staleness or self._next_batch() is None):
            finished = self._order.next_finished(self._under_way)
            if finished is None:
                break
            self._begun.discard(finished.index)
            if self._waits_for_end_of_outage(finished):
                continue
            self._failure = finished.error or self._note_outage(finished) or self._invalid.note(finished.group)
            if self._failure:
                self._order.forget([finished.index])  # the next call of `generate_batch` starts this group again
                break
            self._order.consume(finished.index)
            self._settle(finished)
            self._ask_for_groups()
        if not self._begun:
            self._idle_since = perf_counter()
        self._changed.set()

    def _settle(self, finished: FinishedGroup) -> None:
        """Add the finished group to the ready groups, or count it as dropped."""
        del self._under_way[finished.index]
        self._tally.completed.append(finished.index)
        if finished.unavailable:
            self._tally.unavailable.append(finished.index)
        else:
            self._tally.rewards += scored_rewards(finished.group)
        if finished.decision.keep:
            self._ready[finished.index] = finished.group
        else:
            self._tally.drops[finished.decision.reason] += 1

    def _waits_for_end_of_outage(self, finished: FinishedGroup) -> bool:
        """True if the finished group was unavailable and is generated again after a pause; False if it is kept or
        dropped now."""
        assert self._tasks, "the manager must be open"
        if not finished.unavailable or finished.index in self._order.unavailable:
            return False
        if not self._is_paused:
            pause_s = self._outage.begin_pause(finished.unavailable)
            if not pause_s:
                return False
            self._is_paused = True
            self._tasks.start_soon(self._end_pause, pause_s)
        self._order.forget([finished.index])
        self._under_way[finished.index] = self._pending_group(finished.index)
        return True

    def _note_outage(self, finished: FinishedGroup) -> RolloutsError | None:
        """The error that ends the run if too many recent groups were unavailable; None otherwise."""
        if finished.index in self._order.unavailable:
            return None  # the replayed schedule drops this group, even if its environment is available now
        return self._outage.note_group(finished.unavailable)

    async def _end_pause(self, pause_s: float) -> None:
        await anyio.sleep(pause_s)
        self._is_paused = False
        self._outage.end_pause(pause_s)
        self._tally.paused_s += pause_s
        self._ask_for_groups()
        self._changed.set()


def _round_size(config: RolloutConfig) -> int:
    """Number of groups requested together if `max_staleness` is 0. It includes over-sampling."""
    return max(config.batch_size, int(config.batch_size * config.over_sampling_factor))


def _too_few_groups(num_kept: int, drops: Counter[str], config: RolloutConfig) -> DataError:
    return DataError(
        f"only {num_kept} of {config.batch_size} groups passed the filter after {config.max_refills} refills "
        f"(dropped: {dict(drops)}): the task is too easy, too hard, or the filter too strict"
    )
