"""Keep one server at its target weights: repeat calls, wait for restarts, pause, and release memory.

A client knows which weights its server must serve. A server that died and restarted serves its initial weights again.
The client notices this by the version, loads the right weights and repeats the request, so completions from old weights
are never returned:

    generate -> connection lost | other version -> wait until it answers -> load weights again -> generate
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio

from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.scoring import ScoredTokens, ScoringRequest
from rollouts_core.engines.silence import SilenceWatch
from rollouts_core.engines.transfer.canary import Canary
from rollouts_core.engines.transfer.checksums import vocabulary_size
from rollouts_core.engines.transfer.delivery import ServedWeights, ServerCalls, WeightDelivery
from rollouts_core.errors import (
    EngineAnswerError,
    EngineBusyError,
    EngineError,
    EngineUnavailableError,
    OtherVersionError,
)
from rollouts_core.system.backoff import MAX_BACKOFF_S

if TYPE_CHECKING:
    from rollouts_core.engines.protocol import Weights

AnswerT = TypeVar("AnswerT", bound=Completion | ScoredTokens)

MAX_ATTEMPTS = 3
RETRY_PAUSE_S = 1.0
"""Pause before the second attempt, seconds. The pause doubles for each further attempt, to relieve an overloaded
server."""
MAX_BUSY_ATTEMPTS = 8
"""Number of attempts at a server that reports overload. The attempts take a minute and a half, or as long as the server
asks."""
POLL_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 10.0
MAX_SPANNED_VERSIONS = 64
"""Largest number of versions that sampled one completion. A completion from more versions is requested again."""


class RecoveringEngine:
    """Keeps one server at its target weights, also after restarts of the server.

    Args:
        restart_timeout_s: how long to wait for a server that vanished.
        silence_timeout_s: how long a server with running requests may be silent before it counts as gone.
        start_timeout_s: used in place of a shorter `silence_timeout_s` until the first request has ended.
        model_dir: the model that the server must serve, if known before weights are loaded.
    """

    def __init__(
        self,
        server: ServerCalls,
        *,
        restart_timeout_s: float,
        silence_timeout_s: float,
        start_timeout_s: float,
        model_dir: Path | None,
    ) -> None:
        self.server = server
        self._delivery = WeightDelivery(server)
        self.restart_timeout_s = restart_timeout_s
        self._served: ServedWeights | None = None
        self._model_dir = model_dir
        self._vocab_size = vocabulary_size(model_dir) if model_dir else None
        self._is_proven = True
        """Whether the served weights are verified. False during a load, and after a failed load."""
        self._proven_versions: deque[str] = deque(maxlen=MAX_SPANNED_VERSIONS)
        """Verified versions in the order in which the server had them, up to the current version."""
        self.is_paused = False
        """Whether the server is paused. A paused server answers no request for completions."""
        self._is_left_paused = False
        """True if the server was told to resume, but may not have received the command."""
        self._handed_over: str | None = None
        """The version that the server had when it freed its memory, or None while the server has its memory."""
        self._recovering = asyncio.Lock()
        self.watch = SilenceWatch(
            server.name,
            server.show_life,
            self._recovering.locked,
            timeout_s=silence_timeout_s,
            start_timeout_s=start_timeout_s,
        )
        self._recovery_failure: EngineError | None = None
        """The error of the last recovery that failed."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests, from the weights at the time of the call or later weights.

        Raises:
            EngineUnavailableError: the server did not return, or stayed busy.
            EngineAnswerError: the answer is unusable.
            EngineError: the server refused the request.
        """
        for request in requests:
            self._check_tokens(request.prompt_tokens, "a prompt")

        async def complete() -> list[Completion]:
            completions = await self.server.complete(requests)
            for completion in completions:
                self._check_tokens(completion.tokens, "a completion", EngineAnswerError)
            return completions

        return await self._ask(complete)

    async def score(self, requests: Sequence[ScoringRequest]) -> list[ScoredTokens]:
        """Log-probs of given tokens in the order of the requests, from the weights at the time of the call or later
        weights.

        Raises:
            EngineUnavailableError: the server did not return, or stayed busy.
            EngineAnswerError: the answer is unusable.
            EngineError: the server refused the request, or a request names tokens that the model does not have.
        """
        for request in requests:
            self._check_tokens([*request.tokens, *request.token_ids], "a request for log-probs")
            # A larger `num_top` would end SGLang's process.
            if self._vocab_size is not None and request.num_top > self._vocab_size:
                raise EngineError(
                    f"{self.server.name}: num_top is {request.num_top}, the served model has {self._vocab_size} tokens"
                )
        return await self._ask(partial(self.server.score_once, requests))

    async def _ask(self, ask: Callable[[], Awaitable[list[AnswerT]]]) -> list[AnswerT]:
        """The answers to a call. The call is repeated until all answers come from verified, current weights."""
        problem = ""
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await anyio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
            if attempt or self._is_left_paused:
                await self._recover()
            served = self._served
            try:
                answers = await self._ask_with_backoff(ask)
                self.watch.note_sign()
            except EngineBusyError as error:
                raise EngineUnavailableError(
                    f"{self.server.name} had too much to do {MAX_BUSY_ATTEMPTS} times in a row: {error}"
                ) from error
            except EngineUnavailableError as error:
                problem = str(error)
                continue
            accepted = self._versions_since(served)
            stale = [version for each in answers for version in each.versions.difference(accepted) if self._served]
            # A server reports a new version before its tensors are verified.
            if not stale and self._is_proven:
                return answers
            problem = f"it served {stale[0]}" if stale else "its weights were not proved"
        expected = self._served.version if self._served else "its weights"
        raise EngineUnavailableError(
            f"{self.server.name} did not serve {expected} in {MAX_ATTEMPTS} attempts: {problem}"
        )

    async def _ask_with_backoff(self, ask: Callable[[], Awaitable[list[AnswerT]]]) -> list[AnswerT]:
        """The answers to a call. An overloaded server is called again after longer and longer pauses."""
        for attempt in range(1, MAX_BUSY_ATTEMPTS):
            try:
                return await self.watch.over(ask)
            except EngineBusyError as error:
                await anyio.sleep(max(error.retry_after_s, min(MAX_BACKOFF_S, RETRY_PAUSE_S * 2.0 ** (attempt - 1))))
        return await self.watch.over(ask)

    async def load_weights(self, weights: Weights, version: str, canary: Canary | None) -> None:
        """Load published weights, and return when the server is verified to serve them.

        Raises:
            WeightSyncError: the server refused, or serves another version or other tensors.
            EngineUnavailableError: the server vanished and did not return.
        """
        async with self._recovering:
            await self._load(ServedWeights(weights, version, canary))

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids of the served model, or None if unknown."""
        return self._vocab_size

    @property
    def is_recovering(self) -> bool:
        """Whether a call is loading or verifying weights, or is waiting for the server to return."""
        return self._recovering.locked()

    def note_pause(self) -> None:
        """Record that the server was paused."""
        self.is_paused, self._is_left_paused = True, False

    async def resume(self) -> None:
        """Let the server continue after a pause. An unreachable server is told again before its next request.

        While requests wait in the server, `resume` itself retries the command, because there may be no next request.

        Raises:
            EngineError: the server refused, or cannot be reached.
        """
        self.is_paused = False
        self._is_left_paused = True
        for attempt in range(MAX_ATTEMPTS):
            try:
                await self.server.end_pause()
                break
            except EngineUnavailableError:
                # Retry only while requests wait in the server. A server that is gone has no requests.
                if attempt == MAX_ATTEMPTS - 1 or not self.watch.has_requests:
                    raise
            await anyio.sleep(RETRY_PAUSE_S * 2**attempt)
        self._is_left_paused = False

    async def release_memory(self) -> None:
        """Let the server free its memory. The server's weights count as unverified until the next load.

        Raises:
            EngineError: the server cannot free its memory, or vanished.
        """
        async with self._recovering:
            version = await self.server.weight_version()
            try:
                await self.server.hand_over()
            except EngineUnavailableError:  # the server may have begun to free memory
                self._is_proven = False
                raise
            self._is_proven = False
            self._handed_over = version

    async def resume_memory(self) -> None:
        """Let the server allocate its memory again. A server that restarted after `release_memory` already has its
        memory, with initial weights.

        Raises:
            EngineUnavailableError: the server vanished and did not return.
        """
        async with self._recovering:
            version, self._handed_over = self._handed_over, None
            await self.wait_until_ready(self.restart_timeout_s)
            if version is not None and await self.server.weight_version() == version:
                await self.server.take_back()

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the server answers.

        Raises:
            EngineUnavailableError: the server did not answer before the deadline.
            WeightSyncError: the server serves a model of other shapes.
        """
        problem = "it took the connection and was silent"
        with anyio.move_on_after(timeout_s):
            while True:
                try:
                    with anyio.fail_after(PROBE_TIMEOUT_S):
                        await self.server.weight_version()
                        await self.watch.check()
                except (EngineUnavailableError, TimeoutError) as error:
                    problem = str(error) or problem
                    await anyio.sleep(POLL_INTERVAL_S)
                    continue
                if self._model_dir is not None:
                    await self.server.check_model(self._model_dir)
                return
        raise EngineUnavailableError(f"{self.server.name} did not answer within {timeout_s:g} s: {problem}")

    async def _recover(self) -> None:
        """Wait for the server, and load its target weights if it restarted with other weights.

        Concurrent calls share one attempt and its failure. Otherwise each call in turn would wait for the full timeout
        of a dead server.
        """
        failure_before = self._recovery_failure
        async with self._recovering:
            if (failure := self._recovery_failure) is not failure_before and failure is not None:
                raise type(failure)(str(failure)) from failure
            try:
                await self._recover_once()
            except EngineError as error:
                self._recovery_failure = error
                raise

    async def _recover_once(self) -> None:
        await self.wait_until_ready(self.restart_timeout_s)
        if self._is_left_paused:
            await self.resume()
        if self._served is None:
            return
        if not self._is_proven or await self.server.weight_version() != self._served.version:
            await self._load(self._served)

    async def _load(self, weights: ServedWeights) -> None:
        """Load and verify weights. If the server vanishes meanwhile, the load starts again, because a second load does
        no harm.

        A restart between two requests shows only by the server's version, which is then neither the new nor the
        previous version. `_load` takes the first such version for a restart, and the second for a server that ignores
        the weights.
        """
        problem = ""
        before = self._served if self._is_proven else None
        self._is_proven = False
        has_come_back = False
        for attempt in range(MAX_ATTEMPTS):
            if attempt or self.watch.is_silent:
                await self.wait_until_ready(self.restart_timeout_s)
            try:
                if self._is_left_paused:
                    await self.resume()
                await self._delivery.deliver(
                    weights, None if attempt else before, can_sample=lambda: not self.is_paused
                )
            except EngineUnavailableError as error:
                problem = str(error)
                continue
            except OtherVersionError as error:
                if has_come_back or (before is not None and error.served == before.version):
                    raise
                has_come_back, problem = True, str(error)
                continue
            self._served, self._vocab_size = weights, vocabulary_size(weights.model_dir)
            self._is_proven = True
            self.watch.note_sign()
            if not self._proven_versions or self._proven_versions[-1] != weights.version:
                self._proven_versions.append(weights.version)
            return
        raise EngineUnavailableError(
            f"{self.server.name} vanished in each of {MAX_ATTEMPTS} loads of {weights.version}: {problem}"
        )

    def _versions_since(self, served: ServedWeights | None) -> list[str]:
        """The verified versions from the version `served` on, or all versions if no weights were loaded yet."""
        return list(dropwhile(lambda version: served and version != served.version, self._proven_versions))

    def _check_tokens(self, tokens: Sequence[int], what: str, kind: type[EngineError] = EngineError) -> None:
        """Raise `kind` for a token id outside the vocabulary, because a prompt with such an id would end SGLang's or
        vLLM's process."""
        if self._vocab_size is None or not tokens:
            return
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self._vocab_size:
                raise kind(
                    f"{self.server.name}: {what} has the token id {token}, the served model has {self._vocab_size} "
                    "tokens: serve the model that belongs to the tokenizer"
                )
