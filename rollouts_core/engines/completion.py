"""One completion: what an engine is asked for, and what it sampled. Token ids in, token ids out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollouts_core.config import SamplingConfig
from rollouts_core.errors import EngineAnswerError
from rollouts_core.types import Status

LEFT_OUT_BIAS = -100.0
"""The least that vLLM takes: less than 1e-20 of the probability is left to such tokens."""
STATUS_OF_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Meaning of the finish reasons of all engines."""


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
    num_tokens: int | None = None
    """The tokenizer has the ids below it; others of the model are left out. None leaves out none."""
    affinity: int | None = None
    """Requests with the same number, the turns of a group's conversations, share the beginnings of their prompts. They
    go to the same engine unless it is much busier than the others."""


def left_out_tokens(request: GenerationRequest, vocab_size: int | None) -> range:
    """The token ids that a model of this many must not sample for the request."""
    if request.num_tokens is None or vocab_size is None:
        return range(0)
    return range(request.num_tokens, vocab_size)


def logit_bias_against(token_ids: range) -> dict[str, Any]:  # Any: JSON
    """The sampling parameter by which SGLang and vLLM leave token ids out; empty for none."""
    return {"logit_bias": {str(token): LEFT_OUT_BIAS for token in token_ids}} if token_ids else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An engine's answer to one request."""

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
