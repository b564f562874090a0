"""Pins that a training whose GPU is full goes on by itself with less memory, and computes the same.

Real jobs run in processes whose GPU has room for a number of tokens (small_gpu/sitecustomize.py). Without these tests a
run would end after hours at its first long row, restart forever, or train to something else than its settings say.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollouts_core.config import (
    DeploymentConfig,
    ModelConfig,
    OptimConfig,
    PolicyConfig,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
)
from rollouts_core.data.rows import digest_path
from rollouts_core.fingerprint import digest_model, fingerprint_job
from rollouts_core.job import InputDataset, InputFile, InputModel, RLJob, SFTJob
from rollouts_core.less_memory import (
    FULL_GPU_CODE,
    LESS_MEMORY,
    Lowered,
    find_lowered,
    find_next,
    is_gpu_full,
    smaller_rl_batch,
    smaller_sft_batch,
    with_less,
)
from rollouts_core.metrics import EventLog, read_json_lines, read_metrics
from rollouts_core.run_directory import RunDirectory
from tests.kit.waiting import wait_until
from tests.rollouts_core.backends.test_launch import TWO, find_processes, finish, started, write_job
from tests.rollouts_core.make import make_groups
from tests.rollouts_core.small_gpu import lowered_in, use_small_gpu

ROUNDING = 2e-5
"""Largest difference of weights after ten steps of AdamW in float32 that differ in the order of sums."""
MAX_RESTARTS = 9
SFT = SFTTrainingConfig(
    num_steps=10,
    batch_size=4,
    micro_batch_size=4,
    max_length=128,
    packing=False,
    log_every=1,
    checkpoint_every=2,
    optim=OptimConfig(lr=1e-3),
)
LONG, SHORT = 74, 11
"""Positions of the longest row, and of each of the others."""


@pytest.fixture(scope="module")
def base(base_model: ModelConfig) -> InputModel:
    return InputModel(name="base", model=base_model, digest=digest_model(base_model))


def sft_job(
    folder: Path, base: InputModel, training: SFTTrainingConfig = SFT, *, longest: int = 66, **settings: Any
) -> SFTJob:
    """Fine-tune on forty demonstrations, one of them with a longer completion. Ten steps use each of them once."""
    path = folder / "rows.jsonl"
    lines = [f'{{"prompt": "{n}+1=", "completion": "{"7" * (longest if n == 17 else 3)}"}}\n' for n in range(10, 50)]
    path.write_text("".join(lines))
    data = (InputDataset(path=str(path), digest=digest_path(path)),)
    deployment = DeploymentConfig(trainer_threads=1)
    return SFTJob(**{"model": base, "data": data, "training": training, "deployment": deployment, **settings})


def with_training(job: SFTJob, **training: Any) -> SFTJob:
    return job.model_copy(update={"training": job.training.model_copy(update=training)})


def finish_with_restarts(directory: Path) -> tuple[int, int]:
    """The exit code of a job, which is started again as often as it asks for; and how often that was."""
    for num_restarts in range(MAX_RESTARTS):
        if (code := finish(directory)) != FULL_GPU_CODE:
            return code, num_restarts
    raise AssertionError(f"it asked for {MAX_RESTARTS} restarts")


def last_weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(max((directory / "checkpoints").glob("step_*")) / "model.safetensors")


def assert_same_but_rounding(first: Path, second: Path) -> None:
    torch.testing.assert_close(last_weights(first), last_weights(second), rtol=0, atol=ROUNDING)


def log_of(directory: Path) -> str:
    return (directory / "log.txt").read_text()[-6000:]


# ── real jobs ──


@pytest.mark.slow
def test_a_training_goes_on_with_smaller_micro_batches_and_computes_the_same(
    base: InputModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sft_job(tmp_path, base)
    small = write_job(tmp_path / "small_from_the_start", with_training(job, micro_batch_size=1))
    assert finish(small) == 0, log_of(small)
    run = write_job(tmp_path / "run", job)
    use_small_gpu(monkeypatch, num_tokens=LONG)
    assert finish_with_restarts(run) == (0, 2), log_of(run)
    assert lowered_in(run) == [("micro_batch_size", 4, 2), ("micro_batch_size", 2, 1)]
    resumed = [line["step"] for line in read_json_lines(run / "events.jsonl") if line["event"] == "resumed"]
    assert resumed[0] > 0 and len(resumed) == 2, "it went on from a checkpoint"
    assert_same_but_rounding(run, small)
    losses = [[line["loss"] for line in read_metrics(each / "metrics.jsonl")] for each in (run, small)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    (_, said) = [line for line in (run / "log.txt").read_text().splitlines() if line.startswith("rollouts: ")]
    assert said == (
        "rollouts: a GPU has too little memory (CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 79.10 GiB of which 1.20 GiB is free): the training restarts from its last checkpoint with "
        "training.sft.micro_batch_size = 1 (was 2)"
    )
    written = json.loads((run / "job.json").read_text())
    assert written["training"]["micro_batch_size"] == 4, "job.json has the user's settings"


@pytest.mark.slow
@pytest.mark.matrix
def test_activations_are_recomputed_where_one_row_is_too_much_and_a_killed_run_keeps_that(
    base: InputModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sft_job(tmp_path, base, SFT.model_copy(update={"micro_batch_size": 1, "num_steps": 40}))
    plain = write_job(tmp_path / "plain", job)
    assert finish(plain) == 0, log_of(plain)
    run = write_job(tmp_path / "run", job)
    use_small_gpu(monkeypatch, num_tokens=LONG - 1, LOG=tmp_path)
    assert finish(run) == FULL_GPU_CODE, log_of(run)
    with started(run) as process:
        wait_until(lambda: len([line for line in events_of(run) if line == "resumed"]) == 1)
        wait_until(lambda: events_of(run)[-1] == "checkpoint")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert finish(run) == 0, log_of(run)
    assert lowered_in(run) == [("policy.activation_checkpointing", False, True)]
    assert_same_but_rounding(run, plain)
    passes = [line.split() for line in (tmp_path / "passes-0").read_text().splitlines()]
    first = passes.index([str(LONG), "False"])
    assert {recomputes for _, recomputes in passes[first + 1 :]} == {"True"}


def events_of(directory: Path) -> list[str]:
    return [line["event"] for line in read_json_lines(directory / "events.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["use_less", "stop"])
def test_where_nothing_is_left_to_lower_the_user_is_told_what_was_tried_and_what_helps(
    answer: str, base: InputModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = PolicyConfig.model_validate({"on_out_of_memory": answer})
    run = write_job(tmp_path / "run", sft_job(tmp_path, base, SFT.model_copy(update={"policy": policy})))
    use_small_gpu(monkeypatch, num_tokens=1)
    num_restarts = 3 if answer == "use_less" else 0
    assert finish_with_restarts(run) == (2, num_restarts), log_of(run)
    (failed,) = [line["message"] for line in read_json_lines(run / "events.jsonl") if line["event"] == "failed"]
    tried = (
        ", also after the run set training.sft.micro_batch_size = 2 and training.sft.micro_batch_size = 1 and "
        "training.sft.policy.activation_checkpointing = true: lower training.sft.max_length, train adapters"
    )
    stopped = "1.20 GiB is free): lower training.sft.micro_batch_size (the result stays the same), "
    assert (tried if answer == "use_less" else stopped) in failed
    assert (run / "log.txt").read_text().splitlines()[-1] == f"rollouts: {failed}"


@pytest.mark.slow
@pytest.mark.matrix
def test_two_ranks_lower_the_same_though_only_the_follower_is_full(
    base: InputModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sft_job(tmp_path, base, longest=3, deployment=TWO)
    plain = write_job(tmp_path / "plain", job)
    assert finish(plain) == 0, log_of(plain)
    run = write_job(tmp_path / "run", job)
    use_small_gpu(monkeypatch, num_tokens=SHORT - 1, RANK=1, LOG=tmp_path)
    assert finish_with_restarts(run) == (0, 2), log_of(run)
    # Two rows on each of two ranks, so 2 rows per rank would be no smaller.
    assert lowered_in(run) == [("micro_batch_size", 4, 1), ("policy.activation_checkpointing", False, True)]
    for rank in (0, 1):
        passes = [line.split() for line in (tmp_path / f"passes-{rank}").read_text().splitlines()]
        assert passes[-1][1] == "True", f"rank {rank} does not recompute"
    assert_same_but_rounding(run, plain)
    assert not find_processes(run)


@pytest.mark.slow
def test_rl_goes_on_with_fewer_tokens_per_pass_down_to_its_longest_sample(
    base: InputModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = tmp_path / "steps"
    steps.mkdir()
    for step in (1, 2, 3):
        lines = [json.dumps(sample.to_json()) + "\n" for sample in make_groups(2, 4, seed=step)]
        (steps / f"step_{step:06d}.jsonl").write_text("".join(lines))
    training = RLTrainingConfig(num_steps=3, checkpoint_every=1, packing=False, optim=RLOptimConfig(lr=1e-3))
    job = RLJob(
        model=base,
        rollouts=InputFile(path=str(steps), digest=digest_path(steps)),
        training=training,
        rollout=RolloutConfig(),
        deployment=DeploymentConfig(trainer_threads=1),
    )
    plain, run = write_job(tmp_path / "plain", job), write_job(tmp_path / "run", job)
    assert finish(plain) == 0, log_of(plain)
    longest = max(len(sample.tokens) for step in (1, 2, 3) for sample in make_groups(2, 4, seed=step))
    use_small_gpu(monkeypatch, num_tokens=longest - 1)  # a sample of n tokens has n - 1 positions
    code, num_restarts = finish_with_restarts(run)
    assert code == 0 and num_restarts > 1, log_of(run)
    assert {setting for setting, _, _ in lowered_in(run)} == {"max_micro_batch_tokens"}
    assert lowered_in(run)[-1][2] <= longest
    assert_same_but_rounding(run, plain)


# ── the next setting ──


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "num_processes", "expected"),
    [
        *((8, 8, 1, 4), (8, 4, 1, 2), (8, 2, 1, 1), (8, 1, 1, None), (4, 64, 1, 2), (1, 8, 1, None)),
        *((6, 6, 1, 3), (6, 3, 1, 1), (15, 5, 1, 1), (12, 12, 1, 6)),  # a pass has a divisor of the rows of a step
        *((8, 8, 2, 2), (8, 8, 8, None), (9, 9, 2, 1)),  # each process has its share of the rows
    ],
)
def test_a_smaller_micro_batch_of_sft_divides_the_step_and_has_at_most_half_the_rows(
    batch_size: int, micro_batch_size: int, num_processes: int, expected: int | None, tmp_path: Path
) -> None:
    training = SFTTrainingConfig(batch_size=batch_size, micro_batch_size=micro_batch_size)
    found = smaller_sft_batch(training, RunDirectory(tmp_path), num_processes)
    assert found == (expected and Lowered("micro_batch_size", micro_batch_size, expected))


@pytest.mark.parametrize(
    ("limit", "lengths", "num_processes", "expected"),
    [
        *((16384, [9000] * 10, 1, 9000), (9000, [9000] * 10, 1, None), (8000, [9000] * 10, 1, None)),
        *((16384, [100] * 40, 1, 2000), (16384, [100] * 40, 2, 1000), (150, [100] * 40, 1, 100), (16384, [], 1, None)),
    ],
)
def test_a_smaller_micro_batch_of_rl_has_half_the_tokens_and_the_longest_sample(
    limit: int, lengths: list[int], num_processes: int, expected: int | None, tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path)
    directory.samples.mkdir()
    (directory.samples / "step_000001.jsonl").write_text(json.dumps({"tokens": [0] * 50_000}) + "\n")
    newest = directory.samples / "step_000002.jsonl"
    newest.write_text("".join(json.dumps({"tokens": [0] * length}) + "\n" for length in lengths))
    found = smaller_rl_batch(RLTrainingConfig(max_micro_batch_tokens=limit), directory, num_processes)
    assert found == (expected and Lowered("max_micro_batch_tokens", limit, expected))


def test_lowered_settings_are_kept_unless_the_configuration_is_lower_or_says_stop(
    base: InputModel, tmp_path: Path
) -> None:
    job, directory = sft_job(tmp_path, base), RunDirectory(tmp_path)
    with EventLog(directory.events) as events:
        for lowered in (Lowered("micro_batch_size", 4, 2), Lowered("policy.activation_checkpointing", False, True)):
            events.write(LESS_MEMORY, **lowered._asdict(), message="")
    found = with_less(job, directory)
    assert found.training.micro_batch_size == 2 and found.training.policy.activation_checkpointing
    assert fingerprint_job("sft", found) == fingerprint_job("sft", job)
    assert with_less(with_training(job, micro_batch_size=1), directory).training.micro_batch_size == 1
    assert find_next(found, directory) == Lowered("micro_batch_size", 2, 1)
    assert find_next(with_training(found, micro_batch_size=1), directory) is None
    stopped = with_training(job, policy=PolicyConfig(on_out_of_memory="stop"))
    assert with_less(stopped, directory) == stopped
    assert find_lowered(stopped, directory) == [] and find_next(stopped, directory) is None


def test_errors_of_full_gpus_are_known_by_both_backends_words() -> None:
    assert is_gpu_full(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_gpu_full(RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."))
    assert not is_gpu_full(RuntimeError("shapes cannot be multiplied"))
    assert not is_gpu_full(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."))


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "HIP error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    ],
)
def test_full_gpus_are_known_by_the_messages_of_libraries(message: str) -> None:
    assert is_gpu_full(RuntimeError(message))
