"""Runs that a test interrupts: wait for an event, kill or pause a process, read the records of a run directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollouts.flows.own_server.lend import local_server
from rollouts.flows.prefect_api import ask
from rollouts_core.checkpoint import list_checkpoints, load_manifest, verify_checkpoint
from rollouts_core.metrics import read_json_lines, read_metrics
from tests.kit.commands import Rollouts, processes_of
from tests.kit.waiting import wait_until

NUM_STEPS = 200
LONG: dict[str, Any] = {  # Any: settings of every type
    "training__sft__num_steps": NUM_STEPS,
    "training__sft__log_every": 1,
    "training__rl__num_steps": NUM_STEPS,
    "training__rl__checkpoint_every": 20,
}
"""Long enough to be hit in the middle, by whoever looks every tenth of a second."""
ENDLESS = LONG | {"training__sft__num_steps": 100_000}
"""Trains until something ends it. Once its checkpoint is seen, it leaves the processors to other tests."""
GONE_S = 15.0
"""After a run that stopped its jobs, all processes are gone within this time: less than any lease."""


def run_until(
    rollouts: Rollouts, config: Path, stage: str, *, event: str = "checkpoint"
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a run and return it, with the stage's run directory, when the stage has written an event."""
    process = rollouts.start("run", str(config))

    def is_there() -> bool:
        return any(events_of(path, event) for path in rollouts.store.glob(f"stages/{stage}-*"))

    wait_until(lambda: is_there() or process.poll() is not None, what=f"the event {event!r} of {stage}")
    assert process.poll() is None, f"the run ended too early:\n{rollouts.said()}"
    directory = run_dir(rollouts, stage)
    give_way(directory)
    return process, directory


def give_way(directory: Path) -> None:
    """Lower the priority of a job whose training does not end by itself, so that other tests get the processor."""
    training = json.loads((directory / "job.json").read_text()).get("training", {})
    if training.get("num_steps") != ENDLESS["training__sft__num_steps"]:
        return
    with suppress(OSError):  # a thread has just ended
        for thread in Path(f"/proc/{program_of(directory)}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 10)


def end_flow(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """End the process of a run by a signal that makes it leave its jobs."""
    process.send_signal(number)
    assert process.wait(120) == -number


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """A process that stands still inside the block, so that it cannot end too early for the test."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # the test may have killed it
            os.kill(pid, signal.SIGCONT)


def run_dir(rollouts: Rollouts, stage: str) -> Path:
    """The only run directory of a stage."""
    (path,) = rollouts.store.glob(f"stages/{stage}-*")
    return path


def events_of(directory: Path, name: str) -> list[dict[str, Any]]:  # Any: JSON
    """The events of a run directory that have this name."""
    return [event for event in read_json_lines(directory / "events.jsonl") if event["event"] == name]


def program_of(directory: Path) -> int:
    """The process that does the job of a run directory."""
    return int(events_of(directory, "started")[-1]["pid"])


def exits_of(directory: Path) -> list[str]:
    """The names of the records of ended attempts."""
    return sorted(path.name for path in directory.glob("exit-*.json"))


def digests_of(directory: Path) -> dict[str, str]:
    """The digests of all checkpoints of a run directory."""
    return {path.name: load_manifest(path).digest for path in list_checkpoints(directory / "checkpoints")}


def flip_a_byte(path: Path) -> None:
    """Change the last byte of a file."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def last_run(rollouts: Rollouts) -> dict[str, Any]:  # Any: JSON
    """The run.json of the run that ended last."""
    path = max(rollouts.store.glob("runs/*/run.json"), key=lambda path: path.stat().st_mtime)
    record: dict[str, Any] = json.loads(path.read_text())  # Any: JSON
    return record


def task_states(store: Path, *, of_run: str) -> dict[str, str]:
    """The state of every task run of a flow run, by the task run's name, as Prefect's server tells it."""
    with local_server(store) as address:
        answer = ask(address, "POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [of_run]}}})
    return {task_run["name"]: task_run["state_name"] for task_run in answer}


def assert_goes_on(directory: Path) -> None:
    """The job trains at least one more step."""
    before = len(read_json_lines(directory / "metrics.jsonl"))
    assert exits_of(directory) == []
    wait_until(lambda: len(read_json_lines(directory / "metrics.jsonl")) > before, what="one more step")


def assert_resumed(directory: Path, *, attempt: int) -> None:
    """This attempt, and no other, went on from the last checkpoint before it, and every step has its metrics."""
    (resumed,) = events_of(directory, "resumed")
    saved = [event["step"] for event in events_of(directory, "checkpoint") if event["attempt"] < attempt]
    assert (resumed["attempt"], resumed["step"]) == (attempt, saved[-1])
    assert [line["step"] for line in read_metrics(directory / "metrics.jsonl")] == list(range(1, NUM_STEPS + 1))


def assert_last_step_is_saved(directory: Path) -> None:
    """The job was stopped, and saved the last step that it did: not the last one at which a checkpoint was due."""
    ended = json.loads((directory / exits_of(directory)[-1]).read_text())
    last = read_metrics(directory / "metrics.jsonl")[-1]["step"]
    assert ended["cancelled"] and ended["saved_step"] == last > 0
    assert verify_checkpoint(list_checkpoints(directory / "checkpoints")[-1]).step == last


def assert_nothing_is_left(rollouts: Rollouts) -> None:
    """No process of the store lives, or will in a moment."""
    wait_until(
        lambda: not processes_of(rollouts.store), what=f"the end of {processes_of(rollouts.store)}", timeout_s=GONE_S
    )
