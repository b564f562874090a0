"""The stages of a run, and the orders in which they run. A new stage is a file or folder here and a row of STAGES.

Not here: the jobs that do a stage (jobs/), where and when they run (tasks, flows). Nothing here imports torch.
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
    "label_of",
    "selection_of",
    "stages_of",
    "trainings_of",
]

STAGES = {"sft": SFT, "rl": RL, "select": SELECT, "evaluate": EVALUATE}
assert [name for name, kind in STAGES.items() if kind.is_graded] == [RL.name], "only RL may be graded so far"
PIPELINES = {"sft": (SFT, SELECT), "rl": (RL, SELECT), "sft+rl": (SFT, SELECT, RL, SELECT)}
"""The stages of each mode, in order. Every run ends with EVALUATE."""
TRAININGS = {name: kind for name, kind in STAGES.items() if kind.trains}
BASE = "base"
"""The name of the start model in evaluations."""


class StagePlace(NamedTuple):
    """A stage at its place in a run."""

    name: str
    """sft, select-sft, rl, ...: unique within the run."""
    kind: StageKind


def selection_of(training: str) -> str:
    """The name of the stage that chooses a checkpoint of a training."""
    return f"{SELECT.name}-{training}"


STAGE_NAMES = (*(name for each in TRAININGS for name in (each, selection_of(each))), EVALUATE.name)
"""The stages that a run may have, in order."""


def stages_of(mode: str) -> tuple[StagePlace, ...]:
    """The stages of a run, in order.

    Args:
        mode: a name of PIPELINES; empty for a run that only evaluates.
    """
    places: list[StagePlace] = []
    for kind in PIPELINES[mode] if mode else ():
        name = kind.name if kind.trains else selection_of(places[-1].name)
        places.append(StagePlace(name, kind))
    names = [place.name for place in places]
    assert len(names) == len(set(names)), f"a stage occurs twice in the mode {mode}: {names}"
    return (*places, StagePlace(EVALUATE.name, EVALUATE))


def trainings_of(mode: str) -> tuple[StagePlace, ...]:
    """The stages of a run that train, in order."""
    return tuple(place for place in stages_of(mode) if place.kind.trains)


def kind_of(name: str) -> StageKind:
    """The kind of a stage of a run.

    Raises:
        KeyError: there is no such stage.
    """
    if is_selection(name):
        return SELECT
    return STAGES[name]


def is_selection(name: str) -> bool:
    """Whether a stage of this name chooses a checkpoint."""
    return name.startswith(f"{SELECT.name}-")


def is_training(name: str) -> bool:
    """Whether a stage of this name trains. Stores of other versions may have stages that are unknown here."""
    return name in TRAININGS


def label_of(model: str) -> str:
    """The label of a model of an evaluation: that of the training that left it. Other models keep their names."""
    if model == BASE:
        return "Base"
    return kind_of(model).label if is_training(model) else model


def capitalized(title: str) -> str:
    """The title as the start of a sentence."""
    return title[:1].upper() + title[1:]


def describe_mode(mode: str) -> str:
    """What the runs of a mode train. Modes of other versions keep their names."""
    if mode not in PIPELINES:
        return mode
    return ", then ".join(place.kind.title for place in trainings_of(mode))
