"""One completion: the request to an engine and its answer, both in token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollouts_core.config import SamplingConfig
from rollouts_core.errors import EngineAnswerError
from rollouts_core.types import Status

LEFT_OUT_BIAS = -100.0
"""The smallest bias that vLLM accepts. Tokens with this bias have a probability below 1e-20."""
STATUS_OF_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Meaning of the finish reasons of all engines."""


def status_of_finish(name: str, reason: str, message: str = "") -> Status:
    """The status of a completion that ended for the finish reason `reason`.

    Raises:
        EngineAnswerError: the reason is not in `STATUS_OF_FINISH`, so the completion cannot be graded.
    """
    if reason not in STATUS_OF_FINISH:
        raise EngineAnswerError(
            f"{name} ended a completion with the reason {reason!r}, expected one of {', '.join(STATUS_OF_FINISH)}: "
            f"{message or 'see its log'}"
        )
    return STATUS_OF_FINISH[reason]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion to sample."""

    prompt_tokens: list[int]
    """Token ids that the policy gets as its input."""
    sampling: SamplingConfig
    """Sampling parameters of the completion."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end the completion and are part of it."""
    seed: int
    """Seed of this completion, if the engine supports seeds."""
    num_continued: int = 0
    """Number of tokens at the end of `prompt_tokens` that an interrupted completion had already sampled."""
    num_tokens: int | None = None
    """Only token ids below this number may be sampled, because the tokenizer lacks larger ids. None permits all ids."""
    affinity: int | None = None
    """All turns of a group's conversations have the same number, because the beginnings of their prompts are equal.
    Requests with the same number go to the same engine unless that engine is much busier than the others."""


def left_out_tokens(request: GenerationRequest, vocab_size: int | None) -> range:
    """The token ids that a model with `vocab_size` ids must not sample for the request."""
    if request.num_tokens is None or vocab_size is None:
        return range(0)
    return range(request.num_tokens, vocab_size)


def logit_bias_against(token_ids: range) -> dict[str, Any]:  # Any: JSON
    """The sampling parameter that makes SGLang and vLLM exclude token ids, or {} without ids."""
    return {"logit_bias": {str(token): LEFT_OUT_BIAS for token in token_ids}} if token_ids else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An engine's answer to one request."""

    tokens: list[int]
    """The sampled tokens, including the stop token."""
    logprobs: list[float]
    """log p of each token under the distribution from which it was sampled, nats."""
    status: Status
    """How the completion ended."""
    finish_reason: str
    """The engine's name for the reason why the completion ended."""
    version_spans: tuple[tuple[str, int, int], ...]
    """Each entry is (weight version, start, end): the positions in `tokens` that this version sampled."""

    @property
    def versions(self) -> frozenset[str]:
        """The weight versions that sampled the completion."""
        return frozenset(version for version, _, _ in self.version_spans)
