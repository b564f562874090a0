"""Reasons to end a running program: a cancel request, its time limit, its lease."""

from __future__ import annotations

import contextlib
import math
import time
from typing import NamedTuple

from rollouts.infra.supervisor.files import POLL_S, granted_path, internal_path, read_stop_state
from rollouts.infra.supervisor.spec import JobSpec


class Grant(NamedTuple):
    """Time that a program gets for saving its state."""

    pid: int
    """The process that gets SIGTERM. The program may need its other processes for saving."""
    seconds: float


class StopRequests:
    """Watches for reasons to end a job from outside: a cancel request, its time limit, its lease.

    Time is measured by the monotonic clock, which stops while a machine sleeps: after a laptop wakes up, its jobs have
    the same time left as before.

    A reached limit is noted in a file, so that a start does not attach to a job that is about to end. A start first
    renews the lease and then looks for the note. This class first writes the note and then checks the lease again. So
    a start that finds no note has renewed the lease in time.
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
        """The grace time of the cancel request, or else of the spec."""
        return self._limits[0]

    @property
    def _limits(self) -> tuple[float, float]:
        """The grace time of the job, and its limit for a program that requests time for saving."""
        with contextlib.suppress(OSError, ValueError):
            grace_s, max_grace_s = map(float, self._cancel_path.read_text().split())
            return grace_s, max_grace_s
        return self._spec.grace_s, self._spec.max_grace_s

    def grant(self) -> Grant | None:
        """Grant the time that the program requests for saving, and write it down for the program; None without request.

        Later calls never return more time: a later request for the same end may leave less.
        """
        said = read_stop_state(self._spec.run_dir, self._attempt)
        if self._granted is None and not isinstance(said.get("pid"), int):
            return None
        wanted = self._granted or Grant(said["pid"], float(said.get("grace_s", 0.0)))
        granted = Grant(wanted.pid, min(wanted.seconds, self._limits[1]))
        if granted != self._granted:
            with contextlib.suppress(OSError):  # on a full disk the program assumes its requested time
                granted_path(self._spec.run_dir, self._attempt).write_text(f"{granted.seconds:g}")
            self._granted = granted
        return granted

    def find(self) -> str:
        """Return why the job has to end now; empty if it may continue."""
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
        with contextlib.suppress(OSError):  # on a full disk the job must end, too
            self._ending_path.touch()

    def wait(self, pause_s: float) -> str:
        """Wait until the time is up or the job has to end; return the reason for the end, or empty."""
        until = time.monotonic() + pause_s
        while not (reason := self.find()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return reason
