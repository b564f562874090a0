"""Pins the promise that nobody sees from a run how often it was killed: SIGKILL at random moments, also inside saves.

Each run is a real `python -m rollouts_core`, killed again and again and started again each time, and then compared with
a run that nobody touched: every file of the last checkpoint, every metric but times, every sample, bit for bit.
Without it a resumed run could train on other data, other random numbers or half a checkpoint, and look healthy.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollouts_core.checkpoint import list_checkpoints, verify_checkpoint
from rollouts_core.config import (
    DeploymentConfig,
    ModelConfig,
    OptimConfig,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
    SFTTrainingConfig,
)
from rollouts_core.data.rows import digest_path
from rollouts_core.fingerprint import digest_model
from rollouts_core.job import EngineAddress, InputDataset, InputFile, InputModel, RLJob, ServeJob, SFTJob
from rollouts_core.metrics import read_json_lines, read_metrics
from tests.rollouts_core.histories import without_times
from tests.rollouts_core.kill_rewards import grade_even_digits, grade_even_digits_late

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[3]
START_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 120.0
POLL_S = 0.002
MAX_FURTHER_KILLS = 10
SERVING = re.compile(r"serving on (http://\S+)")
"""What an engine says when it is ready."""
ONE_THREAD = DeploymentConfig(trainer_threads=1)
SFT_TRAINING = SFTTrainingConfig(
    num_steps=120,
    batch_size=4,
    micro_batch_size=2,
    max_length=64,
    log_every=1,
    checkpoint_every=3,
    eval_every=3,
    keep_checkpoints=2,
    keep_best=2,
    optim=OptimConfig(lr=1e-3, num_warmup_steps=5),
)
RL_TRAINING = RLTrainingConfig(
    num_steps=30, checkpoint_every=3, keep_checkpoints=2, keep_best=1, sync_every=2, optim=RLOptimConfig(lr=1e-3)
)
ROLLOUT = RolloutConfig(
    batch_size=3, n_samples_per_prompt=4, sampling=SamplingConfig(max_new_tokens=8), reward_fn=grade_even_digits
)
OVER_SAMPLED = ROLLOUT.model_copy(
    update={"reward_fn": grade_even_digits_late, "filter_fn": "reward_nonzero_std", "over_sampling_factor": 2.0}
)


@pytest.fixture(scope="module")
def base(base_model: ModelConfig) -> InputModel:
    return InputModel(name="base", model=base_model, digest=digest_model(base_model))


@pytest.fixture(scope="module")
def engine(base: InputModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineAddress]:
    """A server of the base model in a process of its own, which outlives the trainers that are killed."""
    directory = tmp_path_factory.mktemp("engine")
    process = start(write_job(directory, ServeJob(model=base, port=0, context_length=128, deployment=ONE_THREAD)))
    try:
        wait_while_it_runs(lambda: SERVING.search(said_by(process)), process, START_TIMEOUT_S)
        [url] = SERVING.findall(said_by(process))
        yield EngineAddress(url=url, lease_file=str(directory / "lease"))
    finally:
        process.terminate()
        process.wait(120)


def input_file(path: Path) -> InputFile:
    return InputFile(path=str(path), digest=digest_path(path))


def write_job(directory: Path, job: SFTJob | RLJob | ServeJob) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "job.json").write_text(job.model_dump_json())
    return directory


def start(directory: Path, *, attempt: int = 1) -> subprocess.Popen[bytes]:
    """An attempt at the job of a run directory."""
    kind = json.loads((directory / "job.json").read_text())["kind"]
    with (directory / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "rollouts_core", kind, str(directory / "job.json")],
            cwd=REPOSITORY,
            env={**os.environ, "ROLLOUTS_ATTEMPT": str(attempt), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
        )


def said_by(process: subprocess.Popen[bytes]) -> str:
    """What a job has said so far, in all its attempts."""
    assert isinstance(process.args, list)
    return Path(str(process.args[-1])).with_name("log.txt").read_text()


def wait_while_it_runs(condition: Callable[[], object], process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Return when the condition holds; fail the test where the process ends first, or at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, f"it ended too soon:\n{said_by(process)[-3000:]}"
        assert time.monotonic() < deadline, "the process hangs"
        time.sleep(POLL_S)


def finish(directory: Path, *, attempt: int = 1) -> None:
    """Do the job, or what is left of it."""
    process = start(directory, attempt=attempt)
    assert process.wait(FINISH_TIMEOUT_S) == 0, said_by(process)[-3000:]


def kill_somewhere(
    directory: Path, rng: random.Random, *, attempt: int, max_steps: int, save_share: float = 0.6
) -> bool:
    """Start an attempt and kill it: in a save or some steps later; returns whether a save was cut in two."""
    process = start(directory, attempt=attempt)
    log = directory / "metrics.jsonl"
    size_before = log.stat().st_size if log.exists() else 0
    wait_while_it_runs(lambda: log.exists() and log.stat().st_size > size_before, process, START_TIMEOUT_S)
    lines = read_json_lines(log)
    last_step = (lines[-1]["step"] if lines else 0) + rng.randrange(1, max_steps)
    wait_while_it_runs(
        lambda: (read_json_lines(log) or [{"step": 0}])[-1]["step"] >= last_step, process, START_TIMEOUT_S
    )
    if rng.random() < save_share:
        wait_while_it_runs(lambda: any(directory.glob("checkpoints/.*partial*")), process, START_TIMEOUT_S)
        time.sleep(rng.random() * 0.004)
    else:
        time.sleep(rng.random() * 0.05)
    assert process.poll() is None, f"it ended before it could be killed:\n{said_by(process)[-3000:]}"
    process.send_signal(signal.SIGKILL)
    process.wait()
    return any(directory.glob("checkpoints/.*partial*"))


def kill_often(directory: Path, *, seed: int, num_kills: int, max_steps: int) -> None:
    """Kill the run of a directory at seeded moments, one of them at least in a save, then let it finish."""
    rng = random.Random(seed)
    cut = [kill_somewhere(directory, rng, attempt=n + 1, max_steps=max_steps) for n in range(num_kills)]
    while not any(cut):  # where a save ends within the time that a busy machine takes to kill
        assert len(cut) < num_kills + MAX_FURTHER_KILLS, "no kill hit a save: the moments are chosen badly"
        cut.append(kill_somewhere(directory, rng, attempt=len(cut) + 1, max_steps=2, save_share=1.0))
    finish(directory, attempt=len(cut) + 1)
    starts = [line for line in read_json_lines(directory / "events.jsonl") if line["event"] == "started"]
    assert len(starts) == len(cut) + 1


def assert_same_run(first: Path, second: Path) -> None:
    """Two run directories that nothing but times and attempts tells apart."""
    metrics = [without_times(read_rows(run)) for run in (first, second)]
    assert metrics[0] == metrics[1]
    names = [[path.name for path in list_checkpoints(run / "checkpoints")] for run in (first, second)]
    assert names[0] == names[1]
    for name in names[0]:
        ours, theirs = (verify_checkpoint(run / "checkpoints" / name) for run in (first, second))
        assert ours.files == theirs.files, name
    samples = [{p.name: p.read_bytes() for p in (run / "samples").glob("*.jsonl")} for run in (first, second)]
    assert samples[0] == samples[1]
    for run in (first, second):
        assert not any((run / "checkpoints").glob(".*")), "leftovers of a killed save"


def read_rows(run: Path) -> list[dict[str, float]]:
    return read_metrics(run / "metrics.jsonl")


def schedules_of(run: Path) -> dict[int, list[int]]:
    """The logged order of every step; asserts that no attempt logged another one."""
    by_step: dict[int, list[int]] = {}
    for line in read_json_lines(run / "events.jsonl"):
        if line["event"] == "rollouts_scheduled":
            assert by_step.setdefault(line["step"], line["completed"]) == line["completed"], line["step"]
    return by_step


def rl_job(base: InputModel, quickstart_dir: Path, engine: EngineAddress, rollout: RolloutConfig) -> RLJob:
    return RLJob(
        model=base,
        prompts=input_file(quickstart_dir / "prompts.jsonl"),
        training=RL_TRAINING,
        rollout=rollout,
        engines=(engine,),
        deployment=ONE_THREAD,
    )


def with_dropout(base: InputModel, directory: Path) -> InputModel:
    """The model with dropout, so that training takes from torch's random state in every step."""
    shutil.copytree(base.model.path, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.2}))
    model = ModelConfig(path=str(directory))
    return InputModel(name="base", model=model, digest=digest_model(model))


@pytest.mark.matrix
def test_sft_killed_eight_times_is_the_run_that_was_not(base: InputModel, quickstart_dir: Path, tmp_path: Path) -> None:
    path = quickstart_dir / "sft.jsonl"
    data = InputDataset(path=str(path), digest=digest_path(path))
    model = with_dropout(base, tmp_path / "model")
    job = SFTJob(model=model, data=(data,), eval_data=input_file(path), training=SFT_TRAINING, deployment=ONE_THREAD)
    straight = start(write_job(tmp_path / "straight", job))
    kill_often(write_job(tmp_path / "killed", job), seed=1, num_kills=8, max_steps=12)
    assert straight.wait(FINISH_TIMEOUT_S) == 0
    assert [row["step"] for row in read_rows(tmp_path / "killed")] == list(range(1, 121))
    assert_same_run(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.promise
def test_rl_killed_six_times_is_the_run_that_was_not(
    base: InputModel, quickstart_dir: Path, engine: EngineAddress, tmp_path: Path
) -> None:
    job = rl_job(base, quickstart_dir, engine, ROLLOUT)
    # One folder name for both: weight versions begin with it, and samples say which version they came from.
    straight, killed = (write_job_of_run(tmp_path / name, job) for name in ("straight", "killed"))
    finish(straight)
    kill_often(killed, seed=2, num_kills=6, max_steps=5)
    assert_same_run(straight, killed)


@pytest.mark.matrix
def test_rl_that_generates_ahead_killed_six_times_is_the_run_that_was_not(
    base: InputModel, quickstart_dir: Path, engine: EngineAddress, tmp_path: Path
) -> None:
    """Publications wait for what is under way, so no token depends on how fast it was sampled."""
    job = rl_job(base, quickstart_dir, engine, ROLLOUT.model_copy(update={"max_staleness": 2}))
    job = job.model_copy(update={"training": RL_TRAINING.model_copy(update={"keep_best": 0})})
    straight, killed = (write_job_of_run(tmp_path / name, job) for name in ("straight", "killed"))
    finish(straight)
    kill_often(killed, seed=4, num_kills=6, max_steps=5)
    assert_same_run(straight, killed)
    assert {row["staleness_max"] for row in read_rows(straight)} == {0.0, 1.0, 2.0}


@pytest.mark.matrix
def test_rl_with_over_sampling_follows_its_log_after_every_kill(
    base: InputModel, quickstart_dir: Path, engine: EngineAddress, tmp_path: Path
) -> None:
    job = rl_job(base, quickstart_dir, engine, OVER_SAMPLED)
    killed, replayed = (write_job_of_run(tmp_path / name, job) for name in ("killed", "replayed"))
    kill_often(killed, seed=3, num_kills=6, max_steps=5)
    schedules = schedules_of(killed)
    assert list(schedules) == list(range(1, RL_TRAINING.num_steps + 1))
    assert any(order != sorted(order) for order in schedules.values()), "timing decided nothing"
    # A run that nobody killed and whom the log tells, from its first step, what timing decided in the killed one.
    lines = [{"event": "rollouts_scheduled", "step": step, "completed": order} for step, order in schedules.items()]
    (replayed / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    finish(replayed)
    assert schedules_of(replayed) == schedules
    assert_same_run(killed, replayed)


def write_job_of_run(parent: Path, job: RLJob) -> Path:
    parent.mkdir()
    return write_job(parent / "rl-0123456789abcdef", job)


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.01])
def test_sigterm_waits_for_the_checkpoint_that_is_being_written(
    base: InputModel, quickstart_dir: Path, tmp_path: Path, delay_s: float
) -> None:
    path = quickstart_dir / "sft.jsonl"
    data = InputDataset(path=str(path), digest=digest_path(path))
    training = SFT_TRAINING.model_copy(update={"keep_best": 0})
    directory = write_job(tmp_path / "run", SFTJob(model=base, data=(data,), training=training, deployment=ONE_THREAD))
    process = start(directory)
    wait_while_it_runs(lambda: any(directory.glob("checkpoints/.*partial*")), process, START_TIMEOUT_S)
    time.sleep(delay_s)
    process.terminate()
    assert process.wait(120) == 128 + signal.SIGTERM
    checkpoints = list_checkpoints(directory / "checkpoints")
    assert checkpoints and not any((directory / "checkpoints").glob(".*"))
    saved = [line["step"] for line in read_json_lines(directory / "events.jsonl") if line["event"] == "checkpoint"]
    assert saved[-1] == verify_checkpoint(checkpoints[-1]).step
