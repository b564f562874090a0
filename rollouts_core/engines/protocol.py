"""The interface between training and an inference engine of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.scoring import ScoredTokens, ScoringRequest

if TYPE_CHECKING:
    from rollouts_core.engines.transfer.adapters import AdaptedWeights
    from rollouts_core.engines.transfer.canary import Canary
    from rollouts_core.engines.transfer.shared_memory import SegmentedWeights
    from rollouts_core.engines.transfer.versions import SentWeights

    Weights = Path | SegmentedWeights | SentWeights | AdaptedWeights


class SegmentAccess(IntEnum):
    """Which segments of this process a server can open. For several servers, the smallest value counts."""

    NONE = 0
    """The server takes only model directories."""
    FILES = 1
    """The server can open segments that are files."""
    MEMORY = 2
    """The server can also open segments in memory, because it runs on this machine."""


class InferenceEngine(Protocol):
    """One inference server. A call waits for a restarting server until the call's time limit, then raises
    EngineError."""

    @property
    def name(self) -> str:
        """Name of the engine in logs and errors."""
        ...

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions in the order of the requests, sampled only from the weights that were loaded last."""
        ...

    async def segment_access(self) -> SegmentAccess:
        """Which `SegmentedWeights` the engine can load."""
        ...

    async def load_weights(self, weights: Weights, version: str, canary: Canary | None = None) -> None:
        """Load published weights, and raise WeightSyncError unless the engine is verified to serve them.

        Args:
            weights: a directory, segments that the engine can map, weights to send, or adapters in a folder.
            canary: verifies tensors without comparable checksums. The default is a forward pass of the published model.
        """
        ...

    async def release_memory(self) -> None:
        """Free the GPU's memory. The engine generates nothing until `resume_memory` and a load of weights after it.

        Raises:
            EngineError: the server was started without support for releasing memory.
        """
        ...

    async def resume_memory(self) -> None:
        """Allocate the GPU's memory again. The memory's content is undefined, so the caller must load weights next."""
        ...

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the engine answers. Raises EngineUnavailableError at the deadline."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that computes log-probs of given tokens."""

    async def score(self, requests: Sequence[ScoringRequest]) -> list[ScoredTokens]:
        """Log-probs of given tokens in the order of the requests, from the weights that were loaded last."""
        ...
