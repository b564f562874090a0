"""The input of a report: its stages, trainings, folders and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollouts_core.benchmarks import BenchmarkTable
from rollouts_core.config import Config, ReportConfig
from rollouts_core.stages import BASE, TRAININGS, label_of

LABELS = {name: label_of(name) for name in (BASE, *TRAININGS)}
"""Titles of the final evaluation's checkpoints on the page, in the order of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """How one stage of the pipeline got its result."""

    name: str
    """The name of the stage: sft, select-sft, rl, ..."""
    how: str
    """How the stage got its result: the stage ran, was reused, or was attached because another run had already started
    it."""
    why: str
    """The reason why the stage was reused or attached, with the other run's name; empty if unknown."""
    seconds: float
    """Seconds that this pipeline run spent on the stage."""
    run_dir: str
    """The stage's run directory; empty for a stage without a run directory."""
    usd: float | None = None
    """Cost of rented machines during the stage; None if the run rented no machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStage:
    """A training of the run, and its selected checkpoint."""

    name: str
    """The name of the training's stage: sft, rl, ..."""
    run_dir: Path
    selection_dir: Path | None
    """Run directory of the evaluation that selected the checkpoint."""
    selected: str
    """The name of the selected checkpoint, for example step_000800."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInput:
    """All input of a report."""

    run_name: str
    """The page's title."""
    mode: str
    """The configuration's mode, which is a name in PIPELINES."""
    stages: tuple[StageSummary, ...]
    """The stages in the order in which they ran."""
    usd_outside_stages: float | None = None
    """Cost of rented machines outside of stages, until the report was written; None if the run rented no machine."""
    evaluation_dir: Path
    """Run directory of the final evaluation. The evaluated checkpoints are named "base" or after their training ("sft",
    "rl")."""
    trainings: tuple[TrainedStage, ...]
    """The trainings of the run, in order."""
    checkpoint_path: str
    """Folder of the run's final checkpoint."""
    settings_toml: str
    """The settings that differ from their defaults, as TOML."""
    reproduce_command: str
    """Command that repeats this training."""
    use_command: str
    """Command that serves the final checkpoint."""
    verdict: str
    """One sentence that says whether RL improved the model; empty if the run was not judged."""
    is_improvement: bool | None
    """Whether the run counts as an improvement; None if the run was not judged."""
    benchmarks: tuple[BenchmarkTable, ...] = ()
    """Results of benchmarks, which users run after the run."""
    contents: ReportConfig = field(default_factory=ReportConfig)
    """Settings of the page's samples and of its largest size."""
    run_id: str = ""
    """The flow run's id; empty if unknown."""
    written_at: float = 0.0
    """Time when the report is written, in seconds since 1970. 0 if unknown."""
    ended_at: float = 0.0
    """Time when the run ended, for a report that is written again later. 0 if the report is written at the run's
    end."""
    began_at: float = 0.0
    """Time when the run began its first stage, in seconds since 1970. 0 if unknown."""
    config: Config | None = None
    """All settings of the training; None if unknown."""

    @property
    def selected(self) -> Mapping[str, str]:
        """The selected checkpoint of each training: `{"sft": "step_000800", "rl": "step_000030"}`."""
        return {training.name: training.selected for training in self.trainings}

    @property
    def labels(self) -> Mapping[str, str]:
        """Titles of the final evaluation's checkpoints on the page, in the order of training."""
        return {name: label_of(name) for name in (BASE, *self.selected)}
