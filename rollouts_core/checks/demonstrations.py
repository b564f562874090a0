"""Read demonstrations as SFT would, before the run starts, and warn of rows that would teach something unintended.

Not here: comparing held-out rows with demonstrations (compared_rows.py), turning rows into samples (data/).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollouts_core.checks.epochs import MANY_EPOCHS_OF_SFT, describe_epochs
from rollouts_core.checks.model_checks import check_longest
from rollouts_core.checks.templates import UnreadFields, UnwrittenRoles, find_unwritten
from rollouts_core.config import Config, DatasetConfig
from rollouts_core.config.data import RowFile
from rollouts_core.data.bad_rows import BadRows
from rollouts_core.data.chat import Conversation, TrainOn, trained_turns
from rollouts_core.data.conversations import (
    UNTRAINED_MARKS,
    Row,
    find_said,
    find_unheeded_marks,
    read_demonstration,
    says_nothing,
)
from rollouts_core.data.dataset import CHUNK_ROWS, count_used_rows, iterate_samples, open_datasets, sample_rules
from rollouts_core.data.held_out import HeldOutRows, watch_rows
from rollouts_core.data.rows import resolve_revision
from rollouts_core.data.turns import THOUGHTS
from rollouts_core.errors import DataError
from rollouts_core.findings import Caution
from rollouts_core.mistakes import Mistakes
from rollouts_core.types import Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_STREAMED_ROWS_CHECKED = 10_000
PROGRESS_INTERVAL_S = 5.0
"""Seconds between progress messages while rows are read."""

logger = logging.getLogger(__name__)


def check_demonstrations(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[HeldOutRows] = (),
    mistakes: Mistakes | None = None,
) -> list[str]:
    """Read the demonstrations as SFT does. Returns findings about each dataset and about the number of epochs.

    Only the first rows of streamed datasets are read.

    Args:
        mistakes: collects the error of each dataset. If None, the first error is raised.

    Raises:
        DataError: SFT could not train on a row or a dataset.
    """
    findings: list[str] = []
    num_epoch_rows = 0.0
    sft = config.training.sft
    noted = Mistakes() if mistakes is None else mistakes
    read: list[tuple[DatasetConfig, _Counts]] = []
    for place, dataset in place_datasets(config, noted):
        with noted.at(place):
            read.append((dataset, _check_demonstrations(dataset, config, tokenizer, held_out)))
    if mistakes is None:
        noted.check()
    if noted.has("data.sft"):
        return []
    for dataset, counts in read:
        findings += [counts.sentence(dataset.path), *counts.taught_turns.warn(dataset.path, counts.num_checked)]
        findings += counts.warn_of_unseen(dataset.path)
        findings += check_longest(dataset.path, counts.num_longest, config.model)
        share = dataset.repeat * counts.num_rows / counts.num_checked
        num_epoch_rows += share * (counts.num_tokens / sft.max_length if sft.packing else counts.num_samples)
    if not num_epoch_rows:  # not an error: rows of streamed data that were not read may be shorter
        sentence = f"training.sft.max_length {sft.max_length} leaves out every demonstration that was checked"
        return [*findings, Caution(f"{sentence}: raise it, because otherwise there may be nothing to train on")]
    num_rows = math.ceil(num_epoch_rows)  # a packed row never has demonstrations of two epochs
    if num_rows < sft.batch_size:
        findings.append(
            Caution(
                f"training.sft.batch_size {sft.batch_size} exceeds the about {num_rows} rows of {sft.max_length} "
                "tokens in an epoch, so a step trains on the same demonstrations several times: lower it, or add "
                "demonstrations"
            )
        )
    of_what = f"about {num_rows:,} {'packed rows' if sft.packing else 'rows'}"
    per_epoch = num_rows / sft.batch_size
    return [
        *findings,
        describe_epochs("training.sft", sft.num_steps, per_epoch, of_what=of_what, many=MANY_EPOCHS_OF_SFT),
    ]


def place_datasets(config: Config, mistakes: Mistakes) -> list[tuple[str, DatasetConfig]]:
    """The datasets of SFT for which `mistakes` has no error, each with the name of its setting."""
    if isinstance(config.data.sft, str):
        return [] if mistakes.has("data.sft") else [("data.sft", config.demonstrations[0])]
    placed = [(f"data.sft.{index}", dataset) for index, dataset in enumerate(config.data.sft)]
    return [(place, dataset) for place, dataset in placed if not mistakes.has(place)]


def dataset_of(name: RowFile, config: Config) -> DatasetConfig:
    """The file in the setting `data.NAME`, as a dataset."""
    return DatasetConfig(path=getattr(config.data, name), columns=config.data.columns_of(name))


def read_each_demonstration(dataset: DatasetConfig) -> None:
    """Check the form of the rows of a dataset without a tokenizer, for a model whose tokenizer cannot be loaded.

    Raises:
        DataError: a row is not a demonstration, or the dataset cannot be read.
    """
    [table] = open_datasets([dataset.model_copy(update={"revision": resolve_revision(dataset.path, dataset.revision)})])
    bad, num_rows = BadRows(dataset.path), count_used_rows(table, dataset)
    for start in range(0, num_rows, CHUNK_ROWS):
        for number, row in table.read(range(start, min(start + CHUNK_ROWS, num_rows)), bad):
            bad.num_rows = number
            with bad.at(number):
                read_demonstration(row)
    bad.check()


class TaughtTurns:
    """Collects demonstrations whose trained turns probably teach the model something unintended."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: TrainOn) -> None:
        self._train_on = train_on
        self._empty: list[int] = []
        """Numbers of the rows with an empty trained turn."""
        self._unwritten: dict[str, list[int]] = {key: [] for key in find_unwritten(tokenizer)}
        """For each key of a message that the chat template leaves out: rows with this key in a trained turn."""
        self._marked: dict[str, list[int]] = {key: [] for key in UNTRAINED_MARKS}
        """For each key that excludes a turn from training in other systems, but not here: rows with such a turn."""

    def note(self, number: int, read: Conversation | str) -> None:
        """Check a demonstration.

        Raises:
            DataError: the conversation has no assistant message after its context.
        """
        if isinstance(read, str):
            self._empty += [number] if not read.strip() else []
            return
        turns = [read.messages[i] for i in trained_turns(read, self._train_on)]
        if any(map(says_nothing, turns)):
            self._empty.append(number)
        said = find_said(turns)
        if said.intersection(THOUGHTS) - self._unwritten.keys():  # the template writes another key with thoughts
            said -= set(THOUGHTS)
        for key in said & self._unwritten.keys():
            self._unwritten[key].append(number)
        for key in find_unheeded_marks(turns):
            self._marked[key].append(number)

    def warn(self, path: str, num_rows: int) -> list[Caution]:
        """One warning per problem, with the number of affected rows."""
        empty = (
            "the assistant's message is empty, which teaches the model to end its turn at once: remove these rows, or "
            "add answers"
        )
        unwritten = (
            "the assistant has `{key}`, which the chat template leaves out: the model learns only the rest of the "
            "turn; use a template that writes `{key}`"
        )
        marked = (
            "`{key}` excludes a turn from training in other systems, but not in this one: use train_on = "
            "last_assistant, or move the turns that are only context into `prompt`"
        )
        found = [(empty, self._empty)]
        found += [(unwritten.format(key=key), numbers) for key, numbers in self._unwritten.items()]
        found += [(marked.format(key=key), numbers) for key, numbers in self._marked.items()]
        return [
            Caution(f"{path}: in {len(numbers)} of {num_rows} rows (row {numbers[0]} first) {sentence}")
            for sentence, numbers in found
            if numbers
        ]


@dataclass(frozen=True, slots=True)
class _Counts:
    """Statistics of a dataset of demonstrations."""

    num_rows: int
    """Rows that SFT uses."""
    num_checked: int
    """Rows that were read. Fewer than `num_rows` for streamed data."""
    num_dropped: int
    """Rows that SFT drops because they are too long."""
    num_cut: int
    """Rows that SFT truncates."""
    num_samples: int
    """Samples made from the rows. A conversation gives several samples if its turns need separate texts."""
    num_tokens: int
    num_longest: int
    """Tokens of the longest sample, after truncation."""
    num_trained: int
    """Tokens that contribute to the loss."""
    taught_turns: TaughtTurns
    unwritten_roles: UnwrittenRoles
    unread_fields: UnreadFields

    def warn_of_unseen(self, path: str) -> list[Caution]:
        """A warning for each role and each field of the rows that the model does not see."""
        return self.unwritten_roles.warn(path, self.num_checked) + self.unread_fields.warn(path, self.num_checked)

    def sentence(self, path: str) -> str:
        """The statistics in one sentence, for the list of findings."""
        checked = f" in the first {self.num_checked} of {self.num_rows} rows" * (self.num_checked < self.num_rows)
        cut = f", {self.num_cut} cut" * bool(self.num_cut)
        dropped = f", {self.num_dropped} left out because they are too long" * bool(self.num_dropped)
        kept = self.num_checked - self.num_dropped
        texts = f" in {self.num_samples} texts" * (self.num_samples > kept)
        return f"{path}: {kept} demonstrations{checked}{texts}, {self.num_trained} trained tokens{cut}{dropped}"


def _check_demonstrations(
    dataset: DatasetConfig,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[HeldOutRows] = (),
) -> _Counts:
    commit = resolve_revision(dataset.path, dataset.revision)  # raises for a wrong dataset name before any row is read
    [table] = open_datasets([dataset.model_copy(update={"revision": commit})])
    num_rows = count_used_rows(table, dataset)
    num_checked = min(num_rows, NUM_STREAMED_ROWS_CHECKED) if config.data.streaming else num_rows
    chunks = (range(i, min(i + CHUNK_ROWS, num_checked)) for i in range(0, num_checked, CHUNK_ROWS))
    bad = BadRows(dataset.path)
    read = (row for chunk in chunks for row in table.read(chunk, bad))
    num_kept = num_samples = num_cut = num_tokens = num_longest = num_trained = 0
    rows = _say_progress(read, dataset.path, num_checked)
    taught_turns = TaughtTurns(tokenizer, config.training.sft.train_on)
    unwritten_roles, unread_fields = UnwrittenRoles(tokenizer), UnreadFields(config.model.chat_template_kwargs)
    noted = _note_rows(rows, taught_turns, unwritten_roles, unread_fields, bad)
    watched = watch_rows(noted, dataset.path, held_out)
    for samples in iterate_samples(watched, dataset.path, tokenizer, sample_rules(config.training.sft), bad=bad):
        num_kept += bool(samples)
        num_samples += len(samples)
        num_cut += any(sample.status is Status.TRUNCATED for sample in samples)
        for sample in samples:
            num_tokens += len(sample.tokens)
            num_longest = max(num_longest, len(sample.tokens))
            num_trained += sum(map(bool, sample.loss_mask))
    bad.check()
    if num_kept == 0 and num_checked == num_rows:
        raise DataError(f"{dataset.path}: all {num_rows} rows are longer than training.sft.max_length: raise it")
    return _Counts(
        num_rows,
        num_checked,
        num_checked - num_kept,
        num_cut,
        num_samples,
        num_tokens,
        num_longest,
        num_trained,
        taught_turns,
        unwritten_roles,
        unread_fields,
    )


def _say_progress(rows: Iterable[tuple[int, Row]], path: str, num_rows: int) -> Iterator[tuple[int, Row]]:
    """Yield the rows unchanged, and log the progress every few seconds."""
    said_at = time.monotonic()
    for i, row in enumerate(rows):
        if (now := time.monotonic()) - said_at >= PROGRESS_INTERVAL_S:
            said_at = now
            logger.info("%s: %s of %s rows read", path, f"{i:,}", f"{num_rows:,}")
        yield row


def _note_rows(
    rows: Iterable[tuple[int, Row]],
    taught_turns: TaughtTurns,
    unwritten_roles: UnwrittenRoles,
    unread_fields: UnreadFields,
    bad: BadRows,
) -> Iterator[tuple[int, Row]]:
    """Pass each row to the objects that collect warnings, then yield the row unchanged."""
    for number, row in rows:
        bad.num_rows = number
        with suppress(DataError):  # the code that converts the row to samples reports the error
            read = read_demonstration(row)
            if not isinstance(read, str):
                unwritten_roles.note(number, read.messages)
                unread_fields.note(number, row, read.messages)
            taught_turns.note(number, read)
        yield number, row


def check_compared_demonstrations(name: RowFile, config: Config, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Read the demonstrations in `data.NAME`, on which a loss is measured. Returns findings, one sentence each."""
    path = getattr(config.data, name)
    counts = _check_demonstrations(dataset_of(name, config), config, tokenizer)
    findings = [counts.sentence(path), *counts.warn_of_unseen(path)]
    return [*findings, *check_longest(path, counts.num_longest, config.model)]
