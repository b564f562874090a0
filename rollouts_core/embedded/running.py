"""Own the batch of running requests: admit requests, sample one token for each, and return finished completions.

Not here: threads, the queue of waiting requests, names of weight versions (scheduler.py), HTTP.

    GenerationRequest -> Partial --step--> row 0..B-1 --step--> (Partial, FinishReason)
                           ^                    |
                           +------ remove ------+      aborted or retracted, with the tokens sampled so far

Each running request has a row. The rows are the decoder's slots 0..B-1 without gaps: when a request ends, the last row
moves into its slot. Letters: B rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from rollouts_core.embedded.constraints import Constraint, Constraints
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.patterns import PatternSearch, Search
from rollouts_core.embedded.sampling import (
    SamplingParams,
    SamplingRows,
    adjust_logits,
    sample_tokens,
    tempered_logprobs,
)
from rollouts_core.embedded.scoring import (
    NO_LOGPROBS,
    Alternatives,
    LogprobParams,
    PromptScorer,
    PromptScores,
    find_alternatives,
    join_alternatives,
)
from rollouts_core.errors import NoMemoryError

NO_TOKEN = -1
MAX_SEARCH_S, MAX_SEARCH_S_PER_TOKEN = 1.0, 1e-3
"""Limit of CPU time for searching a completion for its stop patterns: seconds, plus seconds per token. All other
requests wait during a search. A normal pattern needs 0.1 ms for 10,000 characters."""


class FinishReason(NamedTuple):
    """Why a completion ended."""

    kind: Literal["stop", "length", "abort", "error"]
    """stop: by a stop token, string or pattern; length: by the token limit; abort: by a call; error: request failed."""
    token_id: int = NO_TOKEN
    """The stop token that ended the completion, if kind is "stop"."""
    message: str = ""
    """The cause of an abort or an error. For an error, also what to change in the request."""
    string: str = ""
    """The stop string or pattern that ended the completion, if kind is "stop" and no stop token did."""


NO_NUMBERS = FinishReason(
    "error",
    # `engines/http.py` recognizes the first sentence.
    message="The log-probs of the next token are no finite numbers. The training of these weights may have diverged. "
    "If not, use a smaller logit_bias, or a repetition_penalty further from 0.",
)


class WeightSpan(NamedTuple):
    """A range of completion tokens, [start, end), that weights of one version sampled."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for one completion."""

    request_id: str
    """Unique id of the request, used in aborts and answers."""
    input_ids: tuple[int, ...]
    """The prompt."""
    params: SamplingParams
    """Sampling parameters and stop conditions."""
    logprobs: LogprobParams = NO_LOGPROBS
    """The log-probs to return besides those of the sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """A request and the tokens of its completion so far."""

    request: GenerationRequest
    seed: int
    """The seed for sampling: the request's seed, or a random seed if the request has none."""
    output_ids: tuple[int, ...] = ()
    """Token ids of the completion so far."""
    output_logprobs: tuple[float, ...] = ()
    """Log-prob of each completion token under the distribution from which it was sampled."""
    version_changes: tuple[tuple[str, int], ...] = ()
    """(replaced version, number of completion tokens at its replacement) of each weight update so far, in order."""
    prompt_scores: PromptScores | None = None
    """Log-probs of the prompt tokens; None until they are computed, or if the request does not ask for them."""
    alternatives: tuple[Alternatives, ...] = ()
    """Log-probs of alternative tokens at each completion position; empty if the request does not ask for them."""
    submitted_at: float = field(default_factory=time.monotonic)
    """Time of submission, in seconds of `time.monotonic`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished completion, the answer to one request."""

    request_id: str
    output_ids: tuple[int, ...]
    """The sampled tokens. A stop token, or the tokens of a stop string, are included."""
    output_logprobs: tuple[float, ...]
    """Log-prob of each sampled token under the distribution from which it was sampled."""
    finish_reason: FinishReason
    prompt_tokens: int
    weight_versions: tuple[WeightSpan, ...]
    """The weight version of each range of tokens. Without a weight update during the completion, there is one span."""
    latency_s: float
    """Time from the request's submission to the end of the completion, seconds."""
    prompt_scores: PromptScores | None = None
    """Log-probs of the prompt tokens; None if the request does not ask for them."""
    alternatives: Alternatives | None = None
    """Log-probs of alternative tokens at each completion position; None if the request does not ask for them."""

    @property
    def weight_version(self) -> str:
        """The version of the weights that sampled the last token."""
        return self.weight_versions[-1].version


def complete(partial: Partial, reason: FinishReason, *, weight_version: str) -> Completion:
    """Finish a completion. `weight_version` is the version of the current weights."""
    return Completion(
        request_id=partial.request.request_id,
        output_ids=partial.output_ids,
        output_logprobs=partial.output_logprobs,
        finish_reason=reason,
        prompt_tokens=len(partial.request.input_ids),
        weight_versions=weight_spans(partial.version_changes, weight_version, len(partial.output_ids)),
        latency_s=time.monotonic() - partial.submitted_at,
        prompt_scores=partial.prompt_scores,
        alternatives=join_alternatives(partial.alternatives, partial.request.logprobs)
        if partial.request.logprobs.num_alternatives
        else None,
    )


def weight_spans(changes: Sequence[tuple[str, int]], current_version: str, num_tokens: int) -> tuple[WeightSpan, ...]:
    """Convert version changes to spans: [("1", 3)], "2", 5 gives version 1 for [0, 3) and version 2 for [3, 5)."""
    spans: list[WeightSpan] = []
    for version, end in (*changes, (current_version, num_tokens)):
        start = spans[-1].end if spans else 0
        if spans and end <= start:
            continue
        if spans and spans[-1].version == version:
            spans[-1] = spans[-1]._replace(end=end)
        else:
            spans.append(WeightSpan(version, start, end))
    return tuple(spans)


def note_version_change(partial: Partial, old_version: str) -> Partial:
    """A copy of `partial` that records that new weights replaced `old_version` after the last token of `partial`."""
    if not partial.output_ids:
        return partial
    change = (old_version, len(partial.output_ids))
    return replace(partial, version_changes=(*partial.version_changes, change))


class RunningBatch:
    """The running requests and their completions so far, a row per request. Not thread-safe.

    Args:
        decoder: decoder for this batch only.
        tokenizer: decodes text to find stop strings and patterns. Without a tokenizer, requests cannot have stop
            strings or patterns.

    Raises:
        NoMemoryError: the memory is too small for the decoder's slots.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer | None = None) -> None:
        slots, length = decoder.num_slots, decoder.context_length
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._partials: list[Partial] = []
        self._alternatives: list[list[Alternatives]] = []
        self._patterns = PatternSearch()
        self.constraints = Constraints(tokenizer, decoder.architecture.vocab_size, decoder.architecture.eos_token_ids)
        """Creates the grammar constraints (JSON schema, regular expression) of requests."""
        self._followed: list[Constraint | None] = []
        try:
            self._sampling = SamplingRows(slots)
            self._last_token = np.zeros(slots, dtype=np.int64)
            self._num_cached = np.zeros(slots, dtype=np.int64)
            self._num_output = np.zeros(slots, dtype=np.int64)
            self._max_output = np.zeros(slots, dtype=np.int64)
            self._stop_ids = np.full((slots, 1), NO_TOKEN, dtype=np.int64)
            self._search_s = np.zeros(slots)
            self._has_alternatives = np.zeros(slots, dtype=np.bool_)
            self._output_ids = np.zeros((slots, length), dtype=np.int64)
            self._output_logprobs = np.zeros((slots, length), dtype=np.float32)
        except MemoryError as error:
            raise NoMemoryError(
                f"the embedded engine has too little memory for {slots} completions of {length} tokens each: lower "
                "deployment.max_running_requests (--max-running-requests)"
            ) from error

    @property
    def num_rows(self) -> int:
        """Number of running requests, which is the number of rows."""
        return len(self._partials)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all running requests, including prompts."""
        return int(self._num_cached[: self.num_rows].sum())

    @property
    def num_free(self) -> int:
        """Number of free rows, each of which can take a new request."""
        return self._decoder.num_slots - self.num_rows

    def close(self) -> None:
        self._patterns.close()

    def step(self, admitted: Sequence[Partial] = ()) -> list[tuple[Partial, FinishReason]]:
        """Admit requests and sample one token for every running request; returns the requests that ended."""
        assert len(admitted) <= self.num_free, f"{len(admitted)} requests for {self.num_free} free rows"
        num_decoding = self.num_rows
        full = [partial for partial in admitted if self._output_limit(partial) == 0]
        for partial in admitted:
            if self._output_limit(partial) > 0:
                self._add_row(partial)
        scorers = {key: PromptScorer(*key) for partial in admitted if (key := _scorer_key(partial))}
        prompts = [added.request.input_ids + added.output_ids for added in self._partials[num_decoding:]]
        # A request that wants only log-probs of its prompt, without a completion, uses a free slot in this pass alone.
        prompts += [partial.request.input_ids for partial in full if _scorer_key(partial)]
        if not num_decoding and not prompts:
            return [(partial, FinishReason("length")) for partial in full]
        logits_BV = self._decoder.step(
            torch.from_numpy(self._last_token[:num_decoding]),
            torch.from_numpy(self._num_cached[:num_decoding]),
            prompts,
            scorers=list(scorers.values()),
        )
        scores = {key: scorer.scores() for key, scorer in scorers.items()}
        num_filled = num_decoding + len(prompts)
        ended = [self._end_scored(_with_scores(partial, scores), num_filled) for partial in full]
        if not self.num_rows:
            return ended
        self._partials[num_decoding:] = [_with_scores(added, scores) for added in self._partials[num_decoding:]]
        self._num_cached[:num_decoding] += 1
        self._append_tokens(logits_BV[: self.num_rows])
        return ended + self._take_finished()

    def _end_scored(self, partial: Partial, num_filled: int) -> tuple[Partial, FinishReason]:
        """Finish a request that generates no tokens. If the log-probs of its prompt are NaN, clear the slots that no
        row uses."""
        if partial.prompt_scores is None or not np.isnan(partial.prompt_scores.logprobs_T).any():
            return partial, FinishReason("length")
        for slot in range(self.num_rows, num_filled):
            self._decoder.clear_slot(slot)
        return partial, NO_NUMBERS

    def remove(self, is_chosen: Callable[[str], bool]) -> list[Partial]:
        """Remove the requests whose id `is_chosen`, and return them with their tokens so far, in the order of rows."""
        rows = [row for row, p in enumerate(self._partials) if is_chosen(p.request.request_id)]
        removed = [self.partial(row) for row in rows]
        self._drop_rows(rows)
        return removed

    def partial(self, row: int) -> Partial:
        """The request of a row with its completion so far."""
        count = self._num_output[row]
        return replace(
            self._partials[row],
            output_ids=tuple(self._output_ids[row, :count].tolist()),
            output_logprobs=tuple(self._output_logprobs[row, :count].tolist()),
            alternatives=tuple(self._alternatives[row]),
        )

    def row_of(self, request_id: str) -> int | None:
        """The index of a request's row; None if the request is not running."""
        ids = (p.request.request_id for p in self._partials)
        return next((row for row, found in enumerate(ids) if found == request_id), None)

    def note_version_change(self, old_version: str) -> None:
        """Record in all requests that weights `old_version` sampled their tokens so far."""
        self._partials = [note_version_change(self.partial(row), old_version) for row in range(self.num_rows)]

    def _output_limit(self, partial: Partial) -> int:
        room = self._decoder.context_length - len(partial.request.input_ids)
        wanted = partial.request.params.max_new_tokens
        return room if wanted is None else min(wanted, room)

    def _add_row(self, partial: Partial) -> None:
        row, count = self.num_rows, len(partial.output_ids)
        params = partial.request.params
        self._set_stop_ids(row, [] if params.ignore_eos else sorted(self._ends_of(params)))
        self._num_cached[row] = len(partial.request.input_ids) + count
        self._num_output[row] = count
        self._search_s[row] = 0.0
        self._max_output[row] = self._output_limit(partial)
        self._output_ids[row, :count] = partial.output_ids
        self._output_logprobs[row, :count] = partial.output_logprobs
        self._sampling.set(row, params, partial.seed)
        self._partials.append(partial)
        self._alternatives.append([*partial.alternatives])
        self._followed.append(self.constraints.begin(params, partial.output_ids))
        self._has_alternatives[row] = partial.request.logprobs.num_alternatives > 0

    def _ends_of(self, params: SamplingParams) -> set[int]:
        """Token ids that end a completion: the model's end tokens and the request's `stop_token_ids`."""
        architecture = self._decoder.architecture
        known = range(architecture.vocab_size)  # ids outside the vocabulary would only widen the array of end tokens
        return {*architecture.eos_token_ids, *filter(known.__contains__, params.stop_token_ids)}

    def _set_stop_ids(self, row: int, stop_ids: list[int]) -> None:
        missing = len(stop_ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self._stop_ids[row] = NO_TOKEN
        self._stop_ids[row, : len(stop_ids)] = stop_ids

    def _append_tokens(self, logits_BV: Tensor) -> None:
        """Sample a token for every row from its logits, and append it. `_num_cached` is the position of this token."""
        count = self.num_rows
        sampling = self._sampling.first(count)
        for row in np.flatnonzero(sampling.is_adjusted_B):
            params = self._partials[row].request.params
            output_ids = self._output_ids[row, : self._num_output[row]]
            adjust_logits(logits_BV[row], output_ids, params, self._ends_of(params))
            if (constraint := self._followed[row]) is not None:
                constraint.restrict(logits_BV[row], self._ends_of(params))
        tokens_B, logprobs_B = sample_tokens(logits_BV, sampling, self._num_cached[:count])
        row_numbers, places = np.arange(count), self._num_output[:count]
        self._last_token[:count] = tokens_B.numpy()
        self._output_ids[row_numbers, places] = self._last_token[:count]
        self._output_logprobs[row_numbers, places] = logprobs_B.numpy()
        self._num_output[:count] += 1
        for row in np.flatnonzero(sampling.is_adjusted_B):
            if (constraint := self._followed[row]) is not None:
                constraint.take(int(self._last_token[row]))
        for row in np.flatnonzero(self._has_alternatives[:count]):
            logprobs_RV = tempered_logprobs(logits_BV[row : row + 1], sampling.temperature_B[row : row + 1])
            self._alternatives[row].append(find_alternatives(logprobs_RV, self._partials[row].request.logprobs))

    def _take_finished(self) -> list[tuple[Partial, FinishReason]]:
        """Remove the requests that ended with their last sampled token, and return each with the reason."""
        count = self.num_rows
        last_token = self._last_token[:count]
        is_stopped = (last_token[:, None] == self._stop_ids[:count]).any(1)
        is_full: NDArray[np.bool_] = self._num_output[:count] >= self._max_output[:count]
        stops = self._find_stops(np.flatnonzero(self._sampling.has_stop_B[:count]).tolist()) | self._find_no_numbers()
        rows = sorted({*np.flatnonzero(is_stopped | is_full).tolist(), *stops})
        reasons = [
            stops[row]
            if row in stops
            else FinishReason("stop", token_id=int(last_token[row]))
            if is_stopped[row]
            else FinishReason("length")
            for row in rows
        ]
        finished = [(self.partial(row), reason) for row, reason in zip(rows, reasons, strict=True)]
        self._drop_rows(rows)
        return finished

    def _find_stops(self, rows: list[int]) -> dict[int, FinishReason]:
        """The rows that end because of a stop string or pattern, or because the search for a pattern took too long."""
        stops = {row: FinishReason("stop", string=string) for row in rows if (string := self._stop_string(row))}
        searched = [row for row in rows if row not in stops and self._partials[row].request.params.stop_regex]
        for row, found in zip(searched, self._patterns.find(list(map(self._pattern_search, searched))), strict=True):
            self._search_s[row] += found.seconds
            if found.problem:
                message = f"The search for stop_regex in the completion {found.problem}: give a simpler pattern."
                stops[row] = FinishReason("error", message=message)
            elif found.pattern:
                stops[row] = FinishReason("stop", string=found.pattern)
        return stops

    def _find_no_numbers(self) -> dict[int, FinishReason]:
        """The rows whose last log-prob is NaN or infinite. Clears their slots in the KV cache."""
        last_logprobs = self._output_logprobs[np.arange(self.num_rows), self._num_output[: self.num_rows] - 1]
        rows = np.flatnonzero(~np.isfinite(last_logprobs)).tolist()
        for row in rows:
            self._decoder.clear_slot(row)
        return dict.fromkeys(rows, NO_NUMBERS)

    def _stop_string(self, row: int) -> str:
        """The stop string that the last tokens of a row contain; "" without a match. Other text may follow the stop
        string."""
        wanted = self._partials[row].request.params.stop
        if not wanted:
            return ""
        assert self._tokenizer is not None, "the scheduler refuses stop strings without a tokenizer"
        num_tail = max(len(string.encode()) for string in wanted) + 1  # enough, as each token has at least one byte
        count = self._num_output[row]
        tail_ids = self._output_ids[row, max(0, count - num_tail) : count].tolist()
        tail = self._tokenizer.decode(tail_ids, skip_special_tokens=False)
        return next((string for string in wanted if string in tail), "")

    def _pattern_search(self, row: int) -> Search:
        """The search for the stop patterns of a row in its text, limited to its remaining CPU time."""
        assert self._tokenizer is not None, "the scheduler refuses stop patterns without a tokenizer"
        count = int(self._num_output[row])
        limit_s = MAX_SEARCH_S + MAX_SEARCH_S_PER_TOKEN * count - float(self._search_s[row])
        text = self._tokenizer.decode(self._output_ids[row, :count].tolist(), skip_special_tokens=False)
        return Search(patterns=self._partials[row].request.params.stop_regex, text=text, limit_s=limit_s)

    def _drop_rows(self, rows: list[int]) -> None:
        """Remove rows, and move the last rows into the gaps. `rows` are in ascending order."""
        for row in reversed(rows):
            last = self.num_rows - 1
            if row != last:
                self._move_row(last, row)
            self._partials.pop()
            self._alternatives.pop()
            self._followed.pop()

    def _move_row(self, source: int, target: int) -> None:
        self._decoder.move_slot(source, target, length=int(self._num_cached[source]))
        columns = (self._last_token, self._num_cached, self._num_output, self._max_output, self._stop_ids)
        for column in (*columns, self._search_s, self._has_alternatives):
            column[target] = column[source]
        count = self._num_output[source]
        self._output_ids[target, :count] = self._output_ids[source, :count]
        self._output_logprobs[target, :count] = self._output_logprobs[source, :count]
        self._sampling.move(source, target)
        self._partials[target] = self._partials[source]
        self._alternatives[target] = self._alternatives[source]
        self._followed[target] = self._followed[source]


def _scorer_key(partial: Partial) -> tuple[tuple[int, ...], LogprobParams, int | None] | None:
    """A key of the inputs to a prompt's log-probs; None if they are not requested or already computed."""
    request = partial.request
    if request.logprobs.start is None or partial.prompt_scores is not None:
        return None
    return request.input_ids, request.logprobs, request.params.num_tokens


def _with_scores(
    partial: Partial, scores: Mapping[tuple[tuple[int, ...], LogprobParams, int | None], PromptScores]
) -> Partial:
    key = _scorer_key(partial)
    return partial if key is None else replace(partial, prompt_scores=scores[key])
