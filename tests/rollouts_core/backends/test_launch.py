"""A job that asks for two trainer processes: it starts them itself, ends as they end, and leaves none behind.

Without these tests a bad setting could look like a crash, and a worker that died could leave the others on a rented
machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollouts_core.backends.launch import choose_exit_code, num_processes
from rollouts_core.backends.protocol import TrainingBackend
from rollouts_core.backends.ranks import Ranks
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
from rollouts_core.job import EngineAddress, EvalJob, InputDataset, InputFile, InputModel, RLJob, ServeJob, SFTJob
from rollouts_core.jobs.training_job import run_training_job
from rollouts_core.metrics import EventLog, read_json_lines, read_metrics
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stopping import TrainingStop
from tests.kit.waiting import wait_until
from tests.rollouts_core.kill_rewards import grade_even_digits

REPOSITORY = Path(__file__).parents[3]
TIMEOUT_S = 90.0
TWO = DeploymentConfig(trainer_processes=2, trainer_threads=1)
SFT = SFTTrainingConfig(
    num_steps=4,
    batch_size=5,
    micro_batch_size=1,
    max_length=64,
    log_every=1,
    checkpoint_every=2,
    optim=OptimConfig(lr=1e-3),
)
ENDLESS = SFT.model_copy(update={"num_steps": 1_000_000, "checkpoint_every": 1_000_000})


def test_processes_without_a_gpu_of_their_own_share_the_cpu_also_where_there_is_one(
    base: InputModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process would ask for a second GPU, and no lock keeps others from the first."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices: list[torch.device] = []

    async def train(events: EventLog, ranks: Ranks | None, stop: TrainingStop) -> None:
        assert ranks is not None
        ranks.followers_wait = False
        devices.append(ranks.device)

    def create(ranks: Ranks | None) -> TrainingBackend:
        raise AssertionError("there is no other rank")

    run_training_job(sft_job(base, SFT, TWO), RunDirectory(tmp_path), create=create, train=train)
    assert devices == [torch.device("cpu")]


@pytest.fixture(scope="module")
def base(base_model: ModelConfig) -> InputModel:
    return InputModel(name="base", model=base_model, digest=digest_model(base_model))


def sft_job(base: InputModel, training: SFTTrainingConfig, deployment: DeploymentConfig = TWO) -> SFTJob:
    """Fine-tune the base model on the quickstart's demonstrations."""
    path = Path(base.model.path).parent / "sft.jsonl"
    data = (InputDataset(path=str(path), digest=digest_path(path)),)
    return SFTJob(model=base, data=data, training=training, deployment=deployment)


def write_job(directory: Path, job: SFTJob | RLJob | ServeJob) -> Path:
    directory.mkdir()
    (directory / "job.json").write_text(job.model_dump_json())
    return directory


def job_environment() -> dict[str, str]:
    """The environment of a job that may import the tests' rewards, besides what PYTHONPATH has already."""
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def started(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The job of a run directory under way; whatever of it is left at the end of the block is killed."""
    kind = json.loads((directory / "job.json").read_text())["kind"]
    with (directory / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollouts_core", kind, str(directory / "job.json")],
            cwd=REPOSITORY,
            env=job_environment(),
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        for pid in find_processes(directory):
            os.kill(pid, signal.SIGKILL)
        process.wait(10)


def find_processes(directory: Path) -> list[int]:
    """Every live process of a job."""
    table = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in table.splitlines() if str(directory / "job.json") in line]
    return [int(pid) for pid, state, _ in rows if not state.startswith("Z")]


def finish(directory: Path) -> int:
    """The exit code of a job that is run to its end."""
    with started(directory) as process:
        return process.wait(TIMEOUT_S)


def is_training(directory: Path) -> bool:
    return len(read_metrics(directory / "metrics.jsonl")) > 2


def test_only_training_asks_for_several_processes(base: InputModel) -> None:
    sft = sft_job(base, SFT)
    evaluation = EvalJob(checkpoints=(base,), data=InputFile(path="rows", digest=""), evaluation={}, deployment=TWO)
    assert [num_processes(job) for job in (sft, evaluation)] == [2, 1]
    assert DeploymentConfig(trainer_gpu_ranks=(4, 5, 6)).num_trainer_processes == 3
    assert DeploymentConfig(trainer_gpu_ranks=(4, 5, 6), trainer_processes=1).num_trainer_processes == 1


@pytest.mark.parametrize(
    ("exit_codes", "expected"),
    [
        *(({0: 1}, 1), ({0: 2, 1: 1}, 2), ({1: 1, 0: 2}, 2), ({0: 1, 1: -9}, -9), ({0: 3}, 3)),
        *(({0: 1, 1: 76}, 76), ({0: -9, 1: 76}, 76), ({0: 2, 1: 76}, 2)),
        # torchrun ends the others by SIGTERM
        *(({0: -15, 1: -9}, -9), ({0: 143, 1: -9}, -9), ({0: -15, 1: 1}, 1), ({0: -15, 1: 2}, 2), ({0: 143}, 143)),
    ],
)
def test_the_exit_code_is_that_of_the_cause(exit_codes: dict[int, int], expected: int) -> None:
    assert choose_exit_code(exit_codes) == expected


def test_a_pool_that_user_code_never_closes_does_not_keep_a_worker(tmp_path: Path) -> None:
    """A reward function has one for its whole module, and a rented machine would wait for its threads for ever."""
    program = tmp_path / "program.py"
    program.write_text(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from rollouts_core.backends.launch import run_worker\n"
        "pool = ThreadPoolExecutor()\n"
        "run_worker(lambda: pool.submit(int, '3').result())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    worker = subprocess.run([sys.executable, str(program)], env=environment, timeout=20.0, check=False)
    assert worker.returncode == 3


@pytest.mark.slow
def test_two_processes_leave_what_one_leaves(base: InputModel, tmp_path: Path) -> None:
    one = write_job(tmp_path / "one", sft_job(base, SFT, DeploymentConfig(trainer_threads=1)))
    two = write_job(tmp_path / "two", sft_job(base, SFT))
    assert finish(one) == finish(two) == 0
    assert find_processes(two) == []
    assert not (two / "torchrun").exists()
    losses = [[line["loss"] for line in read_metrics(run / "metrics.jsonl")] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    events = [[line["event"] for line in read_json_lines(run / "events.jsonl")] for run in (one, two)]
    assert events[0] == events[1]
    weights = [load_file(run / "checkpoints" / "step_000004" / "model.safetensors") for run in (one, two)]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-5, rtol=1e-4)
    assert json.loads((two / "result.json").read_text())["num_samples"] == 40


@pytest.mark.matrix
@pytest.mark.slow
def test_two_nodes_that_torchrun_starts_leave_what_two_processes_of_one_leave(base: InputModel, tmp_path: Path) -> None:
    together = write_job(tmp_path / "together", sft_job(base, SFT))
    assert finish(together) == 0, (together / "log.txt").read_text()
    job = sft_job(base, SFT, TWO.model_copy(update={"trainer_processes": 0}))
    nodes = [write_job(tmp_path / f"node{rank}", job) for rank in range(2)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = [start_node(directory, rank, port) for rank, directory in enumerate(nodes)]
    try:
        assert [agent.wait(TIMEOUT_S) for agent in agents] == [0, 0], (nodes[0] / "log.txt").read_text()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    names = {path.name for path in nodes[1].iterdir()}
    assert names == {"job.json", "log.txt"}, "only the leader writes"
    weights = [load_file(each / "checkpoints/step_000004/model.safetensors") for each in (together, nodes[0])]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def start_node(directory: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
    """One of two nodes, as docs/multi_gpu.md starts them."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"]
    size = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
    logs = ["--log-dir", str(directory.with_name(f"{directory.name}-torchrun"))]
    command = [sys.executable, "-m", "torch.distributed.run", *size, *rendezvous, *logs, "-m", "rollouts_core", "sft"]
    with (directory / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [*command, str(directory / "job.json")],
            cwd=REPOSITORY,
            env=job_environment(),
            stdout=log,
            stderr=log,
        )


@pytest.mark.slow
def test_a_mistake_of_the_user_is_told_as_one(base: InputModel, tmp_path: Path) -> None:
    job = sft_job(base.model_copy(update={"digest": "of another model"}), SFT)
    run = write_job(tmp_path / "sft", job)
    assert finish(run) == 2
    failures = [line["message"] for line in read_json_lines(run / "events.jsonl") if line["event"] == "failed"]
    assert len(failures) == 1 and "changed since the stage was planned" in failures[0]
    assert (run / "log.txt").read_text().splitlines()[-1] == f"rollouts: {failures[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_a_worker_that_is_killed_ends_the_job_with_its_signal(base: InputModel, tmp_path: Path, rank: int) -> None:
    run = write_job(tmp_path / "sft", sft_job(base, ENDLESS))
    with started(run) as process:
        wait_until(lambda: is_training(run))
        [leader] = [line["pid"] for line in read_json_lines(run / "events.jsonl") if line["event"] == "started"]
        [follower] = set(find_processes(run)) - {leader, process.pid}
        os.kill((leader, follower)[rank], signal.SIGKILL)
        assert process.wait(120) == -signal.SIGKILL
        wait_until(lambda: not find_processes(run), timeout_s=60)
    assert f"rank {rank} was killed by signal 9" in (run / "log.txt").read_text()
    assert not (run / "torchrun").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.matrix), signal.SIGKILL])
def test_nothing_is_left_of_a_job_that_is_ended(base: InputModel, tmp_path: Path, number: signal.Signals) -> None:
    run = write_job(tmp_path / "sft", sft_job(base, ENDLESS))
    with started(run) as process:
        wait_until(lambda: is_training(run))
        assert len(find_processes(run)) == 3
        process.send_signal(number)
        code = process.wait(120)
        wait_until(lambda: not find_processes(run), timeout_s=60)
    assert code == (128 + number if number == signal.SIGTERM else -number)
    assert "Traceback" not in (run / "log.txt").read_text()


@pytest.mark.slow
def test_rl_with_two_trainers_and_an_engine_trains_what_one_trains(base: InputModel, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = ServeJob(model=base, port=port, context_length=128, deployment=DeploymentConfig(trainer_threads=1))
    prompts = Path(base.model.path).parent / "prompts.jsonl"
    address = EngineAddress(url=f"http://127.0.0.1:{port}", lease_file=str(tmp_path / "lease"))
    histories = []
    for deployment in (TWO, DeploymentConfig(trainer_threads=1)):
        name = f"rl-{deployment.num_trainer_processes}"
        job = RLJob(
            model=base,
            prompts=InputFile(path=str(prompts), digest=digest_path(prompts)),
            training=RLTrainingConfig(num_steps=2, checkpoint_every=2, optim=RLOptimConfig(lr=1e-3)),
            rollout=RolloutConfig(
                batch_size=3,
                n_samples_per_prompt=4,
                sampling=SamplingConfig(max_new_tokens=8),
                reward_fn=grade_even_digits,
            ),
            engines=(address,),
            deployment=deployment,
        )
        with started(write_job(tmp_path / f"engine-{name}", serve)):  # each begins with the start weights
            run = write_job(tmp_path / name, job)
            assert finish(run) == 0
        histories.append(read_metrics(run / "metrics.jsonl"))
        assert [line["event"] for line in read_json_lines(run / "events.jsonl")].count("weights_published") == 2
    for two, one in zip(*histories, strict=True):
        for metric in ("loss", "grad_norm", "reward", "kl_rollout_policy"):
            assert two[metric] == pytest.approx(one[metric], rel=1e-3, abs=1e-5)
