"""The interface between training and an inference engine of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollouts_core.engines.completion import Completion, GenerationRequest

if TYPE_CHECKING:
    from rollouts_core.engines.adapters import AdaptedWeights
    from rollouts_core.engines.canary import Canary
    from rollouts_core.engines.segments import SegmentedWeights
    from rollouts_core.engines.sent import SentWeights

    Weights = Path | SegmentedWeights | SentWeights | AdaptedWeights


class SegmentAccess(IntEnum):
    """Which segments of this process a server can open; those of several servers are what the least of them can."""

    NONE = 0
    """It takes model directories alone."""
    FILES = 1
    """Those that are files."""
    MEMORY = 2
    """Also those in memory: it runs on this machine."""


class InferenceEngine(Protocol):
    """One inference server. Calls wait for a restarting server up to their limits, then raise EngineError."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions of the requests in their order, sampled only from the weights that were loaded last."""
        ...

    async def segment_access(self) -> SegmentAccess:
        """Which `SegmentedWeights` it can load."""
        ...

    async def load_weights(self, weights: Weights, version: str, canary: Canary | None = None) -> None:
        """Load published weights, and verify that they are served; raises WeightSyncError otherwise.

        Args:
            weights: a directory, segments that the engine can map, weights to send, or adapters in a folder.
            canary: verifies tensors that cannot be compared; by default a forward pass of the directory's model.
        """
        ...

    async def release_memory(self) -> None:
        """Hand the GPU's memory over; until `resume_memory` and a load after it, nothing is generated.

        Raises:
            EngineError: the server cannot, as it was started.
        """
        ...

    async def resume_memory(self) -> None:
        """Take the memory back; the weights in it are to be loaded."""
        ...

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the engine answers; raises EngineUnavailableError at the deadline."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...
