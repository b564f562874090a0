"""Give new weights to an engine with running requests, and decide how these requests end or continue.

Loading and proving weights is done in delivery.py; interrupted completions are continued in generate.py.

                     running requests              new requests    tokens of a completion come from
    finish           end before the load           wait            one version
    abort            end with partial results      wait            one version; the continuation from a later one
    continue         pause with their tokens       wait            several versions, each recorded

In each case the engine samples nothing between the start of a load and its verification. Requests that do not end
within the time limit of a request are given up and repeated with the new weights, so a hanging engine does not delay
the other engines.

`break_off` ends requests at any time, as `abort` does.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import anyio

from rollouts_core.config import InFlight
from rollouts_core.engine_kinds.spec import AdapterForm
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.protocol import InferenceEngine
from rollouts_core.engines.running_calls import RunningCalls
from rollouts_core.engines.transfer.adapters import common_form
from rollouts_core.engines.transfer.canary import Canary
from rollouts_core.engines.transfer.rounding import common_dtype
from rollouts_core.errors import EngineUnavailableError

if TYPE_CHECKING:
    import torch

    from rollouts_core.engines.protocol import SegmentAccess, Weights

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 600.0
ABORT_TIMEOUT_S = 30.0
"""Time limit for an engine's answer to an abort, seconds. After this time the abort is sent again."""
ABORT_INTERVAL_S = 0.2
"""Seconds after which the abort is sent again, because a request may have arrived after the first abort."""


@runtime_checkable
class InterruptibleEngine(InferenceEngine, Protocol):
    """An engine whose running requests another caller can end or pause."""

    async def abort_running(self) -> None:
        """End all requests with the tokens sampled so far and `Status.ABORTED`."""
        ...

    async def pause(self) -> None:
        """Stop generating. Requests keep their tokens, but the engine drops their cache from the old weights."""
        ...

    async def resume(self) -> None:
        """Continue generating after `pause`."""
        ...


class InFlightEngine:
    """A wrapper that lets an engine get new weights at any time. The wrapper owns the engine.

    Args:
        in_flight: how running requests end or continue when new weights arrive.
        finish_timeout_s: how long to wait until running requests end or pause. Give the time limit of a request.
    """

    def __init__(
        self,
        engine: InterruptibleEngine,
        in_flight: InFlight = "finish",
        *,
        finish_timeout_s: float = FINISH_TIMEOUT_S,
    ) -> None:
        self.engine = engine
        self.in_flight = in_flight
        self.finish_timeout_s = finish_timeout_s
        self._calls = RunningCalls()
        self._idle = anyio.Event()
        self._opened = anyio.Event()
        self._opened.set()

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.engine.name

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests. Waits while weights are being loaded.

        Raises:
            EngineError: raised by the engine.
        """
        while True:
            while not self._opened.is_set():
                await self._opened.wait()
            try:
                with self._calls.one(len(requests)):
                    return await self.engine.generate(requests)
            finally:
                if not self._calls.num_requests:
                    self._idle.set()

    async def segment_access(self) -> SegmentAccess:
        """Which `SegmentedWeights` the engine can load."""
        return await self.engine.segment_access()

    async def weights_dtype(self) -> torch.dtype | None:
        """The number format of the engine's weights, or None if the engine does not report it."""
        return await common_dtype([self.engine])

    async def adapter_form(self, rank: int) -> AdapterForm:
        """The form in which the engine takes adapters of this rank, or empty for merged weights.

        With `in_flight` = "continue" a folder of adapters is not used, because a running request would keep its first
        adapter until its end.
        """
        form = await common_form([self.engine], rank)
        return "" if form == "folder" and self.in_flight == "continue" else form

    async def load_weights(self, weights: Weights, version: str, canary: Canary | None = None) -> None:
        """Load published weights after the running requests have ended or paused.

        Raises:
            WeightSyncError, EngineUnavailableError: raised by the engine.
        """
        if self._opened.is_set():  # a new event would leave the calls that wait since `release_memory` waiting for ever
            self._opened = anyio.Event()
        try:
            async with self._paused() if self.in_flight == "continue" else self._idling(is_aborting=self._aborts):
                await self.engine.load_weights(weights, version, canary)
        finally:
            self._opened.set()

    async def break_off(self) -> None:
        """End the running requests with the tokens sampled so far. New requests wait until `go_on`."""
        self._opened = anyio.Event()
        async with self._idling(is_aborting=True):
            pass

    def go_on(self) -> None:
        """Accept requests again after `break_off`."""
        self._opened.set()

    async def release_memory(self) -> None:
        """Free the engine's memory after the running requests have ended. New requests wait for the next load of
        weights.

        With `in_flight` = "continue" requests are aborted here, because paused requests would need their cache.

        Raises:
            EngineError: raised by the engine.
        """
        self._opened = anyio.Event()
        async with self._idling(is_aborting=self._aborts):
            await self.engine.release_memory()

    async def resume_memory(self) -> None:
        """Allocate the engine's memory again. Raises EngineUnavailableError if the engine is unreachable."""
        await self.engine.resume_memory()

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the engine answers. Raises EngineUnavailableError at the deadline."""
        await self.engine.wait_until_ready(timeout_s)

    async def aclose(self) -> None:
        """Close the engine's connections."""
        await self.engine.aclose()

    @property
    def _aborts(self) -> bool:
        """Whether running requests are interrupted if they cannot be paused."""
        return self.in_flight != "finish"

    @asynccontextmanager
    async def _idling(self, *, is_aborting: bool) -> AsyncIterator[None]:
        """Within the block, no request is running."""
        with anyio.move_on_after(self.finish_timeout_s):
            await self._wait_until_idle(is_aborting=is_aborting)
        if self._calls.num_requests:
            logger.warning(
                "%s: %d requests did not end within %g s; they are made again when it has its new weights",
                self.name,
                self._calls.num_requests,
                self.finish_timeout_s,
            )
            await self._give_up_running()
        yield

    async def _wait_until_idle(self, *, is_aborting: bool) -> None:
        while self._calls.num_requests:
            self._idle = anyio.Event()
            if not is_aborting:
                await self._idle.wait()
                continue
            # Ignore an unreachable engine, because it generates nothing.
            with suppress(EngineUnavailableError), anyio.move_on_after(ABORT_TIMEOUT_S):
                await self.engine.abort_running()
            with anyio.move_on_after(ABORT_INTERVAL_S):
                await self._idle.wait()

    async def _give_up_running(self) -> None:
        """Interrupt all calls in this process. Each call then starts again, and waits for the new weights."""
        self._calls.break_off()
        while self._calls.num_requests:
            self._idle = anyio.Event()
            await self._idle.wait()

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Within the block, the engine is paused and running requests wait."""
        with suppress(EngineUnavailableError), anyio.move_on_after(self.finish_timeout_s):
            await self.engine.pause()
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True), suppress(EngineUnavailableError):
                await self.engine.resume()
