"""The inputs of a report, from the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollouts_core.config import Config, ReportConfig
from rollouts_core.stages import BASE, TRAININGS, label_of

LABELS = {name: label_of(name) for name in (BASE, *TRAININGS)}
"""Names on the page for the checkpoints of the final evaluation, in the order of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """How one stage of the pipeline came to its result."""

    name: str
    """The stage: sft, select-sft, rl, ..."""
    how: str
    """Whether it ran, was attached to while another run had started it, or was reused."""
    why: str
    """The reason of that, and which other run it was; empty if nobody knows."""
    seconds: float
    """Time that this pipeline run spent on it."""
    run_dir: str
    """Where its files lie; empty for a stage without a run directory."""
    usd: float | None = None
    """Cost of rented machines during the stage; None where the run rented none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStage:
    """A training of the run, and what was chosen of it."""

    name: str
    """The stage: sft, rl, ..."""
    run_dir: Path
    """Its run directory."""
    selection_dir: Path | None
    """Run directory of the evaluation that chose among its checkpoints."""
    selected: str
    """The chosen checkpoint: step_000800."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInput:
    """Everything that a report is made of."""

    run_name: str
    """The page's title."""
    mode: str
    """The mode of the configuration: a name of PIPELINES."""
    stages: tuple[StageSummary, ...]
    """The stages in the order in which they ran."""
    usd_outside_stages: float | None = None
    """Cost of rented machines outside of stages, until the report; None where the run rented none."""
    evaluation_dir: Path
    """Run directory of the final evaluation; its checkpoints are named base and as the trainings."""
    trainings: tuple[TrainedStage, ...]
    """The trainings of the run, in order."""
    checkpoint_path: str
    """Folder of the run's final checkpoint."""
    settings_toml: str
    """The settings that differ from their defaults, as TOML."""
    reproduce_command: str
    """Command line that trains the same again."""
    use_command: str
    """Command line that serves the final checkpoint."""
    verdict: str
    """One sentence on whether RL improved the model; empty if nothing was judged."""
    is_improvement: bool | None
    """Whether the run counts as an improvement; None if nothing was judged."""
    contents: ReportConfig = field(default_factory=ReportConfig)
    """Which samples the page holds, and how large it may be."""
    run_id: str = ""
    """The flow run's id; empty if it is not known."""
    written_at: float = 0.0
    """When the report is written, seconds since 1970; 0 if it is not known."""
    ended_at: float = 0.0
    """When the run ended, of a report that is written again later; 0 if the report is written at the run's end."""
    began_at: float = 0.0
    """When the run came to its first stage, seconds since 1970; 0 if it is not known."""
    config: Config | None = None
    """All settings of the training; None if they are not known."""

    @property
    def selected(self) -> Mapping[str, str]:
        """The chosen checkpoint of each training: `{"sft": "step_000800", "rl": "step_000030"}`."""
        return {training.name: training.selected for training in self.trainings}

    @property
    def labels(self) -> Mapping[str, str]:
        """Names on the page for the checkpoints of the final evaluation, in the order of training."""
        return {name: label_of(name) for name in (BASE, *self.selected)}
