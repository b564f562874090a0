"""Use several engines behind SGLang's own router, which chooses an engine per request. Weights are sent to each engine
directly.

    generate -> router -> the engine whose cache has most of the prompt, or the least busy one
       |          ^
       |          +-- its workers: the engines with the current version; a quarantined engine is removed before it gets
       |              weights
       +-- the router is gone, or an engine answered with another version -> the pool asks the engines directly

The router does not know versions: a restarted engine passes its health checks long before it serves the current
version. Answers through the router are therefore accepted only if they carry the current version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import dropwhile
from typing import TYPE_CHECKING

import anyio

from rollouts_core.engine_kinds.spec import AdapterForm
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.http import EngineConnection
from rollouts_core.engines.pool import EnginePool
from rollouts_core.engines.protocol import SegmentAccess
from rollouts_core.engines.recovery import MAX_SPANNED_VERSIONS, POLL_INTERVAL_S, PROBE_TIMEOUT_S
from rollouts_core.engines.scoring import ScoredTokens, ScoringRequest
from rollouts_core.engines.sglang import SGLangEngine, parse_completion, render_request
from rollouts_core.engines.transfer.canary import Canary
from rollouts_core.errors import EngineAnswerError, EngineError, EngineUnavailableError
from rollouts_core.system.concurrency import ClosedOnExit, gather

if TYPE_CHECKING:
    import torch

    from rollouts_core.engines.protocol import Weights

logger = logging.getLogger(__name__)

WORKERS_TIMEOUT_S = 10.0
"""Time limit for adding or removing engines, seconds. The router answers before it adds or removes the engine."""


class SGLangRouter(ClosedOnExit):
    """The client of one router. The client owns the connections to the router.

    Args:
        request_timeout_s: time limit of a request.
        api_key: the API key of the router and of its engines, or empty to send no key.
    """

    def __init__(self, url: str, *, request_timeout_s: float = 600.0, api_key: str = "") -> None:
        self._connection = EngineConnection(url, request_timeout_s=request_timeout_s, api_key=api_key)
        self._api_key = api_key

    @property
    def name(self) -> str:
        """The router's URL."""
        return self._connection.url

    async def complete(
        self, requests: Sequence[GenerationRequest], *, ends: Collection[int], vocab_size: int | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests, from weights of any version.

        Each request is one call, because the router takes no list of sampling parameters.

        Args:
            ends: tokens of the engines' model that end completions, besides the stop tokens of a request.
            vocab_size: number of token ids of the engines' model, if known.

        Raises:
            EngineUnavailableError: the router is unreachable, or none of its engines answers.
            EngineError: an engine refused the request, or answered something unusable.
        """
        bodies = [render_request(each, vocab_size=vocab_size) for each in requests]
        calls = [partial(self._connection.sample, "/generate", body) for body in bodies]
        answers = await gather(calls)
        return [
            parse_completion(answer, request, self.name, ends)
            for answer, request in zip(answers, requests, strict=True)
        ]

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the router answers. Raises EngineUnavailableError at the deadline."""
        problem = "it took the connection and was silent"
        with anyio.move_on_after(timeout_s):
            while True:
                try:
                    await self._workers()
                except EngineUnavailableError as error:
                    problem = str(error)
                    await anyio.sleep(POLL_INTERVAL_S)
                else:
                    return
        raise EngineUnavailableError(f"{self.name}, the router, did not answer within {timeout_s:g} s: {problem}")

    async def use(self, urls: Sequence[str]) -> None:
        """Let the router use exactly these engines, and return when the router uses them.

        An engine that is not added in time is left out if the router uses at least one other.

        Raises:
            EngineUnavailableError: the router is gone, or did not change in time.
        """
        workers = await self._workers()
        for url, (worker_id, _) in workers.items():
            if url not in urls:
                await self._connection.call("DELETE", f"/workers/{worker_id}")
        for url in urls:
            if url not in workers:
                key = {"api_key": self._api_key} if self._api_key else {}
                await self._connection.call("POST", "/workers", json={"url": url, **key}, is_answered=False)
        with anyio.move_on_after(WORKERS_TIMEOUT_S):
            # Wait until an added engine is listed, because the router cannot remove an engine that it is still adding.
            while _describe_difference(workers, urls) or not workers.keys() >= {*urls}:
                await anyio.sleep(POLL_INTERVAL_S)
                workers = await self._workers()
        if problem := _describe_difference(workers, urls):
            raise EngineUnavailableError(f"{self.name}, the router, {problem} within {WORKERS_TIMEOUT_S:g} s")

    async def _workers(self) -> dict[str, tuple[str, bool]]:
        """The router's engines by URL: the router's id of each engine, and whether the router sends requests to the
        engine."""
        answer = await self._connection.call("GET", "/workers", timeout=PROBE_TIMEOUT_S)
        try:
            return {each["url"]: (str(each["id"]), bool(each["is_healthy"])) for each in answer["workers"]}
        except (KeyError, TypeError) as error:
            raise EngineError(
                f"{self.name} answered /workers without {error}: is it the router of sglang-router 0.3.2 or newer?"
            ) from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connection.aclose()


def _describe_difference(workers: Mapping[str, tuple[str, bool]], urls: Sequence[str]) -> str:
    """The reason why the engines at `urls` cannot be used through a router, or empty if they can."""
    if others := sorted(workers.keys() - {*urls}):
        return f"did not let go of {', '.join(others)}"
    if not any(is_healthy for _, is_healthy in workers.values()):
        return f"asked none of {', '.join(urls)}"
    return ""


class RoutedPool(ClosedOnExit):
    """Engines behind a router, used as one engine. This object owns the engines and the router's client.

    Args:
        pool: a pool of the same engines. The pool delivers weights, and is used when the router does not answer.
        engines: the engines behind the router.
        revive: called when the router did not answer. It restarts the router if this process owns the router.
    """

    def __init__(
        self,
        router: SGLangRouter,
        pool: EnginePool,
        engines: Sequence[SGLangEngine],
        *,
        revive: Callable[[], None] = lambda: None,
    ) -> None:
        self.router = router
        self.pool = pool
        self._engines = engines
        self._revive = revive
        self._routed: frozenset[str] | None = None
        """Names of the engines that the router was last told to use, or None if unknown."""
        self._telling = anyio.Lock()
        self._versions: list[str] = []
        """Loaded and verified versions, up to the current version."""
        pool.on_quarantine = self._leave_out

    @property
    def name(self) -> str:
        """The names of the router and of all engines."""
        return f"{self.router.name} ({self.pool.name})"

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests, from the weights at the time of the call or later weights.

        Raises:
            EngineUnavailableError: no engine is left.
            EngineError: an engine refused the request, or answered something unusable.
        """
        asked_under = self._versions[-1] if self._versions else None
        try:
            try:
                await self._tell_router()
            except EngineError as error:  # a refusal counts too: the router may have removed the worker
                raise EngineUnavailableError(str(error)) from error
            completions = await self._complete(requests)
        except (EngineUnavailableError, EngineAnswerError) as error:
            logger.warning("%s; the engines are asked directly", error)
            self._routed = None
            self._revive()
            for engine in self._engines:
                if engine.watch.is_silent:
                    self.pool.quarantine(engine, "it fell silent amid requests of the router's")
            return await self.pool.generate(requests)
        accepted = list(dropwhile(lambda version: version != asked_under, self._versions))
        foreign = {version for each in completions for version, _, _ in each.version_spans} - {*accepted}
        if not foreign or not self._versions:
            return completions
        logger.warning("an engine behind %s served %s; it is left out", self.router.name, ", ".join(sorted(foreign)))
        await self._quarantine_others()
        return await self.pool.generate(requests)

    async def score(self, requests: Sequence[ScoringRequest]) -> list[ScoredTokens]:
        """Log-probs of given tokens in the order of the requests. The engines are asked directly, because a router
        chooses engines by their caches, which scoring does not use."""
        return await self.pool.score(requests)

    async def _complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """The router's answer. The call is interrupted if any engine falls silent, because only the router knows which
        engine it chose."""
        first = self._engines[0]
        ask = partial(self.router.complete, requests, ends=first.ends, vocab_size=first.vocab_size)
        for engine in self._engines:
            if engine.name not in self.pool.quarantined:
                ask = partial(engine.watch.over, ask)
        return await ask()

    async def _tell_router(self) -> None:
        """Let the router use the engines that are not quarantined, if this set changed."""
        async with self._telling:
            wanted = frozenset(engine.name for engine in self._engines) - self.pool.quarantined.keys()
            if wanted != self._routed:
                self._routed = None
                await self.router.use(sorted(wanted))
                self._routed = wanted

    async def _leave_out(self) -> None:
        """Tell the router to stop using quarantined engines."""
        with suppress(EngineError):  # `generate` tells the router before the next request
            await self._tell_router()

    async def _quarantine_others(self) -> None:
        """Quarantine the engines that do not serve the current version. The pool then gives them this version."""

        async def look(engine: SGLangEngine) -> None:
            try:
                with anyio.fail_after(PROBE_TIMEOUT_S):
                    problem = await engine.weight_version()
            except (EngineError, TimeoutError) as error:
                problem = str(error) or "nothing"
            if problem != self._versions[-1]:
                self.pool.quarantine(engine, f"it served {problem} in place of {self._versions[-1]}")

        await gather([partial(look, engine) for engine in self._engines])

    async def segment_access(self) -> SegmentAccess:
        """The access to segments that all engines in use have."""
        return await self.pool.segment_access()

    async def weights_dtype(self) -> torch.dtype | None:
        """The number format in which all engines keep weights, or None if formats differ or an engine reports no
        format."""
        return await self.pool.weights_dtype()

    async def adapter_form(self, rank: int) -> AdapterForm:
        """The form in which all engines in use take adapters of this rank, or empty for merged weights.

        Behind a router, the form "folder" is not used.
        """
        form = await self.pool.adapter_form(rank)
        return "" if form == "folder" else form

    async def load_weights(self, weights: Weights, version: str, canary: Canary | None = None) -> None:
        """Load published weights into every engine. Engines that do not take the weights are quarantined.

        Raises:
            WeightSyncError: no engine took the weights.
        """
        await self.pool.load_weights(weights, version, canary)
        self._routed = None  # tell the router again, because an earlier change may have failed after its answer
        self._versions = [*self._versions, version][-MAX_SPANNED_VERSIONS:]

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the router and every engine answer. Engines that do not answer in time are quarantined.

        Raises:
            EngineUnavailableError: the router, or every engine, did not answer before the deadline.
        """
        await gather([partial(self.router.wait_until_ready, timeout_s), partial(self.pool.wait_until_ready, timeout_s)])

    async def abort_running(self) -> None:
        """End all requests with the tokens sampled so far."""
        await self.pool.abort_running()

    async def pause(self) -> None:
        """Stop generating. Requests keep the tokens sampled so far."""
        await self.pool.pause()

    async def resume(self) -> None:
        """Continue generating after `pause`."""
        await self.pool.resume()

    async def release_memory(self) -> None:
        """Free the GPU memory of every engine. Raises EngineError if an engine cannot free its memory."""
        await self.pool.release_memory()

    async def resume_memory(self) -> None:
        """Allocate the GPU memory of every engine again."""
        await self.pool.resume_memory()

    async def aclose(self) -> None:
        """Close all connections."""
        await self.pool.aclose()
        await self.router.aclose()
