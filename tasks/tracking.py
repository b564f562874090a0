"""Send the metrics of a training to trackers such as W&B while the training runs.

Each tracker has its own process, so that a tracker that fails or hangs does not affect the training.

    metrics.jsonl ──this process, line by line──> tracker      <store>/tracked/<run>-<stage>-<tracker>.json: next step,
         ^                                                     so that a resumed run sends nothing twice
    the training, or the mirror of a remote training

Not here: the trackers (trackers.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

from rollouts.infra.locks import locked
from rollouts.tasks.records import RunScope, Stage
from rollouts.tasks.trackers import ALL_TRACKERS, TrackedStage, Tracker
from rollouts_core.config.messages import first_line
from rollouts_core.metrics import parse_line, read_metrics
from rollouts_core.run_directory import RunDirectory
from rollouts_core.system.files import write_json

SEND_EVERY_S = 5.0
FINISH_TIMEOUT_S = 90.0
"""A tracker may send metrics for this many seconds after the training has ended."""
GRACE_S = 5.0
WHERE = "the metrics are in"
"""Text before the path of metrics.jsonl in messages about a failed tracker."""
NOT_METRICS = ("step", "attempt", "time")


@contextmanager
def tracked(stage: Stage, scope: RunScope, say: Callable[[str], None]) -> Iterator[None]:
    """Send a training's metrics to the run's trackers while the `with` block runs.

    The block ends when all metrics are sent. After an exception, such as an interrupt, the block ends at once: the
    trackers' processes then send the rest and end by themselves.
    """
    names = scope.report_to if stage.trains else ()
    with ExitStack() as stack:
        for name in names:
            training = TrackedStage(
                tracker=name,
                run=scope.output_dir.name,
                run_name=scope.run_name,
                stage=stage.name,
                metrics=RunDirectory(Path(stage.run_dir)).metrics,
                store=Path(scope.store),
                settings=stage.job,
            )
            try:
                if not has_all(training):
                    stack.enter_context(_process_beside(training, say))
            except (OSError, ValueError) as error:  # a damaged state file, a full disk, or too little memory
                reason = error.strerror if isinstance(error, OSError) else first_line(error)
                say(f"{name}: cannot be started ({reason}); {WHERE} {training.metrics}")
        yield


def has_all(training: TrackedStage) -> bool:
    """True if the training is finished and the tracker has all of its metrics."""
    directory = RunDirectory(training.metrics.parent)
    if directory.read_result() is None:
        return False
    lines = read_metrics(training.metrics)
    return not lines or lines[-1]["step"] < first_unsent_step(training)


def first_unsent_step(training: TrackedStage) -> int:
    """The first step of the training that was not yet sent to the tracker."""
    return int(json.loads(training.state.read_text())["next_step"]) if training.state.exists() else 0


@contextmanager
def _process_beside(training: TrackedStage, say: Callable[[str], None]) -> Iterator[None]:
    """Run the process of one tracker during the `with` block, and then wait until it has sent the last metrics."""
    training.state.parent.mkdir(parents=True, exist_ok=True)
    with training.state.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollouts.tasks.tracking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C must not reach the tracker's process
        )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{training.model_dump_json()}\n")  # a job's settings may be too long for the command line
    process.stdin.flush()

    def relay(lines: Iterator[str]) -> None:
        line = ""
        for line in lines:
            say(line.rstrip())
        code = process.wait()
        if code != 0 and WHERE not in line:  # the tracker's process has not reported its failure itself
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            say(f"{training.tracker}: its process was ended {how}; {WHERE} {training.metrics}")

    # Prefect needs this context to assign the thread's log lines to the run.
    relaying = threading.Thread(target=copy_context().run, args=(relay, process.stdout), daemon=True)
    relaying.start()
    with process.stdin as its_end:
        yield
        its_end.close()
        relaying.join(FINISH_TIMEOUT_S + GRACE_S)
        if relaying.is_alive():  # a child process of the tracker holds the output open
            os.killpg(process.pid, signal.SIGKILL)


def track(training: TrackedStage, is_over: threading.Event, say: Callable[[str], None]) -> None:
    """Send new lines of metrics.jsonl to the tracker until `is_over` is set and the tracker has all lines."""
    with locked(training.state.with_suffix(".lock")):  # a process that a killed run started may still be sending
        tracker = ALL_TRACKERS[training.tracker](training, first_unsent_step(training), say)
        say(tracker.shown_at)
        position, is_last = 0, False
        try:
            while not is_last:
                is_last = is_over.wait(SEND_EVERY_S)
                position, lines = _whole_lines(training.metrics, position)
                send(tracker, lines)
                write_json(training.state, {"next_step": tracker.next_step})
        finally:
            tracker.close()


def send(tracker: Tracker, lines: list[dict[str, Any]]) -> None:  # Any: JSON
    """Send the metrics of steps that the tracker does not have.

    A step that a later attempt of the training repeats is not sent again, because its metrics are equal.
    """
    for line in lines:
        if line["step"] >= tracker.next_step:
            tracker.log(line["step"], line["time"], {key: line[key] for key in line if key not in NOT_METRICS})
            tracker.next_step = line["step"] + 1
    tracker.flush()


def _whole_lines(path: Path, position: int) -> tuple[int, list[dict[str, Any]]]:  # Any: JSON
    """Read the complete lines of a file after a byte position. Returns the new position and the lines.

    A file that is shorter than the position was replaced, so it is read from its beginning.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        start = position if os.fstat(file.fileno()).st_size >= position else 0
        file.seek(start)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        return start + len(whole), list(filter(None, map(parse_line, whole.splitlines())))
    return 0, []


def main() -> None:
    """Send the metrics of one training. The first line of standard input describes the training as JSON.

    When the training has ended, the run closes standard input. This process then ends within `FINISH_TIMEOUT_S`.
    """
    training = TrackedStage.model_validate_json(sys.stdin.readline())
    is_over = threading.Event()

    def say(sentence: str) -> None:
        with suppress(BrokenPipeError):  # the run that reads this output has ended
            sys.stdout.write(f"{training.tracker}: {sentence}\n")
            sys.stdout.flush()

    def wait_for_end() -> None:
        sys.stdin.read()
        is_over.set()
        time.sleep(FINISH_TIMEOUT_S)
        say(f"did not receive all metrics within {FINISH_TIMEOUT_S:g} s; {WHERE} {training.metrics}")
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        track(training, is_over, say)
    except Exception as error:  # noqa: BLE001 - an error of a tracker must not end the training
        say(f"{first_line(error)}; {WHERE} {training.metrics}")
        os._exit(1)


if __name__ == "__main__":
    main()
