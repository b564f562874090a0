"""`StageKind`: everything about a stage that code outside of the stage asks.

Not here: the stages themselves (a file or folder per stage beside this one).

Nothing here imports torch. Functions that need it are dotted names, `package.module:function`, which `load` resolves.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple


class Curve(NamedTuple):
    """A metric that the report and the live page draw over the steps of a training."""

    metric: str
    title: str
    note: str
    is_from_zero: bool = True
    min_high: float = 0.0
    """The axis reaches at least this far, so that rounding noise looks as small as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """A kind of stage: a row of STAGES."""

    name: str
    """The stage in settings, directories and records. `training.NAME` has the settings of a training."""
    title: str
    """The stage in a sentence: "supervised fine-tuning"."""
    label: str = ""
    """The model that a training leaves, in tables: "SFT"."""
    trains: bool = False
    """Whether the stage trains the model and leaves checkpoints."""
    is_judged: bool = False
    """Whether a run fails if this training does not improve on the model that it started from."""
    curves: tuple[Curve, ...] = ()
    """The metrics that are drawn, in order."""
    colors: tuple[str, str] = ("#2f6fd0", "#6ea3f5")
    """CSS colors of a training on the pages, on light and on dark ground."""
    keeps_samples: bool = False
    """Whether a training writes completions to samples/, which the live page shows."""
    facts: str = ""
    """Function of a training's job and run directory: (what, text) pairs for the report."""

    @property
    def setting(self) -> str:
        """The table of the training's settings: "training.sft"."""
        return f"training.{self.name}"


def load(name: str) -> Any:  # Any: functions and classes of many shapes
    """The function or class of `package.module:name`."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
