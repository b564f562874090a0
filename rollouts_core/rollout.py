"""Sample, grade and filter completions until a batch of groups is full.

Not here: how a group is generated (generate.py), what settings name (resolve.py), advantages and tensors (rl.py), the
order of prompts (data/data_buffer.py).

    DataBuffer -> pending groups -> generate_fn -> reward_fn -> filter_fn --keep--> batch, ordered by group
                       ^                                           |
                       +------------ ask for more <------drop------+

Groups are kept in the order in which they finish and never chosen by reward: choosing would bias the gradient.
Groups still under way when the batch is full begin the next one. Where that, or a filter, lets timing decide which
groups a batch gets, the order in which groups finished is in its metadata; a manager that is told that order takes
them in it again, however they finish this time, and so makes the same batch.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rollouts_core.config import RolloutConfig, name_of_function
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.errors import (
    ConfigError,
    DataError,
    EnvironmentOutageError,
    EnvironmentUnavailableError,
    RewardError,
    RolloutsError,
)
from rollouts_core.filters import FilterDecision
from rollouts_core.generate import Group, build_pending_group
from rollouts_core.resolve import GenerateFn, resolve_filter_fn, resolve_generate_fn, resolve_reward_fn
from rollouts_core.rewards import RewardFn, WeightedRewards, grade_group, grade_sample
from rollouts_core.rollout_batch import apply_sample_transforms, convert_to_batch
from rollouts_core.types import RolloutBatch, Sample, sample_from_json

logger = logging.getLogger(__name__)

FAILURE_WINDOW = 50
"""Over so many groups the share is taken that was dropped because something was not available."""
UNAVAILABLE = "environment_unavailable"
"""The reason under which those are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finished:
    """What the task of one group sends back: the finished group and its fate, or what went wrong."""

    group: Group
    decision: FilterDecision
    error: RolloutsError | None = None
    unavailable: str = ""
    """What failed, where the group was dropped because an environment or a reward was not available."""


class AsyncRolloutManager:
    """Generates batches from a `DataBuffer` with groups in parallel; owns the groups that are under way.

    Used with `async with`. `generate_fn` defaults to the function that `config` names.

    Raises:
        ConfigError: a function name in the configuration that does not exist.
    """

    def __init__(
        self,
        data_buffer: DataBuffer,
        config: RolloutConfig,
        *,
        generate_fn: GenerateFn | None = None,
        reward_fn: RewardFn | None = None,
    ) -> None:
        self.data_buffer = data_buffer
        self.config = config
        self.generate_fn = generate_fn or resolve_generate_fn(config)
        self.reward_fn = reward_fn or resolve_reward_fn(config)
        self.filter_fn = resolve_filter_fn(config)
        self.partial_samples: list[Sample] = []
        """Groups that were asked for but not used: the next batch begins with them."""
        self._failures: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self._orders: deque[Sequence[int]] = deque()
        self._timing_decides = self.filter_fn is not None or _num_asked_groups(config) > config.batch_size

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def generate_batch(self, reward_fn: RewardFn | None = None) -> RolloutBatch:
        """The next `config.batch_size` groups that the filter keeps, ordered by group.

        Raises:
            RewardError, EngineError: what a group's generation or grading raised; the others are stopped.
            DataError: the filter dropped so much that `max_refills` was reached.
        """
        grade = reward_fn or self.reward_fn
        kept: list[Group] = []
        under_way: dict[int, Group] = {}
        drops: Counter[str] = Counter()
        num_asked = 0
        failure: RolloutsError | None = None
        order = _LoggedOrder(self._orders.popleft() if self._orders else ())
        completed: list[int] = []
        send, receive = anyio.create_memory_object_stream[_Finished](float("inf"))
        async with send, receive, anyio.create_task_group() as tasks:
            while len(kept) < self.config.batch_size and failure is None:
                if len(kept) + len(under_way) < self.config.batch_size:
                    if num_asked > self.config.max_refills:
                        failure = _too_few_groups(len(kept), drops, self.config)
                        break
                    num_asked += 1
                    for group in self._next_groups():
                        under_way[group[0].group_index] = group
                        tasks.start_soon(self._finish_group, group, grade, send)
                finished = await order.next_finished(receive, under_way)
                completed.append(finished.group[0].group_index)
                del under_way[completed[-1]]
                failure = finished.error or self._outage(finished)
                if finished.decision.keep:
                    kept.append(finished.group)
                elif failure is None:
                    drops[finished.decision.reason] += 1
            tasks.cancel_scope.cancel()
        if order.was_left:
            self._orders.clear()
        self.partial_samples.extend(sample for group in under_way.values() for sample in group)
        if failure is not None:
            raise failure
        kept.sort(key=lambda group: group[0].group_index)
        counters = {"epoch_id": self.data_buffer.epoch_id, "num_dropped_groups": drops.total(), "drops": dict(drops)}
        schedule = {"completed": completed} if self._timing_decides else {}
        of_rewards = {"reward_metrics": grade.take_metrics()} if isinstance(grade, WeightedRewards) else {}
        metadata = {**counters, **schedule, **of_rewards}
        return convert_to_batch([sample for group in kept for sample in group], metadata=metadata)

    async def generate_batches(self, reward_fn: RewardFn | None = None) -> AsyncIterator[RolloutBatch]:
        """Batches without end."""
        while True:
            yield await self.generate_batch(reward_fn)

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """The groups under way, as JSON values."""
        return {"partial_samples": [sample.to_json() for sample in self.partial_samples]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Go on with the groups of `state_dict`."""
        self.partial_samples = [sample_from_json(record) for record in state["partial_samples"]]

    def replay(self, orders: Sequence[Sequence[int]]) -> None:
        """Make the next batches like those whose metadata had these `completed` groups, in order."""
        self._orders = deque(orders)

    def _next_groups(self) -> list[Group]:
        """The groups to ask for: those carried over first, then new prompts."""
        carried: dict[int, Group] = {}
        for sample in self.partial_samples:
            carried.setdefault(sample.group_index, []).append(sample)
        self.partial_samples = []
        num_groups = _num_asked_groups(self.config)
        first_index = self.data_buffer.num_drawn
        prompts = self.data_buffer.get_prompts(max(0, num_groups - len(carried)))
        fresh = [
            build_pending_group(prompt, group_index=first_index + i, size=self.config.n_samples_per_prompt)
            for i, prompt in enumerate(prompts)
        ]
        return [*carried.values(), *fresh]

    async def _finish_group(self, group: Group, grade: RewardFn, send: MemoryObjectSendStream[_Finished]) -> None:
        # Errors travel as values: raised in a task they would reach the caller wrapped in an ExceptionGroup.
        try:
            timeout_s = self.config.reward_timeout_s
            graded = await grade_group(await self._generate(group), grade, timeout_s=timeout_s)
            decision = self._decide(graded)
        except EnvironmentUnavailableError as error:
            logger.warning("dropped group %d: %s", group[0].group_index, error)
            dropped = FilterDecision(False, UNAVAILABLE)
            send.send_nowait(_Finished(group=group, decision=dropped, unavailable=str(error)))
            return
        except RolloutsError as error:
            send.send_nowait(_Finished(group=group, decision=FilterDecision(False), error=error))
            return
        send.send_nowait(_Finished(group=graded, decision=decision))

    async def _generate(self, group: Group) -> Sequence[Sample]:
        try:
            outcome = self.generate_fn(group)
            return await outcome if inspect.isawaitable(outcome) else outcome
        except RolloutsError:
            raise
        except Exception as error:
            raise _user_function_error("generation", self.generate_fn, group, error) from error

    def _outage(self, finished: _Finished) -> EnvironmentOutageError | None:
        """An error, when more groups were dropped for what was not available than the settings allow."""
        self._failures.append(bool(finished.unavailable))
        num_failed, share = sum(self._failures), self.config.max_environment_failure_share
        if not finished.unavailable or num_failed <= share * FAILURE_WINDOW:
            return None
        return EnvironmentOutageError(
            f"{num_failed} of the last {len(self._failures)} groups were dropped because an environment or a reward "
            f"was not available, more than rollout.max_environment_failure_share {share:g} of {FAILURE_WINDOW} allows; "
            f"nothing of them was graded. Mend it, then start the run again. The last one: {finished.unavailable}"
        )

    def _decide(self, group: Group) -> FilterDecision:
        if self.filter_fn is None:
            return FilterDecision(True)
        try:
            outcome = self.filter_fn(group)
        except Exception as error:
            raise _user_function_error("filter", self.filter_fn, group, error) from error
        return outcome if isinstance(outcome, FilterDecision) else FilterDecision(bool(outcome), "filtered")


class _LoggedOrder:
    """Hands out finished groups in the order of a log; without a log, or behind its end, as they come."""

    def __init__(self, order: Sequence[int]) -> None:
        self._expected = deque(order)
        self.was_left = False
        """The log could not be followed."""
        self._early: dict[int, _Finished] = {}

    async def next_finished(
        self, receive: MemoryObjectReceiveStream[_Finished], under_way: Mapping[int, Group]
    ) -> _Finished:
        """The next group to look at, after waiting for it."""
        if self._expected and self._expected[0] not in under_way:
            logger.warning(
                "the logged schedule has group %d next, which was not asked for: from here on timing decides again",
                self._expected[0],
            )
            self._expected.clear()
            self.was_left = True
        if not self._expected:
            return self._early.pop(next(iter(self._early))) if self._early else await receive.receive()
        group_index = self._expected.popleft()
        while group_index not in self._early:
            finished = await receive.receive()
            self._early[finished.group[0].group_index] = finished
        return self._early.pop(group_index)


def generate_rollout_batches(
    data_buffer: DataBuffer, config: RolloutConfig, **kwargs: Any
) -> Iterator[RolloutBatch]:  # Any: handed through to the user's function
    """Batches without end from a plain `config.generate_fn`, one call per batch; no filter, no engine.

    Args:
        kwargs: handed to `generate_fn` with each call.
    """
    generate_fn, reward_fn = resolve_generate_fn(config), resolve_reward_fn(config)
    if inspect.iscoroutinefunction(generate_fn):
        raise ConfigError("rollout.generate_fn is a coroutine function: use AsyncRolloutManager with it")
    while True:
        first_index = data_buffer.num_drawn
        pending = [
            sample
            for i, prompt in enumerate(data_buffer.get_prompts(config.batch_size))
            for sample in build_pending_group(prompt, group_index=first_index + i, size=config.n_samples_per_prompt)
        ]
        generated = generate_fn(pending, **kwargs)
        assert not inspect.isawaitable(generated), "a plain generate_fn returned something to wait for"
        yield convert_to_batch(
            apply_sample_transforms(generated, [lambda sample: _grade_now(sample, reward_fn)]),
            metadata={"epoch_id": data_buffer.epoch_id},
        )


def _grade_now(sample: Sample, reward_fn: RewardFn) -> Sample:
    return anyio.run(grade_sample, sample, reward_fn)


def _num_asked_groups(config: RolloutConfig) -> int:
    """Groups that a batch asks for at a time."""
    return max(config.batch_size, int(config.batch_size * config.over_sampling_factor))


def _user_function_error(kind: str, function: Callable[..., Any], group: Group, error: Exception) -> RewardError:
    prompt_id = group[0].metadata.get("prompt_id", "?")
    return RewardError(
        f"{kind} function {name_of_function(function)} on prompt {prompt_id!r} raised {type(error).__name__}: {error}"
    )


def _too_few_groups(num_kept: int, drops: Counter[str], config: RolloutConfig) -> DataError:
    return DataError(
        f"only {num_kept} of {config.batch_size} groups passed the filter after {config.max_refills} refills "
        f"(dropped: {dict(drops)}): the task is too easy, too hard, or the filter too strict"
    )
