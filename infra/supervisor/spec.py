"""What a client asks for: the command, its place and its limits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

FIRST_GPU = "first"
"""Stands for the GPU that a program takes that is told of none; for nothing where there is no GPU."""


class JobError(Exception):
    """A verb cannot be carried out; its one sentence reaches the caller."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What is to be run, where, and within which limits."""

    run_dir: str
    """Absolute path of the run directory: the identity of the job and its working directory."""
    argv: tuple[str, ...]
    job: Mapping[str, Any]
    """The content of job.json; holds no secrets."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """Added to a minimal inherited environment; the only way for secrets, never written to disk."""
    timeout_s: float = 0.0
    """The whole attempt ends after this time; 0 is no limit."""
    grace_s: float = 30.0
    """Between SIGTERM and SIGKILL when the job is ended from outside."""
    max_grace_s: float = 600.0
    """The most between the two for a program that says in stop.json how long it needs to save what it has."""
    max_restarts: int = 0
    """How often, within an attempt, a program that ended with another code than 0 is started again in a row."""
    healthy_s: float = 3600.0
    """A program that ran for so long before it ended is one that was not restarted yet: its restarts begin anew."""
    restart_backoff_s: float = 1.0
    """Pause before the first restart in a row; doubles with each, up to half a minute."""
    lease_s: float = 0.0
    """The job ends when nobody has renewed its lease for this time; 0 is no lease."""
    max_log_bytes: int = 256 << 20
    """What one attempt may add to log.txt; above it only the end of the output is kept."""
    gpus: tuple[str, ...] = ()
    """What it was given, by number as nvidia-smi counts, or FIRST_GPU; the job begins when no other has any of them."""
    gpu_group: str = ""
    """Jobs with the same name here have their GPUs together; empty for one that shares with nobody."""
    run_name: str = ""
    """Who asked for it, for people whose jobs wait."""


def parse_spec(text: bytes) -> JobSpec:
    """The spec that a client sent, as `dataclasses.asdict` and JSON made it."""
    try:
        document = json.loads(text)
        spec = JobSpec(**{**document, "argv": tuple(document["argv"]), "gpus": tuple(document["gpus"])})
    except (ValueError, TypeError, KeyError) as error:
        raise JobError(f"the spec on standard input is not one of this version: {error}") from error
    if not spec.argv or spec.max_log_bytes <= 0:
        raise JobError("a job needs a command and room for its log: argv and max_log_bytes must not be empty")
    return spec
