"""Sample tokens from logits with the parameters of each request, and compute the log-prob of each sampled token.

Not here: stop conditions (running.py), reading JSON (protocol.py).

    logits_BV - penalties                                         for tokens that are already in the completion
        - inf                                                     for end tokens before min_new_tokens tokens
        - inf                                                     for token ids from num_tokens on
        + logit_bias
        / temperature -> log_softmax -> logprobs                  the reported log-probs
                                   |
                     top_k, top_p, min_p                          exclude tokens from the choice
                                   |
    uniform(seed, position) -> inverse cumulative distribution -> tokens_B

The uniform number is a hash of the request's seed and the token's position. Therefore neither the other requests of the
batch, nor an abort after which the request continues with the same seed, change the uniform number.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MIN_TEMPERATURE = 1e-6
"""A request with a lower temperature is greedy: it gets the most probable token. SGLang has the same limit."""
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 256
"""Limit of characters of a stop string. Every step searches the stop strings of every completion."""
MAX_STOP_PATTERNS = 32
MAX_PATTERN_BYTES = 256
MAX_GRAMMAR_CHARS = 2**16
ALL_TOKENS = 2**31 - 1

_UNIFORM_BITS = 52


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters and stop conditions of one completion, with SGLang's names and defaults.

    Raises:
        ValueError: a value is outside its range. The message is the same as in SGLang.
    """

    max_new_tokens: int | None = 128
    """Highest number of completion tokens; None permits as many as fit into the context."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, besides the model's end tokens. The completion includes the end token."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion when its text contains one of them. The completion includes that string."""
    stop_regex: tuple[str, ...] = ()
    """Regular expressions that end the completion when one of them matches anywhere in its text."""
    min_new_tokens: int = 0
    """Minimum number of completion tokens. A shorter completion cannot end by an end token."""
    ignore_eos: bool = False
    """If true, neither the model's end tokens nor `stop_token_ids` end the completion."""
    temperature: float = 1.0
    """Divisor of the logits. With temperature 0, the most probable token is always sampled."""
    top_p: float = 1.0
    """Nucleus sampling: keep only the most probable tokens whose probabilities together reach this value."""
    top_k: int = -1
    """Keep only this many of the most probable tokens; -1 keeps all tokens."""
    min_p: float = 0.0
    """Keep only tokens with at least this share of the most probable token's probability."""
    frequency_penalty: float = 0.0
    """Number that is subtracted from a token's logit for each occurrence of the token in the completion."""
    presence_penalty: float = 0.0
    """Number that is subtracted from a token's logit if the completion already contains the token."""
    repetition_penalty: float = 1.0
    """Divisor of a token's positive logit, or factor of a negative one, if the completion already has the token."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the number that is added to the token's logit."""
    num_tokens: int | None = None
    """Only token ids below this number can be sampled; None permits all token ids of the model."""
    sampling_seed: int | None = None
    """Seed for sampling. The same seed, prompt and weights give the same completion. None draws a random seed."""
    skip_special_tokens: bool = True
    """Omit special tokens from the completion's text. The completion's token ids always include special tokens."""
    no_stop_trim: bool = False
    """Keep the stop string or end token in the completion's text. The completion's token ids always include it."""
    json_schema: str = ""
    """A JSON schema that the completion's text must follow; empty for no schema."""
    regex: str = ""
    """A regular expression that the whole text of the completion must match; empty for no expression."""
    grammar: str = ""
    """A grammar in llguidance's Lark syntax that the completion must follow; empty for no grammar. Requests cannot set
    it: the server derives it from the tools of a chat."""

    def __post_init__(self) -> None:
        most_tokens = math.inf if self.max_new_tokens is None else self.max_new_tokens
        is_allowed = {
            "temperature must be a non-negative finite number": 0.0 <= self.temperature < math.inf,
            "top_p must be in (0, 1]": 0.0 < self.top_p <= 1.0,
            "min_p must be in [0, 1]": 0.0 <= self.min_p <= 1.0,
            "top_k must be -1 (disable) or at least 1": self.top_k >= 1 or self.top_k == -1,
            "frequency_penalty must be in [-2, 2]": -2.0 <= self.frequency_penalty <= 2.0,
            "presence_penalty must be in [-2, 2]": -2.0 <= self.presence_penalty <= 2.0,
            "repetition_penalty must be in (0, 2] (1.0 = no penalty)": 0.0 < self.repetition_penalty <= 2.0,
            "max_new_tokens must be at least 0": most_tokens >= 0,
            f"min_new_tokens must be in [0, max_new_tokens({most_tokens})]": 0 <= self.min_new_tokens <= most_tokens,
            "num_tokens must be at least 1": self.num_tokens is None or self.num_tokens >= 1,
            "sampling_seed must be in [-2**63, 2**63 - 1]": MIN_SEED <= (self.sampling_seed or 0) <= MAX_SEED,
        }
        for demand, is_met in is_allowed.items():
            if not is_met:
                raise ValueError(f"{demand}, got {getattr(self, demand.split()[0])}.")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(self.stop)}")
        if (longest := max(map(len, self.stop), default=0)) > MAX_STOP_CHARS:
            raise ValueError(f"a stop string may have at most {MAX_STOP_CHARS} characters, got {longest}")
        _check_patterns(self.stop_regex)
        constraints = [each for each in (self.json_schema, self.regex, self.grammar) if each]
        if len(constraints) > 1:
            raise ValueError("Only one of json_schema, regex and a required tool call can be set.")
        if max(map(len, constraints), default=0) > MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"json_schema, regex and the tools of a required call may have at most {MAX_GRAMMAR_CHARS} characters."
            )
        if not all(math.isfinite(value) for _, value in self.logit_bias):
            raise ValueError("logit_bias must have finite numbers.")

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is always chosen."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def is_penalized(self) -> bool:
        """True if a penalty changes the logits of tokens that are already in the completion."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def is_constrained(self) -> bool:
        """True if the completion must follow a schema, a regular expression or a grammar."""
        return bool(self.json_schema or self.regex or self.grammar)

    @property
    def is_adjusted(self) -> bool:
        """True if logits are changed before sampling."""
        return self.is_penalized or self.min_new_tokens > 0 or bool(self.logit_bias) or self.is_constrained

    @property
    def is_restricted(self) -> bool:
        """True if top_k, top_p or min_p may exclude tokens."""
        return self.top_p < 1.0 or self.top_k > 1 or self.min_p > 0.0


class SamplingRows:
    """The sampling parameters of B rows as arrays. The arrays are updated in place, which is faster than building new
    ones.

    Args:
        num_rows: B. The content of a row is undefined until it is set.
    """

    def __init__(self, num_rows: int) -> None:
        self.temperature_B = np.ones(num_rows, dtype=np.float32)
        """Temperature of each row; 1 if the row is greedy with temperature 0."""
        self.top_p_B = np.ones(num_rows, dtype=np.float32)
        self.top_k_B = np.zeros(num_rows, dtype=np.int64)
        """`top_k` of each row. A number above the size of every vocabulary permits all tokens."""
        self.num_tokens_B = np.full(num_rows, ALL_TOKENS, dtype=np.int64)
        """`num_tokens` of each row: only token ids below this number can be sampled."""
        self.min_p_B = np.zeros(num_rows, dtype=np.float32)
        self.seed_B = np.zeros(num_rows, dtype=np.int64)
        """Seed of each row: the request's seed, or a random seed if the request has none."""
        self.is_greedy_B = np.zeros(num_rows, dtype=np.bool_)
        """True for rows that always take the most probable token."""
        self.is_restricted_B = np.zeros(num_rows, dtype=np.bool_)
        """True for rows whose top_k, top_p or min_p may exclude tokens."""
        self.is_adjusted_B = np.zeros(num_rows, dtype=np.bool_)
        """True for rows whose logits are changed before sampling."""
        self.has_stop_B = np.zeros(num_rows, dtype=np.bool_)
        """True for rows that have stop strings or stop patterns."""

    def set(self, row: int, params: SamplingParams, seed: int) -> None:
        self.temperature_B[row] = 1.0 if params.temperature < MIN_TEMPERATURE else params.temperature
        self.top_p_B[row] = params.top_p
        self.top_k_B[row] = params.top_k if params.top_k > 0 else ALL_TOKENS
        self.num_tokens_B[row] = ALL_TOKENS if params.num_tokens is None else params.num_tokens
        self.min_p_B[row] = params.min_p
        self.seed_B[row] = seed
        self.is_greedy_B[row] = params.is_greedy
        self.is_restricted_B[row] = params.is_restricted
        self.is_adjusted_B[row] = params.is_adjusted
        self.has_stop_B[row] = bool(params.stop or params.stop_regex)

    def move(self, source: int, target: int) -> None:
        """Copy row `source` to row `target`."""
        for column in vars(self).values():
            column[target] = column[source]

    def first(self, num_rows: int) -> SamplingRows:
        """A view of the first `num_rows` rows."""
        rows = SamplingRows(0)
        vars(rows).update({name: column[:num_rows] for name, column in vars(self).items()})
        return rows


@torch.inference_mode()
def sample_tokens(logits_BV: Tensor, rows: SamplingRows, positions_B: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return a token per row and its log-probability under log_softmax(logits / temperature).

    Args:
        logits_BV: next-token logits. Logits of token ids that `num_tokens` excludes become minus infinity, in place.
        rows: the sampling parameters of each row of the logits.
        positions_B: the position that each token will have, counted from the start of the prompt.

    Returns:
        tokens_B (int64) and logprobs_B (float32, nats). top_k, top_p and min_p do not renormalise the log-probs. If
        logits are not finite, or all tokens are excluded, the token is arbitrary and its log-prob is not finite.
    """
    num_words = logits_BV.shape[-1]
    is_limited = bool((rows.num_tokens_B < num_words).any())
    if is_limited:
        leave_out(logits_BV, rows.num_tokens_B)
    logprobs_BV = tempered_logprobs(logits_BV, rows.temperature_B)
    probs_BV = logprobs_BV.exp()
    allowed_BV = _restrict(probs_BV, rows) if rows.is_restricted_B.any() else probs_BV
    cumulative_BV = allowed_BV.cumsum(-1, dtype=torch.float64)
    uniform_B = torch.from_numpy(uniform_numbers(rows.seed_B, positions_B))
    thresholds_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    tokens_B = torch.searchsorted(cumulative_BV, thresholds_B1, right=True)[:, 0].clamp_(max=num_words - 1)
    if is_limited:
        tokens_B = tokens_B.minimum(torch.from_numpy(rows.num_tokens_B - 1))
    if rows.is_greedy_B.any():
        tokens_B = torch.where(torch.from_numpy(rows.is_greedy_B), logprobs_BV.argmax(-1), tokens_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


@torch.inference_mode()
def tempered_logprobs(logits_BV: Tensor, temperature_B: NDArray[np.float32]) -> Tensor:
    """log_softmax(logits / temperature), the distribution before top_k, top_p and min_p exclude tokens."""
    return torch.log_softmax(logits_BV.float() / _as_column(temperature_B), -1)


@torch.inference_mode()
def leave_out(logits_BV: Tensor, num_tokens_B: NDArray[np.int64]) -> None:
    """Set the logits of each row's token ids from `num_tokens_B` on to minus infinity, in place."""
    least = int(num_tokens_B.min())
    if least == num_tokens_B.max():
        logits_BV[:, least:] = -math.inf
        return
    ids_V = torch.arange(least, logits_BV.shape[-1])
    logits_BV[:, least:].masked_fill_(ids_V >= _as_column(num_tokens_B), -math.inf)


@torch.inference_mode()
def adjust_logits(
    logits_V: Tensor, output_ids: NDArray[np.int64], params: SamplingParams, ends: Collection[int]
) -> None:
    """Apply the penalties, minimum length and logit bias of a request to the next token's logits, in place.

    Args:
        output_ids: token ids of the completion so far.
        ends: tokens that would end the completion.
    """
    if params.is_penalized:
        penalize(logits_V, output_ids, params)
    if len(output_ids) < params.min_new_tokens:
        logits_V[[token for token in ends if 0 <= token < len(logits_V)]] = -math.inf
    if params.logit_bias:
        tokens, values = zip(*params.logit_bias, strict=True)
        logits_V[list(tokens)] += torch.tensor(values, dtype=logits_V.dtype)


@torch.inference_mode()
def penalize(logits_V: Tensor, output_ids: NDArray[np.int64], params: SamplingParams) -> None:
    """Apply the penalties for tokens that are already in the completion, in place and in SGLang's order."""
    found, counts = np.unique(output_ids, return_counts=True)
    tokens, times = torch.from_numpy(found), torch.from_numpy(counts)
    logits = logits_V[tokens] - (times * params.frequency_penalty + params.presence_penalty)
    scaled = torch.where(logits < 0, logits * params.repetition_penalty, logits / params.repetition_penalty)
    logits_V[tokens] = scaled.to(logits_V.dtype)


def uniform_numbers(seeds_B: NDArray[np.int64], positions_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) from two rounds of the splitmix64 finaliser over (seed, position)."""
    mixed_seeds = _splitmix64(seeds_B.astype(np.uint64))
    mixed = _splitmix64(mixed_seeds + positions_B.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) * 2.0**-_UNIFORM_BITS


def _check_patterns(patterns: tuple[str, ...]) -> None:
    if len(patterns) > MAX_STOP_PATTERNS:
        raise ValueError(f"at most {MAX_STOP_PATTERNS} stop_regex patterns are allowed, got {len(patterns)}")
    for pattern in patterns:
        if (num_bytes := len(pattern.encode())) > MAX_PATTERN_BYTES:
            raise ValueError(f"stop_regex is {num_bytes} bytes, over the {MAX_PATTERN_BYTES}-byte limit")
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"invalid stop_regex {pattern!r}: {error}") from error


def _splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = values + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _restrict(probs_BV: Tensor, rows: SamplingRows) -> Tensor:
    """Set the probabilities of excluded tokens to 0. top_k, top_p and min_p each apply to the full distribution."""
    sorted_BV, order_BV = probs_BV.sort(stable=True, dim=-1, descending=True)
    rank_V = torch.arange(probs_BV.shape[-1])
    before_BV = sorted_BV.cumsum(-1, dtype=torch.float64) - sorted_BV
    excluded_BV = (rank_V >= _as_column(rows.top_k_B)) | (before_BV > _as_column(rows.top_p_B))
    excluded_BV |= sorted_BV < sorted_BV[:, :1] * _as_column(rows.min_p_B)
    excluded_BV[:, 0] = False
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV.masked_fill(excluded_BV, 0.0))


def _as_column(values_B: NDArray[Any]) -> Tensor:  # Any: an array of any dtype
    return torch.from_numpy(values_B)[:, None]
