"""The client of one server of any kind. The calls of RL are built on the few calls in which servers differ.

Not here: the calls in which servers differ (sglang.py, vllm.py), restarts and retries (recovery.py), several servers
(pool.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from rollouts_core.embedded.architecture import read_end_token_ids
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.http import EngineConnection
from rollouts_core.engines.protocol import SegmentAccess
from rollouts_core.engines.recovery import RecoveringEngine
from rollouts_core.engines.scoring import ScoredTokens, ScoringRequest
from rollouts_core.engines.silence import SILENCE_TIMEOUT_S, SilenceWatch
from rollouts_core.engines.transfer.adapters import AdaptedWeights
from rollouts_core.engines.transfer.canary import Canary
from rollouts_core.engines.transfer.checksums import HeldTensors
from rollouts_core.engines.transfer.shared_memory import SegmentedWeights
from rollouts_core.engines.transfer.versions import SentWeights
from rollouts_core.errors import WeightSyncError
from rollouts_core.system.concurrency import ClosedOnExit

if TYPE_CHECKING:
    from rollouts_core.engines.protocol import Weights


class EngineClient(ClosedOnExit):
    """The client of one server. The client owns its connections and closes them at the end of `async with`.

    Args:
        request_timeout_s: time limit of a request.
        restart_timeout_s: how long to wait for a server that vanished.
        silence_timeout_s: how long a server with running requests may be silent before it counts as gone.
        start_timeout_s: used in place of a shorter `silence_timeout_s` until the first request has ended, because
            servers compile kernels then.
        model_dir: the model that the server must serve. Token ids and shapes are checked against this model. The
            model's settings name the tokens that end completions, besides a request's stop tokens.
        api_key: sent with every request as `Authorization: Bearer KEY`, unless it is empty.
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
        """Tokens that end completions, besides a request's stop tokens, or empty without `model_dir`."""

    @property
    def name(self) -> str:
        """The server's URL."""
        return self._connection.url

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids of the served model, or None if unknown."""
        return self._keeper.vocab_size

    @property
    def watch(self) -> SilenceWatch:
        """Detects that the server, or the router before the server, has become silent while requests are running."""
        return self._keeper.watch

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests, from the weights that were loaded last.

        Raises:
            EngineUnavailableError: the server vanished and did not return.
            EngineError: the server refused the request, or its answer is unusable.
        """
        return await self._keeper.generate(requests)

    async def score(self, requests: Sequence[ScoringRequest]) -> list[ScoredTokens]:
        """Log-probs of given tokens in the order of the requests, from the weights that were loaded last.

        The server computes them in a forward pass over the given tokens, without sampling from them.

        Raises:
            EngineUnavailableError: the server vanished and did not return.
            EngineError: the server refused the request, for example for its length or `num_top`, or its answer is
                unusable.
        """
        return await self._keeper.score(requests)

    async def segment_access(self) -> SegmentAccess:
        """Which `SegmentedWeights` the server can load."""
        return SegmentAccess.NONE

    async def load_weights(self, weights: Weights, version: str, canary: Canary | None = None) -> None:
        """Load published weights, and return when the server is verified to serve these weights.

        Args:
            weights: a directory, segments that the server can map, or weights to send.
            canary: verifies tensors without comparable checksums. The default is a forward pass of the published model.

        Raises:
            WeightSyncError: the server refused, or serves another version or other tensors.
            EngineUnavailableError: the server vanished and did not return.
        """
        await self._keeper.load_weights(weights, version, canary)

    async def release_memory(self) -> None:
        """Free the GPU's memory, including the weights. Send no request until `resume_memory` and a load of weights.

        Raises:
            EngineError: the server was started without support for releasing memory.
            EngineUnavailableError: the server vanished.
        """
        await self._keeper.release_memory()

    async def resume_memory(self) -> None:
        """Allocate the GPU's memory again, unless the server was restarted meanwhile. The caller must load weights
        next.

        Raises:
            EngineUnavailableError: the server vanished and did not return.
        """
        await self._keeper.resume_memory()

    async def abort_running(self) -> None:
        """End all requests with the tokens sampled so far.

        The method does nothing while weights are being loaded, including into a restarted server. During a load, this
        client's requests wait, and the requests that verify the weights must not be ended.

        Raises:
            EngineUnavailableError: the server vanished.
        """
        if not self._keeper.is_recovering:
            await self.end_running()

    async def resume(self) -> None:
        """Resume generation after a pause. A server that cannot be reached is resumed before the next request.

        Raises:
            EngineError: the server refused, or cannot be reached.
        """
        await self._keeper.resume()

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the server answers.

        Raises:
            EngineUnavailableError: the server did not answer before the deadline.
            WeightSyncError: the server's model has other shapes than `model_dir`.
        """
        await self._keeper.wait_until_ready(timeout_s)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connection.aclose()

    # Each method below makes one attempt, whichever weights the server has.

    @abstractmethod
    async def complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Request completions, without a retry."""

    @abstractmethod
    async def score_once(self, requests: Sequence[ScoringRequest]) -> list[ScoredTokens]:
        """Request log-probs of given tokens, without a retry."""

    @abstractmethod
    async def weight_version(self) -> str:
        """The version that the server reports."""

    @abstractmethod
    async def check_model(self, path: Path) -> None:
        """Raise WeightSyncError if the server's model has other shapes than the model in a directory."""

    @abstractmethod
    async def take_weights(self, path: Path, version: str) -> HeldTensors:
        """Load weights once and set the version. Running requests end before the load, on the old weights.

        Raises:
            WeightSyncError: the server refused, serves a model of other shapes, or reports another version.
        """

    @abstractmethod
    async def hand_over(self) -> None:
        """Free weights and cache, while no request is running, without a retry. Raises EngineError if nothing can be
        freed."""

    @abstractmethod
    async def take_back(self) -> None:
        """Allocate the memory of weights and cache again, after `hand_over`."""

    @abstractmethod
    async def end_running(self) -> None:
        """Tell the server to end all requests with the tokens sampled so far, without a retry."""

    @abstractmethod
    async def pause(self) -> None:
        """Let the server stop generating. Requests keep their tokens, but lose their cache from the old weights.

        Raises:
            EngineError: this kind of server cannot continue requests with new weights.
        """

    @abstractmethod
    async def end_pause(self) -> None:
        """Tell a paused server to generate again, without a retry. Does nothing if the server is not paused."""

    @abstractmethod
    async def show_life(self) -> None:
        """Return when the server's scheduler has answered a liveness probe. A paused server answers too."""

    async def take_segments(self, weights: SegmentedWeights, version: str) -> Mapping[str, str]:
        """Load segments once, set the version, and return the `tensor_digest` of every served tensor.

        Raises:
            WeightSyncError: the server refused the segments, or this kind of server takes no segments.
        """
        raise WeightSyncError(f"{self.name} takes no segments: publish {version} as a model directory")

    async def take_adapters(self, weights: AdaptedWeights, version: str) -> None:
        """Load adapters beside the served weights, use the adapters from now on, and set the version.

        If loading fails, the server continues to serve the earlier adapters.

        Raises:
            WeightSyncError: the server refused, or takes no adapters.
        """
        raise WeightSyncError(f"{self.name} takes no adapters: publish {version} as merged weights")

    async def drop_adapters(self, *, kept: str) -> None:
        """Let the server unload all adapters except `kept`."""

    async def take_sent(self, weights: SentWeights, version: str, kept: Collection[str]) -> HeldTensors:
        """Send weights once and set the version. Running requests end before the load, on the old weights.

        Args:
            kept: tensors that the server already has and that need not be sent.

        Raises:
            WeightSyncError: the server refused the weights, or this kind of server takes no sent weights.
        """
        raise WeightSyncError(f"{self.name} cannot be sent weights: publish {version} as a model directory")
