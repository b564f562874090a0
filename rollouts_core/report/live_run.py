"""A run and its stages as the live page gets them, and what may go wrong with files of other machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollouts_core.errors import RolloutsError

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, RolloutsError)
"""Errors of reading files that no job of ours wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStage:
    """A stage that the run has come to."""

    name: str
    run_dir: Path
    num_steps: int
    """How many metric steps the job goes through; 0 for those without."""
    began_at: float
    """When the run came to it, in seconds since 1970."""
    ended: str = ""
    """How its last attempt ended, by the exit record, in a sentence; empty if there is no record."""
    ended_attempt: int = 0
    """The attempt of that record."""
    is_followed: bool = True
    """Whether a process of the run lives."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Titles of models that the stage scores, by the stage's names of them; others are called by these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A run as far as it has come."""

    name: str
    stages: tuple[LiveStage, ...]
    state: str
    """Whether it is running, or what it left, in a few words."""
    usd: float | None
    """Cost of its rented machines so far; None if none was rented."""
    has_report: bool
    """Whether it came to its end, and wrote its report."""
    verdict: str = ""
    """The verdict of a run that came to its end."""
    is_under_way: bool = True
    """Whether a process of it lives, which comes to the stages that it has not come to."""
    planned: tuple[str, ...] = ()
    """The names of all its stages, in order; empty if they are not known."""
