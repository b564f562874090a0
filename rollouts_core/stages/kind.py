"""`StageKind` describes a kind of stage, such as SFT, to the code that plans, checks, runs and reports stages.

This file must not import torch. Fields therefore contain functions by name (`package.module:function`), and `load`
imports a function.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple


class Curve(NamedTuple):
    """A metric of a training that the report and the live page plot over the steps."""

    metric: str
    """Name of the metric in metrics.jsonl."""
    title: str
    note: str
    """Explanation below the plot."""
    is_from_zero: bool = True
    """Whether the vertical axis starts at 0."""
    min_high: float = 0.0
    """The vertical axis reaches at least this value, so that rounding noise does not look large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRates:
    """Usual learning rates of a kind of training, for warnings about unusual settings. The defaults are for SFT."""

    of_all: str = "5e-6 to 5e-5"
    """Usual range if all weights are trained."""
    of_adapters: str = "1e-4 to 5e-4"
    """Usual range if adapters (LoRA) are trained."""
    low_for_adapters: float = 2e-5
    """Training adapters with a learning rate up to this value gives a warning, because such a rate is usual for
    training all weights."""
    share: float = 1.0
    """Usual learning rate of this kind of training, divided by the usual learning rate of SFT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """A kind of stage, an entry of STAGES. A training must have `settings`, `job`, `plan` and `run`.

    A field about a function or class contains its name, `package.module:name`.
    """

    name: str
    """Name of the stage in settings, directories and records. The settings of a training are in `training.NAME`."""
    title: str
    """Name in sentences, for example "supervised fine-tuning"."""
    label: str = ""
    """Name of the trained model in tables, for example "SFT"."""
    trains: bool = False
    """True if the stage trains the model and writes checkpoints."""
    purpose: str = ""
    """Purpose of the stage, in one sentence for --help and for Prefect."""
    leaves: str = ""
    """Text for --help: files that the job reads and writes in its directory."""
    settings: str = ""
    """Class of the settings `training.NAME`: a Record with the fields that SFTTrainingConfig and
    RLTrainingConfig share."""
    job: str = ""
    """Class of the training's job: a subclass of TrainingJob whose `kind` is the stage's name."""
    plan: str = ""
    """Function (start model, Config) -> the training's job, with digests of its inputs."""
    run: str = ""
    """Function (job, run directory) that runs the training."""
    reads: tuple[str, ...] = ()
    """Settings `data.NAME` that the training may read."""
    needs: tuple[tuple[str, ...], ...] = ()
    """Settings `data.NAME` that the training needs: at least one setting of each tuple."""
    is_graded: bool = False
    """True if the training learns from rewards of completions that engines generate or that `data.rollouts` records.
    Only RL may set this, because checks of graded modes read `training.rl`, and the job must have the fields of
    RLJob."""
    is_judged: bool = False
    """True if the run fails when the trained model is not better than the model from which the training started."""
    rules: str = ""
    """Function (Config) -> one error message per conflict between settings of different sections."""
    warn: str = ""
    """Function (valid Config) -> one warning per probable mistake in the training's settings."""
    memory: str = ""
    """Function (settings, Config, model size, number of processes) -> the parts of the GPU memory needed."""
    remedies: str = ""
    """Function (settings, section) -> advice on settings that lower the training's GPU memory."""
    smaller_batch: str = ""
    """Function (settings, run directory, number of processes) that lowers the micro-batch after a GPU ran out of
    memory. The function returns a Lowered, or None if the micro-batch is already the smallest."""
    find_unused: str = ""
    """Function (Config) -> one sentence per setting of the training that has no effect."""
    learning_rates: LearningRates = LearningRates()
    """Usual learning rates, for warnings."""
    curves: tuple[Curve, ...] = ()
    """Metrics that the report and the live page plot, in order."""
    colors: tuple[str, str] = ("#2f6fd0", "#6ea3f5")
    """CSS colors of the training in the report and on the live page: on a light and on a dark background."""
    keeps_samples: bool = False
    """True if the training writes completions to samples/, which the live page shows."""
    facts: str = ""
    """Function (job, run directory) -> (name, text) pairs for the report."""

    def __post_init__(self) -> None:
        missing = [name for name in ("settings", "job", "plan", "run") if self.trains and not getattr(self, name)]
        assert not missing, f"the training {self.name} lacks {', '.join(missing)}"

    @property
    def setting(self) -> str:
        """The name of the training's settings, for example "training.sft"."""
        return f"training.{self.name}"


def load(name: str) -> Any:  # Any: functions and classes of many shapes
    """Import the function or class `package.module:name`. For an empty name, return a function that returns ()."""
    if not name:
        return lambda *_: ()
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
