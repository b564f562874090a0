"""Log-probs besides the log-probs of the sampled tokens: of prompt tokens, the most probable tokens, and given tokens.

Not here: which rows of a pass have logits (decoder.py), sampling (sampling.py), JSON (protocol.py).

    prompt      5     9     2     7        start = 1
    position    0     1     2     3
    log-probs         None  of 2  of 7     the token at `start` has none, as in SGLang; row t predicts token t + 1

The logits of a prompt's positions are computed for some rows at a time (`Decoder.step`), so a long prompt needs no
memory for its length times the vocabulary.

Letters: R rows, V vocabulary, T positions, K most probable tokens, G given tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobParams:
    """The log-probs that a request wants besides those of the sampled tokens."""

    start: int | None = None
    """First position of the prompt with log-probs; None for no log-probs of the prompt."""
    num_top: int = 0
    """Number of most probable tokens at each position."""
    token_ids: tuple[int, ...] = ()
    """Ids of the given tokens: the answer has their log-probs at each position."""

    @property
    def num_alternatives(self) -> int:
        """Number of log-probs of other tokens at each position."""
        return self.num_top + len(self.token_ids)

    def count_entries(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Number of log-probs in the answer to a request."""
        num_prompt = 0 if self.start is None else max(prompt_tokens - self.start, 0)
        return (num_prompt + completion_tokens) * (1 + self.num_alternatives) if self.num_alternatives else num_prompt


NO_LOGPROBS = LogprobParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """Log-probs of other tokens at each position, nats."""

    top_ids_TK: NDArray[np.int64]
    """The most probable tokens, the most probable first."""
    top_logprobs_TK: NDArray[np.float32]
    """Log-probs of the most probable tokens, in the order of `top_ids_TK`."""
    given_logprobs_TG: NDArray[np.float32]
    """Log-probs of the given tokens, in the order of `LogprobParams.token_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Log-probs of a prompt's tokens from `LogprobParams.start` + 1 on."""

    logprobs_T: NDArray[np.float32]
    """Log-probs of the prompt's tokens."""
    alternatives: Alternatives
    """Log-probs of other tokens at the same positions."""


def join_alternatives(parts: Sequence[Alternatives], params: LogprobParams) -> Alternatives:
    """Join the log-probs of consecutive ranges of positions, in order."""
    empty = _no_alternatives(params)
    return Alternatives(
        top_ids_TK=np.concatenate([empty.top_ids_TK, *(part.top_ids_TK for part in parts)]),
        top_logprobs_TK=np.concatenate([empty.top_logprobs_TK, *(part.top_logprobs_TK for part in parts)]),
        given_logprobs_TG=np.concatenate([empty.given_logprobs_TG, *(part.given_logprobs_TG for part in parts)]),
    )


@torch.inference_mode()
def find_alternatives(logprobs_RV: Tensor, params: LogprobParams) -> Alternatives:
    """The log-probs of the most probable and of the given tokens, for each row of `logprobs_RV`."""
    num_top = min(params.num_top, logprobs_RV.shape[-1])
    top = logprobs_RV.topk(num_top, dim=-1)
    return Alternatives(
        top_ids_TK=top.indices.numpy(),
        top_logprobs_TK=top.values.numpy(),
        given_logprobs_TG=logprobs_RV[:, list(params.token_ids)].numpy(),
    )


class PromptScorer:
    """Reads the logits of a prompt, some rows at a time.

    Args:
        prompt: token ids of the prompt.
        params: the wanted log-probs; `start` is not None.
        num_tokens: only token ids below this number exist; None permits all ids of the model.
    """

    def __init__(self, prompt: tuple[int, ...], params: LogprobParams, num_tokens: int | None) -> None:
        assert params.start is not None, "the caller wants log-probs of the prompt"
        self.prompt = prompt
        self.start = min(params.start, len(prompt) - 1)
        """First position whose logits are read."""
        self._next_ids = torch.tensor(prompt[self.start + 1 :], dtype=torch.int64)
        self._params = params
        self._num_tokens = num_tokens
        self._num_read = 0
        self._logprobs: list[NDArray[np.float32]] = []
        self._alternatives: list[Alternatives] = []

    @property
    def is_done(self) -> bool:
        return self._num_read == len(self._next_ids)

    @torch.inference_mode()
    def read(self, logits_RV: Tensor) -> None:
        """Read the logits of the next positions."""
        if self._num_tokens is not None:
            logits_RV[:, self._num_tokens :] = -torch.inf
        next_ids = self._next_ids[self._num_read : self._num_read + len(logits_RV)]
        self._num_read += len(logits_RV)
        logprobs_RV = logits_RV.float().log_softmax(-1)
        self._logprobs.append(logprobs_RV.gather(-1, next_ids[:, None])[:, 0].numpy())
        if self._params.num_alternatives:
            self._alternatives.append(find_alternatives(logprobs_RV, self._params))

    def scores(self) -> PromptScores:
        """The log-probs of all positions that were read."""
        logprobs_T = np.concatenate([np.zeros(0, dtype=np.float32), *self._logprobs])
        return PromptScores(logprobs_T=logprobs_T, alternatives=join_alternatives(self._alternatives, self._params))


def _no_alternatives(params: LogprobParams) -> Alternatives:
    return Alternatives(
        top_ids_TK=np.zeros((0, params.num_top), dtype=np.int64),
        top_logprobs_TK=np.zeros((0, params.num_top), dtype=np.float32),
        given_logprobs_TG=np.zeros((0, len(params.token_ids)), dtype=np.float32),
    )
