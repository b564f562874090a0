"""Stop a training on request without losing a finished step.

`jobs/training_job.py` requests the stop. `run_checkpoints.py` writes the checkpoint.

    asked ──┬── the running step ends in time ──> the training loop saves the step, and ends
            └── it would outlast the grace period ──> `Watch`, a thread, saves the last whole step and ends the process

The training can be saved before a step's first change of the weights, and after its last change. While a step changes
the weights, the training loop holds the lock of `TrainingStop`, and `Watch` waits for the lock. A checkpoint therefore
never contains half of an update.

A GPU runs work later than the loop submits it. A loop that took the lock when it submits the weight update would hold
the lock during most of the step. In a long step, the loop therefore waits for the backward passes before it takes the
lock.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rollouts_core.errors import RolloutsError

MIN_GRACE_S = 30.0
GRACE_FACTOR = 1.5
"""The grace period is this factor times the sum of the durations of the longest recent step and of the last save."""
LONG_STEP_S = 10.0
"""Duration in seconds up to which a step is never abandoned, because the step and its save end within any grace
period."""
NUM_RECENT_STEPS = 20
STOPPED_CODE = 128 + signal.SIGTERM
TOLD_BYTES = 4096
"""Size of the file in which the job writes how long it needs to stop. The file is overwritten in place, because
overwriting also works on a full disk."""
MIN_SAVE_S = 2.0


class StoppedError(RolloutsError):
    """The training has stopped on request. `step` is the last saved step, or 0 if no step is saved.

    Args:
        problem: why the last step could not be saved; "" if it was saved.
    """

    def __init__(self, step: int, problem: str = "") -> None:
        super().__init__(describe_stop(step, problem))
        self.step = step
        self.problem = problem


def describe_stop(step: int, problem: str = "") -> str:
    """A sentence that says which step of a stopped training is saved."""
    saved = f"step {step} is saved" if step else "there is no step to save"
    if not problem:
        return f"stopped: {saved}"
    return f"stopped: {problem}; " + (f"step {step} was saved earlier and is intact" if step else "no step is saved")


class TrainingStop:
    """State of a stop request: whether a stop was requested, how long stopping may take, and the last saved step.

    Args:
        told: file in which this process writes the seconds that it needs to stop. None writes no file.
        granted: file in which the supervisor writes the grace period in seconds. Without this file, `wanted_s` is the
            grace period.
        attempt: number of the job's attempt.
        can_abandon: whether a step may be abandoned midway. False if several processes compute the step together.
    """

    def __init__(
        self, *, told: Path | None = None, granted: Path | None = None, attempt: int = 1, can_abandon: bool = True
    ) -> None:
        self.can_abandon = can_abandon
        self.saved_step = 0
        self.problem = ""
        self.is_training = False
        """True after the first step has started. Until then, a stop request has no step to wait for."""
        self.is_watched = False
        """True if `Watch` abandons a step that outlasts the grace period. The training loop must then prepare each
        finished step for saving (`let_go`)."""
        self._told, self._granted, self._attempt = told, granted, attempt
        self._asked = threading.Event()
        self._asked_at = math.inf
        self._held = threading.Lock()
        self._is_held = False
        self._step_times: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._save_s = 0.0
        self._save_last_whole: Callable[[], None] | None = None
        self._tell()

    @property
    def is_asked(self) -> bool:
        """True after a stop was requested."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Request a stop. May be called in a signal handler."""
        if not self.is_asked:
            self._asked_at = time.monotonic()
            self._asked.set()

    @property
    def wanted_s(self) -> float:
        """Seconds that the training needs to stop: the longest recent step plus the last save, times a safety
        factor.
        """
        return max(MIN_GRACE_S, GRACE_FACTOR * (max(self._step_times, default=0.0) + self._save_s))

    @property
    def grace_s(self) -> float:
        """The grace period in seconds: the number that the supervisor wrote, or else `wanted_s`."""
        with suppress(OSError, ValueError):
            if self._granted is not None:
                return float(self._granted.read_text(encoding="utf-8"))
        return self.wanted_s

    @property
    def may_give_up_step(self) -> bool:
        """True if the running step may be abandoned and can be long enough to outlast the grace period.

        The first step counts as long enough, because its duration is unknown.
        """
        return self.is_watched and not self._is_held and max(self._step_times, default=math.inf) > LONG_STEP_S

    def note_step(self, seconds: float) -> None:
        self._step_times.append(seconds)
        self._tell()

    def note_saved(self, step: int, seconds: float = 0.0) -> None:
        """Record that a checkpoint is complete, and the seconds that it took to write."""
        self.saved_step = step
        self._save_s = seconds or self._save_s
        self._tell()

    def note_problem(self, problem: str) -> None:
        """Record why the last step could not be saved."""
        self.problem = problem
        self._tell()

    def hold(self) -> None:
        """Prevent `Watch` from saving, because the weights are about to change.

        If `Watch` is already saving, this method never returns, because `Watch` then ends the process.
        """
        if not self._is_held:
            self._held.acquire()
            self._is_held = True

    def let_go(self, save: Callable[[], None] | None) -> None:
        """Allow `Watch` to save a finished step, until `hold` is called.

        Args:
            save: writes the step's checkpoint in the thread that calls it; None if the step is already saved.
        """
        self._save_last_whole = save
        if self._is_held:
            self._is_held = False
            self._held.release()

    def watching(self, on_end: Callable[[int, str], None]) -> Watch:
        """Return a context manager. Within its `with` block, a step that outlasts the grace period is abandoned."""
        return Watch(self, on_end)

    def wait_until_overdue(self, is_over: threading.Event) -> bool:
        """Wait until a stop was requested and the rest of the grace period is just long enough to save. Returns False
        if the training ends first."""
        while not self._asked.wait(0.5):
            if is_over.is_set():
                return False
        grace_s = self.grace_s
        needed_s = max(MIN_SAVE_S, GRACE_FACTOR * self._save_s) if self._save_s else grace_s / 3
        until = self._asked_at + grace_s - min(needed_s, grace_s / 2)
        return not is_over.wait(max(0.0, until - time.monotonic()))

    def save_last_whole(self) -> None:
        """Wait until no update is changing the weights, then save the last whole step.

        `Watch` calls this method before it ends the process.
        """
        self._held.acquire()
        if self._save_last_whole is not None:
            self._save_last_whole()

    def _tell(self) -> None:
        if self._told is None:
            return
        said = {
            "attempt": self._attempt,
            "pid": os.getpid(),
            "grace_s": math.ceil(self.wanted_s),
            "saved_step": self.saved_step,
            "problem": self.problem[: TOLD_BYTES // 8],
        }
        with suppress(OSError):  # without this file, the supervisor grants its default time
            descriptor = os.open(self._told, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, json.dumps(said).encode().ljust(TOLD_BYTES), 0)
            finally:
                os.close(descriptor)


class Watch:
    """A thread that saves the last whole step and ends the process if the training loop does not end in time.

    Args:
        on_end: called before the process ends, with the last saved step and the reason why no newer step is saved.
    """

    def __init__(self, stop: TrainingStop, on_end: Callable[[int, str], None]) -> None:
        self._stop = stop
        self._on_end = on_end
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop of the training", daemon=True)

    def __enter__(self) -> None:
        self._stop.is_watched = self._stop.can_abandon
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        if not self._stop.wait_until_overdue(self._is_over) or not self._stop.can_abandon:
            return
        try:
            self._stop.save_last_whole()
        except Exception as error:  # noqa: BLE001 - the process ends in any case and reports the reason
            self._stop.note_problem(describe_problem(error))
        try:
            self._on_end(self._stop.saved_step, self._stop.problem)
        finally:
            os._exit(STOPPED_CODE)


def describe_problem(error: Exception) -> str:
    """A phrase that says why a checkpoint could not be written."""
    return f"the last step could not be saved ({str(error) or type(error).__name__})"
