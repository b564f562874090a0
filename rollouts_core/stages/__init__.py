"""The kinds of stages, such as SFT and RL, and their order in each mode of a run.

A new kind of stage needs a file in this package and an entry in STAGES. Not here: executing the jobs of stages (jobs/).
This package must not import torch.
"""

from __future__ import annotations

from typing import NamedTuple

from rollouts_core.stages.kind import StageKind
from rollouts_core.stages.rl import RL
from rollouts_core.stages.scoring import EVALUATE, SELECT
from rollouts_core.stages.sft import SFT

__all__ = [
    "BASE",
    "EVALUATE",
    "PIPELINES",
    "SELECT",
    "STAGES",
    "STAGE_NAMES",
    "TRAININGS",
    "StagePlace",
    "capitalized",
    "describe_mode",
    "is_selection",
    "is_training",
    "kind_of",
    "label_checkpoint",
    "label_of",
    "selection_of",
    "stages_of",
    "trainings_of",
]

STAGES = {"sft": SFT, "rl": RL, "select": SELECT, "evaluate": EVALUATE}
assert [name for name, kind in STAGES.items() if kind.is_graded] == [RL.name], "only RL may be graded so far"
PIPELINES = {"sft": (SFT, SELECT), "rl": (RL, SELECT), "sft+rl": (SFT, SELECT, RL, SELECT)}
"""The stages of each mode, in order. EVALUATE, the last stage of every run, is added by `stages_of`."""
TRAININGS = {name: kind for name, kind in STAGES.items() if kind.trains}
BASE = "base"
"""Name of the start model in evaluations."""


class StagePlace(NamedTuple):
    """A stage of a run."""

    name: str
    """Name of the stage, unique within the run, for example sft, select-sft, rl."""
    kind: StageKind


def selection_of(training: str) -> str:
    """The name of the stage that selects a checkpoint of a training: "select-sft" for "sft"."""
    return f"{SELECT.name}-{training}"


STAGE_NAMES = (*(name for each in TRAININGS for name in (each, selection_of(each))), EVALUATE.name)
"""The names of all possible stages, in order."""


def stages_of(mode: str) -> tuple[StagePlace, ...]:
    """The stages of a run, in order.

    Args:
        mode: a key of PIPELINES; "" for a run that only evaluates.
    """
    places: list[StagePlace] = []
    for kind in PIPELINES[mode] if mode else ():
        name = kind.name if kind.trains else selection_of(places[-1].name)
        places.append(StagePlace(name, kind))
    names = [place.name for place in places]
    assert len(names) == len(set(names)), f"a stage occurs twice in the mode {mode}: {names}"
    return (*places, StagePlace(EVALUATE.name, EVALUATE))


def trainings_of(mode: str) -> tuple[StagePlace, ...]:
    return tuple(place for place in stages_of(mode) if place.kind.trains)


def kind_of(name: str) -> StageKind:
    """The kind of the stage with this name.

    Raises:
        KeyError: unknown stage.
    """
    if is_selection(name):
        return SELECT
    return STAGES[name]


def is_selection(name: str) -> bool:
    return name.startswith(f"{SELECT.name}-")


def is_training(name: str) -> bool:
    """True if a stage name is a training that this version knows. A store that another version wrote may have other
    stages."""
    return name in TRAININGS


def label_of(model: str) -> str:
    """The label of a model in an evaluation: "Base", the label of its training ("SFT"), or else the given name."""
    if model == BASE:
        return "Base"
    return kind_of(model).label if is_training(model) else model


def label_checkpoint(name: str, step: int, stage: str) -> str:
    """The label of a scored model in messages: "Base", "SFT step 1000", or its own name.

    Args:
        name: the model's name in the evaluation: base, a training, a checkpoint of a selection, or a user's model.
        stage: the stage that scores the model.
    """
    training = stage.removeprefix(f"{SELECT.name}-") if is_selection(stage) else name
    return f"{label_of(training)} step {step}" if is_training(training) and step else label_of(name)


def capitalized(title: str) -> str:
    """The title with a capital first letter, for the beginning of a sentence."""
    return title[:1].upper() + title[1:]


def describe_mode(mode: str) -> str:
    """Text such as "supervised fine-tuning, then reinforcement learning". An unknown mode is returned unchanged."""
    if mode not in PIPELINES:
        return mode
    return ", then ".join(place.kind.title for place in trainings_of(mode))
