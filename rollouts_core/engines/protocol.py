"""What training needs of an inference engine, whichever server is behind it. Token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollouts_core.config import SamplingConfig
from rollouts_core.errors import EngineAnswerError
from rollouts_core.types import Status

if TYPE_CHECKING:
    from rollouts_core.engines.canary import Canary
    from rollouts_core.engines.segments import SegmentedWeights
    from rollouts_core.engines.sent import SentWeights

    Weights = Path | SegmentedWeights | SentWeights

STATUS_OF_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""What the finish reasons of all engines mean."""


def status_of_finish(name: str, reason: str, message: str = "") -> Status:
    """How a completion of the engine `name` ended that it ended for this reason.

    Raises:
        EngineAnswerError: for another reason than those of every engine, so there is nothing to grade.
    """
    if reason not in STATUS_OF_FINISH:
        raise EngineAnswerError(
            f"{name} ended a completion with the reason {reason!r}, expected one of {', '.join(STATUS_OF_FINISH)}: "
            f"{message or 'look at its log'}"
        )
    return STATUS_OF_FINISH[reason]


class SegmentAccess(IntEnum):
    """Which segments of this process a server can open; those of several servers are what the least of them can."""

    NONE = 0
    """It takes model directories alone."""
    FILES = 1
    """Those that are files."""
    MEMORY = 2
    """Also those in memory: it runs on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion to sample."""

    prompt_tokens: list[int]
    """What the policy reads."""
    sampling: SamplingConfig
    """How it samples."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end the completion and are part of it."""
    seed: int
    """Randomness of this completion, where the engine has seeds."""
    num_continued: int = 0
    """How many tokens at the end of `prompt_tokens` are of the same completion, which was broken off after them."""
    affinity: int | None = None
    """Requests of one number, the turns of a group's conversations, share the beginnings of their prompts: of several
    engines the same one is asked, as far as it has not much more to do than the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled for one request."""

    tokens: list[int]
    """The sampled tokens, the stop token included."""
    logprobs: list[float]
    """log p of each of them under the distribution it was sampled from, nats."""
    status: Status
    """How it ended."""
    finish_reason: str
    """The engine's own word for it."""
    version_spans: tuple[tuple[str, int, int], ...]
    """(weight version, start, end) over `tokens`."""


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
        """Serve published weights, and verify that it does; raises WeightSyncError otherwise.

        Args:
            weights: a directory, segments that it has access to, or weights that are sent to it.
            canary: proves tensors that cannot be compared; by default a forward pass of the directory's model.
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
