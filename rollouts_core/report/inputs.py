"""What a report is made of, as the pipeline hands it over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LABELS = {"base": "Base", "sft": "SFT", "rl": "RL"}
"""What the checkpoints of the final evaluation are called on the page, in the order of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """How one stage of the pipeline came to its result."""

    name: str
    """The stage: sft, select-sft, rl, ..."""
    how: str
    """Whether it ran, was attached to while another run had started it, or was reused."""
    why: str
    """The reason of that, and which other run it was; empty where nobody knows."""
    seconds: float
    """Time that this pipeline run spent on it."""
    run_dir: str
    """Where its files lie; empty for a stage without a run directory."""
    usd: float | None = None
    """What rented machines cost meanwhile; None where the run rented none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInput:
    """Everything that a report is made of."""

    run_name: str
    """The page's title."""
    mode: str
    """The mode of the configuration: sft, rl or sft+rl."""
    stages: tuple[StageSummary, ...]
    """The stages in the order in which they ran."""
    usd_outside_stages: float | None = None
    """What rented machines cost besides, until the report; None where the run rented none."""
    evaluation_dir: Path
    """Run directory of the final evaluation; its checkpoints are named base, sft and rl, as far as they exist."""
    sft_dir: Path | None
    """Run directory of SFT; None in mode rl."""
    sft_selection_dir: Path | None
    """Run directory of the evaluation that chose among the checkpoints of SFT."""
    rl_dir: Path | None
    """Run directory of RL; None in mode sft."""
    rl_selection_dir: Path | None
    """Run directory of the evaluation that chose among the checkpoints of RL."""
    selected: Mapping[str, str]
    """The chosen checkpoint of each training stage: `{"sft": "step_000800", "rl": "step_000030"}`."""
    checkpoint_path: str
    """Folder of the run's final checkpoint."""
    settings_toml: str
    """The settings that differ from their defaults, as TOML."""
    reproduce_command: str
    """Command line that trains the same again."""
    use_command: str
    """Command line that serves the final checkpoint."""
    verdict: str
    """One sentence on whether RL improved the model; empty where nothing was judged."""
    is_improvement: bool | None
    """Whether the run counts as an improvement; None where nothing was judged."""
