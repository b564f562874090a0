"""The specification of a job: its command, its directory and its limits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

FIRST_GPU = "first"
"""Placeholder for the default GPU of a program without an assignment. On a machine without GPUs it means no GPU."""


class JobError(Exception):
    """A verb cannot be carried out. Its message, one sentence, reaches the caller."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The program to run, its directory, and its limits."""

    run_dir: str
    """Absolute path of the run directory, which identifies the job."""
    argv: tuple[str, ...]
    job: Mapping[str, Any]
    """The content of job.json. It contains no secrets."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """Variables added to a minimal inherited environment. Secrets are passed only here and never written to disk."""
    timeout_s: float = 0.0
    """Time limit of the whole attempt; 0: no limit."""
    grace_s: float = 30.0
    """Seconds between SIGTERM and SIGKILL when the job is ended from outside."""
    max_grace_s: float = 600.0
    """Limit of that time for a program that requests a time for saving in stop.json."""
    max_restarts: int = 0
    """How often in a row the program is restarted within an attempt after an exit code other than 0."""
    healthy_s: float = 3600.0
    """A program that ran for this many seconds resets the count of restarts."""
    restart_backoff_s: float = 1.0
    """Pause before the first restart in a row, in seconds. It doubles with each restart, up to 30 s."""
    restart_code: int = 0
    """The exit code with which the program asks for a restart. Such restarts come at once, and `max_restarts` does not
    count them. 0: no such code."""
    lease_s: float = 0.0
    """The job ends if its lease was not renewed for this many seconds; 0: no lease."""
    max_log_bytes: int = 256 << 20
    """Bytes that one attempt may add to log.txt. Further output is dropped except for its end."""
    gpus: tuple[str, ...] = ()
    """GPUs of the job: numbers as in nvidia-smi, or FIRST_GPU. The job starts when no other job has any of them."""
    gpu_group: str = ""
    """Jobs with the same group share their GPUs; empty: the job shares its GPUs with no other job."""
    run_name: str = ""
    """Name of the run, for the messages of other waiting jobs."""


def parse_spec(text: bytes) -> JobSpec:
    """Parse a spec that a client made with `dataclasses.asdict` and JSON."""
    try:
        document = json.loads(text)
        spec = JobSpec(**{**document, "argv": tuple(document["argv"]), "gpus": tuple(document["gpus"])})
    except (ValueError, TypeError, KeyError) as error:
        raise JobError(f"the spec on standard input does not fit this version: {error}") from error
    if not spec.argv or spec.max_log_bytes <= 0:
        raise JobError("a job needs a command and room for its log: argv and max_log_bytes must not be empty")
    return spec
