"""The specification of a job: its command, its directory and its limits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

FIRST_GPU = "first"
"""Placeholder for the default GPU of a program without an assignment. On a machine without GPUs it means no GPU."""


class JobError(Exception):
    """A verb failed. The error's text, one sentence, is printed to the caller."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    run_dir: str
    """Absolute path of the run directory. The path identifies the job."""
    argv: tuple[str, ...]
    job: Mapping[str, Any]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """Variables that are added to a minimal inherited environment. Secrets are passed only in this field and are never
    written to disk."""
    timeout_s: float = 0.0
    """Time limit of an attempt in seconds, with restarts but without the wait for GPUs; 0 means no limit."""
    grace_s: float = 30.0
    """Seconds between SIGTERM and SIGKILL when a request, the time limit or the lease ends the job."""
    max_grace_s: float = 600.0
    """Largest grace time in seconds for a program that requests time for saving in stop.json."""
    max_restarts: int = 0
    """Largest number of restarts in a row within an attempt. The program is restarted after an exit code other than
    0."""
    healthy_s: float = 3600.0
    """If the program ran for this many seconds, restarts are counted from 0 again."""
    restart_backoff_s: float = 1.0
    """Pause before the first restart in a row, in seconds. The pause doubles with each restart, up to 30 s."""
    restart_code: int = 0
    """The exit code with which the program asks for a restart. The program is then restarted at once, and the restart
    does not count towards `max_restarts`. 0: no exit code asks for a restart."""
    lease_s: float = 0.0
    """The job ends if its lease was not renewed for this many seconds; 0 means no lease."""
    max_log_bytes: int = 256 << 20
    """Number of bytes that one attempt may add to log.txt. Only the end of further output is kept."""
    gpus: tuple[str, ...] = ()
    """GPUs of the job: numbers as in nvidia-smi, or FIRST_GPU. The job starts when no other job holds any of these
    GPUs."""
    gpu_group: str = ""
    """Jobs of the same group share their GPUs. Empty: the job shares its GPUs with no other job."""
    run_name: str = ""
    """Name of the run, for the log lines of other jobs that wait for this job's GPUs."""


def parse_spec(text: bytes) -> JobSpec:
    """Parse a spec that a client has serialized with `dataclasses.asdict` and JSON."""
    try:
        document = json.loads(text)
        spec = JobSpec(**{**document, "argv": tuple(document["argv"]), "gpus": tuple(document["gpus"])})
    except (ValueError, TypeError, KeyError) as error:
        raise JobError(f"the spec on standard input does not fit this version: {error}") from error
    if not spec.argv or spec.max_log_bytes <= 0:
        raise JobError("a job needs a command and room for its log: argv and max_log_bytes must not be empty")
    return spec
