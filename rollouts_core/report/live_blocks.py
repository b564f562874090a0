"""Build the blocks that the live page of a run requests: curves, and samples in pages of limited size.

    curves                       the metrics of all trainings, thinned
    rows                         rows of SFT
    page/rl/120, page/rl/last    the table of the samples of step 120, or of the last step, and neighbouring steps
    page/held-out                the table of held-out answers
    prompt/rl/120/7              the table of one prompt's groups at all steps; group 7 of step 120 has this prompt
    chunk/rl/120/0/<version>     the first chunk of the groups of step 120
    chunk/rl/120/g7/<version>    group 7 of step 120

The sample files of a page have about `PAGE_BYTES` together. Pages are counted from the first step, so a new step
changes only the last page. A request for a page encodes the page's files. The most recently used files stay in memory.

Not here: the page (live.py), the encoding of a rollout (rollout_codec.py), the decoding in the page (viewer.js).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from rollouts_core.job import EvalJob, RLJob, SFTJob
from rollouts_core.metrics import metrics_by_step, parse_line, read_spread_lines
from rollouts_core.report.curve_data import JsonObject, describe_gpus, describe_training
from rollouts_core.report.embedded import (
    KeptStep,
    SampleSet,
    StepFile,
    describe_rows,
    describe_samples,
    encoded_groups,
    held_out_sets,
    keep_groups,
    keep_held_out,
    only_groups,
    read_chunk,
    split_chunks,
    training_sets,
)
from rollouts_core.report.live_run import UNREADABLE, LiveRun, LiveStage
from rollouts_core.report.packed import pack_json
from rollouts_core.report.rollout_codec import prompt_turns
from rollouts_core.report.trainings import load_job_of
from rollouts_core.report.vocabulary import Vocabulary, load_vocabulary
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import BASE, EVALUATE, TRAININGS, is_training, label_of

PAGE_BYTES = 4_000_000
"""Largest total size of a page's sample files, bytes. A larger file gets its own page."""
MAX_PAGE_STEPS = 500
MAX_CACHED_BYTES = 64_000_000
"""Largest total size of the encoded steps in the cache. An encoded step has at most about a fifth of its file's
size."""
BYTES_PER_ROW = 400
"""Approximate memory that the server needs per row of the table of samples, bytes."""
MAX_LINES = 4_000
"""Approximate number of lines of metrics for the curves, and of lines of GPU use."""
SEARCH_BYTES = 512_000_000
"""Largest number of bytes of sample files that a search for a prompt reads, beginning with the newest step."""
MAX_FOUND = 400
"""Largest number of groups of one prompt on a page. viewer.js has the same limit."""
LEVEL = 4
"""Compression level of the blocks that a page requests."""
HELD_OUT = "held-out"
Found = TypeVar("Found")


class StepCache:
    """Caches the encoded files of samples. When the cache is full, the least recently used file is dropped."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self.max_bytes = max_bytes
        self.lock = threading.Lock()
        self._held_out: tuple[str, list[KeptStep], list[str]] = ("", [], [])
        self._held: OrderedDict[tuple[Any, ...], KeptStep] = OrderedDict()  # Any: path and versions of files

    @property
    def num_bytes(self) -> int:
        """The approximate memory that the cached files take."""
        return sum(map(_size_of, self._held.values()))

    def load(self, file: StepFile, vocabulary: Vocabulary) -> KeptStep:
        """The groups of a file. The file is read only if the file is not cached or has changed."""
        key = (str(file.path), version_of(file), len(vocabulary.texts))
        step = self._held.pop(key, None) or keep_groups(0, file.step, encoded_groups(file, vocabulary))
        self._held[key] = step
        while self.num_bytes > self.max_bytes and len(self._held) > 1:
            self._held.popitem(last=False)
        return step

    def load_held_out(self, sets: Sequence[SampleSet], vocabulary: Vocabulary) -> tuple[list[KeptStep], list[str]]:
        """The held-out answers of all models, with notes about the answers. The files are read only if one of the files
        changed."""
        held_out = [(place, each) for place, each in enumerate(sets) if not each.is_training]
        key = " ".join(f"{place} {file.path} {version_of(file)}" for place, each in held_out for file in each.files)
        if self._held_out[0] != key:
            notes = list[str]()
            self._held_out = (key, keep_held_out(held_out, vocabulary, PAGE_BYTES, notes), notes)
        return self._held_out[1:]


def _size_of(step: KeptStep) -> int:
    return len(step.draft) + BYTES_PER_ROW * sum(len(group.rows) for group in step.groups)


def version_of(file: StepFile) -> str:
    """A string that changes when the files of a step change."""
    versions = []
    for path in (file.path, file.scores):
        try:
            versions.append(f"{path.stat().st_mtime_ns:x}" if path else "")
        except FileNotFoundError:
            versions.append("")
    return "-".join(versions)


def find_block(run: LiveRun, name: str, cache: StepCache) -> bytes | None:
    """A compressed block of a run; None if the run has no such block.

    Raises:
        FileNotFoundError: a file was deleted while it was read.
    """
    kind, *parts = name.split("/")
    try:
        with cache.lock:
            block = READERS[kind](run, parts, cache)
    except UNREADABLE:
        return None
    return None if block is None else pack_json(block, level=LEVEL)


def describe_live_curves(run: LiveRun, *_: object) -> list[JsonObject]:
    sections = []
    for stage in run.stages:
        if not is_training(stage.name):
            continue
        files = RunDirectory(stage.run_dir)
        try:
            metrics = metrics_by_step(read_spread_lines(files.metrics, MAX_LINES, rare="eval_loss"))
            sections += describe_training(stage.name, metrics, mark=None)
            sections += describe_gpus(stage.name, read_spread_lines(files.gpu_use, MAX_LINES))
        except UNREADABLE:
            continue
    return sections


def find_rows(run: LiveRun, *_: object) -> JsonObject | None:
    """The recorded rows of SFT, with the texts of their tokens."""
    for stage in run.stages:
        path = RunDirectory(stage.run_dir).rows
        if path.is_file():
            described = json.loads(path.read_text(encoding="utf-8"))
            tokens = {token for row in described["rows"] for token in row["tokens"]}
            return {**describe_rows(described), "vocabulary": vocabulary_of([stage]).only(tokens)}
    return None


def live_sets(run: LiveRun) -> list[SampleSet]:
    """The sample sets of all trainings so far, the latest training first, then the sets of held-out answers."""
    sets = []
    for stage in reversed(run.stages):
        if is_training(stage.name):
            sets += training_sets(stage.name, stage.run_dir)
    for stage in run.stages:
        if stage.name == EVALUATE.name:
            sets += held_out_sets(stage.run_dir, model_labels(stage))
    return sets


def model_labels(stage: LiveStage) -> dict[str, str]:
    """The titles of the models that an evaluation scores, in the evaluation's order."""
    job = load_job_of(stage.run_dir)
    names = [each.name for each in job.checkpoints] if isinstance(job, EvalJob) else (BASE, *TRAININGS)
    return {name: stage.labels.get(name, label_of(name)) for name in names}


def vocabulary_of(stages: Sequence[LiveStage]) -> Vocabulary:
    """The texts of tokens, from the folder of a start model or checkpoint of `stages`; empty if this machine has no
    such folder."""
    for stage in stages:
        job = load_job_of(stage.run_dir)
        starts = [Path(job.model.model.path)] if isinstance(job, SFTJob | RLJob) else []
        for folder in (*starts, *sorted(RunDirectory(stage.run_dir).checkpoints.glob("step_*"))):
            if (folder / "tokenizer.json").is_file():
                return _vocabulary(folder)
    return Vocabulary()


@lru_cache(maxsize=2)
def _vocabulary(folder: Path) -> Vocabulary:
    return load_vocabulary(folder)


def split_pages(files: Sequence[StepFile]) -> Iterator[list[StepFile]]:
    """The files of each page, in order. Only the last page changes when files are added."""
    page, size = list[StepFile](), 0
    for file in files:
        added = file.path.stat().st_size
        if page and (size + added > PAGE_BYTES or len(page) == MAX_PAGE_STEPS):
            yield page
            page, size = [], 0
        page.append(file)
        size += added
    if page:
        yield page


def find_page(run: LiveRun, parts: Sequence[str], cache: StepCache) -> JsonObject | None:
    """The table of the samples of some steps, or of the held-out answers.

    Args:
        parts: a set's key and a step or "last"; or `HELD_OUT` alone.
    """
    sets, vocabulary = live_sets(run), vocabulary_of(run.stages)
    if parts[0] == HELD_OUT:
        kept, notes = cache.load_held_out(sets, vocabulary)
        return describe_page(sets, kept, vocabulary, notes=notes, about={"name": f"page/{HELD_OUT}", "set": HELD_OUT})
    chosen = _first(each for each in sets if each.key == parts[0])
    step = chosen.files[-1].step if parts[1] == "last" else int(parts[1])
    before, page, after = list[StepFile](), list[StepFile](), list[StepFile]()
    for each in split_pages(chosen.files):
        if page and each[0].step > step:
            after = each
            break
        before, page = page, each
    about = {
        "name": f"page/{chosen.key}/{page[0].step}",
        "set": chosen.key,
        "first": page[0].step,
        "last": page[-1].step,
        "before": before[-1].step if before else None,
        "after": after[0].step if after else None,
        "oldest": chosen.files[0].step,
        "newest": chosen.files[-1].step,
    }
    place = sets.index(chosen)
    kept = [replace(cache.load(file, vocabulary), set_index=place) for file in page]
    return describe_page(sets, kept, vocabulary, notes=[], about=about)


def find_prompt(run: LiveRun, parts: Sequence[str], cache: StepCache) -> JsonObject:
    """The table of all groups with the same prompt. The search begins at the newest step and may stop at a limit.

    Args:
        parts: the set's key, the step and the number of one group with this prompt.
    """
    sets, number = live_sets(run), int(parts[2])
    chosen, asked = _find_file(sets, parts)
    place, vocabulary = sets.index(chosen), vocabulary_of(run.stages)
    prompt = only_groups(cache.load(asked, vocabulary), {number}).groups[0].prompt
    needle, kept, searched, notes = _needle(asked, number), list[KeptStep](), 0, list[str]()
    for file in reversed(chosen.files):
        if searched > SEARCH_BYTES or len(kept) == MAX_FOUND:
            notes = [f"The search went back to step {file.step + 1:,}. Earlier steps may have the prompt, too."]
            break
        searched += file.path.stat().st_size
        if needle in file.path.read_bytes():
            step = cache.load(file, vocabulary)
            numbers = {group.group for group in step.groups if group.prompt == prompt}
            kept += [replace(only_groups(step, numbers), set_index=place)] if numbers else []
    about = {"name": "/".join(("prompt", *parts)), "set": None}
    return describe_page(sets, kept[::-1], vocabulary, notes=notes, about=about, of_groups=True)


def _needle(file: StepFile, group: int) -> bytes:
    """Bytes that occur in every line with the same prompt as this group: the text of its last turn in JSON."""
    with file.path.open("rb") as lines:
        record = _first(found for line in lines if (found := parse_line(line)) and found.get("group_index") == group)
    return json.dumps(prompt_turns(record["prompt"])[-1][1])[1:-1].encode()


def find_chunk(run: LiveRun, parts: Sequence[str], cache: StepCache) -> JsonObject:
    """The content of a chunk, or of single groups of a step.

    Args:
        parts: the set's key, the step, and the chunk's number or "g" with the numbers of groups. The file's version
            follows, so that a changed file gets a new address.
    """
    sets, vocabulary = live_sets(run), vocabulary_of(run.stages)
    chosen, file = _find_file(sets, parts)
    if chosen.is_training:
        step = cache.load(file, vocabulary)
    else:
        place = sets.index(chosen)
        step = _first(each for each in cache.load_held_out(sets, vocabulary)[0] if each.set_index == place)
    if parts[2].startswith("g"):
        step = only_groups(step, set(map(int, parts[2][1:].split("+"))))
        return read_chunk([text for _, texts in split_chunks([step]) for text in texts])
    return read_chunk([texts for _, texts in split_chunks([step])][int(parts[2])])


def _find_file(sets: Sequence[SampleSet], parts: Sequence[str]) -> tuple[SampleSet, StepFile]:
    chosen = _first(each for each in sets if each.key == parts[0])
    return chosen, _first(file for file in chosen.files if file.step == int(parts[1]))


def _first(found: Iterable[Found]) -> Found:
    for each in found:
        return each
    raise LookupError("the run has no such block")


def describe_page(
    sets: Sequence[SampleSet],
    kept: Sequence[KeptStep],
    vocabulary: Vocabulary,
    *,
    notes: list[str],
    about: JsonObject,
    of_groups: bool = False,
) -> JsonObject:
    """A table with the names of its chunks and the texts of its tokens.

    Args:
        about: facts about the page that viewer.js needs, such as its first and last step.
        of_groups: whether the steps hold only some of their groups.
    """
    first_groups, names, num_groups = list[int](), list[str](), 0
    for step in filter(lambda each: each.groups, kept):
        samples = sets[step.set_index]
        version = version_of(_first(file for file in samples.files if file.step == step.step))
        numbers = "g" + "+".join(str(group.group) for group in step.groups)
        for place, (first, _) in enumerate(split_chunks([step]) if not of_groups else [(0, "")]):
            first_groups.append(num_groups + first)
            names.append(f"chunk/{samples.key}/{step.step}/{numbers if of_groups else place}/{version}")
        num_groups += len(step.groups)
    tokens = set[int]().union(*(group.tokens for step in kept for group in step.groups))
    shown = {"chunks": first_groups, "chunkNames": names, "notes": notes, "page": about}
    return {**describe_samples(sets, kept), **shown, "vocabulary": vocabulary.only(tokens)}


READERS: dict[str, Callable[[LiveRun, list[str], StepCache], JsonObject | list[JsonObject] | None]] = {
    "curves": describe_live_curves,
    "rows": find_rows,
    "page": find_page,
    "prompt": find_prompt,
    "chunk": find_chunk,
}
"""The functions that build blocks, by the first part of the block's name."""
