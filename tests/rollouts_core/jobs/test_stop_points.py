"""Pins the promise that a training which is asked to stop loses no step that was done, and that nobody sees it later.

Each run is a real `python -m rollouts_core` that gets SIGTERM at random moments, also amid steps that outlast what it
is granted, saves and evaluations, and is started again each time. Then it is compared with a run that nobody stopped:
every file of the last checkpoint, every metric but times, every sample, bit for bit. Without it a Cancel could cost
hours of training, or leave half of an update in a checkpoint that looks whole.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.checkpoint import list_checkpoints, load_manifest, verify_checkpoint
from rollouts_core.config import (
    DeploymentConfig,
    OptimConfig,
    RLOptimConfig,
    RLTrainingConfig,
    SFTTrainingConfig,
)
from rollouts_core.data.rows import digest_path
from rollouts_core.job import EngineAddress, InputDataset, InputModel, SFTJob
from rollouts_core.metrics import read_json_lines
from tests.kit.mounts import fill, mounted_tmpfs
from tests.rollouts_core.jobs import test_kill_points
from tests.rollouts_core.jobs.test_kill_points import (
    FINISH_TIMEOUT_S,
    ONE_THREAD,
    ROLLOUT,
    START_TIMEOUT_S,
    assert_same_run,
    finish,
    input_file,
    rl_job,
    said_by,
    start,
    wait_while_it_runs,
    with_dropout,
    write_job,
    write_job_of_run,
)

pytestmark = pytest.mark.slow
base, engine = test_kill_points.base, test_kill_points.engine

STOPPED_CODE = 128 + signal.SIGTERM
NUM_STOPS = 4
SFT_TRAINING = SFTTrainingConfig(
    num_steps=60,
    batch_size=4,
    micro_batch_size=2,
    max_length=64,
    log_every=1,
    checkpoint_every=20,
    eval_every=20,
    keep_checkpoints=2,
    keep_best=1,
    optim=OptimConfig(lr=1e-3, num_warmup_steps=5),
)

RL_TRAINING = RLTrainingConfig(
    num_steps=24, checkpoint_every=10, keep_checkpoints=2, sync_every=3, optim=RLOptimConfig(lr=1e-3)
)


def events_of(directory: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(directory / "events.jsonl") if line["event"] == name]


def last_step(directory: Path) -> int:
    return int((read_json_lines(directory / "metrics.jsonl") or [{"step": 0}])[-1]["step"])


def run_somewhere(directory: Path, rng: random.Random, *, attempt: int, max_steps: int) -> subprocess.Popen[bytes]:
    """Start an attempt, and return its process at a moment some steps later."""
    before = last_step(directory)
    process = start(directory, attempt=attempt)
    wanted = before + rng.randrange(1, max_steps)
    wait_while_it_runs(lambda: last_step(directory) >= wanted, process, START_TIMEOUT_S)
    time.sleep(rng.random() * 0.05)
    return process


def stop_somewhere(directory: Path, rng: random.Random, *, attempt: int, max_steps: int) -> int:
    """Start an attempt, stop it some steps later, and return the step that it saved: the last one that was whole."""
    process = run_somewhere(directory, rng, attempt=attempt, max_steps=max_steps)
    done = last_step(directory)
    process.terminate()
    assert process.wait(120) == STOPPED_CODE, said_by(process)[-3000:]
    stopped = events_of(directory, "stopped")[-1]
    assert stopped["attempt"] == attempt
    assert stopped["step"] >= done
    assert list_checkpoints(directory / "checkpoints")[-1].name == f"step_{stopped['step']:06d}"
    told = json.loads((directory / "stop.json").read_text())
    assert (told["attempt"], told["saved_step"]) == (attempt, stopped["step"])
    return int(stopped["step"])


def stop_often(directory: Path, *, seed: int, max_steps: int) -> None:
    """Stop the run of a directory four times at seeded moments, then let it finish."""
    rng = random.Random(seed)
    for attempt in range(1, NUM_STOPS + 1):
        saved = stop_somewhere(directory, rng, attempt=attempt, max_steps=max_steps)
        resumed = [line["step"] for line in events_of(directory, "resumed")]
        assert len(resumed) == attempt - 1
        assert not resumed or resumed[-1] <= saved
    finish(directory, attempt=NUM_STOPS + 1)


def stop_or_kill_often(directory: Path, *, seed: int, max_steps: int) -> None:
    """End the run of a directory at seeded moments by SIGTERM, SIGKILL, and both, then let it finish."""
    rng = random.Random(seed)
    for attempt in range(1, 6):
        process = run_somewhere(directory, rng, attempt=attempt, max_steps=max_steps)
        if how := rng.randrange(3):
            process.terminate()
        if how == 1:
            assert process.wait(120) == STOPPED_CODE, said_by(process)[-3000:]
        time.sleep(rng.random() * 0.3 if how == 2 else 0)  # amid the rest of a step, a save, or after it
        process.kill()
        process.wait()
        for checkpoint in list_checkpoints(directory / "checkpoints"):
            verify_checkpoint(checkpoint)
    finish(directory, attempt=6)


def sft_job(base: InputModel, quickstart_dir: Path, **training: Any) -> SFTJob:
    path = quickstart_dir / "sft.jsonl"
    data = InputDataset(path=str(path), digest=digest_path(path))
    changed = SFT_TRAINING.model_copy(update=training)
    return SFTJob(model=base, data=(data,), eval_data=input_file(path), training=changed, deployment=ONE_THREAD)


@pytest.fixture(scope="module")
def straight_sft(base: InputModel, quickstart_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SFT run that nothing stopped, with dropout."""
    folder = tmp_path_factory.mktemp("straight_sft")
    directory = write_job(folder / "run", sft_job(with_dropout(base, folder / "model"), quickstart_dir))
    finish(directory)
    return directory


@pytest.fixture(scope="module")
def straight_rl(
    base: InputModel, quickstart_dir: Path, engine: EngineAddress, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An RL run that nothing stopped."""
    job = rl_job(base, quickstart_dir, engine, ROLLOUT).model_copy(update={"training": RL_TRAINING})
    directory = write_job_of_run(tmp_path_factory.mktemp("straight_rl") / "parent", job)
    finish(directory)
    return directory


def same_job(straight: Path, parent: Path) -> Path:
    """A directory of the same name with the same job: weight versions of RL begin with the name."""
    directory = parent / straight.name
    directory.mkdir()
    shutil.copy(straight / "job.json", directory)
    return directory


MORE_SEEDS = [pytest.param(seed, marks=pytest.mark.matrix) for seed in range(2, 9)]


@pytest.mark.parametrize("seed", [1, *MORE_SEEDS])
def test_sft_stopped_four_times_is_the_run_that_was_not(straight_sft: Path, tmp_path: Path, seed: int) -> None:
    stopped = same_job(straight_sft, tmp_path)
    stop_often(stopped, seed=seed, max_steps=12)
    assert_same_run(straight_sft, stopped)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 9))
def test_sft_stopped_and_killed_five_times_is_the_run_that_was_not(
    straight_sft: Path, tmp_path: Path, seed: int
) -> None:
    ended = same_job(straight_sft, tmp_path)
    stop_or_kill_often(ended, seed=seed, max_steps=10)
    assert_same_run(straight_sft, ended)


def test_a_step_that_outlasts_the_grace_period_is_given_up_and_done_again(
    base: InputModel,
    quickstart_dir: Path,
    tmp_path: Path,
) -> None:
    """A step of 200 micro-batches takes some seconds; two are granted, and half of them are kept for the save."""
    job = sft_job(
        with_dropout(base, tmp_path / "model"), quickstart_dir, num_steps=3, batch_size=400, checkpoint_every=3
    )
    straight = start(write_job(tmp_path / "straight", job))
    stopped = write_job(tmp_path / "stopped", job)
    process = start(stopped)
    wait_while_it_runs(lambda: last_step(stopped) == 1, process, START_TIMEOUT_S)
    (stopped / "stop-1").write_text("2")
    time.sleep(0.5)
    process.terminate()
    assert process.wait(120) == STOPPED_CODE, said_by(process)
    assert "stopped: step 1 is saved" in said_by(process)
    assert [event["step"] for event in events_of(stopped, "stopped")] == [1]
    assert load_manifest(list_checkpoints(stopped / "checkpoints")[-1]).is_early
    finish(stopped, attempt=2)
    assert [event["step"] for event in events_of(stopped, "resumed")] == [1]
    assert straight.wait(FINISH_TIMEOUT_S) == 0
    assert_same_run(tmp_path / "straight", stopped)


def is_at(directory: Path, *, step: int, num_resumed: int) -> bool:
    return last_step(directory) == step and len(events_of(directory, "resumed")) == num_resumed


@pytest.mark.matrix
def test_an_evaluation_that_outlasts_the_grace_period_is_done_when_the_run_goes_on(
    base: InputModel,
    quickstart_dir: Path,
    tmp_path: Path,
) -> None:
    rows = (quickstart_dir / "sft.jsonl").read_text()
    (tmp_path / "eval.jsonl").write_text(rows * 60)
    job = sft_job(
        with_dropout(base, tmp_path / "model"), quickstart_dir, num_steps=8, checkpoint_every=4, eval_every=4
    ).model_copy(update={"eval_data": input_file(tmp_path / "eval.jsonl")})
    straight = start(write_job(tmp_path / "straight", job))
    stopped = write_job(tmp_path / "stopped", job)
    for attempt in (1, 2):
        process = start(stopped, attempt=attempt)
        wait_while_it_runs(partial(is_at, stopped, step=3, num_resumed=attempt - 1), process, START_TIMEOUT_S)
        time.sleep(0.3)  # step 4 takes a fraction of that, its evaluation many seconds
        (stopped / f"stop-{attempt}").write_text("1")
        process.terminate()
        assert process.wait(120) == STOPPED_CODE, said_by(process)
        assert last_step(stopped) == 3
        assert events_of(stopped, "stopped")[-1]["step"] == 4
    finish(stopped, attempt=3)
    assert straight.wait(FINISH_TIMEOUT_S) == 0
    assert_same_run(tmp_path / "straight", stopped)


def test_before_the_first_whole_step_there_is_nothing_to_save(
    base: InputModel,
    quickstart_dir: Path,
    tmp_path: Path,
) -> None:
    directory = write_job(tmp_path / "run", sft_job(base, quickstart_dir, num_steps=3, batch_size=400))
    process = start(directory)
    wait_while_it_runs(lambda: events_of(directory, "data_loaded"), process, START_TIMEOUT_S)
    (directory / "stop-1").write_text("1")
    process.terminate()
    assert process.wait(120) == STOPPED_CODE, said_by(process)
    assert "stopped: there is no step to save" in said_by(process)
    assert [event["step"] for event in events_of(directory, "stopped")] == [0]
    assert not list_checkpoints(directory / "checkpoints")


@pytest.mark.parametrize("seed", [1, *MORE_SEEDS])
def test_rl_stopped_four_times_is_the_run_that_was_not(straight_rl: Path, tmp_path: Path, seed: int) -> None:
    stopped = same_job(straight_rl, tmp_path)
    stop_often(stopped, seed=seed, max_steps=5)
    assert_same_run(straight_rl, stopped)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 9))
def test_rl_stopped_and_killed_five_times_is_the_run_that_was_not(straight_rl: Path, tmp_path: Path, seed: int) -> None:
    ended = same_job(straight_rl, tmp_path)
    stop_or_kill_often(ended, seed=seed, max_steps=4)
    assert_same_run(straight_rl, ended)


@pytest.mark.matrix
def test_a_publication_that_outlasts_the_grace_period_is_done_when_the_run_goes_on(
    base: InputModel,
    quickstart_dir: Path,
    engine: EngineAddress,
    tmp_path: Path,
) -> None:
    """The engine stands still from the moment on in which step 3 has its samples, and takes no weights."""
    training = RL_TRAINING.model_copy(update={"num_steps": 6})
    job = rl_job(base, quickstart_dir, engine, ROLLOUT).model_copy(update={"training": training})
    straight, stopped = (write_job_of_run(tmp_path / name, job) for name in ("straight", "stopped"))
    finish(straight)
    [engine_pid] = [event["pid"] for event in events_of(Path(engine.lease_file).parent, "started")]
    process = start(stopped)
    wait_while_it_runs((stopped / "samples/step_000003.jsonl").exists, process, START_TIMEOUT_S)
    os.kill(engine_pid, signal.SIGSTOP)
    try:
        told = stopped / "stop.json"
        wait_while_it_runs(lambda: last_step(stopped) == 2, process, START_TIMEOUT_S)
        time.sleep(3)  # step 3 is trained within a fraction of that
        (stopped / "stop-1").write_text("1")
        process.terminate()
        assert process.wait(120) == STOPPED_CODE, said_by(process)
    finally:
        os.kill(engine_pid, signal.SIGCONT)
    assert (last_step(stopped), json.loads(told.read_text())["saved_step"]) == (2, 3)
    assert not list(stopped.rglob("served.safetensors"))  # the next start publishes what is saved
    finish(stopped, attempt=2)
    assert_same_run(straight, stopped)


@pytest.mark.matrix
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_completions_that_outlast_the_grace_period_are_given_up_and_sampled_again(
    base: InputModel, quickstart_dir: Path, engine: EngineAddress, tmp_path: Path, max_staleness: int
) -> None:
    """The engine stands still amid the completions of a step, or of several that are under way."""
    rollout = ROLLOUT.model_copy(update={"max_staleness": max_staleness})
    training = RL_TRAINING.model_copy(update={"num_steps": 12})
    job = rl_job(base, quickstart_dir, engine, rollout).model_copy(update={"training": training})
    straight, stopped = (write_job_of_run(tmp_path / name, job) for name in ("straight", "stopped"))
    finish(straight)
    [engine_pid] = [event["pid"] for event in events_of(Path(engine.lease_file).parent, "started")]
    process = start(stopped)
    wait_while_it_runs(lambda: last_step(stopped) >= 4, process, START_TIMEOUT_S)
    os.kill(engine_pid, signal.SIGSTOP)
    try:
        time.sleep(3)  # what has its completions already is trained within a fraction of that
        (stopped / "stop-1").write_text("1")
        process.terminate()
        assert process.wait(120) == STOPPED_CODE, said_by(process)
    finally:
        os.kill(engine_pid, signal.SIGCONT)
    saved = events_of(stopped, "stopped")[-1]["step"]
    assert saved >= last_step(stopped) >= 4
    finish(stopped, attempt=2)
    assert [event["step"] for event in events_of(stopped, "resumed")] == [saved]
    assert_same_run(straight, stopped)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize(
    "rollout",
    [
        pytest.param({"max_staleness": 2}, id="ahead of the trainer"),
        pytest.param({"environment": "tests.rollouts_core.kill_rewards:GoOn", "reward_fn": ""}, id="turns"),
    ],
)
def test_rl_of_other_kinds_stopped_four_times_is_the_run_that_was_not(
    base: InputModel, quickstart_dir: Path, engine: EngineAddress, tmp_path: Path, rollout: dict[str, Any], seed: int
) -> None:
    settings = ROLLOUT.model_copy(update=rollout)
    settings = type(settings).model_validate(settings.model_dump(exclude_defaults=True))
    job = rl_job(base, quickstart_dir, engine, settings).model_copy(update={"training": RL_TRAINING})
    straight, stopped = (write_job_of_run(tmp_path / name, job) for name in ("straight", "stopped"))
    finish(straight)
    stop_often(stopped, seed=seed, max_steps=5)
    assert_same_run(straight, stopped)


def test_several_processes_finish_the_step_and_lose_none(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    """Only the leading process is told, as the supervisor does."""
    two = DeploymentConfig(trainer_threads=1, trainer_processes=2)
    job = sft_job(base, quickstart_dir, num_steps=12, checkpoint_every=12).model_copy(update={"deployment": two})
    straight = start(write_job(tmp_path / "straight", job))
    stopped = write_job(tmp_path / "stopped", job)
    process = start(stopped)
    wait_while_it_runs(lambda: last_step(stopped) >= 3, process, FINISH_TIMEOUT_S)
    (stopped / "stop-1").write_text("0.1")  # no step is given up, however little time there is
    told = json.loads((stopped / "stop.json").read_text())
    assert told["pid"] != process.pid
    os.kill(told["pid"], signal.SIGTERM)
    assert process.wait(60) == STOPPED_CODE, said_by(process)
    assert events_of(stopped, "stopped")[-1]["step"] >= 3
    finish(stopped, attempt=2)
    assert straight.wait(FINISH_TIMEOUT_S) == 0
    assert_same_run(tmp_path / "straight", stopped)


def test_on_a_full_disk_the_checkpoint_before_stays_whole(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    with mounted_tmpfs(tmp_path / "disk", "size=64m") as disk:
        directory = write_job(disk / "run", sft_job(base, quickstart_dir, num_steps=100_000, checkpoint_every=40))
        (directory / "log.txt").symlink_to(tmp_path / "log.txt")  # the supervisor takes what is said by a pipe
        process = start(directory)
        wait_while_it_runs(lambda: events_of(directory, "checkpoint"), process, START_TIMEOUT_S)
        process.send_signal(signal.SIGSTOP)
        fill(disk)
        process.terminate()
        process.send_signal(signal.SIGCONT)
        assert process.wait(120) in (2, STOPPED_CODE), said_by(process)
        newest = list_checkpoints(directory / "checkpoints")[-1]
        told = json.loads((directory / "stop.json").read_text())
        assert told["saved_step"] == verify_checkpoint(newest).step
    assert (tmp_path / "log.txt").read_text().splitlines()[-1].startswith("rollouts: the disk is full")
