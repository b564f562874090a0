"""Keep one server at the weights it must serve: calls that are made again, restarts, loads that are proved.

Not here: one call (http.py), the clients (client.py), the endpoints of a server (sglang.py, vllm.py), how its tensors
are compared (content.py), how a server that hangs is noticed (silence.py), several servers (pool.py).

A client knows which weights its server must serve. A server that died and came back serves its start weights again;
the client notices by the version, loads the right ones and asks again, so no completion of old weights is ever
returned:

    generate -> connection lost | other version -> wait until it answers -> load weights again -> generate
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio

from rollouts_core.backoff import MAX_BACKOFF_S
from rollouts_core.concurrency import in_short_thread
from rollouts_core.config.messages import first_line
from rollouts_core.embedded.weights import read_tensors
from rollouts_core.engines.canary import Canary, prove, published_canary
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.content import (
    EMPTY_DIGEST,
    HeldTensors,
    check_digests,
    find_left_behind,
    find_unproven,
    read_config,
    sample_content,
    vocabulary_size,
)
from rollouts_core.engines.segments import SegmentedWeights
from rollouts_core.engines.sent import SentWeights, find_kept
from rollouts_core.engines.silence import SilenceWatch
from rollouts_core.errors import (
    CheckpointError,
    EngineAnswerError,
    EngineBusyError,
    EngineError,
    EngineUnavailableError,
    TrainingError,
    WeightSyncError,
)

if TYPE_CHECKING:
    from rollouts_core.engines.protocol import Weights

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
RETRY_PAUSE_S = 1.0
"""Before the second attempt, and twice as long before the third: an overloaded server is not helped by haste."""
MAX_BUSY_ATTEMPTS = 8
"""A server that says that it has too much to do is alive: it is given a minute and a half, or the time it asks for."""
POLL_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 10.0
MAX_SPANNED_VERSIONS = 64
"""Tokens of so many versions may be in one completion; one that takes longer is asked for again."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that a server must serve."""

    weights: Weights
    version: str
    canary: Canary | None
    """What proves them where tensors cannot be compared; None takes a forward pass of the directory's model."""

    @property
    def model_dir(self) -> Path:
        """Directory with the model's config.json."""
        return self.weights if isinstance(self.weights, Path) else self.weights.model_dir


class ServerCalls(Protocol):
    """What the loops need of one server's client: each call is made once, and fails with a typed error."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    async def complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Ask for completions."""
        ...

    async def weight_version(self) -> str:
        """The version that the server reports."""
        ...

    async def check_model(self, path: Path) -> None:
        """Raise WeightSyncError where the server's model has other shapes than that of a directory."""
        ...

    async def take_weights(self, path: Path, version: str) -> HeldTensors:
        """Load the weights of a directory and check the version; raises WeightSyncError."""
        ...

    async def take_sent(self, weights: SentWeights, version: str, kept: Collection[str]) -> HeldTensors:
        """Load weights that are sent, but for those that it has, and check the version; raises WeightSyncError."""
        ...

    async def hand_over(self) -> None:
        """Free weights and cache."""
        ...

    async def take_back(self) -> None:
        """Allocate weights and cache after `hand_over`."""
        ...

    async def end_pause(self) -> None:
        """Generate again; nothing where it is not paused."""
        ...

    async def show_life(self) -> None:
        """Return when what generates answered between two of its steps; a paused server's does, too."""
        ...

    async def take_segments(self, weights: SegmentedWeights, version: str) -> Mapping[str, str]:
        """Load segments, check the version, return the digests of all tensors; raises WeightSyncError."""
        ...


class WeightKeeper:
    """Keeps one server at the weights it must serve, through restarts.

    Args:
        restart_timeout_s: how long a server that vanished may take to answer again.
        silence_timeout_s: how long a server that took requests may give no sign of life.
        start_timeout_s: the same before a first request has ended, where that is longer.
        model_dir: the model that it must serve, if known before any weights are loaded.
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
        self.restart_timeout_s = restart_timeout_s
        self._served: ServedWeights | None = None
        self._model_dir = model_dir
        self._vocab_size = vocabulary_size(model_dir) if model_dir else None
        self._is_proven = True
        """False from the beginning of a load until the server proved it, also where it failed or was given up."""
        self._proven: tuple[str, Mapping[str, str]] | None = None
        """A version that a canary proved, and the checksums that the server gave for it."""
        self._proven_content: tuple[Mapping[str, tuple[str, ...]], Mapping[str, str]] = ({}, {})
        """What that version's tensors were made of (`sample_content`), and the same checksums."""
        self._proven_versions: deque[str] = deque(maxlen=MAX_SPANNED_VERSIONS)
        """What was served last, the current version at the end."""
        self.is_paused = False
        """The server answers no completion before it is told to go on."""
        self._is_left_paused = False
        """It was told to go on, and may not have heard it."""
        self._handed_over: str | None = None
        """The version that was served when memory was handed over; None while the server has its own."""
        self._recovering = asyncio.Lock()
        self.watch = SilenceWatch(
            server.name,
            server.show_life,
            self._recovering.locked,
            timeout_s=silence_timeout_s,
            start_timeout_s=start_timeout_s,
        )
        self._recovery_failure: EngineError | None = None
        """Why the last recovery that failed did."""
        self._takes_parts = True
        """False after it was sent what changed, and refused that or did not prove the whole: it is sent everything."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions of the requests in their order, from the weights that were loaded last when they were asked for,
        or from others that were loaded and proved since then.

        Raises:
            EngineUnavailableError: the server stayed away, or busy.
            EngineAnswerError: it answered something unusable.
            EngineError: it refused the request.
        """
        for request in requests:
            self._check_tokens(request.prompt_tokens, "a prompt")
        problem = ""
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await anyio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
            if attempt or self._is_left_paused:
                await self._recover()
            served = self._served
            try:
                completions = await self._complete(requests)
                self.watch.note_sign()
            except EngineBusyError as error:
                raise EngineUnavailableError(
                    f"{self.server.name} had too much to do {MAX_BUSY_ATTEMPTS} times in a row: {error}"
                ) from error
            except EngineUnavailableError as error:
                problem = str(error)
                continue
            for completion in completions:
                self._check_tokens(completion.tokens, "a completion", EngineAnswerError)
            accepted = self._versions_since(served)
            stale = [c for c in completions if self._served and not _is_of_versions(c, accepted)]
            # A server reports a version before its tensors are proved to be those of it.
            if not stale and self._is_proven:
                return completions
            problem = f"it served {stale[0].version_spans[0][0]}" if stale else "its weights were not proved"
        expected = self._served.version if self._served else "its weights"
        raise EngineUnavailableError(
            f"{self.server.name} did not serve {expected} in {MAX_ATTEMPTS} attempts: {problem}"
        )

    async def _complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions, asked for later and later where the server has too much to do."""
        for attempt in range(1, MAX_BUSY_ATTEMPTS):
            try:
                return await self.watch.over(partial(self.server.complete, requests))
            except EngineBusyError as error:
                await anyio.sleep(max(error.retry_after_s, min(MAX_BACKOFF_S, RETRY_PAUSE_S * 2.0 ** (attempt - 1))))
        return await self.watch.over(partial(self.server.complete, requests))

    async def load_weights(self, weights: Weights, version: str, canary: Canary | None) -> None:
        """Serve published weights; returns when the server proved that it does.

        Raises:
            WeightSyncError: it refused, or serves another version or other tensors.
            EngineUnavailableError: it vanished and stayed away.
        """
        async with self._recovering:
            await self._load(ServedWeights(weights, version, canary))

    @property
    def is_recovering(self) -> bool:
        """Whether weights are being loaded and proved, or somebody waits for the server in order to."""
        return self._recovering.locked()

    def note_pause(self) -> None:
        """Take note that the server was paused."""
        self.is_paused, self._is_left_paused = True, False

    async def resume(self) -> None:
        """Have the server go on after a pause; one that cannot be told is told before it is next asked for anything.

        Raises:
            EngineError: it refused, or cannot be reached.
        """
        self.is_paused = False
        self._is_left_paused = True
        await self.server.end_pause()
        self._is_left_paused = False

    async def release_memory(self) -> None:
        """Have the server hand its memory over; its weights count as unproved until the next load.

        Raises:
            EngineError: it cannot, or vanished.
        """
        async with self._recovering:
            version = await self.server.weight_version()
            try:
                await self.server.hand_over()
            except EngineUnavailableError:  # it may have begun
                self._is_proven = False
                raise
            self._is_proven = False
            self._handed_over = version

    async def resume_memory(self) -> None:
        """Have the server take its memory back; one that came back meanwhile, with its start weights, has it.

        Raises:
            EngineUnavailableError: it vanished and stayed away.
        """
        async with self._recovering:
            version, self._handed_over = self._handed_over, None
            await self.wait_until_ready(self.restart_timeout_s)
            if version is not None and await self.server.weight_version() == version:
                await self.server.take_back()

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the server answers.

        Raises:
            EngineUnavailableError: it did not before the deadline.
            WeightSyncError: it serves a model of other shapes than it must.
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
        """Wait for the server, and load the weights it must serve if it came back with others.

        Who waits here for the attempt of another call shares its failure: each waiting on its own, one after the
        other, would make one dead server cost the timeout as often as there are calls.
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
        """Load and prove; begins again when the server vanished meanwhile, since loading twice is loading once."""
        problem = ""
        before = self._served if self._is_proven else None
        self._is_proven = False
        for attempt in range(MAX_ATTEMPTS):
            if attempt or self.watch.is_silent:
                await self.wait_until_ready(self.restart_timeout_s)
            try:
                if self._is_left_paused:
                    await self.resume()
                await self._load_once(weights, None if attempt else before)
            except EngineUnavailableError as error:
                problem = str(error)
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

    async def _load_once(self, served: ServedWeights, before: ServedWeights | None) -> None:
        """Load and prove.

        Args:
            before: what the server was proved to serve until now; None where nobody knows.
        """
        try:
            if isinstance(served.weights, SegmentedWeights):
                digests = await self.server.take_segments(served.weights, served.version)
                check_digests(self.server.name, served.version, digests, await served.weights.digests())
            elif isinstance(served.weights, SentWeights):
                await self._load_sent(served.weights, served, await self._find_kept(served.weights, before))
            else:
                held = await self.server.take_weights(served.weights, served.version)
                await self._prove(served.weights, served, held)
        except (EngineUnavailableError, WeightSyncError):
            raise
        except EngineError as error:
            raise WeightSyncError(f"{self.server.name} refused {served.version}: {error}") from error
        except (OSError, CheckpointError) as error:
            raise WeightSyncError(f"{self.server.name} cannot be given {served.version}: {error}") from error
        except TrainingError:  # a canary's answer is the trainer's, and so is what becomes of it
            raise
        except Exception as error:  # torch's, for want of memory or of a port, and safetensors' have no common root
            problem = f"{type(error).__name__}: {first_line(error)}"
            raise WeightSyncError(f"{self.server.name} cannot be given {served.version}: {problem}") from error

    async def _find_kept(self, weights: SentWeights, before: ServedWeights | None) -> Collection[str]:
        """The tensors that the server has already: it was proved, and was not started anew since then."""
        if before is None or not isinstance(before.weights, SentWeights) or not self._takes_parts:
            return ()
        kept = find_kept(weights, before.weights)
        return kept if kept and await self.server.weight_version() == before.version else ()

    async def _load_sent(self, weights: SentWeights, served: ServedWeights, kept: Collection[str]) -> None:
        """Send and prove; where a part was sent, and that was refused or cannot be proved, send everything."""
        try:
            await self._prove(weights, served, await self.server.take_sent(weights, served.version, kept))
        except EngineUnavailableError:
            raise
        except EngineError as error:
            if not kept:
                raise
            logger.warning(
                "%s was sent what changed alone, and failed: %s; it is sent everything from now on",
                self.server.name,
                error,
            )
            self._takes_parts = False
            await self._prove(weights, served, await self.server.take_sent(weights, served.version, ()))

    async def _prove(self, weights: Path | SentWeights, served: ServedWeights, held: HeldTensors) -> None:
        """Compare what the server says it holds with what was published; where that says too little, ask a canary."""

        def examine() -> tuple[list[str], dict[str, tuple[str, ...]]]:
            tensors = weights.tensors if isinstance(weights, SentWeights) else read_tensors(weights)
            unproven = find_unproven(self.server.name, tensors, served.version, held)
            is_quantized = "quantization_config" in read_config(served.model_dir)  # small steps may not show in it
            return unproven, sample_content(tensors, held) if unproven and not is_quantized else {}

        unproven, sampled = await in_short_thread(examine)
        proof = (served.version, held.digests)
        # Checksums that are missing, or those of nothing, are the same for any weights.
        is_identified = bool(held.digests) and EMPTY_DIGEST not in held.digests.values()
        if not unproven or (is_identified and self._proven == proof):
            return
        content = (sampled, held.digests)
        # After a small step of training a canary finds the weights before it as right as those after it.
        if left := find_left_behind(self._proven_content, content):
            raise WeightSyncError(
                f"{self.server.name} says it serves {served.version}, but its checksums of {len(left)} tensors "
                f"that changed are those of the version before, {left[0]} first: its update left them as they were, "
                "restart it"
            )
        if self.is_paused:
            raise WeightSyncError(
                f"{self.server.name} has no comparable checksum of {unproven[0]}, so it must sample to prove "
                f'{served.version}, and it is paused: set rollout.in_flight = "finish" or "abort"'
            )
        gap = await prove(self.server.name, self.server.complete, served.canary or published_canary(weights))
        logger.info(
            "%s: %d tensors without a comparable checksum, %s first; its log-probs are %.2g nats off",
            self.server.name,
            len(unproven),
            unproven[0],
            gap,
        )
        self._proven, self._proven_content = proof, content

    def _versions_since(self, served: ServedWeights | None) -> list[str]:
        """The proven versions from the served one on; all where nothing had been loaded."""
        return list(dropwhile(lambda version: served and version != served.version, self._proven_versions))

    def _check_tokens(self, tokens: Sequence[int], what: str, kind: type[EngineError] = EngineError) -> None:
        """Raise for an id outside the vocabulary: as part of a prompt it would end SGLang's and vLLM's process."""
        if self._vocab_size is None or not tokens:
            return
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self._vocab_size:
                raise kind(
                    f"{self.server.name}: {what} has the token id {token}, the served model has {self._vocab_size} "
                    "tokens: serve the model that belongs to the tokenizer"
                )


def _is_of_versions(completion: Completion, versions: Sequence[str]) -> bool:
    return all(version in versions for version, _, _ in completion.version_spans)
