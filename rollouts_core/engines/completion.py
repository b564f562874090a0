"""One completion: what an engine is asked for, and what it sampled. Token ids in, token ids out."""

from __future__ import annotations

from dataclasses import dataclass

from rollouts_core.config import SamplingConfig
from rollouts_core.errors import EngineAnswerError
from rollouts_core.types import Status

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
