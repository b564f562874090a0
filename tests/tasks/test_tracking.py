"""Pins that trackers get every step once, whatever is interrupted, and that they cannot hold up or end a training.

Without it curves have steps twice or not at all after a resume, or a training fails because of a page that shows it.
The trackers are the real ones; W&B keeps its files here, which it reads itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollouts.flows.deployments import evaluation_options
from rollouts.flows.form import RunOptions
from rollouts.tasks import tracking
from rollouts.tasks.records import RunScope, Stage
from rollouts.tasks.trackers import TrackerName, check_trackers
from rollouts.tasks.tracking import tracked
from rollouts_core.errors import ConfigError
from rollouts_core.metrics import JSONLLogger
from rollouts_core.run_directory import RunDirectory
from tests.infra.shell_jobs import is_alive
from tests.kit.excuses import ExcusedSkip
from tests.kit.waiting import wait_until

WANDB_HEADER_BYTES, BLOCK_BYTES = 7, 32768
RECORD_HEADER = struct.Struct("<IHB")
FULL, LAST = 1, 4

pytestmark = pytest.mark.slow

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
pytest.importorskip("wandb")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    run_dir = tmp_path / "stages" / "sft-0"
    run_dir.mkdir(parents=True)
    job = {"kind": "sft", "training": {"optim": {"lr": 0.5}}}
    return Stage(name="sft", fingerprint="0", run_dir=str(run_dir), job=job, num_steps=9, timeout_s=0)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def scope_of(tmp_path: Path, *trackers: TrackerName) -> RunScope:
    return RunScope(run_id="0123456789", run_name="small", store=str(tmp_path), report_to=trackers)


def write_steps(stage: Stage, steps: range, *, attempt: int = 1) -> None:
    with JSONLLogger(Path(stage.run_dir) / "metrics.jsonl", attempt=attempt) as log:
        for step in steps:
            log.log({"loss": 1 / step}, step)


def tensorboard_steps(tmp_path: Path) -> list[tuple[int, float]]:
    folder = tmp_path / "tensorboard" / "small-01234567" / "sft"
    if not folder.exists():  # TensorBoard takes it for one that was deleted
        return []
    accumulator = event_accumulator.EventAccumulator(str(folder))
    is_there = "loss" in accumulator.Reload().Tags()["scalars"]
    return [(event.step, round(event.value, 4)) for event in accumulator.Scalars("loss")] if is_there else []


def wandb_records(tmp_path: Path) -> list[Any]:  # Any: messages of W&B's own format
    """What the files for `wandb sync` hold."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    return [Record.FromString(data) for path in files for data in leveldb_records(path.read_bytes())]


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a file of W&B: blocks as LevelDB's log format has them, behind a header."""
    position, record = WANDB_HEADER_BYTES, b""
    while position < len(log):
        if BLOCK_BYTES - position % BLOCK_BYTES < RECORD_HEADER.size:
            position += BLOCK_BYTES - position % BLOCK_BYTES
            continue
        _, size, kind = RECORD_HEADER.unpack_from(log, position)
        position += RECORD_HEADER.size
        record += log[position : position + size]
        position += size
        if kind in (FULL, LAST):
            yield record
            record = b""


def wandb_steps(tmp_path: Path) -> list[tuple[int, float]]:
    found = []
    for record in wandb_records(tmp_path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found.append((record.history.step.num, round(items["loss"], 4)))
    return found


def steps(numbers: range) -> list[tuple[int, float]]:
    return [(step, round(1 / step, 4)) for step in numbers]


def test_a_tracker_that_is_disabled_says_that_nothing_is_kept(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    said = list[str]()
    write_steps(stage, range(1, 4))
    with tracked(stage, scope_of(tmp_path, "wandb"), said.append):
        pass
    assert "wandb: no metrics, because WANDB_MODE is disabled" in said and not list(tmp_path.glob("wandb/*run-*"))


def test_every_step_is_shown_once_while_and_after_a_training_is_resumed(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope, said = scope_of(tmp_path, "tensorboard", "wandb"), list[str]()
    with tracked(stage, scope, said.append):  # before the training has written anything
        write_steps(stage, range(1, 4))
        wait_until(lambda: (tmp_path / "tensorboard").exists() and tensorboard_steps(tmp_path), what="steps")
        assert tensorboard_steps(tmp_path) == steps(range(1, 4)), "while it trains"
        with (Path(stage.run_dir) / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "torn')
    write_steps(stage, range(3, 7), attempt=2)
    with (Path(stage.run_dir) / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "lo\0\0\n')  # as a damaged disk leaves one
    with tracked(stage, scope, said.append):
        pass
    assert tensorboard_steps(tmp_path) == wandb_steps(tmp_path) == steps(range(1, 7))
    assert f"tensorboard: metrics by: tensorboard --logdir {tmp_path}/tensorboard" in said
    assert any(line.startswith(f"wandb: metrics kept for: wandb sync {tmp_path}/wandb/offline-run-") for line in said)
    (run, *_) = [record.run for record in wandb_records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group, run.job_type, run.run_id) == (
        "small",
        "small-01234567",
        "sft",
        "small-01234567-sft",
    )
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["training"] == {"optim": {"lr": 0.5}}


def test_a_training_of_very_many_datasets_is_shown(stage: Stage, tmp_path: Path) -> None:
    data = [{"path": f"/data/shard-{number:05d}.jsonl", "digest": 64 * "0"} for number in range(2_000)]
    large = stage.model_copy(update={"job": {**stage.job, "data": data}})
    said: list[str] = []
    with tracked(large, scope_of(tmp_path, "tensorboard"), said.append):
        write_steps(stage, range(1, 4))
    assert tensorboard_steps(tmp_path) == steps(range(1, 4)) and len(said) == 1


def test_a_stage_that_is_reused_is_shown_once_in_each_run(stage: Stage, tmp_path: Path) -> None:
    write_steps(stage, range(1, 4))
    RunDirectory(Path(stage.run_dir)).write_result({})
    said: list[str] = []
    with tracked(stage, scope_of(tmp_path, "tensorboard"), said.append):
        pass
    assert tensorboard_steps(tmp_path) == steps(range(1, 4)) and len(said) == 1
    with tracked(stage, scope_of(tmp_path, "tensorboard"), pytest.fail):  # the run is tried again
        pass
    other = scope_of(tmp_path, "tensorboard").model_copy(update={"run_id": "9876543210"})
    with tracked(stage, other, said.append):
        pass
    assert len(said) == 2 and {path.parent.name for path in tmp_path.glob("tensorboard/*/sft")} == {
        "small-01234567",
        "small-98765432",
    }


def test_other_stages_and_runs_without_trackers_start_nothing(stage: Stage, tmp_path: Path) -> None:
    score = stage.model_copy(update={"job": {"kind": "eval"}})
    for each, scope in ((stage, scope_of(tmp_path)), (score, scope_of(tmp_path, "tensorboard"))):
        with tracked(each, scope, pytest.fail):
            write_steps(stage, range(1, 2))
    assert not (tmp_path / "tracked").exists()


def test_what_is_wrong_with_a_tracker_is_said_and_the_training_goes_on(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file, where a folder must be")
    said: list[str] = []
    with tracked(stage, scope_of(tmp_path, "tensorboard", "wandb"), said.append):
        write_steps(stage, range(1, 4))
    (problem,) = [line for line in said if "; the metrics are in" in line]
    assert problem.startswith("tensorboard: ") and problem.endswith(f"{stage.run_dir}/metrics.jsonl")
    assert wandb_steps(tmp_path) == steps(range(1, 4))


def test_a_tracker_that_cannot_be_started_is_said(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "tracked").write_text("a file, where a folder must be")
    said: list[str] = []
    with tracked(stage, scope_of(tmp_path, "tensorboard"), said.append):
        write_steps(stage, range(1, 4))
    assert said == [f"tensorboard: cannot be started (File exists); the metrics are in {stage.run_dir}/metrics.jsonl"]


def test_a_note_of_what_was_sent_that_is_damaged_is_said(stage: Stage, tmp_path: Path) -> None:
    write_steps(stage, range(1, 4))
    RunDirectory(Path(stage.run_dir)).write_result({})
    (tmp_path / "tracked").mkdir()
    state = tmp_path / "tracked/small-01234567-sft-tensorboard.json"
    state.write_text("")
    said: list[str] = []
    with tracked(stage, scope_of(tmp_path, "tensorboard"), said.append):
        pass
    (sentence,) = said
    assert sentence.startswith("tensorboard: cannot be started (") and sentence.endswith("/metrics.jsonl")


def test_a_server_that_does_not_answer_is_said_and_its_metrics_are_kept_here(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    said: list[str] = []
    with tracked(stage, scope_of(tmp_path, "wandb"), said.append):
        write_steps(stage, range(1, 4))
    assert [line.partition(" (")[0].partition(": ")[2] for line in said[:1]] == ["W&B does not answer"]
    assert wandb_steps(tmp_path) == steps(range(1, 4))


def test_a_tracker_that_takes_forever_is_left_behind(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server takes connections, and says nothing."""
    monkeypatch.setattr(tracking, "FINISH_TIMEOUT_S", 3.0)
    monkeypatch.setattr(tracking, "GRACE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with tracked(stage, scope_of(tmp_path, "wandb"), lambda line: None):
            write_steps(stage, range(1, 4))
        assert time.monotonic() - began < 60


def test_a_tracker_whose_process_is_killed_is_said(stage: Stage, tmp_path: Path) -> None:
    said: list[str] = []
    with tracked(stage, scope_of(tmp_path, "tensorboard"), said.append):
        wait_until(lambda: said, what="where its metrics are")
        for pid in Path("/proc/self/task").glob("*/children"):
            for child in map(int, pid.read_text().split()):
                if b"rollouts.tasks.tracking" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(child, signal.SIGKILL)
        wait_until(lambda: len(said) == 2, what="that it is gone")
    metrics = f"{stage.run_dir}/metrics.jsonl"
    assert said[1] == f"tensorboard: its process was ended by signal 9; the metrics are in {metrics}"


def test_a_tracker_outlives_neither_an_interrupted_run_nor_one_that_was_killed(stage: Stage, tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom rollouts.tasks.records import RunScope, Stage\n"
        "from rollouts.tasks.tracking import tracked\n"
        "with tracked(Stage.model_validate_json(sys.argv[1]), RunScope.model_validate_json(sys.argv[2]), print):\n"
        "    time.sleep(600)\n"
    )
    scope = scope_of(tmp_path, "tensorboard")
    write_steps(stage, range(1, 4))
    for ending in (signal.SIGINT, signal.SIGKILL):
        with subprocess.Popen(
            [sys.executable, "-c", program, stage.model_dump_json(), scope.model_dump_json()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as run:
            try:
                wait_until(lambda: children_of(run), what="its tracker")
                (tracker,) = children_of(run)
                wait_until(lambda: tensorboard_steps(tmp_path), what="steps")
                run.send_signal(ending)
                run.wait(60)
            finally:
                run.kill()
        wait_until(lambda: not is_alive(tracker), what="its end")  # noqa: B023
    assert tensorboard_steps(tmp_path) == steps(range(1, 4))


def children_of(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_a_tracker_that_is_not_installed_or_has_no_key_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_trackers(["tensorboard", "wandb"])
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(
        ConfigError, match=r"^run\.report_to: W&B has no API key here: set WANDB_API_KEY, or run `wandb"
    ):
        check_trackers(["wandb"])
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    check_trackers(["wandb"])
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.company.example")
    with pytest.raises(ConfigError, match="has no API key"):
        check_trackers(["wandb"])
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r'tensorboard is not installed here: pip install "rollouts\[tensorboard\]"$'):
        check_trackers(["tensorboard"])


@pytest.fixture
def with_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Trackio importable for the processes of trackers, if it is not installed."""
    if importlib.util.find_spec("trackio") is None:
        packages = str(tmp_path / "packages")
        missing = ["trackio>=0.43,<1", "gradio-client>=2,<3", "brotli>=1,<2"]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, *missing]
        installed = subprocess.run(pip, capture_output=True, text=True)
        if installed.returncode != 0:
            raise ExcusedSkip(f"pip cannot install Trackio here: {installed.stderr[-300:]}")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])]))


def trackio_steps(tmp_path: Path) -> list[tuple[int, float]]:
    with closing(sqlite3.connect(tmp_path / "trackio/small.db")) as database:
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = 'small-01234567-sft'").fetchall()
    return [(step, round(json.loads(metrics)["loss"], 4)) for step, metrics in rows]


@pytest.mark.matrix
@pytest.mark.usefixtures("with_trackio")
def test_trackio_has_every_step_once_after_a_resume_and_sends_no_requests(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope, said = scope_of(tmp_path, "trackio"), list[str]()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")  # with a token, Trackio asks the Hub for the user's name
    with socket.create_server(("127.0.0.1", 0)) as asked:
        nobody = f"http://127.0.0.1:{asked.getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_ENDPOINT", "TRACKIO_SERVER_URL"):
            monkeypatch.setenv(name, nobody)
        with tracked(stage, scope, said.append):
            write_steps(stage, range(1, 4))
            state = tmp_path / "tracked/small-01234567-sft-trackio.json"
            wait_until(lambda: state.exists() and json.loads(state.read_text())["next_step"] == 4, what="steps")
            assert trackio_steps(tmp_path) == steps(range(1, 4)), "saved before the note of what was sent"
        write_steps(stage, range(3, 7), attempt=2)
        with tracked(stage, scope, said.append):
            pass
        assert trackio_steps(tmp_path) == steps(range(1, 7))
        state.unlink()  # as if the process was killed before it wrote the note
        with tracked(stage, scope, said.append):
            pass
        asked.setblocking(False)
        with pytest.raises(BlockingIOError):
            asked.accept()
    assert trackio_steps(tmp_path) == steps(range(1, 7))
    assert said == [f"trackio: metrics by: TRACKIO_DIR={tmp_path}/trackio trackio show --project small"] * 3


def test_an_evaluation_has_nothing_to_track() -> None:
    assert evaluation_options(RunOptions(report_to=("tensorboard",))).report_to == ()
    assert os.environ["WANDB_MODE"] == "offline"
