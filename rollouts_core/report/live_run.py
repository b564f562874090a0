"""Records of a run and its stages for the live page, and the exceptions that invalid files cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollouts_core.errors import RolloutsError

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, RolloutsError)
"""Exceptions that a file can cause if it was not written by a job of this project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStage:
    """A stage that the run has begun."""

    name: str
    run_dir: Path
    num_steps: int
    """Planned number of metric steps. 0 for stages without steps."""
    began_at: float
    """Time when the run began the stage, in seconds since 1970."""
    ended: str = ""
    """A sentence from the exit record that says how the last attempt ended; empty without a record."""
    ended_attempt: int = 0
    """The number of the attempt that `ended` describes."""
    is_followed: bool = True
    """Whether a process of the run is alive."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Titles of the models that the stage scores, by their names in the stage. Without a title, the name is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A run with the stages that it has begun."""

    name: str
    stages: tuple[LiveStage, ...]
    state: str
    """A few words that say whether the run is running, or how the run ended."""
    usd: float | None
    """Cost of the run's rented machines until now; None if the run rented no machine."""
    has_report: bool
    """Whether the run has finished and written its report."""
    verdict: str = ""
    """The verdict of a finished run on whether training helped."""
    is_under_way: bool = True
    """Whether a process of the run is alive, so that its remaining stages will follow."""
    planned: tuple[str, ...] = ()
    """The names of all stages of the run, in order; empty if unknown."""
