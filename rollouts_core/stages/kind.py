"""`StageKind`: everything that code outside of a stage asks about it.

This file must not import torch. Functions that need torch are dotted names, `package.module:function`, which `load`
resolves.
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
    """The axis reaches at least this value, so that rounding noise does not look large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRates:
    """Usual learning rates for training large language models. The defaults are for SFT."""

    of_all: str = "5e-6 to 5e-5"
    """Range when all weights are trained."""
    of_adapters: str = "1e-4 to 5e-4"
    """Range when adapters are trained."""
    low_for_adapters: float = 2e-5
    """For adapters, a learning rate up to this value gives a warning: it is usual for all weights."""
    share: float = 1.0
    """This training's learning rate divided by the usual one of SFT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """A kind of stage: a row of STAGES. A training must have `settings`, `job`, `plan` and `run`."""

    name: str
    """Name in settings, directories and records. The settings of a training are `training.NAME`."""
    title: str
    """Name in a sentence: "supervised fine-tuning"."""
    label: str = ""
    """Name of the trained model in tables: "SFT"."""
    trains: bool = False
    """Whether the stage trains the model and leaves checkpoints."""
    purpose: str = ""
    """Purpose of the stage, in one sentence."""
    leaves: str = ""
    """Inputs and outputs in the job's directory, in sentences for --help."""
    settings: str = ""
    """Class of a training's settings, `training.NAME`: a Record with the common fields of SFTTrainingConfig and
    RLTrainingConfig."""
    job: str = ""
    """Class of a training's job: a TrainingJob whose kind is the stage's name."""
    plan: str = ""
    """Function (start model, Config) -> the training's job, with digests of its inputs."""
    run: str = ""
    """Function that runs a training's job in a run directory."""
    reads: tuple[str, ...] = ()
    """Settings of `data` that the training may read."""
    needs: tuple[tuple[str, ...], ...] = ()
    """Settings of `data` that the training needs; one of each tuple is enough."""
    is_graded: bool = False
    """Whether the training learns from rewards of completions, by engines or recorded in `data.rollouts`. So far only
    RL may set this: the checks of graded modes read `training.rl`, and the job has the fields of RLJob."""
    is_judged: bool = False
    """Whether a run fails if this training does not improve on its start model."""
    rules: str = ""
    """Function (Config) -> a sentence for each broken rule between sections."""
    warn: str = ""
    """Function (valid Config) -> a warning for each probable mistake in the training's settings."""
    memory: str = ""
    """Function (settings, Config, model size, number of processes) -> the parts of the training's GPU memory."""
    remedies: str = ""
    """Function (settings, section) -> settings of the training that lower its GPU memory."""
    find_unused: str = ""
    """Function (Config) -> a sentence for each setting of the training without effect."""
    learning_rates: LearningRates = LearningRates()
    """Usual learning rates, for warnings."""
    curves: tuple[Curve, ...] = ()
    """Metrics to draw, in order."""
    colors: tuple[str, str] = ("#2f6fd0", "#6ea3f5")
    """CSS colors of the training on pages, on a light and a dark background."""
    keeps_samples: bool = False
    """Whether the training writes completions to samples/, which the live page shows."""
    facts: str = ""
    """Function (job, run directory) -> (name, text) pairs for the report."""

    def __post_init__(self) -> None:
        missing = [name for name in ("settings", "job", "plan", "run") if self.trains and not getattr(self, name)]
        assert not missing, f"the training {self.name} lacks {', '.join(missing)}"

    @property
    def setting(self) -> str:
        """The table of the training's settings: "training.sft"."""
        return f"training.{self.name}"


def load(name: str) -> Any:  # Any: functions and classes of many shapes
    """Import `package.module:name`. An empty name gives a function that returns ()."""
    if not name:
        return lambda *_: ()
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
