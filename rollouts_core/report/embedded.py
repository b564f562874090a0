"""Choose the rollouts that a page holds, and compress them into blocks.

    files of samples -> choose groups within the budget -> a table of all kept samples ("index") and chunks of
                                                           consecutive groups ("chunk-0", "chunk-1", ...)

A rollout usually takes one to two kilobytes, so most pages hold only a part of the rollouts. Groups stay whole. Steps
are chosen at even distances. Within a step, groups are sorted by their mean reward and chosen at even distances.
Held-out prompts are sorted by the models' rewards and chosen at even distances; all models show the same prompts.

Files are read line by line, one step at a time. Memory is therefore bounded by the largest step and the budget.

Not here: the encoding of a rollout (rollout_codec.py), the decoding in the page (viewer.js).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rollouts_core.metrics import parse_line
from rollouts_core.report.inputs import ReportInput
from rollouts_core.report.packed import embedded_size, pack_json
from rollouts_core.report.rollout_codec import (
    STATUSES,
    EncodedGroup,
    JsonObject,
    encode_group,
    group_records,
    join_columns,
    mask_runs,
    numbers_text,
)
from rollouts_core.report.vocabulary import Vocabulary, load_vocabulary
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import BASE, is_training, kind_of, label_of

CHUNK_CHARS = 400_000
"""Approximate number of characters of JSON in a chunk. The page decompresses such a chunk in a few milliseconds."""
DRAFT_LEVEL = 6
HELD_OUT_SHARE = 0.4
"""The largest share of the page's room that held-out answers take if the run also has training samples."""
NUM_PROBED = 3
"""Number of step files that are encoded to estimate the size of all files."""
INDEX_BYTES_PER_SAMPLE = 6
"""Approximate size of a sample's row in the page's table, bytes."""
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Exceptions that a line can cause if it was not written by a job of this project."""


class StepFile(NamedTuple):
    """The samples file of one step, or of one model's held-out answers."""

    step: int
    path: Path
    scores: Path | None = None
    """The file with each sample's advantage and trainer log-probs; None for held-out answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """The samples of one training, or the held-out answers of one model."""

    key: str
    """The name of the set in addresses within the page, for example rl or heldout-base."""
    label: str
    css: str
    is_training: bool
    files: tuple[StepFile, ...]


@dataclass(slots=True, kw_only=True)
class KeptStep:
    """The chosen groups of a step. The groups' texts stay compressed until the page is written."""

    set_index: int
    step: int
    draft: bytes
    groups: list[EncodedGroup]
    """The groups of the step without their texts, which are in `draft`."""


@dataclass(slots=True, kw_only=True)
class Embedded:
    """The blocks of a page by name, and notes about what was left out."""

    blocks: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """A sentence for each sample set of which the page holds only a part."""


def find_sets(report: ReportInput) -> list[SampleSet]:
    """The sample sets of all trainings that keep samples, then a set of held-out answers for each compared model."""
    trained = [each for training in report.trainings for each in training_sets(training.name, training.run_dir)]
    return [*trained, *held_out_sets(report.evaluation_dir, report.labels)]


def training_sets(name: str, run_dir: Path) -> list[SampleSet]:
    """A list with the training's sample set; empty if the training keeps no samples or has no samples yet."""
    kind = kind_of(name)
    if not kind.keeps_samples or not (files := _step_files(run_dir)):
        return []
    return [
        SampleSet(key=name, label=f"{label_of(name)} training", css=kind.name, is_training=True, files=files),
    ]


def held_out_sets(evaluation_dir: Path, labels: Mapping[str, str]) -> list[SampleSet]:
    """A sample set for each compared model that has held-out answers.

    Args:
        labels: the titles of the models, in order.
    """
    sets = []
    for name, label in labels.items():
        path = RunDirectory(evaluation_dir).samples / f"{name}.jsonl"
        if path.is_file():
            css = kind_of(name).name if is_training(name) else BASE
            file = StepFile(0, path)
            sets.append(SampleSet(key=f"heldout-{name}", label=label, css=css, is_training=False, files=(file,)))
    return sets


def _step_files(run_dir: Path) -> tuple[StepFile, ...]:
    files = RunDirectory(run_dir)
    found = []
    for path in files.samples.glob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdecimal():
            found.append(StepFile(int(number), path, files.credit / path.name))
    return tuple(sorted(found))


def embed_samples(report: ReportInput, *, room: int) -> Embedded:
    """The run's samples, cut to about `room` bytes of the page."""
    vocabulary = load_vocabulary(Path(report.checkpoint_path))
    sets = [each for each in find_sets(report) if report.contents.samples != "none"]
    if report.contents.samples == "held-out":
        sets = [each for each in sets if not each.is_training]
    embedded = Embedded()
    row_tokens = _embed_rows(report, embedded) if report.contents.samples == "all" else set[int]()
    if not sets:
        embedded.blocks["vocabulary"] = pack_json(vocabulary.only(row_tokens))
        return embedded
    held_out = [(i, each) for i, each in enumerate(sets) if not each.is_training]
    trained = [(i, each) for i, each in enumerate(sets) if each.is_training]
    kept = keep_held_out(held_out, vocabulary, int(room * (HELD_OUT_SHARE if trained else 1)), embedded.notes)
    used = sum(room_of(step) for step in kept)
    for i, each in trained:
        kept += _keep_steps(i, each, vocabulary, (room - used) // len(trained), embedded)
    kept.sort(key=lambda step: (step.set_index, step.step))
    pack_kept(sets, kept, embedded)
    shown = row_tokens.union(*(group.tokens for step in kept for group in step.groups))
    embedded.blocks["vocabulary"] = pack_json(vocabulary.only(shown))
    return embedded


def _embed_rows(report: ReportInput, embedded: Embedded) -> set[int]:
    """Put the recorded SFT rows into the block "rows", and return the ids of the rows' tokens."""
    for training in report.trainings:
        try:
            described = json.loads(RunDirectory(training.run_dir).rows.read_text(encoding="utf-8"))
            embedded.blocks["rows"] = pack_json(describe_rows(described))
            return {token for row in described["rows"] for token in row["tokens"]}
        except (OSError, *UNREADABLE):
            continue
    return set()


def describe_rows(described: JsonObject) -> JsonObject:
    """The content of rows.json in the page's format."""
    sources = list(dict.fromkeys(row["source"] for row in described["rows"]))
    rows = [
        {
            "s": sources.index(row["source"]),
            "row": row["row"],
            "outcome": row["outcome"],
            "reason": row["reason"],
            "t": numbers_text(row["tokens"]),
            "m": mask_runs(row["loss_mask"]),
        }
        for row in described["rows"]
    ]
    return {
        "sources": sources,
        "rows": rows,
        "numRows": described["num_rows"],
        "numDropped": described["num_dropped"],
        "maxLength": described["max_length"],
        "lengthCounts": described["length_counts"],
        "trainedShare": described["trained_share"],
    }


def _keep_steps(
    set_index: int, samples: SampleSet, vocabulary: Vocabulary, room: int, embedded: Embedded
) -> list[KeptStep]:
    """The groups of steps at even distances, as many as fit into `room` bytes."""
    files = samples.files
    share = min(1.0, room / max(1, _estimate_size(files, vocabulary)))
    kept, used, num_samples, num_kept = [], 0, 0, 0
    order = spread_order(len(files)) if share < 1 else range(len(files))
    for place in order:
        groups = list(encoded_groups(files[place], vocabulary))
        chosen = groups if share >= 1 else spread_by_reward(groups, max(2, int(share * len(groups))))
        if not chosen:
            continue
        step = keep_groups(set_index, files[place].step, chosen)
        if used + room_of(step) > room:
            break
        used += room_of(step)
        kept.append(step)
    num_kept = sum(len(group.rows) for step in kept for group in step.groups)
    num_samples = sum(count_lines(file.path) for file in files)
    if num_kept < num_samples:
        embedded.notes.append(
            f"{samples.label}: {num_kept:,} of {num_samples:,} samples, from {len(kept):,} of {len(files):,} steps. "
            "Groups are whole. Steps and, within a step, rewards are spread evenly."
        )
    return kept


def keep_held_out(
    sets: Sequence[tuple[int, SampleSet]], vocabulary: Vocabulary, room: int, notes: list[str]
) -> list[KeptStep]:
    """The answers of all models to the same prompts, as many as fit into `room` bytes. Adds a note if prompts are left
    out."""
    if not sets:
        return []
    rewards = [{group.group: group.reward for group in encoded_groups(each.files[0], vocabulary)} for _, each in sets]
    prompts = sorted(set[int]().union(*rewards), key=lambda group: tuple(of.get(group, 0.0) for of in rewards))
    size = sum(_estimate_size(each.files, vocabulary) for _, each in sets)
    if size > room:
        chosen = set(spread_evenly(prompts, max(1, int(len(prompts) * room / size))))
        notes.append(
            f"Held-out answers: {len(chosen):,} of {len(prompts):,} prompts with the answers of every model, spread "
            "evenly over the combinations of rewards."
        )
    else:
        chosen = set(prompts)
    return [
        keep_groups(i, 0, [group for group in encoded_groups(each.files[0], vocabulary) if group.group in chosen])
        for i, each in sets
    ]


def keep_groups(set_index: int, step: int, groups: Iterable[EncodedGroup]) -> KeptStep:
    """The groups as a `KeptStep`, with their texts compressed."""
    compressor = zlib.compressobj(DRAFT_LEVEL)
    parts, light = [], []
    for group in groups:
        parts.append(compressor.compress(group.text.encode() + b"\n"))
        light.append(replace(group, text=""))
    return KeptStep(set_index=set_index, step=step, draft=b"".join([*parts, compressor.flush()]), groups=light)


def room_of(step: KeptStep) -> int:
    """The approximate number of bytes that the groups take in a page."""
    return embedded_size(step.draft) + INDEX_BYTES_PER_SAMPLE * sum(len(group.rows) for group in step.groups)


def _estimate_size(files: Sequence[StepFile], vocabulary: Vocabulary) -> int:
    """The estimated bytes that all groups of the files would take in a page, extrapolated from a few files."""
    sizes = [file.path.stat().st_size for file in files]
    probed = spread_evenly(range(len(files)), NUM_PROBED)
    taken = sum(room_of(keep_groups(0, 0, encoded_groups(files[place], vocabulary))) for place in probed)
    return int(taken * sum(sizes) / max(1, sum(sizes[place] for place in probed)))


def encoded_groups(file: StepFile, vocabulary: Vocabulary) -> Iterator[EncodedGroup]:
    """The groups of a file. Unreadable lines and groups are skipped."""
    for records, scores in group_records(list(_lines(file))):
        try:
            yield encode_group(records, scores, vocabulary)
        except UNREADABLE:
            continue


def _lines(file: StepFile) -> Iterator[tuple[JsonObject, JsonObject]]:
    """Each sample with its line of the training's scores file (advantage, trainer log-probs); {} if this line is
    missing."""
    scores: list[JsonObject | None] = []
    if file.scores is not None and file.scores.is_file():
        with file.scores.open("rb") as lines:
            scores = [parse_line(line) for line in lines]
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines):
            record = parse_line(line)
            if record is not None and isinstance(record.get("group_index"), int):
                score = scores[number] if number < len(scores) else None
                yield record, score or {}


def count_lines(path: Path) -> int:
    """The number of lines of a file. The file is read in parts, to save memory."""
    with path.open("rb") as lines:
        return sum(1 for _ in lines)


def spread_by_reward(groups: Sequence[EncodedGroup], count: int) -> list[EncodedGroup]:
    """`count` groups in their original order, chosen at even distances after sorting by mean reward."""
    places = sorted(range(len(groups)), key=lambda place: groups[place].reward)
    return [groups[place] for place in sorted(spread_evenly(places, count))]


def spread_evenly(values: Sequence[int], count: int) -> list[int]:
    """At most `count` of the values at even distances, including the first and the last value."""
    if count >= len(values):
        return list(values)
    if count == 1:
        return [values[len(values) // 2]]
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def spread_order(count: int) -> list[int]:
    """The numbers 0 to count - 1, ordered so that every prefix is spread evenly: last, first, middle, quarters, ..."""
    order, seen, parts = [count - 1, 0], {0, count - 1}, 2
    while len(seen) < count:
        for odd in range(1, parts, 2):
            place = round(odd * (count - 1) / parts)
            if place not in seen:
                seen.add(place)
                order.append(place)
        parts *= 2
    return order[:count]


def pack_kept(sets: Sequence[SampleSet], kept: Sequence[KeptStep], embedded: Embedded) -> None:
    """Put the index and the chunks of the kept steps into the page's blocks."""
    first_groups = []
    for place, (first_group, texts) in enumerate(split_chunks(kept)):
        embedded.blocks[f"chunk-{place}"] = pack_json(read_chunk(texts))
        first_groups.append(first_group)
    index = describe_samples(sets, kept)
    embedded.blocks["index"] = pack_json({**index, "chunks": first_groups, "notes": embedded.notes})


def split_chunks(kept: Iterable[KeptStep]) -> Iterator[tuple[int, list[str]]]:
    """Split groups into chunks of consecutive groups. Yields each chunk's first group number and the texts of its
    groups."""
    chunk, first, num_groups, size = list[str](), 0, 0, 0
    for step in kept:
        for text in group_texts(step):
            if size > CHUNK_CHARS:
                yield first, chunk
                chunk, first, size = [], num_groups, 0
            chunk.append(text)
            size += len(text)
            num_groups += 1
    yield first, chunk


def group_texts(step: KeptStep) -> list[str]:
    return zlib.decompress(step.draft).decode().splitlines()


def read_chunk(texts: Sequence[str]) -> JsonObject:
    """A chunk of groups in the page's format."""
    return join_columns([json.loads(text) for text in texts])


def only_groups(step: KeptStep, numbers: Collection[int]) -> KeptStep:
    """The step with only the groups that have these numbers."""
    chosen = [(text, each) for text, each in zip(group_texts(step), step.groups, strict=True) if each.group in numbers]
    return keep_groups(step.set_index, step.step, [replace(each, text=text) for text, each in chosen])


def describe_samples(sets: Sequence[SampleSet], kept: Sequence[KeptStep]) -> JsonObject:
    """The table of all kept samples: columns with an entry per group, and columns with an entry per sample."""
    prompts: dict[str, int] = {}
    previews: list[str] = []
    groups: dict[str, list[Any]] = {name: [] for name in ("set", "step", "group", "prompt", "size")}  # Any: JSON
    rows = [row for step in kept for group in step.groups for row in group.rows]
    for step in kept:
        for group in step.groups:
            if group.prompt not in prompts:
                prompts[group.prompt] = len(prompts)
                previews.append(group.preview)
            values = (step.set_index, step.step, group.group, prompts[group.prompt], len(group.rows))
            for column, value in zip(groups.values(), values, strict=True):
                column.append(value)
    statuses = list(STATUSES) + sorted({row.status for row in rows} - set(STATUSES))
    names = sorted({name for row in rows for name in row.terms})
    return {
        "sets": [{"key": s.key, "label": s.label, "css": s.css, "isTraining": s.is_training} for s in sets],
        "prompts": previews,
        "groups": groups,
        "reward": [row.reward for row in rows],
        "advantage": _unless_empty([row.advantage for row in rows]),
        "length": [row.length for row in rows],
        "status": [statuses.index(row.status) for row in rows],
        "version": _unless_empty([row.version for row in rows]),
        "terms": {name: [row.terms.get(name) for row in rows] for name in names},
        "statuses": statuses,
    }


def _unless_empty(values: list[Any]) -> list[Any] | None:  # Any: JSON
    return values if any(value is not None for value in values) else None
