"""Generate, grade and filter completions until a batch of groups is full, also ahead of the trainer.

    DataBuffer -> pending groups -> generate_fn -> reward_fn -> filter_fn --keep--> ready -> batch, ordered by group
                       ^                                           |
                       +------------ ask for more <------drop------+

Groups are never selected by reward, which would bias the gradient. The only back-pressure is the number of live groups
(running or ready):

    max_staleness 0    One batch is generated while the trainer waits, nothing while it trains. A batch takes the groups
                       that finish first. The other groups are given up and start the next batch, from their prompts or,
                       with max_partial_staleness, from their tokens. If this or a filter lets timing decide which
                       groups a batch gets, the batch's metadata records the order. A manager that replays this order
                       makes the same batch again.
    max_staleness S    S batches are generated while the trainer trains, and one more while it waits. A batch takes the
                       oldest live groups, so timing decides nothing unless a filter drops groups. A group is at most S
                       publications old when it is trained on.

One group: `finish_group.py`. Replayed order: `group_order.py`. Outages: `outage.py`.
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
from rollouts_core.rollout.group_order import FinishedGroup, LoggedOrder, Schedule
from rollouts_core.rollout.outage import OutageWatch
from rollouts_core.rollout.resolve import (
    GenerateFn,
    Interruptible,
    Remembering,
    Resumable,
    resolve_buffer_filter_fn,
    resolve_filter_fn,
    resolve_generate_fn,
    resolve_reward_fn,
)
from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.rollout.staleness import PublishedVersions
from rollouts_core.rollout.validity import InvalidWatch
from rollouts_core.system.time_limits import interrupt_after
from rollouts_core.types import RolloutBatch, Sample, group_samples, sample_from_json
from rollouts_core.user_code.failures import describe_raised

logger = logging.getLogger(__name__)

BREAK_OFF_TIMEOUT_S = 30.0
"""Time limit for engines to interrupt their requests, seconds; later tokens are lost."""
STALE = "stale"
"""Drop reason for groups that were too old and are generated again."""


@dataclass(slots=True)
class _Tally:
    """Counters since the last batch."""

    num_asked: int = 0
    """Groups that were requested."""
    drops: Counter[str] = field(default_factory=Counter)
    """Dropped groups by reason."""
    completed: list[int] = field(default_factory=list)
    """Numbers of the groups that were kept or dropped, in order."""
    unavailable: list[int] = field(default_factory=list)
    """Groups dropped because of an outage."""
    rewards: list[float] = field(default_factory=list)
    """Rewards in all kept or dropped groups; a trajectory counts once."""
    paused_s: float = 0.0
    """Seconds without requests because of an outage."""


class AsyncRolloutManager:
    """Generates batches of groups in parallel from a `DataBuffer`; owns the live groups.

    Use with `async with`. At its end running groups are given up and moved to `partial_samples`. `generate_fn` defaults
    to the function in `config`.

    Args:
        num_tokens: samples with a token id of at least this number are invalid.

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
        self._remembering = function if isinstance(function, Remembering) else None
        is_kept = config.max_partial_staleness > 0
        self._interruptible = function if is_kept and isinstance(function, Interruptible) else None
        self.reward_fn = reward_fn or resolve_reward_fn(config)
        self.filter_fn = resolve_filter_fn(config)
        self._finisher = GroupFinisher(config, self.generate_fn, self.filter_fn, num_tokens=num_tokens)
        self.buffer_filter_fn = resolve_buffer_filter_fn(config)
        self.partial_samples: list[Sample] = []
        """Groups that were given up, with their tokens. The next batch requests these groups first."""
        self.published = PublishedVersions(config.max_token_age + 2)
        """The last published weight versions."""
        self._under_way: dict[int, Group] = {}
        """Groups that were requested and neither kept nor dropped yet."""
        self._begun: set[int] = set()
        """Groups in `_under_way` whose task is running or has finished."""
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
        self._order = LoggedOrder()
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
        """The next `config.batch_size` groups that pass the filter, ordered by group.

        A call implies that the previous batch was trained on and, if due, its weights published. A call that is
        cancelled or raises loses nothing: the next call continues with the same groups and decisions, and gives the
        same batch. Concurrent calls run one after another.

        Raises:
            RewardError, EngineError: generating or grading a group failed; the other groups are stopped.
            DataError: the filter dropped so many groups that `max_refills` was reached, or too many samples are
            invalid.
        """
        async with self._calls:
            self._grade = reward_fn or self.reward_fn
            if self.config.max_staleness:
                assert self._tasks, (
                    "with max_staleness groups are generated between the calls: use `async with manager`"
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
        """An endless stream of batches."""
        while True:
            yield await self.generate_batch(reward_fn)

    def weights_published(self, version: int) -> None:
        """Note that the engines serve this version from now on."""
        self.published.add(version)

    def take_idle_s(self) -> float:
        """Seconds since the last call in which no group was running, so that generation waited for the trainer."""
        now = perf_counter()
        idle_s = self._idle_s + (now - self._idle_since if self._idle_since is not None else 0.0)
        self._idle_s = 0.0
        self._idle_since = now if self._idle_since is not None else None
        return idle_s

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """The live groups as JSON values: groups to request again, with their tokens, and ready groups."""
        # With generation ahead, groups are taken by number, so the order of finishing does not matter.
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
        """Restore the groups of `state_dict`.

        Args:
            is_regraded: grade and filter ready groups again, because the settings of rewards or filters may differ.
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
        """Repeat the schedules of earlier batches, given by `completed` and `unavailable` in their metadata."""
        self._schedules = deque(schedules)
        self._order = self._next_order()

    async def _start(self) -> None:
        self._tasks = await self._running.enter_async_context(anyio.create_task_group())

    async def _stop(self) -> None:
        """End the tasks. Unfinished groups stay in `_under_way` and restart later."""
        if self._tasks is None:
            return
        self._num_wanted = 0  # groups that finish while stopping are not considered
        self._is_paused = False
        self._tasks.cancel_scope.cancel()
        try:
            await self._running.aclose()
        finally:  # also if this task was cancelled, when the last group has ended
            self._tasks = None
            self._order.forget(self._begun)
            self._begun.clear()
            self._idle_since = perf_counter()

    def _give_up_under_way(self) -> None:
        """Move running groups to the next batch, which starts with them."""
        for index, group in self._under_way.items():
            # Without permitted staleness, the next weights must generate the group from its prompt.
            self.partial_samples.extend(group if self.config.max_token_age else self._pending_group(index))
        self._under_way = {}

    def _next_order(self) -> LoggedOrder:
        return LoggedOrder(self._schedules.popleft() if self._schedules else None)

    async def _wait_for_batch(self) -> list[int]:
        """Wait until the groups of the next batch are ready; returns their numbers."""
        ahead = self.config.batch_size * self.config.max_staleness
        self._num_wanted = ahead + self.config.batch_size
        self._ask_for_groups()
        self._look_at_finished()  # groups that finished after a failure and before this call
        await anyio.lowlevel.checkpoint()  # lets the groups start before the trainer, even if a batch is ready
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
        """The groups of the next batch; None until all are ready."""
        alive = sorted({*self._ready, *self._under_way}) if self.config.max_staleness else list(self._ready)
        chosen = alive[: self.config.batch_size]
        is_full = len(chosen) == self.config.batch_size and all(index in self._ready for index in chosen)
        return chosen if is_full and self._failure is None else None

    def _ask_again_for_stale(self, indices: Sequence[int]) -> bool:
        """Regenerate ready groups that are too old to train on; False if there are none.

        Groups that finished after the batch was full take their place.
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
        """Request groups until enough are alive, and start requested groups without a task."""
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
        """Start a task for each group without one: a new group, or one that a pause or a cancelled call stopped."""
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
        """The groups to request: first given-up groups, then new prompts."""
        given_up = self._take_given_up(num_groups)
        first_index = self.data_buffer.num_drawn
        num_drawn = len(self.data_buffer.get_prompts(max(0, num_groups - len(given_up))))
        return [*given_up, *(self._pending_group(first_index + i) for i in range(num_drawn))]

    def _take_given_up(self, num_wanted: int) -> list[Group]:
        """Given-up groups that the buffer filter selects; the others stay."""
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
                f"{describe_raised(error)}: return some of the given groups"
            ) from error

    def _renewed_if_stale(self, group: Group) -> Group:
        """A given-up group, without its tokens if they are too old to train on."""
        versions = self._remembering.versions_of(group) if self._remembering else ()
        ages = [self.published.oldest(group), *map(self.published.staleness_of, versions)]
        if max(ages) <= self.config.max_token_age:
            return group
        self._tally.drops[STALE] += 1
        if self._remembering:
            self._remembering.forget(group)
        return self._pending_group(group[0].group_index)

    def _pending_group(self, index: int) -> Group:
        size = self.config.n_samples_per_prompt
        return build_pending_group(self.data_buffer.prompt_of(index), group_index=index, size=size)

    async def _finish_group(self, group: Group, grade: RewardFn) -> None:
        index = group[0].group_index

        def note(generated: Group) -> None:
            self._under_way[index] = generated

        if index in self._order.unavailable:
            finished = dropped_for_outage(group, "the replayed schedule dropped it")
        else:
            finished = await self._finisher.finish(group, grade, version=self._newest_version, note=note)
        self._order.add(finished)
        self._look_at_finished()

    @property
    def _newest_version(self) -> int | None:
        """The weight version that the engines serve; None if unknown."""
        return self.published.versions[-1] if self.published.versions else None

    def _look_at_finished(self) -> None:
        """Keep or drop finished groups in order, until a full batch waits to be taken."""
        while self._failure is None and self._num_wanted and (self.config.max_staleness or self._next_batch() is None):
            finished = self._order.next_finished(self._under_way)
            if finished is None:
                break
            self._begun.discard(finished.index)
            if self._waits_for_end_of_outage(finished):
                continue
            self._failure = finished.error or self._note_outage(finished) or self._invalid.note(finished.group)
            if self._failure:
                self._order.forget([finished.index])  # the next call restarts it
                break
            self._order.go_on_behind(finished.index)
            self._settle(finished)
            self._ask_for_groups()
        if not self._begun:
            self._idle_since = perf_counter()
        self._changed.set()

    def _settle(self, finished: FinishedGroup) -> None:
        """Keep or drop a group."""
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
        """True if a group without an available environment restarts after a pause, instead of being dropped."""
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
        """The error that ends the run if an outage dropped too many groups; None otherwise."""
        if finished.index in self._order.unavailable:
            return None  # an outage in an earlier attempt says nothing about the present
        return self._outage.note_group(finished.unavailable)

    async def _end_pause(self, pause_s: float) -> None:
        await anyio.sleep(pause_s)
        self._is_paused = False
        self._outage.end_pause(pause_s)
        self._tally.paused_s += pause_s
        self._ask_for_groups()
        self._changed.set()


def _round_size(config: RolloutConfig) -> int:
    """Number of groups that are requested together if no groups are generated ahead."""
    return max(config.batch_size, int(config.batch_size * config.over_sampling_factor))


def _too_few_groups(num_kept: int, drops: Counter[str], config: RolloutConfig) -> DataError:
    return DataError(
        f"only {num_kept} of {config.batch_size} groups passed the filter after {config.max_refills} refills "
        f"(dropped: {dict(drops)}): the task is too easy, too hard, or the filter too strict"
    )
