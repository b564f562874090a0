"""Jobs as the node runs them: a job.json goes in, a record comes out beside it.

Without these tests a kind of job that no pipeline of the other tests uses could be broken: generate, and evaluation by
loss.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollouts_core.__main__ import is_disk_full, main
from rollouts_core.checkpoint import load_manifest
from rollouts_core.config import (
    DeploymentConfig,
    EngineConfig,
    EvaluationConfig,
    LoRAConfig,
    ModelConfig,
    OptimConfig,
    PolicyConfig,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
    SFTTrainingConfig,
)
from rollouts_core.data.rows import digest_path
from rollouts_core.errors import DataError, EnvironmentUnavailableError
from rollouts_core.fingerprint import digest_checkpoint, digest_model
from rollouts_core.job import (
    JOB_KINDS,
    EngineAddress,
    EvalJob,
    GenerateJob,
    InputDataset,
    InputFile,
    InputModel,
    Job,
    RLJob,
    ServeJob,
    SFTJob,
)
from rollouts_core.jobs.job_inputs import checked_file
from rollouts_core.metrics import read_json_lines, read_metrics
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.roll_back import RollBack
from rollouts_core.types import Sample, sample_from_json
from tests.kit.nvidia_smi import install_nvidia_smi
from tests.rollouts_core.kill_rewards import grade_even_digits
from tests.rollouts_core.model.test_logit_transforms import make_model
from tests.rollouts_core.served_engine import engine_url

ONE_THREAD = DeploymentConfig(trainer_threads=1)
ROLLOUT = RolloutConfig(environment="arithmetic", n_samples_per_prompt=2, sampling=SamplingConfig(max_new_tokens=8))


def do(job: Job, run_dir: Path) -> dict[str, Any]:
    """The record of a job that is run in a directory."""
    run_dir.mkdir()
    (run_dir / "job.json").write_text(job.model_dump_json())
    assert main([job.kind, str(run_dir / "job.json")]) == 0
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return result


def rows(quickstart_dir: Path, name: str) -> InputFile:
    path = quickstart_dir / f"{name}.jsonl"
    return InputFile(path=str(path), digest=digest_path(path))


@pytest.fixture
def base(base_model: ModelConfig) -> InputModel:
    return InputModel(name="base", model=base_model, digest=digest_model(base_model))


def test_generate_writes_graded_completions_of_every_prompt(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    job = GenerateJob(model=base, prompts=rows(quickstart_dir, "heldout"), rollout=ROLLOUT, deployment=ONE_THREAD)
    result = do(job, tmp_path / "generate-1")
    samples = [sample_from_json(line) for line in read_json_lines(tmp_path / "generate-1/samples/completions.jsonl")]
    assert len(samples) == result["num_samples"] == 16
    assert all(sample.reward is not None and any(sample.loss_mask) for sample in samples)
    assert result["num_rows"] == 8


def test_the_log_of_a_job_has_the_traceback_of_a_users_function(
    base: InputModel,
    quickstart_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rollout = ROLLOUT.model_copy(update={"reward_fn": "tests.rollouts_core.user_code.test_failures:look_up"})
    job = GenerateJob(model=base, prompts=rows(quickstart_dir, "heldout"), rollout=rollout, deployment=ONE_THREAD)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    assert main(["generate", str(tmp_path / "job.json")]) == 2
    assert "raised KeyError: 'rubric' (test_failures.py, line " in capsys.readouterr().err.splitlines()[-1]
    assert 'return rubrics["rubric"]' in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_or_a_quota_that_is_full_is_for_the_user_to_mend(
    number: int,
    base: InputModel,
    quickstart_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Clusters give each user a quota. Without a sentence for it that looks like a bug, and is tried again."""

    def find_no_room(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    job = GenerateJob(model=base, prompts=rows(quickstart_dir, "heldout"), rollout=ROLLOUT, deployment=ONE_THREAD)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    monkeypatch.setattr(os, "fsync", find_no_room)
    assert main(["generate", str(tmp_path / "job.json")]) == 2
    said = f"rollouts: the disk is full ([Errno {number}] {os.strerror(number)}): free some space, then start again"
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert is_disk_full(SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})"))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 "
                "GiB is free. Including non-PyTorch memory, this process has 77.89 GiB memory in use."
            ),
            "(CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 "
            "GiB is free): lower training.sft.max_length, set training.sft.policy.activation_checkpointing, ",
        ),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."),
            "(RESOURCE_EXHAUSTED: Out",
        ),
    ],
)
def test_a_gpu_that_is_full_is_for_the_user_to_mend(
    error: RuntimeError,
    told: str,
    base: InputModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a sentence it looks like a bug, and the settings that help are in the documents alone."""

    def find_no_room(_: object) -> None:
        raise error

    training = SFTTrainingConfig(num_steps=1, batch_size=1)
    job = SFTJob(
        model=base, data=(InputDataset(path="rows.jsonl", digest=""),), training=training, deployment=ONE_THREAD
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    monkeypatch.setattr("rollouts_core.__main__._load_runner", lambda job: find_no_room)
    assert main(["sft", str(tmp_path / "job.json")]) == 2
    assert told in capsys.readouterr().err.splitlines()[-1]
    [event] = read_json_lines(tmp_path / "events.jsonl")
    assert event["event"] == "failed" and told in event["message"]


def warnings_of(run_dir: Path) -> list[str]:
    return [line["message"] for line in read_json_lines(run_dir / "events.jsonl") if line["event"] == "warning"]


@pytest.mark.slow
def test_a_training_says_that_its_own_cpu_is_slow_in_bfloat16(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    """It may run elsewhere than the checks did."""
    file = rows(quickstart_dir, "sft")
    job = SFTJob(
        model=base,
        data=(InputDataset(path=file.path, digest=file.digest),),
        training=SFTTrainingConfig(num_steps=1, batch_size=1, policy=PolicyConfig(precision="bfloat16")),
        deployment=ONE_THREAD,
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "rollouts_core", "sft", str(tmp_path / "job.json")]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [warning] = warnings_of(tmp_path)
    assert warning in done.stderr and 'training.sft.policy.precision "bfloat16" is about' in warning


@pytest.mark.slow
def test_an_evaluation_and_a_server_say_that_their_engine_is_slow_in_bfloat16(
    base: InputModel, quickstart_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine itself is missing: both say so before they start it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("rollouts_core.checks.cpu_formats.measure_factor", lambda: 32.0)
    engine = EngineConfig(kind="sglang", dtype="bfloat16", python=str(tmp_path / "missing"))
    rollout = ROLLOUT.model_copy(update={"engine": engine})
    evaluation = EvalJob(
        checkpoints=(base,),
        data=rows(quickstart_dir, "sft"),
        evaluation=EvaluationConfig(max_prompts=2),
        rollout=rollout,
        deployment=ONE_THREAD,
    )
    by_loss = evaluation.model_copy(update={"evaluation": EvaluationConfig(metric="loss", max_prompts=2)})
    server = ServeJob(model=base, port=0, context_length=64, engine=engine)
    found = {}
    jobs: dict[str, EvalJob | ServeJob] = {"evaluation": evaluation, "by loss": by_loss, "server": server}
    for name, job in jobs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(job.model_dump_json())
        main([job.kind, str(tmp_path / name / "job.json")])
        found[name] = [warning.partition(" times")[0] for warning in warnings_of(tmp_path / name)]
    told = ['rollout.engine.dtype "bfloat16" is about 32']
    assert found == {"evaluation": told, "by loss": [], "server": told}


def test_the_same_generation_twice_gives_the_same_completions(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    job = GenerateJob(model=base, prompts=rows(quickstart_dir, "heldout"), rollout=ROLLOUT, deployment=ONE_THREAD)
    for name in ("first", "second"):
        do(job, tmp_path / name)
    first, second = (tmp_path / name / "samples/completions.jsonl" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_evaluation_by_loss_scores_demonstrations_and_names_the_better_model(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    job = EvalJob(
        checkpoints=(base, base.model_copy(update={"name": "same"})),
        data=rows(quickstart_dir, "sft"),
        evaluation=EvaluationConfig(metric="loss", max_prompts=5),
        deployment=ONE_THREAD,
    )
    result = do(job, tmp_path / "eval-1")
    first, second = result["checkpoints"]
    assert first["scores"] == second["scores"]
    assert len(first["scores"]) == 5
    assert all(-10 < score < -1 for score in first["scores"])  # an untrained model: about -log(29) = -3.4 nats
    assert result["best"] == "base"


def test_losses_over_other_tokens_are_not_compared(
    base: InputModel, quickstart_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(base.model.path, other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("message['content']", "message['content'] + '1'"))
    model = ModelConfig(path=str(other))
    job = EvalJob(
        checkpoints=(base, InputModel(name="other", model=model, digest=digest_model(model))),
        data=rows(quickstart_dir, "sft"),
        evaluation=EvaluationConfig(metric="loss", max_prompts=5),
        deployment=ONE_THREAD,
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    assert main(["eval", str(tmp_path / "job.json")]) == 2
    assert "base and other have different tokens for the same demonstrations" in capsys.readouterr().err


def diverge(base: InputModel, folder: Path, tensor: str, value: float) -> InputModel:
    """The model with a tensor of which all but the first two rows, or numbers, are this number."""
    shutil.copytree(base.model.path, folder)
    weights = load_file(folder / "model.safetensors")
    weights[tensor][2:] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = ModelConfig(path=str(folder))
    return InputModel(name=folder.name, model=model, digest=digest_model(model), step=10)


@pytest.mark.parametrize(
    ("metric", "data", "tensor", "value"),
    [
        ("loss", "sft", "model.norm.weight", 3e38),
        ("loss", "sft", "model.norm.weight", math.nan),
        ("loss", "sft", "model.embed_tokens.weight", math.nan),  # two tokens, tried at its start, compute numbers
        ("accuracy", "heldout", "model.norm.weight", math.nan),
        ("accuracy", "heldout", "model.norm.weight", 3e38),
    ],
)
def test_a_checkpoint_that_diverged_is_not_chosen_and_ends_a_comparison(
    base: InputModel,
    quickstart_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    metric: Literal["loss", "accuracy"],
    data: str,
    tensor: str,
    value: float,
) -> None:
    diverged = diverge(base, tmp_path / "step_000010", tensor, value)
    job = EvalJob(
        checkpoints=(diverged, base),
        data=rows(quickstart_dir, data),
        evaluation=EvaluationConfig(metric=metric, max_prompts=5),
        rollout=ROLLOUT,
        deployment=ONE_THREAD,
        is_selection=True,
    )
    result = do(job, tmp_path / "select")
    assert ([entry["name"] for entry in result["checkpoints"]], result["best"]) == (["base"], "base")
    assert result["warning"].startswith("step_000010 has no score and cannot be chosen: ")
    for name, other, words in (
        ("none", {"checkpoints": (diverged,)}, "no checkpoint has a score; step_000010 has no score and"),
        ("evaluate", {"is_selection": False}, f"{tmp_path}/step_000010"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(job.model_copy(update=other).model_dump_json())
        assert main(["eval", str(tmp_path / name / "job.json")]) == 2
        assert words in capsys.readouterr().err


def test_evaluation_by_accuracy_keeps_what_every_model_said(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    job = EvalJob(
        checkpoints=(base,),
        data=rows(quickstart_dir, "heldout"),
        evaluation=EvaluationConfig(samples_per_prompt=3, temperature=1.0),
        rollout=ROLLOUT,
        deployment=ONE_THREAD,
    )
    result = do(job, tmp_path / "eval-2")
    [entry] = result["checkpoints"]
    assert entry["num_rows"] == 8
    samples = read_json_lines(tmp_path / "eval-2/samples/base.jsonl")
    assert len(samples) == 24
    right = [sum(each["reward"] == 1 for each in samples if each["group_index"] == prompt) for prompt in range(8)]
    assert (entry["samples_per_prompt"], entry["num_right"], len(entry["majority"])) == (3, right, 8)


def reward_that_is_away(sample: Sample) -> float:
    raise EnvironmentUnavailableError("the judge is away")


@pytest.mark.parametrize("is_whole", [True, False])
def test_completions_of_an_attempt_that_could_not_be_graded_are_graded_by_the_next_one(
    base: InputModel, quickstart_dir: Path, tmp_path: Path, is_whole: bool
) -> None:
    job = EvalJob(
        checkpoints=(base,),
        data=rows(quickstart_dir, "heldout"),
        evaluation=EvaluationConfig(),
        rollout=ROLLOUT.model_copy(update={"reward_fn": reward_that_is_away, "max_outage_minutes": 0.0}),
        deployment=ONE_THREAD,
    )
    run_dir = tmp_path / "eval-3"
    with pytest.raises(EnvironmentUnavailableError, match="the judge is away"):
        do(job, run_dir)
    kept = run_dir / "samples/base.jsonl"
    samples = read_json_lines(kept)
    assert len(samples) == 8
    # As the untrained model would hardly have said.
    right = [{**sample, "response": f":{sample['metadata']['answer']}", "status": "completed"} for sample in samples]
    kept.write_text("".join(json.dumps(sample) + "\n" for sample in right[: 8 if is_whole else 7]))
    (run_dir / "job.json").write_text(job.model_copy(update={"rollout": ROLLOUT}).model_dump_json())
    assert main(["eval", str(run_dir / "job.json")]) == 0
    [scored] = json.loads((run_dir / "result.json").read_text())["checkpoints"]
    assert scored["scores"] == [float(is_whole)] * 8 and "num_right" not in scored
    assert [line["reward"] for line in read_json_lines(kept)] == scored["scores"]


def test_a_job_that_was_changed_takes_no_completions_of_what_it_was(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    """As where somebody tries out temperatures or checkpoints by the same job.json."""
    job = GenerateJob(model=base, prompts=rows(quickstart_dir, "heldout"), rollout=ROLLOUT, deployment=ONE_THREAD)
    run_dir = tmp_path / "generate-3"
    do(job, run_dir)
    short = ROLLOUT.model_copy(update={"sampling": SamplingConfig(max_new_tokens=1)})
    (run_dir / "job.json").write_text(job.model_copy(update={"rollout": short}).model_dump_json())
    assert main(["generate", str(run_dir / "job.json")]) == 0
    samples = read_json_lines(run_dir / "samples/completions.jsonl")
    assert [sum(sample["loss_mask"]) for sample in samples] == [1.0] * 16


def test_a_finished_job_says_when_it_started(base: InputModel, quickstart_dir: Path, tmp_path: Path) -> None:
    job = GenerateJob(model=base, prompts=rows(quickstart_dir, "heldout"), rollout=ROLLOUT, deployment=ONE_THREAD)
    do(job, tmp_path / "generate-2")
    events = read_json_lines(tmp_path / "generate-2/events.jsonl")
    assert [(event["event"], event["attempt"]) for event in events] == [("started", 1), ("completing", 1)]


CONSTANT = OptimConfig(lr=1e-3, schedule="constant")


def sft_job(base: InputModel, quickstart_dir: Path, **training: Any) -> SFTJob:
    settings = {"num_steps": 4, "batch_size": 2, "checkpoint_every": 2, "log_every": 1, "optim": CONSTANT, **training}
    source = settings.get("resume_from", "")
    return SFTJob(
        model=base,
        data=(dataset(quickstart_dir / "sft.jsonl"),),
        training=SFTTrainingConfig(**settings),
        resume_digest=digest_checkpoint(source),
        deployment=ONE_THREAD,
    )


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl")]


@pytest.mark.slow
def test_a_finished_stage_is_extended_by_another_that_goes_on_from_it(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    do(sft_job(base, quickstart_dir, num_steps=6), tmp_path / "straight")
    do(sft_job(base, quickstart_dir), tmp_path / "first")
    result = do(sft_job(base, quickstart_dir, num_steps=6, resume_from=str(tmp_path / "first")), tmp_path / "second")
    assert losses(tmp_path / "first") + losses(tmp_path / "second") == losses(tmp_path / "straight")
    ends = [tmp_path / name / "checkpoints/step_000006" for name in ("straight", "second")]
    assert load_manifest(ends[0]).files == load_manifest(ends[1]).files
    assert [entry["name"] for entry in result["checkpoints"]] == ["step_000004", "step_000006"]


def test_sft_leaves_rows_as_it_sees_them_and_says_on_which_machine(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    num_rows = len((quickstart_dir / "sft.jsonl").read_text().splitlines())
    do(sft_job(base, quickstart_dir, max_length=30, on_overlong="drop"), tmp_path / "sft")
    described = json.loads((tmp_path / "sft/rows.json").read_text())
    assert described["num_rows"] == num_rows and 0 < described["num_dropped"] < num_rows
    assert sum(described["length_counts"]) == num_rows - described["num_dropped"]
    assert 0 < described["trained_share"] < 1
    shown = described["rows"]
    assert {row["outcome"] for row in shown} == {"trained", "dropped"} and len(shown) == min(num_rows, 100)
    assert all(row["reason"] for row in shown if row["outcome"] == "dropped")
    trained = next(row for row in shown if row["outcome"] == "trained")
    assert len(trained["tokens"]) == len(trained["loss_mask"]) == trained["num_tokens"]
    started = read_json_lines(tmp_path / "sft/events.jsonl")[1]
    assert started["event"] == "started" and started["host"] and started["versions"]["torch"] == torch.__version__


@pytest.mark.slow
def test_a_training_leaves_the_use_of_its_gpus_where_there_are_any(
    base: InputModel, quickstart_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(sft_job(base, quickstart_dir), tmp_path / "without")
    assert not (tmp_path / "without/gpu_use.jsonl").exists()
    install_nvidia_smi(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    do(sft_job(base, quickstart_dir), tmp_path / "with")
    [sample, *_] = read_json_lines(tmp_path / "with/gpu_use.jsonl")
    assert (sample["attempt"], [reading["use_percent"] for reading in sample["gpus"]]) == (1, [97.0])


def test_settings_of_the_policy_reach_the_training(base: InputModel, quickstart_dir: Path, tmp_path: Path) -> None:
    lora = LoRAConfig(rank=4, target_modules=("q_proj",))
    do(sft_job(base, quickstart_dir, policy=PolicyConfig(lora=lora, precision="bfloat16")), tmp_path / "lora")
    weights = load_file(tmp_path / "lora/checkpoints/step_000004/model.safetensors")
    before = load_file(Path(base.model.path) / "model.safetensors")
    changed = {name for name in weights if not torch.equal(weights[name].float(), before[name].bfloat16().float())}
    assert changed == {name for name in before if name.endswith("q_proj.weight")}


def test_the_loss_of_evaluation_demonstrations_is_logged_and_decides_which_checkpoints_stay(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    kept = {"checkpoint_every": 1, "keep_checkpoints": 1, "keep_best": 1}
    job = sft_job(base, quickstart_dir, eval_every=1, **kept)
    result = do(job.model_copy(update={"eval_data": rows(quickstart_dir, "sft")}), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run/metrics.jsonl")
    losses = {row["step"]: row["eval_loss"] for row in metrics if row.get("eval_loss")}
    assert list(losses) == [1, 2, 3, 4]
    assert [entry["step"] for entry in result["checkpoints"]] == sorted({min(losses, key=losses.__getitem__), 4})


@pytest.mark.slow
def test_a_training_that_a_rule_rolled_back_has_its_best_checkpoint_as_its_only_result(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    """The learning rate rises until the training diverges."""
    diverging = {"optim": OptimConfig(lr=3.0, num_warmup_steps=40, max_grad_norm=1e9), "roll_back_on": ("loss_risen",)}
    kept = {"num_steps": 60, "checkpoint_every": 10, "eval_every": 10, "keep_best": 1}
    job = sft_job(base, quickstart_dir, **kept, **diverging)
    few = tmp_path / "few.jsonl"
    few.write_text("".join((quickstart_dir / "sft.jsonl").read_text().splitlines(keepends=True)[:4]))
    job = job.model_copy(update={"eval_data": InputFile(path=str(few), digest=digest_path(few))})
    result = do(job, tmp_path / "run")
    roll_back = RollBack.model_validate(result["rolled_back"])
    assert (roll_back.rule, roll_back.num_steps, roll_back.metric) == ("loss_risen", 60, "eval_loss")
    metrics = read_metrics(tmp_path / "run/metrics.jsonl")
    found = {row["step"]: row["eval_loss"] for row in metrics if row.get("eval_loss")}
    assert found[roll_back.step] == roll_back.value == min(found.values())
    assert [entry["step"] for entry in result["checkpoints"]] == [roll_back.step]
    assert result["warning"] == roll_back.sentence and "finished_early" not in result
    (tmp_path / "run/result.json").unlink()  # as if the job had been killed before it wrote the result
    assert main(["sft", str(tmp_path / "run/job.json")]) == 0
    assert json.loads((tmp_path / "run/result.json").read_text()) == result
    whole = job.training.model_copy(update={"num_steps": roll_back.from_step, "roll_back_on": ()})
    (tmp_path / "run/job.json").write_text(job.model_copy(update={"training": whole}).model_dump_json())
    assert main(["sft", str(tmp_path / "run/job.json")]) == 0
    assert "rolled_back" not in json.loads((tmp_path / "run/result.json").read_text()), "of an earlier attempt"


@pytest.mark.slow
def test_going_on_from_a_checkpoint_that_is_another_now_is_refused(
    base: InputModel, quickstart_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    do(sft_job(base, quickstart_dir), tmp_path / "first")
    job = sft_job(base, quickstart_dir, num_steps=8, resume_from=str(tmp_path / "first"))
    do(sft_job(base, quickstart_dir, num_steps=6, resume_from=str(tmp_path / "first")), tmp_path / "second")
    (tmp_path / "second/checkpoints/step_000006").rename(tmp_path / "first/checkpoints/step_000006")
    (tmp_path / "third").mkdir()
    (tmp_path / "third/job.json").write_text(job.model_dump_json())
    assert main(["sft", str(tmp_path / "third/job.json")]) == 2
    assert "changed since the stage was planned" in capsys.readouterr().err


@pytest.mark.slow
def test_going_on_with_other_settings_is_refused_in_one_sentence(
    base: InputModel, quickstart_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    do(sft_job(base, quickstart_dir), tmp_path / "first")
    job = sft_job(base, quickstart_dir, num_steps=6, batch_size=4, resume_from=str(tmp_path / "first"))
    (tmp_path / "second").mkdir()
    (tmp_path / "second/job.json").write_text(job.model_dump_json())
    assert main(["sft", str(tmp_path / "second/job.json")]) == 2
    assert "batch_size was 2 and is 4" in capsys.readouterr().err
    allowed = job.model_copy(update={"training": job.training.model_copy(update={"allow_changed": ("batch_size",)})})
    (tmp_path / "second/job.json").write_text(allowed.model_dump_json())
    assert main(["sft", str(tmp_path / "second/job.json")]) == 0


def test_a_checkpoint_of_another_model_is_refused(
    base: InputModel, quickstart_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    do(sft_job(base, quickstart_dir), tmp_path / "first")
    shutil.copytree(base.model.path, tmp_path / "model")
    (tmp_path / "model/README.md").write_text("another one")
    other = ModelConfig(path=str(tmp_path / "model"))
    model = InputModel(name="base", model=other, digest=digest_model(other))
    (tmp_path / "second").mkdir()
    job = sft_job(model, quickstart_dir, num_steps=6, resume_from=str(tmp_path / "first"))
    (tmp_path / "second/job.json").write_text(job.model_dump_json())
    assert main(["sft", str(tmp_path / "second/job.json")]) == 2
    assert "model was" in capsys.readouterr().err


def dataset(path: Path, **share: Any) -> InputDataset:
    """A dataset as a plan names it."""
    return InputDataset(path=str(path), digest=digest_path(path), **share)


def mixture_job(base: InputModel, quickstart_dir: Path, **changes: Any) -> SFTJob:
    """Two steps on a mixture of two files."""
    data = (
        dataset(quickstart_dir / "sft.jsonl", max_samples=30),
        dataset(quickstart_dir / "sft.jsonl", repeat=0.5),
    )
    training = SFTTrainingConfig(num_steps=2, batch_size=2, micro_batch_size=2, max_length=64)
    return SFTJob(model=base, data=data, training=training, deployment=ONE_THREAD).model_copy(update=changes)


def test_sft_on_a_mixture_is_the_same_streamed_or_not(base: InputModel, quickstart_dir: Path, tmp_path: Path) -> None:
    kept = do(mixture_job(base, quickstart_dir), tmp_path / "sft-kept")
    streamed = do(mixture_job(base, quickstart_dir, streaming=True), tmp_path / "sft-streamed")
    assert kept == streamed
    assert kept["num_samples"] == 30 + 40


def test_sft_refuses_data_that_changed_since_it_was_planned(
    base: InputModel, quickstart_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes((quickstart_dir / "sft.jsonl").read_bytes())
    job = mixture_job(base, quickstart_dir, data=(dataset(path),))
    path.write_bytes(path.read_bytes().replace(b"+", b"-", 1))
    (tmp_path / "sft-1").mkdir()
    (tmp_path / "sft-1" / "job.json").write_text(job.model_dump_json())
    assert main(["sft", str(tmp_path / "sft-1" / "job.json")]) == 2
    assert "rows.jsonl changed since the stage was planned" in capsys.readouterr().err


def run_rl(base: InputModel, quickstart_dir: Path, run_dir: Path, *, replicate: int) -> list[Sample]:
    """The samples of two steps of RL with adapters and dropout, against an engine that starts anew."""
    policy = PolicyConfig(lora=LoRAConfig(rank=2, dropout=0.5))
    optim = RLOptimConfig(lr=1e-2, eps=1e-3)
    rollout = ROLLOUT.model_copy(update={"batch_size": 3, "reward_fn": grade_even_digits})
    with engine_url(Path(base.model.path)) as url:
        job = RLJob(
            model=base,
            prompts=rows(quickstart_dir, "prompts"),
            training=RLTrainingConfig(num_steps=2, policy=policy, optim=optim, replicate=replicate),
            rollout=rollout,
            engines=(EngineAddress(url=url, lease_file=str(run_dir) + ".lease"),),
            deployment=ONE_THREAD,
        )
        assert do(job, run_dir)["num_drawn"] == 2 * 3
    lines = [line for step in (1, 2) for line in read_json_lines(run_dir / f"samples/step_{step:06d}.jsonl")]
    return [sample_from_json(line) for line in lines]


def adapters(run_dir: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(run_dir / "checkpoints/step_000002/trainer/tensors.safetensors")
    return {name: value for name, value in tensors.items() if name.endswith("lora_A.default.weight")}


@pytest.mark.slow
def test_a_replicate_draws_every_random_number_anew_and_0_is_the_run_itself(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    runs = {
        name: run_rl(base, quickstart_dir, tmp_path / name, replicate=replicate)
        for name, replicate in (("first", 0), ("again", 0), ("other", 1), ("third", 2))
    }
    assert runs["again"] == runs["first"]
    for one, two in (("first", "other"), ("other", "third")):
        assert [s.metadata["prompt_id"] for s in runs[one]] != [s.metadata["prompt_id"] for s in runs[two]]
        assert [s.response for s in runs[one]] != [s.response for s in runs[two]]
        ours, theirs = adapters(tmp_path / one), adapters(tmp_path / two)
        assert ours.keys() == theirs.keys() and ours
        assert not any(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_replicates_sample_the_same_prompt_differently(base: InputModel, quickstart_dir: Path, tmp_path: Path) -> None:
    first, other = (
        {s.metadata["prompt_id"]: s.response for s in run_rl(base, quickstart_dir, tmp_path / str(n), replicate=n)}
        for n in (0, 1)
    )
    shared = first.keys() & other.keys()
    assert shared
    assert any(first[prompt] != other[prompt] for prompt in shared)


@pytest.mark.parametrize("changed", ["before", "while it is read", "never"])
def test_a_file_is_that_of_the_plan_before_and_after_it_is_read(tmp_path: Path, changed: str) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    file = InputFile(path=str(tmp_path / "rows.jsonl"), digest=digest_path(tmp_path / "rows.jsonl"))
    if changed == "before":
        (tmp_path / "rows.jsonl").write_text("{ }")
    outcome = nullcontext() if changed == "never" else pytest.raises(DataError, match="since the stage was planned")
    with outcome, checked_file(file):
        assert changed != "before"
        if changed == "while it is read":
            (tmp_path / "rows.jsonl").unlink()
            (tmp_path / "rows.jsonl").write_text("{ }")


def test_a_model_that_caps_its_logits_is_trained_and_its_checkpoints_are_compared_by_loss(
    base: InputModel, quickstart_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "gemma"
    make_model("Gemma2").save_pretrained(folder)
    load_tokenizer(base.model).save_pretrained(folder)
    model = ModelConfig(path=str(folder))
    gemma = InputModel(name="base", model=model, digest=digest_model(model))
    training = {"num_steps": 20, "checkpoint_every": 10, "max_length": 64, "optim": OptimConfig(lr=1e-2)}
    trained = do(sft_job(gemma, quickstart_dir, **training), tmp_path / "sft")
    paths = [tmp_path / "sft/checkpoints" / entry["name"] for entry in trained["checkpoints"]]
    models = [ModelConfig(path=str(path)) for path in paths]
    checkpoints = [
        InputModel(name=path.name, model=model, digest=digest_model(model))
        for path, model in zip(paths, models, strict=True)
    ]
    job = EvalJob(
        checkpoints=(gemma, *checkpoints),
        data=rows(quickstart_dir, "sft"),
        evaluation=EvaluationConfig(metric="loss", max_prompts=5),
        deployment=ONE_THREAD,
    )
    result = do(job, tmp_path / "eval")
    means = [entry["mean"] for entry in result["checkpoints"]]
    assert means == sorted(means)
    assert result["best"] == "step_000020"
    # a cap of 1.5 on 32 tokens leaves at least this loss, which uncapped logits would not keep to
    least = math.log(1 + 31 * math.exp(-3.0))
    assert all(-score > least for entry in result["checkpoints"] for score in entry["scores"])


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_help_says_what_each_kind_does_where_a_job_comes_from_and_what_the_exit_codes_mean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = help_of(capsys)
    for kind in JOB_KINDS:
        assert re.search(rf" {kind} [A-Z][^.]+\.", shown), f"{kind} is not explained in {shown}"
    for words in (
        "`rollouts run` writes a job.json",
        "python -m rollouts_core sft",
        "exit codes:",
        "2 the user must change",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sft", "Writes checkpoints/, metrics.jsonl"),
        ("rl", "Writes checkpoints/, samples/"),
        ("eval", "Writes samples/"),
        ("generate", "Writes samples/"),
        ("serve", "Serve a model over HTTP"),
    ],
)
def test_the_help_of_a_kind_says_what_is_there_afterwards(
    capsys: pytest.CaptureFixture[str], kind: str, words: str
) -> None:
    assert words in help_of(capsys, kind)
