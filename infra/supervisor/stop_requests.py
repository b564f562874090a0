"""Why a job has to end though its program goes on: it is cancelled, its time is up, or nobody wants it any more."""

from __future__ import annotations

import contextlib
import math
import time

from infra.supervisor.files import POLL_S, internal_path
from infra.supervisor.spec import JobSpec


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
        self._spec_grace_s = spec.grace_s

    @property
    def grace_s(self) -> float:
        """What the cancel request asks for, or else the spec."""
        with contextlib.suppress(OSError, ValueError):
            return float(self._cancel_path.read_text())
        return self._spec_grace_s

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
