"""Read demonstrations before any training, as SFT would: what is in them, and what they would teach wrongly.

Not here: which of them are held out (compared_rows.py), how rows become samples (data/).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollouts_core.checks.epochs import MANY_EPOCHS_OF_SFT, describe_epochs
from rollouts_core.checks.model_checks import check_longest
from rollouts_core.checks.templates import UnreadFields, UnwrittenRoles, find_unwritten
from rollouts_core.config import Config, DatasetConfig
from rollouts_core.data.chat import TrainOn
from rollouts_core.data.conversations import (
    THOUGHTS,
    UNTRAINED_MARKS,
    Row,
    find_said_beside_content,
    find_unheeded_marks,
    has_empty_turn,
    read_demonstration,
)
from rollouts_core.data.dataset import CHUNK_ROWS, count_used_rows, iterate_samples, sample_rules
from rollouts_core.data.held_out import HeldOutRows, watch_rows
from rollouts_core.data.rows import open_rows, resolve_revision
from rollouts_core.errors import DataError
from rollouts_core.findings import Caution
from rollouts_core.types import Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_STREAMED_ROWS_CHECKED = 10_000
PROGRESS_INTERVAL_S = 5.0
"""So often it is said how far many rows are read."""

logger = logging.getLogger(__name__)


def check_demonstrations(
    config: Config, tokenizer: PreTrainedTokenizerBase, held_out: Sequence[HeldOutRows] = ()
) -> list[str]:
    """Read every row that SFT would, or the first of each dataset where they are streamed; a sentence per dataset.

    Args:
        held_out: told of every row that is read.

    Raises:
        DataError: a row or a dataset that cannot be trained on.
    """
    findings: list[str] = []
    num_epoch_rows = 0.0
    sft = config.training.sft
    for dataset in config.demonstrations:
        counts = _check_demonstrations(dataset, config, tokenizer, held_out)
        findings += [counts.sentence(dataset.path), *counts.warn_of_empty_turns(dataset.path)]
        findings += counts.warn_of_unseen(dataset.path) + counts.warn_of_unwritten(dataset.path)
        findings += counts.warn_of_marks(dataset.path)
        findings += check_longest(dataset.path, counts.num_longest, config.model)
        share = dataset.repeat * counts.num_rows / counts.num_checked
        kept = counts.num_checked - counts.num_dropped
        num_epoch_rows += share * (counts.num_tokens / sft.max_length if sft.packing else kept)
    if not num_epoch_rows:  # streamed data of which later rows may be shorter
        sentence = f"training.sft.max_length {sft.max_length} leaves out every demonstration that was looked at"
        return [*findings, Caution(f"{sentence}: raise it, or nothing may be left to train on")]
    num_rows = math.ceil(num_epoch_rows)  # no row holds demonstrations of two epochs
    if num_rows < sft.batch_size:
        findings.append(
            Caution(
                f"training.sft.batch_size {sft.batch_size} is more than the about {num_rows} rows of "
                f"{sft.max_length} tokens of an epoch: a step sees demonstrations several times"
            )
        )
    of_what = f"about {num_rows:,} {'packed rows' if sft.packing else 'rows'}"
    per_epoch = num_rows / sft.batch_size
    return [
        *findings,
        describe_epochs("training.sft", sft.num_steps, per_epoch, of_what=of_what, many=MANY_EPOCHS_OF_SFT),
    ]


@dataclass(frozen=True, slots=True)
class _Counts:
    """What a dataset of demonstrations holds."""

    num_rows: int
    """All rows of it that are used."""
    num_checked: int
    num_dropped: int
    num_cut: int
    num_tokens: int
    num_longest: int
    """Tokens of its longest sample, after it was cut."""
    num_trained: int
    empty_rows: list[int]
    """Numbers of the rows with a turn that is trained on and says nothing."""
    unwritten_rows: dict[str, list[int]]
    """By the key of a message, the numbers of the rows with a turn that has it, is trained on, and is written without
    it by the chat template."""
    marked_rows: dict[str, list[int]]
    """By the key of a message, the numbers of the rows with a turn that it marks, without effect, as not to be trained
    on."""
    unwritten_roles: UnwrittenRoles
    unread_fields: UnreadFields

    def warn_of_marks(self, path: str) -> list[Caution]:
        """A warning where turns are trained on that rows say are not to be."""
        return [
            Caution(
                f"{path}: in {len(rows)} of {self.num_checked} rows (row {rows[0]} first) the `{key}` of a turn would "
                "leave it out elsewhere, and here it is trained on: use train_on = last_assistant, or put what is only "
                "context into `prompt`"
            )
            for key, rows in self.marked_rows.items()
            if rows
        ]

    def warn_of_unseen(self, path: str) -> list[Caution]:
        """A warning for each role, and each field of rows, of which the model sees nothing."""
        return self.unwritten_roles.warn(path, self.num_checked) + self.unread_fields.warn(path, self.num_checked)

    def warn_of_unwritten(self, path: str) -> list[Caution]:
        """A warning for each thing that trained turns hold and the model does not see."""
        return [
            Caution(
                f"{path}: in {len(rows)} of {self.num_checked} rows (row {rows[0]} first) the assistant has `{key}`, "
                "which the chat template leaves out: the model learns to say the rest; use a template that writes it"
            )
            for key, rows in self.unwritten_rows.items()
            if rows
        ]

    def warn_of_empty_turns(self, path: str) -> list[Caution]:
        """A warning where rows teach to say nothing."""
        if not self.empty_rows:
            return []
        return [
            Caution(
                f"{path}: in {len(self.empty_rows)} of {self.num_checked} rows (row {self.empty_rows[0]} first) the "
                "assistant says nothing, which teaches the model to end its turn at once: remove them, or give them "
                "answers"
            )
        ]

    def sentence(self, path: str) -> str:
        """What was found, for a person."""
        checked = f" in the first {self.num_checked} of {self.num_rows} rows" * (self.num_checked < self.num_rows)
        cut = f", {self.num_cut} cut" * bool(self.num_cut)
        dropped = f", {self.num_dropped} left out for their length" * bool(self.num_dropped)
        kept = self.num_checked - self.num_dropped
        return f"{path}: {kept} demonstrations{checked}, {self.num_trained} trained tokens{cut}{dropped}"


def _check_demonstrations(
    dataset: DatasetConfig,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[HeldOutRows] = (),
) -> _Counts:
    commit = resolve_revision(dataset.path, dataset.revision)  # a name that is wrong is told at once
    table = open_rows(dataset.path, split=dataset.split, subset=dataset.subset, revision=commit)
    num_rows = count_used_rows(table, dataset)
    num_checked = min(num_rows, NUM_STREAMED_ROWS_CHECKED) if config.data.streaming else num_rows
    chunks = (range(i, min(i + CHUNK_ROWS, num_checked)) for i in range(0, num_checked, CHUNK_ROWS))
    read = (row for chunk in chunks for row in table.read(chunk))
    num_kept = num_cut = num_tokens = num_longest = num_trained = 0
    empty_rows: list[int] = []
    unwritten_rows: dict[str, list[int]] = {key: [] for key in find_unwritten(tokenizer)}
    rows = _say_progress(read, dataset.path, num_checked)
    marked_rows: dict[str, list[int]] = {key: [] for key in UNTRAINED_MARKS}
    unwritten_roles, unread_fields = UnwrittenRoles(tokenizer), UnreadFields()
    seen = _note_messages(rows, unwritten_roles, unread_fields)
    noted = _note_turns(seen, config.training.sft.train_on, empty_rows, unwritten_rows, marked_rows)
    watched = watch_rows(noted, dataset.path, held_out)
    for sample in iterate_samples(watched, dataset.path, tokenizer, sample_rules(config.training.sft)):
        if sample is not None:
            num_kept += 1
            num_cut += sample.status is Status.TRUNCATED
            num_tokens += len(sample.tokens)
            num_longest = max(num_longest, len(sample.tokens))
            num_trained += sum(map(bool, sample.loss_mask))
    if num_kept == 0 and num_checked == num_rows:
        raise DataError(f"{dataset.path}: all {num_rows} rows are longer than training.sft.max_length: raise it")
    return _Counts(
        num_rows,
        num_checked,
        num_checked - num_kept,
        num_cut,
        num_tokens,
        num_longest,
        num_trained,
        empty_rows,
        unwritten_rows,
        marked_rows,
        unwritten_roles,
        unread_fields,
    )


def _say_progress(rows: Iterable[tuple[int, Row]], path: str, num_rows: int) -> Iterator[tuple[int, Row]]:
    """The same rows of demonstrations; how many of them were read is logged from time to time."""
    said_at = time.monotonic()
    for i, row in enumerate(rows):
        if (now := time.monotonic()) - said_at >= PROGRESS_INTERVAL_S:
            said_at = now
            logger.info("%s: %s of %s rows read", path, f"{i:,}", f"{num_rows:,}")
        yield row


def _note_messages(
    rows: Iterable[tuple[int, Row]], unwritten_roles: UnwrittenRoles, unread_fields: UnreadFields
) -> Iterator[tuple[int, Row]]:
    """The same rows of demonstrations; those are told of each."""
    for number, row in rows:
        with suppress(DataError):  # who makes samples of the rows says what is wrong
            if not isinstance(read := read_demonstration(row), str):
                unwritten_roles.note(number, read.messages)
                unread_fields.note(number, row, read.messages)
        yield number, row


def _note_turns(
    rows: Iterable[tuple[int, Row]],
    train_on: TrainOn,
    empty: list[int],
    unwritten: Mapping[str, list[int]],
    marked: Mapping[str, list[int]],
) -> Iterator[tuple[int, Row]]:
    """The same rows of demonstrations; their numbers are added to what they are an example of.

    Args:
        empty: of rows that teach to say nothing.
        unwritten: by the key of a message, of rows that teach a turn which has it.
        marked: by the key of a message, of rows that teach a turn which it would leave out elsewhere.
    """
    for number, row in rows:
        with suppress(DataError):  # who makes samples of the rows says what is wrong
            if has_empty_turn(row, train_on):
                empty.append(number)
            said = find_said_beside_content(row, train_on) if unwritten else set()
            if said.intersection(THOUGHTS) - unwritten.keys():  # the same thoughts, under several names
                said -= set(THOUGHTS)
            for key in said & unwritten.keys():
                unwritten[key].append(number)
            for key in find_unheeded_marks(row, train_on):
                marked[key].append(number)
        yield number, row


def check_compared_demonstrations(path: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What was found in demonstrations whose loss is taken, as sentences."""
    counts = _check_demonstrations(DatasetConfig(path=path), config, tokenizer)
    findings = [counts.sentence(path), *counts.warn_of_unseen(path)]
    return [*findings, *check_longest(path, counts.num_longest, config.model)]
