"""Show rows as training sees them: the decoded text with trained parts marked, the tokens, and the cut parts.

<|user|>1+1=?<|end|><|assistant|>[[2<|end|>]]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollouts_core.data.conversations import Row
from rollouts_core.data.dataset import SampleRules, iterate_samples
from rollouts_core.errors import DataError
from rollouts_core.types import Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNCUT = 1 << 40
"""Number of tokens used as length limit to show rows without cutting them."""
OPEN, CLOSE = "[[", "]]"
"""Marks around trained text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A row as training sees it."""

    source: str
    row: int
    """Row number from 1. In JSONL this is the line number."""
    outcome: str
    """"trained", "cut", "dropped", "error", or "prompt" (a prompt of RL, which is not trained on)."""
    reason: str = ""
    """Sentence about the cut part, the reason for dropping the row, or the error."""
    text: str = ""
    """The decoded tokens, including special tokens. Trained text is between `[[` and `]]`."""
    num_tokens: int = 0
    num_trained: int = 0
    tokens: tuple[int, ...] = ()
    loss_mask: tuple[int, ...] = ()
    answer: str = ""
    """Reference answer of a prompt."""


def mark_trained(tokens: Sequence[int], loss_mask: Sequence[float], tokenizer: PreTrainedTokenizerBase) -> str:
    """Decode tokens, with `[[` and `]]` around the trained parts."""
    parts: list[str] = []
    for is_trained, run in itertools.groupby(zip(tokens, loss_mask, strict=True), key=lambda pair: bool(pair[1])):
        text = str(tokenizer.decode([token for token, _ in run], skip_special_tokens=False))
        parts.append(f"{OPEN}{text}{CLOSE}" if is_trained else text)
    return "".join(parts)


def show_sample(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, *, source: str, row: int, num_cut: int = 0
) -> ShownRow:
    """Show a demonstration as SFT sees it.

    Args:
        num_cut: number of tokens that were cut at `max_length`.
    """
    is_cut = sample.status is Status.TRUNCATED
    return ShownRow(
        source=source,
        row=row,
        outcome="cut" if is_cut else "trained",
        reason=f"{num_cut} tokens after the first {len(sample.tokens)} are cut" if is_cut else "",
        text=mark_trained(sample.tokens, sample.loss_mask, tokenizer),
        num_tokens=len(sample.tokens),
        num_trained=sum(map(bool, sample.loss_mask)),
        tokens=tuple(sample.tokens),
        loss_mask=tuple(int(bool(weight)) for weight in sample.loss_mask),
    )


def describe_row(shown: ShownRow) -> str:
    """Text for a terminal: a line with the row's number, outcome and token counts, then the row's content."""
    counts = f", {shown.num_tokens} tokens, {shown.num_trained} trained on" if shown.num_tokens else ""
    reason = f": {shown.reason}" if shown.reason else ""
    answer = f"\nanswer: {shown.answer}" if shown.answer else ""
    text = f"\n{shown.text}" if shown.text else ""
    return f"{shown.source}, row {shown.row}: {shown.outcome}{counts}{reason}{text}{answer}"


def show_demonstrations(
    rows: Iterable[tuple[int, Row]], source: str, tokenizer: PreTrainedTokenizerBase, rules: SampleRules
) -> Iterator[ShownRow]:
    """Yield demonstrations as SFT sees them, including dropped and invalid rows."""
    for number, row in rows:
        try:
            [samples] = iterate_samples([(number, row)], source, tokenizer, rules)
            whole = rules._replace(max_length=UNCUT)
            [uncut] = iterate_samples([(number, row)], source, tokenizer, whole)
        except DataError as error:
            yield ShownRow(source=source, row=number, outcome="error", reason=str(error))
            continue
        if not samples:
            longest = max(len(each.tokens) for each in uncut)
            reason = f"{longest} tokens exceed training.sft.max_length {rules.max_length}"
            yield ShownRow(source=source, row=number, outcome="dropped", reason=reason)
        for sample in samples:  # a row has several samples if its turns need separate texts
            num_kept = len(sample.tokens)
            num_tokens = next(len(each.tokens) for each in uncut if each.tokens[:num_kept] == sample.tokens)
            yield show_sample(sample, tokenizer, source=source, row=number, num_cut=num_tokens - num_kept)
