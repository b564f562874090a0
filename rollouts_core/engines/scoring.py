"""Log-probs of given tokens: the request to an engine, and the engine's answer.

    tokens       5     9     2     7        start = 2: a prompt of two tokens and a completion of two
    position     0     1     2     3
    logprobs               of 2  of 7       the first entry of every list belongs to the position `start`

Not here: the requests over HTTP (sglang.py, vllm.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollouts_core.errors import EngineAnswerError, NoNumbersError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequest:
    """Tokens whose log-probs an engine computes.

    Raises:
        ValueError: no token is left to score, or `num_top` is negative.
    """

    tokens: list[int]
    """Token ids of a prompt with its completion."""
    start: int = 1
    """Position of the first scored token, usually the length of the prompt. The position is at least 1, because no
    token precedes the first token."""
    num_top: int = 0
    """Number of most likely tokens whose log-probs are returned at each position. A number above the size of the
    vocabulary would end SGLang's process, so a client that knows the vocabulary (`model_dir`) refuses such a number.
    vLLM returns at most 20 unless it was started with a larger `--max-logprobs`."""
    token_ids: tuple[int, ...] = ()
    """Tokens whose log-probs are returned at each position. vLLM computes one more prompt per position for these
    tokens, and takes at most 128 tokens and 1,024 positions. With adapters it takes any number of positions, and at
    most 127 tokens."""

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.tokens):
            raise ValueError(
                f"start is {self.start}, expected 1 to {len(self.tokens) - 1} for {len(self.tokens)} tokens"
            )
        if self.num_top < 0:
            raise ValueError(f"num_top is {self.num_top}, expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """An engine's answer to one `ScoringRequest`, with an entry for each token from `start` on.

    Log-probs are natural logarithms of the softmax over the model's whole vocabulary at temperature 1, given all tokens
    before the position. The sampling parameters of completions do not change them.

    Source: SGLang's `input_token_logprobs`; vLLM's `prompt_logprobs` and `logprob_token_ids`.
    """

    logprobs: list[float]
    """Log-prob of each token."""
    top_logprobs: list[dict[int, float]]
    """Log-probs of the `num_top` most likely tokens, the most likely first."""
    token_ids_logprobs: list[dict[int, float]]
    """Log-probs of the request's `token_ids`, in their order."""
    version: str
    """The weight version that computed the log-probs."""

    @property
    def versions(self) -> frozenset[str]:
        """The weight version as a set, as in `Completion.versions`."""
        return frozenset((self.version,))


def read_scored_tokens(
    name: str,
    request: ScoringRequest,
    *,
    logprobs: Sequence[float],
    top: Sequence[Mapping[int, float]],
    named: Sequence[Mapping[int, float]],
    version: str,
) -> ScoredTokens:
    """Convert the log-probs in an answer of the engine `name`.

    Args:
        logprobs: for each position, the log-prob of the request's token.
        top: for each position, log-probs of at least the most likely tokens, ignored if `num_top` is 0.
        named: for each position, log-probs of at least the request's `token_ids`, ignored if there are none.

    Raises:
        EngineAnswerError: log-probs are missing.
        NoNumbersError: log-probs are NaN or infinite.
    """
    count = len(request.tokens) - request.start
    blank: list[Mapping[int, float]] = [{}] * count
    rows_of_top, rows_of_named = top if request.num_top else blank, named if request.token_ids else blank
    if not len(logprobs) == len(rows_of_top) == len(rows_of_named) == count:
        raise EngineAnswerError(f"{name} left out log-probs: it answered {len(logprobs)} of {count} tokens")
    try:
        answer = ScoredTokens(
            logprobs=list(logprobs),
            top_logprobs=[_most_likely(row, request.num_top) for row in rows_of_top],
            token_ids_logprobs=[{token: row[token] for token in request.token_ids} for row in rows_of_named],
            version=version,
        )
    except (KeyError, ValueError) as error:
        raise EngineAnswerError(f"{name} left out log-probs of tokens: {error}") from error
    others = (logprob for row in (*answer.top_logprobs, *answer.token_ids_logprobs) for logprob in row.values())
    if not all(map(math.isfinite, (*answer.logprobs, *others))):
        raise NoNumbersError(f"{name} answered log-probs that are not finite numbers: its weights may hold NaN")
    return answer


def _most_likely(found: Mapping[int, float], num_top: int) -> dict[int, float]:
    """The `num_top` most likely tokens of `found`, the most likely first."""
    if len(found) < num_top:
        raise ValueError(f"{len(found)} of {num_top} most likely tokens")
    return dict(sorted(found.items(), key=lambda entry: -entry[1])[:num_top])
