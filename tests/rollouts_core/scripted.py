"""A policy that says what a test gives it, as an engine: for what an untrained model would never say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.protocol import SegmentAccess
from rollouts_core.types import Status

if TYPE_CHECKING:
    from rollouts_core.engines.protocol import Weights
    from rollouts_core.engines.transfer.canary import Canary


class ScriptedEngine:
    """Says the turns of a script, one per request, each ended by the stop token; remembers what it was asked."""

    name = "script"

    def __init__(self, turns: Sequence[str | list[int]], tokenizer: PreTrainedTokenizerBase) -> None:
        self.turns = list(turns)
        self.tokenizer = tokenizer
        self.requests: list[GenerationRequest] = []

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """The next turn of the script for each request, cut to its token limit."""
        return [self._say(request) for request in requests]

    def _say(self, request: GenerationRequest) -> Completion:
        said = self.turns[min(len(self.requests), len(self.turns) - 1)]
        self.requests.append(request)
        tokens = self.tokenizer(said, add_special_tokens=False)["input_ids"] if isinstance(said, str) else said
        whole = [*tokens, request.stop_token_ids[0]]
        kept = whole[: request.sampling.max_new_tokens]
        is_whole = len(kept) == len(whole)
        return Completion(
            tokens=kept,
            logprobs=[-0.5 - 0.01 * i for i in range(len(kept))],
            status=Status.COMPLETED if is_whole else Status.TRUNCATED,
            finish_reason="stop" if is_whole else "length",
            version_spans=((f"run-{len(self.requests)}", 0, len(kept)),),
        )

    async def segment_access(self) -> SegmentAccess:
        """A script has no weights."""
        return SegmentAccess.NONE

    async def load_weights(self, weights: Weights, version: str, canary: Canary | None = None) -> None:
        """A script has no weights."""

    async def release_memory(self) -> None:
        """A script holds no memory."""

    async def resume_memory(self) -> None:
        """A script holds no memory."""

    async def wait_until_ready(self, timeout_s: float) -> None:
        """A script is ready."""

    async def aclose(self) -> None:
        """A script has no connections."""
