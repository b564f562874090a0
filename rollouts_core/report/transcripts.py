"""Choose held-out prompts with the answers of all models. Prompts for which the models' rewards differ come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rollouts_core.metrics import parse_line
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import label_of
from rollouts_core.types import Sample, Status, sample_from_json

MAX_TRANSCRIPTS = 8
LONG_TEXT_CHARS = 500
"""Number of characters of a text that the page shows at first. A longer text is shown collapsed."""
LONG_TEXT_LINES = 10
MAX_TEXT_CHARS = 8_000
"""Largest number of characters of a text in the page. The rest of a longer text is left out."""


class ShownText(NamedTuple):
    """A text, and the start of the text that the page shows at first. A short text is shown whole."""

    start: str
    text: str
    num_left_out: int
    """Number of characters that the page leaves out."""

    @property
    def is_long(self) -> bool:
        """Whether the text is shown collapsed."""
        return self.start != self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of one checkpoint to a prompt."""

    name: str
    label: str
    text: ShownText
    reward: float | None
    outcome: str
    """If the checkpoints' rewards differ, "best" for the highest reward and "rest" for others; otherwise empty."""
    is_truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One held-out prompt with every checkpoint's first completion."""

    turns: tuple[tuple[str, ShownText], ...]
    """The turns of the prompt as (role, text)."""
    reference: str
    """The dataset's reference answer; empty for a row without a reference answer."""
    answers: tuple[Answer, ...]


def load_transcripts(evaluation_dir: Path, names: Sequence[str]) -> list[Transcript]:
    """Prompts that all checkpoints with samples answered. Prompts for which the rewards differ come first.

    The patterns of rewards (only RL is right, only RL is wrong, ...) take turns, the most frequent pattern first, so
    that rare patterns are shown too.
    """
    directory = RunDirectory(evaluation_dir).samples
    by_name = {name: first for name in names if (first := _first_samples(directory / f"{name}.jsonl"))}
    if not by_name:
        return []
    shared = sorted(set.intersection(*(set(first) for first in by_name.values())))
    groups = pick_different([[first[i].reward for first in by_name.values()] for i in shared], MAX_TRANSCRIPTS)
    return [_describe_transcript({name: first[shared[i]] for name, first in by_name.items()}) for i in groups]


def pick_different(rewards: Sequence[Sequence[float | None]], count: int) -> list[int]:
    """Up to `count` indices of rows: first rows whose rewards differ, with their patterns taking turns, then other
    rows."""
    patterns = [tuple(row) for row in rewards]
    frequency = Counter(patterns)
    seen: Counter[tuple[float | None, ...]] = Counter()
    turn = []
    for pattern in patterns:
        turn.append(seen[pattern])
        seen[pattern] += 1
    order = sorted(
        range(len(patterns)), key=lambda i: (len(set(patterns[i])) == 1, turn[i], -frequency[patterns[i]], i)
    )
    return order[:count]


def shorten_text(text: str) -> ShownText:
    """The text in the form that the page shows: whole, collapsed, or cut."""
    kept = text[:MAX_TEXT_CHARS]
    start = "\n".join(kept[:LONG_TEXT_CHARS].split("\n")[:LONG_TEXT_LINES])
    return ShownText(start, kept, len(text) - len(kept))


def completion_text(sample: Sample) -> str:
    """The readable text of a completion: its response, or all turns after the prompt with their roles."""
    if "conversation" not in sample.metadata:
        return sample.response
    turns = sample.metadata["conversation"][len(sample.messages) :]
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def _first_samples(path: Path) -> dict[int, Sample]:
    """The first sample of every group in a samples file, without its tokens; empty if the file is missing."""
    if not path.is_file():
        return {}
    return {sample.group_index: sample for sample in iterate_samples(path) if sample.index == 0}


def iterate_samples(path: Path) -> Iterator[Sample]:
    with path.open("rb") as lines:
        yield from filter(None, map(read_without_tokens, lines))


def read_without_tokens(line: bytes) -> Sample | None:
    """The sample in a line of a samples file, without its tokens; None for a damaged line."""
    record = parse_line(line)
    if record is None:
        return None
    return sample_from_json({**record, "tokens": [], "loss_mask": [], "rollout_log_probs": None})


def _describe_transcript(samples: Mapping[str, Sample]) -> Transcript:
    asked = next(iter(samples.values()))
    rewards = [sample.reward for sample in samples.values() if sample.reward is not None]
    highest = max(rewards) if len(set(rewards)) > 1 else None
    return Transcript(
        turns=tuple((turn["role"], shorten_text(turn["content"])) for turn in asked.messages),
        reference=str(asked.metadata.get("answer", "")),
        answers=tuple(
            Answer(
                name=name,
                label=label_of(name),
                text=shorten_text(completion_text(sample)),
                reward=sample.reward,
                outcome="" if highest is None else "best" if sample.reward == highest else "rest",
                is_truncated=sample.status == Status.TRUNCATED,
            )
            for name, sample in samples.items()
        ),
    )
