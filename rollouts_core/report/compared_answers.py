"""The answers of compared runs to shared prompts, as blocks of a page.

The page shows the final model of each run. The page also shows the start model if all runs have the same start model. A
token id means different texts in different tokenizers, so the page holds tokens only if all runs have one vocabulary.

Not here: the blocks of samples (embedded.py), finding shared prompts (compared.py), the views (viewer.js).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollouts_core.metrics import parse_line
from rollouts_core.report.compared import RunComparison, letter_of, prompt_keys
from rollouts_core.report.embedded import (
    UNREADABLE,
    Embedded,
    KeptStep,
    SampleSet,
    keep_groups,
    pack_kept,
    room_of,
    spread_evenly,
)
from rollouts_core.report.packed import pack_json
from rollouts_core.report.rollout_codec import EncodedGroup, JsonObject, encode_group, group_records
from rollouts_core.report.vocabulary import Vocabulary, load_vocabulary
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import BASE

WITHOUT_TOKENS: JsonObject = {"tokens": [], "loss_mask": [], "rollout_log_probs": None, "policy_versions": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSet:
    """The held-out answers of one model of one run."""

    run: int
    """Index of the run in the comparison."""
    model: str
    path: Path
    prompts: Mapping[int, int]
    """The prompt's number on the page, by its number in the samples file."""

    @property
    def label(self) -> str:
        return "Base" if self.model == BASE else letter_of(self.run)


def find_answers(compared: RunComparison) -> list[AnswerSet]:
    """The answers that the page may hold; empty unless two runs share prompts and keep samples in their reports."""
    keys = [
        prompt_keys(run.report.evaluation_dir, len(scores.scored[0].scores))
        if run.report.contents.samples != "none"
        else []
        for run, scores in zip(compared.runs, compared.scores, strict=True)
    ]
    times = Counter(itertools.chain(*keys))
    numbers: dict[Hashable, int] = {}
    for key in itertools.chain(*keys):
        if times[key] > 1:
            numbers.setdefault(key, len(numbers))
    has_same_start = not any(each.name == "start model" for each in compared.inputs)
    sets = list[AnswerSet]()
    for place, (run, scores) in enumerate(zip(compared.runs, compared.scores, strict=True)):
        prompts = {i: numbers[key] for i, key in enumerate(keys[place]) if key in numbers}
        models = list(dict.fromkeys([*([BASE] if has_same_start and not sets else []), scores.scored[-1].name]))
        for model in models:
            path = RunDirectory(run.report.evaluation_dir).samples / f"{model}.jsonl"
            if prompts and path.is_file():
                sets.append(AnswerSet(run=place, model=model, path=path, prompts=prompts))
    return sets if len({each.run for each in sets}) > 1 else []


def embed_answers(compared: RunComparison, *, room: int) -> Embedded:
    """The answers, cut to about `room` bytes of the page. Without answers the result has no blocks."""
    sets, embedded = find_answers(compared), Embedded()
    if not sets:
        return embedded
    vocabularies = [load_vocabulary(Path(run.report.checkpoint_path)) for run in compared.runs]
    is_one = all(each == vocabularies[0] for each in vocabularies)
    groups = [list(iterate_groups(each, vocabularies[each.run], with_tokens=is_one)) for each in sets]
    chosen = _choose_prompts(groups, room, embedded)
    kept = [
        keep_groups(place, 0, [group for group in each if group.group in chosen]) for place, each in enumerate(groups)
    ]
    described = [
        SampleSet(
            key=f"heldout-{letter_of(each.run)}-{each.model}",
            label=each.label,
            css="base" if each.model == BASE else f"run-{letter_of(each.run)}",
            is_training=False,
            files=(),
        )
        for each in sets
    ]
    pack_kept(described, kept, embedded)
    shown = set[int]().union(*(group.tokens for step in kept for group in step.groups))
    embedded.blocks["vocabulary"] = pack_json(vocabularies[0].only(shown))
    return embedded


def _choose_prompts(groups: Sequence[Sequence[EncodedGroup]], room: int, embedded: Embedded) -> set[int]:
    """The numbers of the prompts that fit into `room`, evenly spaced after sorting by the models' rewards."""
    rewards = [{group.group: group.reward for group in each} for each in groups]
    prompts = sorted(set[int]().union(*rewards), key=lambda prompt: tuple(of.get(prompt, 0.0) for of in rewards))
    steps: list[KeptStep] = [keep_groups(place, 0, each) for place, each in enumerate(groups)]
    size = sum(map(room_of, steps))
    if size <= room:
        return set(prompts)
    chosen = spread_evenly(prompts, max(1, int(len(prompts) * room / size)))
    embedded.notes.append(
        f"Held-out answers: {len(chosen):,} of {len(prompts):,} shared prompts, spread evenly over the combinations of "
        "rewards."
    )
    return set(chosen)


def iterate_groups(answers: AnswerSet, vocabulary: Vocabulary, *, with_tokens: bool) -> Iterator[EncodedGroup]:
    """Each prompt's answers as an encoded group, numbered by the prompt's number on the page."""
    for records in iterate_records(answers):
        kept = records if with_tokens else [{**record, **WITHOUT_TOKENS} for record in records]
        try:
            group = encode_group(kept, [], vocabulary)
            rows = tuple(
                row._replace(length=sum(map(bool, record["loss_mask"])))
                for row, record in zip(group.rows, records, strict=True)
            )
            yield replace(group, group=answers.prompts[group.group], rows=rows)
        except UNREADABLE:
            continue


def iterate_records(answers: AnswerSet) -> Iterator[list[JsonObject]]:
    """The records of each prompt on the page, one list per prompt."""
    with answers.path.open("rb") as lines:
        found = [record for record in map(parse_line, lines) if record and record.get("group_index") in answers.prompts]
    for records, _ in group_records([(record, {}) for record in found]):
        yield records
