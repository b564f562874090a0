"""Use several engines as one: share requests, continue without failed engines, use failed engines again after
verification.

    generate -> the engine with the fewest running requests; a group is one call, so it stays together on one engine
                |                                            and shares its prompt's keys and values
                +-- a turn of a conversation -> the engine of its group, whose cache has the earlier turns
                +-- unreachable, or unusable answer -> quarantined: this group, and other requests running there,
                                                       go to another engine

    quarantined -> gets no completions -> loads and proves the current version ---> gets requests again
                                       -> answers, if nothing was published yet --> gets requests again

A new version is given to the engines in use without waiting for quarantined engines. Each quarantined engine has a task
that brings the engine to the current version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.lowlevel

from rollouts_core.config.messages import first_line
from rollouts_core.engine_kinds.spec import AdapterForm
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.in_flight import ABORT_TIMEOUT_S, InterruptibleEngine
from rollouts_core.engines.protocol import InferenceEngine, ScoringEngine, SegmentAccess
from rollouts_core.engines.running_calls import RunningCalls
from rollouts_core.engines.scoring import ScoredTokens, ScoringRequest
from rollouts_core.engines.transfer.adapters import common_form
from rollouts_core.engines.transfer.canary import Canary
from rollouts_core.engines.transfer.rounding import common_dtype
from rollouts_core.engines.transfer.weight_sync import (
    SYNC_TIMEOUT_S,
    WeightSyncResult,
    common_access,
    sync_weights_to_engines,
)
from rollouts_core.errors import (
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    NoNumbersError,
    WeightSyncError,
)
from rollouts_core.system.concurrency import ClosedOnExit, gather

if TYPE_CHECKING:
    import torch

    from rollouts_core.engines.protocol import Weights

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

MAX_LEAD = 16
"""A request of a group goes to the least busy engine if the engine with the group's cache has over this many more
requests."""
RETRY_S = 10.0
"""Seconds between two attempts to use a quarantined engine again."""


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """The weights that the engines of a pool must serve."""

    weights: Weights
    version: str
    canary: Canary | None


@dataclass(slots=True)
class Member:
    """One engine of a pool and its state."""

    engine: InterruptibleEngine
    calls: RunningCalls = field(default_factory=RunningCalls)
    is_paused: bool = False
    """Whether the engine was told to pause, and not yet told to resume."""
    quarantined: str = ""
    """Why the engine gets no requests, or empty if the engine is in use."""
    without_numbers: tuple[Published | None] | None = None
    """The weights for which the engine reported NaN log-probs. Another load of these weights would give NaN again."""
    returning: asyncio.Task[None] | None = None
    """The task that brings the engine back from quarantine."""


class EnginePool(ClosedOnExit):
    """Several engines that serve the same weights and are used as one. The pool owns the engines.

    Args:
        sync_timeout_s: time limit for loading a version, seconds. A slower engine is quarantined.
        retry_s: pause between attempts to use a quarantined engine again, seconds.
    """

    def __init__(
        self,
        engines: Sequence[InterruptibleEngine],
        *,
        sync_timeout_s: float = SYNC_TIMEOUT_S,
        retry_s: float = RETRY_S,
    ) -> None:
        assert engines, "a pool needs an engine"
        self.sync_timeout_s = sync_timeout_s
        self.retry_s = retry_s
        self.on_quarantine: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint
        """Awaited before a quarantined engine gets weights, so that a router can stop using the engine. During the
        load, the engine may report the current version before its weights are verified."""
        self._members = [Member(engine) for engine in engines]
        self._published: Published | None = None
        self._is_released = False
        """Whether the trainer uses the engines' GPU memory."""

    @property
    def name(self) -> str:
        """The names of all engines."""
        return ", ".join(member.engine.name for member in self._members)

    @property
    def num_engines(self) -> int:
        """Number of engines, including quarantined engines."""
        return len(self._members)

    @property
    def quarantined(self) -> dict[str, str]:
        """The engines that get no requests, by name, with the reasons."""
        return {member.engine.name: member.quarantined for member in self._members if member.quarantined}

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return completions in the order of the requests, all from one engine.

        Raises:
            EngineUnavailableError: all engines are gone.
            NoNumbersError: all engines are gone, and the log-probs of at least one engine were NaN.
            EngineError: an engine refused the request.
        """
        return await self._ask(lambda engine: engine.generate(requests), len(requests), requests[0].affinity)

    async def score(self, requests: Sequence[ScoringRequest]) -> list[ScoredTokens]:
        """Return log-probs of given tokens in the order of the requests. All engines in use share the requests.

        Raises:
            EngineUnavailableError: all engines are gone.
            NoNumbersError: all engines are gone, and the log-probs of at least one engine were NaN.
            EngineError: an engine refused the request, or cannot score given tokens.
        """

        async def ask(share: Sequence[ScoringRequest], engine: InferenceEngine) -> list[ScoredTokens]:
            if not isinstance(engine, ScoringEngine):
                raise EngineError(f"{engine.name} cannot score given tokens: {type(engine).__name__} has no `score`")
            return await engine.score(share)

        num_shares = max(1, len(self._members) - len(self.quarantined))
        shares = [share for number in range(num_shares) if (share := requests[number::num_shares])]
        scored = await gather([partial(self._ask, partial(ask, share), len(share)) for share in shares])
        return [scored[number % num_shares][number // num_shares] for number in range(len(requests))]

    async def _ask(
        self,
        ask: Callable[[InterruptibleEngine], Awaitable[list[AnswerT]]],
        num_requests: int,
        affinity: int | None = None,
    ) -> list[AnswerT]:
        """The answers of one engine in use. If the engine fails, it is quarantined, and another engine is asked."""
        while healthy := [member for member in self._members if not member.quarantined]:
            member = self._choose(healthy, affinity)
            try:
                with member.calls.one(num_requests):
                    return await ask(member.engine)
            except (EngineUnavailableError, EngineAnswerError, WeightSyncError) as error:
                member.without_numbers = (self._published,) if isinstance(error, NoNumbersError) else None
                self._quarantine(member, str(error))
        kind = NoNumbersError if all(member.without_numbers for member in self._members) else EngineUnavailableError
        raise kind(f"no engine is left: {self._describe_quarantine()}")

    def _choose(self, healthy: Sequence[Member], affinity: int | None) -> Member:
        """The engine of an affinity, or the least busy engine if the affinity's engine is much busier or
        quarantined."""
        idlest = min(healthy, key=lambda each: each.calls.num_requests)
        if affinity is None:
            return idlest
        home = self._members[affinity % len(self._members)]
        is_away = bool(home.quarantined)
        return idlest if is_away or home.calls.num_requests > idlest.calls.num_requests + MAX_LEAD else home

    async def segment_access(self) -> SegmentAccess:
        """The lowest access to segments among the engines in use."""
        healthy = [member.engine for member in self._members if not member.quarantined]
        return await common_access(healthy)

    async def weights_dtype(self) -> torch.dtype | None:
        """The number format in which all engines keep weights, or None if formats differ or an engine reports no
        format.

        Quarantined engines are included, because they get the same weights.
        """
        return await common_dtype([member.engine for member in self._members])

    async def adapter_form(self, rank: int) -> AdapterForm:
        """The form in which all engines in use take adapters of this rank, or empty for merged weights."""
        return await common_form([member.engine for member in self._members if not member.quarantined], rank)

    async def load_weights(self, weights: Weights, version: str, canary: Canary | None = None) -> None:
        """Load published weights into every engine. Engines that do not take the weights are quarantined.

        Raises:
            WeightSyncError: no engine took the weights.
        """
        published = self._published = Published(weights, version, canary)
        members = [member for member in self._members if not member.quarantined]
        if not members:  # try all engines, so that the error has the reasons of all
            await self._stop_returning()
            members = self._members
        results = await self._sync(members, published)
        for member, result in zip(members, results, strict=True):
            if result.error:
                self._quarantine(member, result.error)
            else:
                self._take_back(member, published)
        if all(member.quarantined for member in self._members):
            raise WeightSyncError(f"no engine took {version}: {self._describe_quarantine()}")

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when every engine answers. Engines that do not answer before the deadline are quarantined.

        Raises:
            EngineUnavailableError: no engine answered.
        """

        async def wait(member: Member) -> None:
            try:
                await member.engine.wait_until_ready(timeout_s)
            except EngineError as error:
                self._quarantine(member, str(error))

        async with anyio.create_task_group() as tasks:
            for member in self._members:
                tasks.start_soon(wait, member)
        if all(member.quarantined for member in self._members):
            raise EngineUnavailableError(f"no engine answers: {self._describe_quarantine()}")

    async def abort_running(self) -> None:
        """End all requests with the tokens sampled so far."""
        await self._tell_all(lambda engine: engine.abort_running())

    async def pause(self) -> None:
        """Stop generating. Requests keep the tokens sampled so far."""
        for member in self._members:
            member.is_paused = member.is_paused or not member.quarantined
        await self._tell_all(lambda engine: engine.pause())

    async def resume(self) -> None:
        """Continue generating after `pause`."""
        for member in self._members:
            member.is_paused = member.is_paused and bool(member.quarantined)
        await self._tell_all(lambda engine: engine.resume())

    async def release_memory(self) -> None:
        """Free the GPU memory of every engine. Unreachable engines are quarantined until `resume_memory`.

        Raises:
            EngineError: an engine was started without support for releasing memory.
        """
        self._is_released = True
        await self._stop_returning()  # an engine that loads weights now would allocate memory that the trainer needs
        await self._move_memory(lambda engine: engine.release_memory())

    async def resume_memory(self) -> None:
        """Allocate the GPU memory of every engine again. Unreachable engines are quarantined."""
        await self._move_memory(lambda engine: engine.resume_memory())
        self._is_released = False
        for member in self._members:
            if member.quarantined:
                self._start_returning(member)

    async def aclose(self) -> None:
        """Close the connections of all engines."""
        await self._stop_returning()
        for member in self._members:
            await member.engine.aclose()

    async def _sync(self, members: Sequence[Member], published: Published) -> list[WeightSyncResult]:
        return await sync_weights_to_engines(
            [member.engine for member in members],
            published.weights,
            version=published.version,
            canary=published.canary,
            timeout_s=self.sync_timeout_s,
        )

    async def _tell_all(self, tell: Callable[[InterruptibleEngine], Awaitable[None]]) -> None:
        """Send a command to every engine in use, and skip unreachable engines."""

        async def tell_one(member: Member) -> None:
            with suppress(EngineUnavailableError):  # failing requests will quarantine this engine
                await tell(member.engine)

        await gather([partial(tell_one, member) for member in self._members if not member.quarantined])

    async def _move_memory(self, move: Callable[[InterruptibleEngine], Awaitable[None]]) -> None:
        async def move_one(member: Member) -> None:
            try:
                await move(member.engine)
            except EngineUnavailableError as error:
                self._quarantine(member, str(error))

        await gather([partial(move_one, member) for member in self._members if not member.quarantined])

    def quarantine(self, engine: InterruptibleEngine, reason: str) -> None:
        """Stop using an engine until it has loaded the current version and the weights are verified."""
        for member in self._members:
            if member.engine is engine and not member.quarantined:
                self._quarantine(member, reason)

    def _quarantine(self, member: Member, reason: str) -> None:
        logger.warning("engine %s was quarantined: %s", member.engine.name, reason)
        member.quarantined = reason
        # Interrupt the engine's calls, so that another engine gets them now. A quarantined engine gets no aborts and
        # pauses, so its requests would delay a publication, and the next load would discard their results.
        member.calls.break_off()
        if not self._is_released:
            self._start_returning(member)

    def _start_returning(self, member: Member) -> None:
        if member.returning is None or member.returning.done():
            member.returning = asyncio.create_task(self._bring_back(member))

    def _take_back(self, member: Member, published: Published | None) -> None:
        if member.quarantined:
            served = published.version if published else "what it was started with"
            logger.info("engine %s serves %s and is asked again", member.engine.name, served)
        member.quarantined, member.without_numbers = "", None

    async def _bring_back(self, member: Member) -> None:
        """Load the published weights into a quarantined engine, with retries, until the engine serves the current
        version."""
        await self.on_quarantine()
        await self._end_running(member)
        tried: Published | None = None
        while member.quarantined:
            if member.without_numbers == (self._published,):
                await anyio.sleep(self.retry_s)
                continue
            if tried is self._published:
                await anyio.sleep(self.retry_s)
            tried = self._published
            try:
                await self._bring_to(member, tried)
            except Exception as error:  # otherwise the task would end silently, and the engine would stay quarantined
                wanted = tried.version if tried else "answer"
                logger.exception("engine %s could not be brought to %s", member.engine.name, wanted)
                member.quarantined = f"{type(error).__name__}: {first_line(error)}"

    async def _bring_to(self, member: Member, published: Published | None) -> None:
        """Load a version into a quarantined engine, and use the engine again if the version is still current."""
        if member.is_paused:  # the quarantined engine did not get the command to resume
            member.is_paused = False
            with suppress(EngineError):  # the engine's client repeats the command
                await member.engine.resume()
        if problem := await self._find_problem(member, published):
            member.quarantined = problem
        elif published is self._published:
            self._take_back(member, published)

    async def _find_problem(self, member: Member, published: Published | None) -> str:
        """Load a version into an engine, and return the reason if this fails. Before the first version, only wait for
        an answer."""
        if published is None:  # in an evaluation, the engine serves its initial weights
            try:
                await member.engine.wait_until_ready(self.retry_s)
            except EngineError as error:
                return str(error)
            return ""
        [result] = await self._sync([member], published)
        return result.error

    @staticmethod
    async def _end_running(member: Member) -> None:
        """End the requests that a quarantined engine still has from a router, or from calls whose end the engine did
        not notice."""
        with suppress(EngineError), anyio.move_on_after(ABORT_TIMEOUT_S):  # an unreachable engine generates nothing
            await member.engine.abort_running()

    async def _stop_returning(self) -> None:
        """End the tasks that bring engines back from quarantine."""
        tasks = [member.returning for member in self._members if member.returning is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)  # errors of the cancelled tasks are ignored

    def _describe_quarantine(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.quarantined.items())
