"""Constrained decoding: a JSON schema, a regular expression or a grammar decides which tokens may come next.

Not here: the grammar of tool calls (forced_calls.py), sampling among the permitted tokens (sampling.py), stop patterns
(patterns.py).

    completion so far -> matcher of llguidance -> permitted next tokens -> logits of other tokens become minus infinity

llguidance is optional: `pip install "rollouts[constraints]"`. Log-probs are normalised over the permitted tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from rollouts_core.embedded.sampling import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
WHITE_SPACE = r"[\n ]{0,8}"
"""Pattern of permitted white space between two elements of JSON. Without a limit, some models write white space
forever."""
MAX_LEXER_FUEL = 60_000
"""Limit of llguidance's work on the expressions of a grammar. `((a{1000}){1000}){1000}` uses up any limit: 5 s and
250 MB per completion with llguidance's default, 0.2 s and 10 MB with this one. A schema of `MAX_GRAMMAR_CHARS`
characters needs less."""
NUM_REMEMBERED = 32
"""Number of grammars whose check is remembered. All completions of a request have the same few grammars."""


class Constraints:
    """Creates constraints for requests. Thread-safe.

    Args:
        tokenizer: the model's tokenizer. With None, all constraints are refused.
        vocab_size: number of token ids of the model.
        end_ids: tokens that end a completion of the model.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._known: LLTokenizer | None = None
        self._find_problem = lru_cache(maxsize=NUM_REMEMBERED)(self._validate)

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError if the engine cannot enforce the constraint of a request."""
        if not params.is_constrained:
            return
        if self._tokenizer is None:
            raise ValueError("json_schema and regex need a tokenizer.json in the model directory.")
        try:
            problem = self._find_problem(params.json_schema, params.regex, params.grammar)
        except ImportError as error:
            message = (
                "json_schema, regex and required tool calls need llguidance on the server: "
                'pip install "rollouts[constraints]".'
            )
            raise ValueError(message) from error
        if problem:
            name = "json_schema" if params.json_schema else "regex" if params.regex else "A tool for a required call"
            raise ValueError(f"{name} is not supported: {problem.strip()[:400]}")

    def _validate(self, json_schema: str, regex: str, grammar: str) -> str:
        """The reason why llguidance cannot enforce a constraint; empty if it can."""
        from llguidance import LLMatcher

        try:
            whole = _grammar(json_schema, regex, grammar)
            return LLMatcher.validate_grammar(whole, self._make_tokenizer(), limits=_limits())
        except ValueError as error:  # raised if the schema is not JSON
            return str(error)

    def begin(self, params: SamplingParams, output_ids: Sequence[int]) -> Constraint | None:
        """The constraint of a completion that has `output_ids` so far; None if the request has no constraint."""
        if not params.is_constrained:
            return None
        from llguidance import LLMatcher

        grammar = _grammar(params.json_schema, params.regex, params.grammar)
        matcher = LLMatcher(self._make_tokenizer(), grammar, limits=_limits())
        matcher.consume_tokens(list(output_ids))
        return Constraint(matcher)

    def _make_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        assert self._tokenizer is not None, "`check` refuses constraints without a tokenizer"
        if self._known is None:
            try:
                self._known = LLTokenizer(self._tokenizer.to_str(), self._vocab_size, self._end_ids)
            except Exception as error:  # the llguidance library raises plain Exceptions
                raise ValueError(f"llguidance cannot read the model's tokenizer: {error}") from error
        return self._known


class Constraint:
    """The state of one completion's constraint: the tokens that may come next."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @torch.inference_mode()
    def restrict(self, logits_V: Tensor, ends: Collection[int]) -> None:
        """Set the logits of forbidden tokens to minus infinity, in place. End tokens are forbidden until the text
        satisfies the constraint.

        If the matcher reached one of its limits, only end tokens are permitted.
        """
        is_allowed = np.zeros(len(logits_V), dtype=np.bool_)
        has_given_up = self._matcher.is_error()
        if not has_given_up:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            is_allowed = np.unpackbits(bits, count=len(logits_V), bitorder="little").astype(np.bool_)
        is_whole = has_given_up or self._matcher.is_accepting()
        is_allowed[[token for token in ends if 0 <= token < len(is_allowed)]] = is_whole
        logits_V[torch.from_numpy(~is_allowed)] = -torch.inf

    def take(self, token_id: int) -> None:
        """Advance the constraint by the sampled token."""
        self._matcher.consume_token(token_id)


def _grammar(json_schema: str, regex: str, grammar: str) -> str:
    from llguidance import LLMatcher

    if json_schema:
        return LLMatcher.grammar_from_json_schema(json_schema, overrides={"whitespace_pattern": WHITE_SPACE})
    if regex:
        return LLMatcher.grammar_from_regex(regex)
    return LLMatcher.grammar_from_lark(grammar)


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=MAX_LEXER_FUEL)
