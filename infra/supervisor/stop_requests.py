"""Why a job has to end though its program goes on: it is cancelled, its time is up, or nobody wants it any more."""

from __future__ import annotations

import contextlib
import math
import time
from typing import NamedTuple

from rollouts.infra.supervisor.files import POLL_S, granted_path, internal_path, read_stop_state
from rollouts.infra.supervisor.spec import JobSpec


class Grant(NamedTuple):
    """Time for a program to save what it has."""

    pid: int
    """The process that is told to: the program may have others, which it needs to finish its work."""
    seconds: float


class StopRequests:
    """What can end a job from outside: a cancel request, its time limit, its lease.

    Time is counted on the monotonic clock, which stands still while a machine sleeps: a laptop that wakes up finds
    its jobs with the time they had left.

    That a limit is reached is noted in a file, so that no start attaches to a job that is about to end. A start renews
    the lease, and then looks for the note; here the note is made, and then the lease is looked at once more. So a start
    that does not find the note has kept the lease.
    """

    def __init__(self, spec: JobSpec, attempt: int) -> None:
        self._cancel_path = internal_path(spec.run_dir, f"cancel-{attempt}")
        self._ending_path = internal_path(spec.run_dir, f"ending-{attempt}")
        self._deadline = time.monotonic() + spec.timeout_s if spec.timeout_s > 0 else math.inf
        self._lease_path = internal_path(spec.run_dir, "lease")
        self._lease_s = spec.lease_s if spec.lease_s > 0 else math.inf
        self._lease_stamp = 0.0
        self._renewed = time.monotonic()
        self._spec, self._attempt = spec, attempt
        self._granted: Grant | None = None

    @property
    def grace_s(self) -> float:
        """What the cancel request asks for, or else the spec."""
        return self._limits[0]

    @property
    def _limits(self) -> tuple[float, float]:
        """The time for a program that does not say how long it needs, and the most for one that does."""
        with contextlib.suppress(OSError, ValueError):
            grace_s, max_grace_s = map(float, self._cancel_path.read_text().split())
            return grace_s, max_grace_s
        return self._spec.grace_s, self._spec.max_grace_s

    def grant(self) -> Grant | None:
        """How long a program has that said how long it needs, and write that down for it; None for any other one.

        Asked again it is never longer than before: what is wanted later of the same end may leave less time.
        """
        said = read_stop_state(self._spec.run_dir, self._attempt)
        if self._granted is None and not isinstance(said.get("pid"), int):
            return None
        wanted = self._granted or Grant(said["pid"], float(said.get("grace_s", 0.0)))
        granted = Grant(wanted.pid, min(wanted.seconds, self._limits[1]))
        if granted != self._granted:
            with contextlib.suppress(OSError):  # a full disk: then it has what it said, unless that is too much
                granted_path(self._spec.run_dir, self._attempt).write_text(f"{granted.seconds:g}")
            self._granted = granted
        return granted

    def find(self) -> str:
        """Why the job has to end now; empty when it has not."""
        if self._cancel_path.exists():
            return "cancelled"
        if time.monotonic() >= self._deadline:
            self._note_ending()
            return "timeout"
        if not self._has_lapsed():
            return ""
        self._note_ending()
        if self._has_lapsed():
            return "lease_expired"
        self._ending_path.unlink(missing_ok=True)
        return ""

    def _has_lapsed(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            stamp = self._lease_path.stat().st_mtime
            if stamp != self._lease_stamp:
                self._lease_stamp, self._renewed = stamp, time.monotonic()
        return time.monotonic() >= self._renewed + self._lease_s

    def _note_ending(self) -> None:
        with contextlib.suppress(OSError):  # a full disk keeps no job alive
            self._ending_path.touch()

    def wait(self, pause_s: float) -> str:
        """Wait for a while, or until the job has to end; returns why, or empty."""
        until = time.monotonic() + pause_s
        while not (reason := self.find()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return reason
