"""The client of one server, whichever it is: what RL calls, over the few calls in which servers differ.

Not here: those calls (sglang.py, vllm.py), restarts and retries (recovery.py), several servers (pool.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from rollouts_core.embedded.architecture import read_end_token_ids
from rollouts_core.engines.adapters import AdaptedWeights
from rollouts_core.engines.canary import Canary
from rollouts_core.engines.checksums import HeldTensors
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.http import EngineConnection
from rollouts_core.engines.protocol import SegmentAccess
from rollouts_core.engines.recovery import RecoveringEngine
from rollouts_core.engines.segments import SegmentedWeights
from rollouts_core.engines.sent import SentWeights
from rollouts_core.engines.silence import SILENCE_TIMEOUT_S, SilenceWatch
from rollouts_core.errors import WeightSyncError
from rollouts_core.system.concurrency import ClosedOnExit

if TYPE_CHECKING:
    from rollouts_core.engines.protocol import Weights


class EngineClient(ClosedOnExit):
    """The client of one server; owns its connections, and closes them at the end of `async with`.

    Args:
        request_timeout_s: limit on a request.
        restart_timeout_s: limit on the absence of a server that vanished.
        silence_timeout_s: limit on the silence of a server with running requests, before it counts as gone.
        start_timeout_s: the same limit until a first request has ended, if longer, because servers compile then.
        model_dir: the model that the server must serve: token ids and shapes are checked against it, and it tells which
            tokens end completions on the server's own initiative.
        api_key: sent with every request as `Authorization: Bearer KEY`; nothing is sent if empty.
    """

    def __init__(
        self,
        url: str,
        *,
        request_timeout_s: float = 600.0,
        restart_timeout_s: float = 120.0,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
        start_timeout_s: float = 0.0,
        model_dir: Path | None = None,
        api_key: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._connection = EngineConnection(
            url, request_timeout_s=request_timeout_s, transport=transport, api_key=api_key
        )
        self._keeper = RecoveringEngine(
            self,
            restart_timeout_s=restart_timeout_s,
            silence_timeout_s=silence_timeout_s,
            start_timeout_s=start_timeout_s,
            model_dir=model_dir,
        )
        self.ends = frozenset(read_end_token_ids(model_dir) if model_dir else ())
        """Tokens by which the server ends completions besides those of a request, as far as they are known."""

    @property
    def name(self) -> str:
        """The server's URL."""
        return self._connection.url

    @property
    def vocab_size(self) -> int | None:
        """How many token ids the served model has, as far as is known."""
        return self._keeper.vocab_size

    @property
    def watch(self) -> SilenceWatch:
        """Detects that the server, or a router in front of it, fell silent during requests."""
        return self._keeper.watch

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions of the requests in their order, from the weights that were loaded last.

        Raises:
            EngineUnavailableError: the server stayed away.
            EngineError: it refused the request, or answered something unusable.
        """
        return await self._keeper.generate(requests)

    async def segment_access(self) -> SegmentAccess:
        """Which `SegmentedWeights` the server can load."""
        return SegmentAccess.NONE

    async def load_weights(self, weights: Weights, version: str, canary: Canary | None = None) -> None:
        """Load published weights; returns when the server has proved that it serves them.

        Args:
            weights: a directory, segments that the server can map, or weights to send.
            canary: verifies tensors that cannot be compared; by default a forward pass of the published model.

        Raises:
            WeightSyncError: the server refused, or serves another version or other tensors.
            EngineUnavailableError: the server vanished and did not return.
        """
        await self._keeper.load_weights(weights, version, canary)

    async def release_memory(self) -> None:
        """Hand the GPU's memory over, weights too; until `resume_memory` and a load after it, nothing may be asked.

        Raises:
            EngineError: the server cannot, as it was started.
            EngineUnavailableError: it vanished.
        """
        await self._keeper.release_memory()

    async def resume_memory(self) -> None:
        """Take the memory back, unless the server was started anew meanwhile; its weights are to be loaded.

        Raises:
            EngineUnavailableError: it vanished and stayed away.
        """
        await self._keeper.resume_memory()

    async def abort_running(self) -> None:
        """End all requests with the tokens sampled so far.

        Does nothing while weights are being loaded, including into a restarted server: this client's requests wait for
        the load then, and the requests that prove the weights must not be ended.

        Raises:
            EngineUnavailableError: the server vanished.
        """
        if not self._keeper.is_recovering:
            await self.end_running()

    async def resume(self) -> None:
        """Go on after a pause; a server that cannot be told is told before it is next asked for anything.

        Raises:
            EngineError: it refused, or cannot be reached.
        """
        await self._keeper.resume()

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the server answers.

        Raises:
            EngineUnavailableError: it did not before the deadline.
            WeightSyncError: it serves a model of other shapes than `model_dir`.
        """
        await self._keeper.wait_until_ready(timeout_s)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connection.aclose()

    # Parts of a server's client that each make one attempt, whatever weights the server has.

    @abstractmethod
    async def complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Ask for completions once."""

    @abstractmethod
    async def weight_version(self) -> str:
        """The version that the server reports."""

    @abstractmethod
    async def check_model(self, path: Path) -> None:
        """Raise WeightSyncError where the server's model has other shapes than that of a directory."""

    @abstractmethod
    async def take_weights(self, path: Path, version: str) -> HeldTensors:
        """Load weights once and set the version; running requests end before that, on the old weights.

        Raises:
            WeightSyncError: the server refused, serves a model of other shapes, or reports another version.
        """

    @abstractmethod
    async def hand_over(self) -> None:
        """Free weights and cache once, when no request is running; EngineError if nothing can be freed."""

    @abstractmethod
    async def take_back(self) -> None:
        """Allocate weights and cache once, after `hand_over`."""

    @abstractmethod
    async def end_running(self) -> None:
        """Tell a server once to end all requests with the tokens that they have."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop generating once; requests stay, and what was computed for them under the old weights does not.

        Raises:
            EngineError: such a server cannot go on with new weights.
        """

    @abstractmethod
    async def end_pause(self) -> None:
        """Tell a paused server once to generate again; does nothing if it is not paused."""

    @abstractmethod
    async def show_life(self) -> None:
        """Return when what generates answered between two of its steps; a paused server's does, too."""

    async def take_segments(self, weights: SegmentedWeights, version: str) -> Mapping[str, str]:
        """Load segments once, set the version, and return the `tensor_digest` of every tensor that is served then.

        Raises:
            WeightSyncError: the server refused, or takes no segments.
        """
        raise WeightSyncError(f"{self.name} takes no segments: publish {version} as a model directory")

    async def take_adapters(self, weights: AdaptedWeights, version: str) -> None:
        """Load adapters beside the weights that are served, use them from now on, and set the version.

        If loading fails, the server goes on with what it served.

        Raises:
            WeightSyncError: the server refused, or takes no adapters.
        """
        raise WeightSyncError(f"{self.name} takes no adapters: publish {version} as merged weights")

    async def drop_adapters(self, *, kept: str) -> None:
        """Let the server forget all adapters but one."""

    async def take_sent(self, weights: SentWeights, version: str, kept: Collection[str]) -> HeldTensors:
        """Load weights that are sent once and set the version; running requests end before that, on the old weights.

        Args:
            kept: tensors that the server has already, and need not be sent.

        Raises:
            WeightSyncError: the server refused, or cannot be sent any.
        """
        raise WeightSyncError(f"{self.name} cannot be sent weights: publish {version} as a model directory")
