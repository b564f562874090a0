"""Pins what a person meets whose ports, disks or job files do not serve, and what shows only while a pipeline runs.

Without it a full disk would look like a bug of ours, and an engine would stay behind.

Not here: settings and functions (test_bad_configuration.py), rows and models (test_bad_data.py).
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.infra.node_probe import NO_LOCKS, find_root_problem
from rollouts.infra.ssh.host_keys import make_host_key
from rollouts_core.config import ModelConfig, SFTTrainingConfig
from rollouts_core.data.rows import digest_path
from rollouts_core.fingerprint import digest_model
from rollouts_core.job import InputDataset, InputModel, SFTJob
from tests.flows.refusals import (
    GOOD_ROW,
    Change,
    assert_refused,
    refusal,
    write_config,
    write_function,
    write_rows,
)
from tests.infra.ssh_server import running_server
from tests.kit.commands import RUN_TIMEOUT_S, Rollouts, clean_environment, processes_of
from tests.kit.mounts import fill, mounted_tmpfs
from tests.kit.waiting import wait_until

SMALL = "size=64m"


@contextmanager
def taken_port() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def strange_machine(says: bytes) -> Iterator[int]:
    """A port at which something answers whatever connects with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):  # closed: the block has ended
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(says)
                        connection.recv(1024)

        threading.Thread(target=answer, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_what_a_strange_machine_says_moves_no_cursor(folder: Path) -> None:
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(make_host_key().private)
    with strange_machine(b"\x1b]0;a title\x07\x1b[2Jhello\r\n" * 200) as port:
        node = {"kind": "ssh", "host": f"me@127.0.0.1:{port}", "python": "/usr/bin/python3", "key_file": str(key)}
        shown = CliRunner().invoke(app, ["validate", str(write_config(folder, node=node))]).stderr
    assert "does not answer (hello)" in shown
    assert "\x1b" not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python", "words"),
    [
        (sys.executable, f"{sys.executable} has no vllm, which this rollout.engine.kind needs: install it, and name"),
        ("/nowhere/bin/python", "rollout.engine.python is '/nowhere/bin/python', which is not a program"),
    ],
)
def test_an_engine_that_is_not_installed_is_named_before_anything_starts(folder: Path, python: str, words: str) -> None:
    engine = {"kind": "vllm", "python": python}
    assert_refused(write_config(folder, rollout__engine=engine), words)
    comparing = write_config(folder, rollout__engine=engine, mode="sft")
    assert words in refusal(comparing)
    assert words in refusal(comparing, "base", command="evaluate")


@pytest.mark.slow
def test_an_engine_port_in_use_is_named(folder: Path) -> None:
    with taken_port() as port:
        words = f"deployment.engine_port: port {port} is in use by another process: choose another, or 0"
        assert_refused(write_config(folder, deployment__engine_port=port), words)


@pytest.mark.slow
def test_a_machine_whose_engines_could_not_be_asked_is_named_before_anything_starts(folder: Path) -> None:
    with running_server(folder / "sshd", more_config="AllowTcpForwarding no") as server:
        node = {
            "kind": "ssh",
            "host": f"{server.access.user}@127.0.0.1:{server.port}",
            "python": sys.executable,
            "root": str(folder / "root"),
            "key_file": str(server.client_key_file),
            "host_key": server.access.host_key,
            "min_free_gb": 0.1,
        }
        assert_refused(write_config(folder, node=node), "does not forward connections, which engines there need")


def test_a_server_port_in_use_is_named(folder: Path) -> None:
    with taken_port() as port:
        sentence = refusal(folder / "small.toml", "--port", str(port), command="run")
    assert f"port {port} is in use" in sentence
    assert not processes_of(folder / "store")


@pytest.mark.slow
def test_a_prefect_server_that_does_not_answer_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    sentence = refusal(folder / "small.toml", command="run")
    assert "PREFECT_API_URL is set to http://127.0.0.1:9/api, where no server answers" in sentence


@pytest.mark.parametrize(
    ("store", "words"), [("sft.jsonl", "it is a file"), ("sft.jsonl/store", "Not a directory"), ("/proc/store", "")]
)
@pytest.mark.parametrize("command", ["validate", "run", "ui"])
def test_a_store_that_cannot_be_made_is_named(folder: Path, store: str, words: str, command: str) -> None:
    config = [] if command == "ui" else [str(folder / "small.toml")]
    outcome = CliRunner().invoke(app, [command, *config, "--store", str(folder / store)])
    assert outcome.exit_code == 2
    assert outcome.stderr.count("\n") == 1
    assert f"rollouts: the store {folder / store} cannot be written ({words}" in outcome.stderr
    assert "choose another with --store" in outcome.stderr


def test_a_store_without_locks_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre without the option `flock`."""

    def have_none(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("rollouts.flows.preflight.fcntl.flock", have_none)
    assert_refused(
        folder / "small.toml", f"the store {folder / 'store'} cannot be written (its file system has no locks"
    )
    assert find_root_problem(str(folder / "root")) == NO_LOCKS


@pytest.mark.parametrize("command", ["validate", "run", "ui"])
def test_a_store_whose_database_would_lie_elsewhere_is_named(folder: Path, command: str) -> None:
    config = [] if command == "ui" else [str(folder / "small.toml")]
    outcome = CliRunner().invoke(app, [command, *config, "--store", str(folder / "runs?seed=1")])
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (2, 1), outcome.stderr
    assert (
        f"rollouts: the path of the store {folder / 'runs?seed=1'} has a ?, which Prefect cannot have" in outcome.stderr
    )
    assert not list(folder.glob("runs*"))


def test_a_store_on_a_full_disk_is_named(folder: Path) -> None:
    with mounted_tmpfs(folder / "store", SMALL) as disk:
        fill(disk)
        assert_refused(folder / "small.toml", "cannot be written (No space left on device): choose another")


def test_a_disk_with_less_room_than_is_asked_for_is_named_before_anything_starts(folder: Path) -> None:
    config = write_config(folder, node__min_free_gb=100000.0)
    words = f"100000 GB of free disk are needed at {folder / 'store'}, "
    assert_refused(config, words, "are there: free some space, choose another root, or lower min_free_gb")
    assert words in refusal(config, "base", command="evaluate")


def test_a_disk_without_room_for_the_checkpoints_is_named_before_anything_starts(folder: Path) -> None:
    num_kept = 10**9
    sft = {"num_steps": num_kept, "checkpoint_every": 1, "keep_checkpoints": num_kept, "max_length": 128}
    assert_refused(write_config(folder, training__sft=sft), "GB of free disk are needed at")


def test_a_store_that_is_read_only_is_named(folder: Path) -> None:
    with mounted_tmpfs(folder / "store", SMALL, "ro"):
        assert_refused(folder / "small.toml", "cannot be written (Read-only file system): choose another")


def write_job(folder: Path) -> Path:
    """The job.json of a short SFT on the small pipeline's files, alone in a run directory."""
    model = ModelConfig(path=str(folder / "base_model"))
    job = SFTJob(
        model=InputModel(name="base", model=model, digest=digest_model(model)),
        data=(InputDataset(path=str(folder / "sft.jsonl"), digest=digest_path(folder / "sft.jsonl")),),
        training=SFTTrainingConfig(num_steps=1, max_length=128),
    )
    (folder / "run").mkdir()
    (folder / "run/job.json").write_text(job.model_dump_json())
    return folder / "run/job.json"


def job_refusal(kind: str, job: Path) -> str:
    """The sentence with which `python -m rollouts_core` ends."""
    ended = subprocess.run(
        [sys.executable, "-m", "rollouts_core", kind, str(job)],
        cwd=job.parent.parent,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    [sentence] = [line for line in ended.stderr.splitlines() if line.startswith("rollouts: ")]
    assert sentence == ended.stderr.splitlines()[-1]
    return sentence


def test_a_missing_job_is_named_and_nothing_is_written_where_it_should_be(folder: Path) -> None:
    (folder / "run").mkdir()
    assert "job.json does not exist: give the path of a job.json" in job_refusal("sft", folder / "run/job.json")
    assert list((folder / "run").iterdir()) == []


def test_a_job_of_another_kind_is_named(folder: Path) -> None:
    assert "job.json describes a job of kind sft, not rl" in job_refusal("rl", write_job(folder))


def test_a_job_that_is_no_json_is_named(folder: Path) -> None:
    job = write_job(folder)
    job.write_text("{")
    assert "job.json is not valid JSON" in job_refusal("sft", job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: write_rows(folder / "sft.jsonl", [GOOD_ROW]), "sft.jsonl changed since the stage was planned"),
        pytest.param(
            lambda folder: (folder / "sft.jsonl").unlink(),
            "sft.jsonl is gone since the stage was planned",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            lambda folder: (folder / "base_model/new").touch(),
            "base_model changed since the stage was planned",
            marks=pytest.mark.matrix,
        ),
        (lambda folder: shutil.rmtree(folder / "base_model"), "base_model is gone since the stage was planned"),
    ],
)
def test_an_input_that_changed_since_the_job_was_made_is_named(folder: Path, change: Change, words: str) -> None:
    job = write_job(folder)
    change(folder)
    assert words in job_refusal("sft", job)
    assert sorted(path.name for path in job.parent.iterdir()) == ["events.jsonl", "job.json", "stop.json"]
    assert words in (job.parent / "events.jsonl").read_text()


GRUMPY_REWARD = """
def f(sample):
    if sample.metadata["answer"] not in sample.response and len(sample.response) > 5:
        raise ValueError("a long answer")
    return 0.0
"""
"""It does not raise at what is tried before a run."""


def sentence_of(output: str) -> str:
    """The one sentence in everything that a command printed."""
    assert "Traceback" not in output, output
    [sentence] = [line for line in output.splitlines() if line.startswith("rollouts: ")]
    return sentence


@pytest.mark.slow
@pytest.mark.matrix
def test_a_reward_that_raises_on_some_completions_ends_the_run_and_the_engine(
    rollouts: Rollouts, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_function(folder, GRUMPY_REWARD, monkeypatch)
    config = write_config(folder, mode="rl", rollout__reward_fn=f"{module}:f")
    environment = clean_environment()
    ended = subprocess.run(
        [sys.executable, "-m", "rollouts.flows.cli", "run", str(config), "--store", str(rollouts.store)],
        env=environment | {"PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert f"reward function {module}:f on prompt '" in sentence_of(ended.stderr)
    assert sentence_of(ended.stderr).endswith(f"raised ValueError: a long answer ({module}.py, line 4)")
    assert "engine         answers at http://" in ended.stderr
    wait_until(lambda: not jobs_of(rollouts.store), what="the end of the engine", timeout_s=15.0)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("place", ["store", "root"])
def test_a_disk_that_runs_full_during_sft_is_named(rollouts_alone: Rollouts, folder: Path, place: str) -> None:
    store = rollouts_alone.store
    with mounted_tmpfs(folder / "disk", SMALL) as disk:
        overrides = {"node__root": str(disk), "node__min_free_gb": 0.0}
        if place == "store":
            shutil.copytree(store / "prefect", disk / "prefect")
            store = disk
        config = write_config(folder, mode="sft", training__sft__num_steps=400, **overrides)
        command = dataclasses.replace(rollouts_alone, store=store)
        process = command.start("run", str(config))
        checkpoints = "stages/sft-*/checkpoints/step_*"
        wait_until(lambda: any(disk.glob(checkpoints)) or process.poll() is not None, what="a checkpoint")
        fill(disk)
        assert process.wait(120) == 2, command.said()
        assert "No space left on device" in sentence_of(command.said())
        wait_until(lambda: not processes_of(store), what=f"the end of {processes_of(store)}", timeout_s=30.0)


def jobs_of(store: Path) -> list[str]:
    """The command lines of jobs and their supervisors in a store; its Prefect server lives a little longer."""
    return [command for command in processes_of(store) if f"{store}/stages/" in command]
