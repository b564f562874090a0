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
class LearningRates:
    """The usual learning rates of a training of large language models. The defaults are those of SFT."""

    of_all: str = "5e-6 to 5e-5"
    """If all weights are trained."""
    of_adapters: str = "1e-4 to 5e-4"
    """If adapters are trained."""
    low_for_adapters: float = 2e-5
    """At most this much is remarked on for adapters: it is usual for all weights."""
    share: float = 1.0
    """The share of a learning rate of SFT that this training takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """A kind of stage: a row of STAGES. A training must have `settings`, `job`, `plan` and `run`."""

    name: str
    """The stage in settings, directories and records. `training.NAME` has the settings of a training."""
    title: str
    """The stage in a sentence: "supervised fine-tuning"."""
    label: str = ""
    """The model that a training leaves, in tables: "SFT"."""
    trains: bool = False
    """Whether the stage trains the model and leaves checkpoints."""
    purpose: str = ""
    """What the stage does, in a sentence."""
    leaves: str = ""
    """What its job reads and leaves in its directory, in sentences for a person who starts it by hand."""
    settings: str = ""
    """Class of a training's settings, `training.NAME`: a Record with the fields that SFTTrainingConfig and
    RLTrainingConfig share."""
    job: str = ""
    """Class of a training's job: a TrainingJob whose kind is the name of the stage."""
    plan: str = ""
    """Function of the start model and the Config: the training's job, with digests of what it reads."""
    run: str = ""
    """Function that does a training's job in a run directory."""
    reads: tuple[str, ...] = ()
    """The settings of `data` that a training may read."""
    needs: tuple[tuple[str, ...], ...] = ()
    """The settings of `data` that a training cannot do without; one of each tuple is enough."""
    is_graded: bool = False
    """Whether a training learns from completions and their rewards: from engines, or recorded in `data.rollouts`.
    Only RL may set this so far: the checks of graded modes read `training.rl`, and the job has the fields of RLJob."""
    is_judged: bool = False
    """Whether a run fails if this training does not improve on the model that it started from."""
    rules: str = ""
    """Function of a Config: a sentence for each rule between sections that the training's settings break."""
    warn: str = ""
    """Function of a Config without mistakes: a warning for each setting of the training that is probably one."""
    memory: str = ""
    """Function of a training's settings, the Config, the model's size and the number of processes: the parts of GPU
    memory that it takes."""
    remedies: str = ""
    """Function of a training's settings and their section: settings of its own by which it takes less GPU memory."""
    find_unused: str = ""
    """Function of a Config: a sentence for each setting of the training's own that does nothing."""
    learning_rates: LearningRates = LearningRates()
    """The learning rates that large language models are usually trained with."""
    curves: tuple[Curve, ...] = ()
    """The metrics that are drawn, in order."""
    colors: tuple[str, str] = ("#2f6fd0", "#6ea3f5")
    """CSS colors of a training on the pages, on light and on dark ground."""
    keeps_samples: bool = False
    """Whether a training writes completions to samples/, which the live page shows."""
    facts: str = ""
    """Function of a training's job and run directory: (what, text) pairs for the report."""

    def __post_init__(self) -> None:
        missing = [name for name in ("settings", "job", "plan", "run") if self.trains and not getattr(self, name)]
        assert not missing, f"the training {self.name} lacks {', '.join(missing)}"

    @property
    def setting(self) -> str:
        """The table of the training's settings: "training.sft"."""
        return f"training.{self.name}"


def load(name: str) -> Any:  # Any: functions and classes of many shapes
    """The function or class of `package.module:name`. An empty name gives a function that returns nothing: ()."""
    if not name:
        return lambda *_: ()
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
