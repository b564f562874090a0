"""Stop a training when its process is asked to, without losing a step that was done.

Not here: what a checkpoint holds and when one is due (saving.py), who asks (jobs/training_job.py).

    asked ──┬── the step under way ends in time ──> the loop saves it, and ends
            └── it would outlast the grace period ──> `Watch`, a thread, saves the last whole step and ends the process

A step is whole until it changes the weights for the first time, and again when all that it changes is changed. In
between `TrainingStop` is held by the loop, and the watch waits. So a checkpoint never has half of an update.

A GPU is given the change of the weights together with the work before it, so the loop would hold the stop for the whole
step. Before the change of a long step it therefore waits until that work is done.
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
"""How much longer than any before a step and a save may take."""
LONG_STEP_S = 10.0
"""A step that takes less ends within any grace period, together with its save."""
NUM_RECENT_STEPS = 20
STOPPED_CODE = 128 + signal.SIGTERM
TOLD_BYTES = 4096
"""Size of the file in which a job says how long it needs. It is written again in place, also on a full disk."""
MIN_SAVE_S = 2.0


class StoppedError(RolloutsError):
    """The training was asked to stop, and has. `step` is the last one that is saved; 0 before the first.

    Args:
        problem: why nothing newer could be saved; empty where there was nothing newer.
    """

    def __init__(self, step: int, problem: str = "") -> None:
        super().__init__(describe_stop(step, problem))
        self.step = step
        self.problem = problem


def describe_stop(step: int, problem: str = "") -> str:
    """Which step a stopped training has saved, in one sentence."""
    saved = f"step {step} is saved" if step else "there is no step to save"
    if not problem:
        return f"stopped: {saved}"
    return f"stopped: {problem}; " + (f"step {step} was saved before, and is whole" if step else "no step is saved")


class TrainingStop:
    """Whether a training is to stop, how long it may take to do so, and which step it has saved.

    Args:
        told: where the process says how long it needs, for whatever ends it; None says nothing.
        granted: what ends the process says there how many seconds it has; None, or no such file, grants what was told.
        attempt: which attempt at the job this is.
        can_abandon: whether a step may be given up amid its work. Not where several processes share it.
    """

    def __init__(
        self, *, told: Path | None = None, granted: Path | None = None, attempt: int = 1, can_abandon: bool = True
    ) -> None:
        self.can_abandon = can_abandon
        self.saved_step = 0
        self.problem = ""
        self.is_training = False
        """Whether steps are being done: before, there is nothing to finish."""
        self.is_watched = False
        """Whether a step that outlasts the grace period is given up, so that each whole step has to be kept in mind."""
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
        """Whether the training is to stop."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Have the training stop; may be called by a signal's handler."""
        if not self.is_asked:
            self._asked_at = time.monotonic()
            self._asked.set()

    @property
    def wanted_s(self) -> float:
        """How long the training needs to stop, seconds."""
        return max(MIN_GRACE_S, GRACE_FACTOR * (max(self._step_times, default=0.0) + self._save_s))

    @property
    def grace_s(self) -> float:
        """How long it has."""
        with suppress(OSError, ValueError):
            if self._granted is not None:
                return float(self._granted.read_text(encoding="utf-8"))
        return self.wanted_s

    @property
    def may_give_up_step(self) -> bool:
        """Whether the step under way could be given up here, and may be long enough for that.

        The first step may be, too: nothing is known of its length.
        """
        return self.is_watched and not self._is_held and max(self._step_times, default=math.inf) > LONG_STEP_S

    def note_step(self, seconds: float) -> None:
        """Take note of how long a step took."""
        self._step_times.append(seconds)
        self._tell()

    def note_saved(self, step: int, seconds: float = 0.0) -> None:
        """Take note of a whole checkpoint, and how long it took to write."""
        self.saved_step = step
        self._save_s = seconds or self._save_s
        self._tell()

    def note_problem(self, problem: str) -> None:
        """Take note of why the last step could not be saved."""
        self.problem = problem
        self._tell()

    def hold(self) -> None:
        """Keep the watch from saving; called before anything changes. Never returns when it saves already."""
        if not self._is_held:
            self._held.acquire()
            self._is_held = True

    def let_go(self, save: Callable[[], None] | None) -> None:
        """Let the watch save a whole step, from now until the next `hold`.

        Args:
            save: writes a checkpoint of it, in the thread that calls it; None where there is one.
        """
        self._save_last_whole = save
        if self._is_held:
            self._is_held = False
            self._held.release()

    def watching(self, on_end: Callable[[int, str], None]) -> Watch:
        """A context in which a step that outlasts the grace period is given up."""
        return Watch(self, on_end)

    def wait_until_overdue(self, is_over: threading.Event) -> bool:
        """Wait until the step under way leaves no time to save; False where all is over before."""
        while not self._asked.wait(0.5):
            if is_over.is_set():
                return False
        grace_s = self.grace_s
        needed_s = max(MIN_SAVE_S, GRACE_FACTOR * self._save_s) if self._save_s else grace_s / 3
        until = self._asked_at + grace_s - min(needed_s, grace_s / 2)
        return not is_over.wait(max(0.0, until - time.monotonic()))

    def save_last_whole(self) -> None:
        """Save the last whole step, when nothing is amid a change; for the watch, which ends the process then."""
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
        with suppress(OSError):  # what is not told is granted as to any program
            descriptor = os.open(self._told, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, json.dumps(said).encode().ljust(TOLD_BYTES), 0)
            finally:
                os.close(descriptor)


class Watch:
    """The thread that saves the last whole step where the loop does not come to it, and ends the process.

    Args:
        on_end: called with the step that is saved, and why a newer one is not, before the process ends.
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
        except Exception as error:  # noqa: BLE001 - whatever it is, the process ends, and has to say so
            self._stop.note_problem(describe_problem(error))
        try:
            self._on_end(self._stop.saved_step, self._stop.problem)
        finally:
            os._exit(STOPPED_CODE)


def describe_problem(error: Exception) -> str:
    """Why a checkpoint could not be written, as a part of a sentence."""
    return f"the last step could not be saved ({str(error) or type(error).__name__})"
