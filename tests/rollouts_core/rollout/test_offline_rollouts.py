"""Pins offline RL: training on the rollouts that an earlier run recorded gives, step for step, what that run trained.

Without it what lies in `samples/` would not be enough to find out why a step went wrong, and nobody would notice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from rollouts_core.__main__ import main
from rollouts_core.checkpoint import list_checkpoints, load_manifest, step_directory
from rollouts_core.config import (
    Config,
    DataConfig,
    DeploymentConfig,
    ModelConfig,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
)
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.data.rows import digest_path
from rollouts_core.engines import PublishTarget
from rollouts_core.errors import DataError
from rollouts_core.fingerprint import digest_checkpoint, digest_model
from rollouts_core.job import InputFile, InputModel, RLJob
from rollouts_core.jobs.rl_job import write_rollouts
from rollouts_core.metrics import read_json_lines, read_metrics
from rollouts_core.rl import run_rl_training
from rollouts_core.rollout.generate import create_engine_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.offline_rollouts import OfflineRollouts, check_rollouts, read_rollouts
from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.run_directory import RunDirectory
from rollouts_core.types import Sample, Status
from tests.rollouts_core.make import make_groups
from tests.rollouts_core.served_engine import served_engine
from tests.rollouts_core.test_rl import make_backend

TRAINING = RLTrainingConfig(num_steps=3, checkpoint_every=1, optim=RLOptimConfig(lr=1e-3))


def job_on(folder: Path, base_model: ModelConfig, training: RLTrainingConfig = TRAINING) -> RLJob:
    """RL on the rollouts that are recorded in a folder."""
    return RLJob(
        model=InputModel(name="base", model=base_model, digest=digest_model(base_model)),
        rollouts=InputFile(path=str(folder), digest=digest_path(folder)),
        training=training,
        rollout=RolloutConfig(),
        deployment=DeploymentConfig(trainer_threads=1),
    )


def share_of_even_digits(sample: Sample) -> float:
    return sum(character in "02468" for character in sample.response) / 8


ROLLOUT = RolloutConfig(
    batch_size=3, n_samples_per_prompt=4, sampling=SamplingConfig(max_new_tokens=8), reward_fn=share_of_even_digits
)


def write_samples(path: Path, samples: list[Sample]) -> None:
    """A recorded step."""
    path.write_text("".join(json.dumps(sample.to_json()) + "\n" for sample in samples))


def target_of(base_model: ModelConfig, run: RunDirectory) -> PublishTarget:
    return PublishTarget(weights_dir=run.weights, model_config=Path(base_model.path) / "config.json", prefix="test")


@pytest.fixture(scope="module")
def recorded(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    """The directory of a run of three steps against an engine, with its samples and checkpoints."""
    run = RunDirectory(tmp_path_factory.mktemp("recorded"))
    data_buffer = DataBuffer(load_prompts_from_jsonl(Path(base_model.path).parent / "prompts.jsonl"))
    with served_engine(Path(base_model.path)) as (engine, _):
        generate_fn = create_engine_generate_fn([engine], tokenizer, ROLLOUT)
        manager = AsyncRolloutManager(data_buffer, ROLLOUT, generate_fn=generate_fn)
        asyncio.run(
            run_rl_training(
                make_backend(base_model, TRAINING),
                data_buffer,
                manager,
                [engine],
                TRAINING,
                target=target_of(base_model, run),
                checkpoint_dir=run.checkpoints,
                on_batch=partial(write_rollouts, run, temperature=ROLLOUT.sampling.temperature),
            )
        )
    return run


def assert_equal_checkpoints(first: RunDirectory, second: RunDirectory, step: int) -> None:
    for name in ("model.safetensors", "trainer/tensors.safetensors"):
        ours, theirs = (load_file(step_directory(run.checkpoints, step) / name) for run in (first, second))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def train_offline(base_model: ModelConfig, recorded: RunDirectory, run: RunDirectory, *, num_steps: int) -> None:
    config = TRAINING.model_copy(update={"num_steps": num_steps})
    source = OfflineRollouts(recorded.samples, ROLLOUT)
    backend, target = make_backend(base_model, config), target_of(base_model, run)
    asyncio.run(run_rl_training(backend, None, source, [], config, target=target, checkpoint_dir=run.checkpoints))


def test_recorded_steps_train_the_same_weights_without_an_engine(
    base_model: ModelConfig, recorded: RunDirectory, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    train_offline(base_model, recorded, run, num_steps=1)
    assert_equal_checkpoints(recorded, run, 1)
    train_offline(base_model, recorded, run, num_steps=3)  # goes on from the first
    assert_equal_checkpoints(recorded, run, 3)
    assert not run.weights.exists()


def test_after_the_last_recorded_step_the_first_comes_again(recorded: RunDirectory) -> None:
    source = OfflineRollouts(recorded.samples, ROLLOUT)

    async def take(num: int) -> list[int]:
        batches = [await source.generate_batch() for _ in range(num)]
        return [batch.samples[0].group_index for batch in batches]

    assert asyncio.run(take(5)) == [0, 3, 6, 0, 3]
    assert asyncio.run(source.generate_batch()).metadata["epoch_id"] == 1


def test_an_offline_job_leaves_checkpoints_and_metrics(
    base_model: ModelConfig, recorded: RunDirectory, tmp_path: Path
) -> None:
    job = job_on(recorded.samples, base_model)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    assert main(["rl", str(tmp_path / "job.json")]) == 0
    run = RunDirectory(tmp_path)
    assert [entry["step"] for entry in json.loads(run.root.joinpath("result.json").read_text())["checkpoints"]] == [
        1,
        2,
        3,
    ]
    assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2, 3]
    weights = [load_file(step_directory(each.checkpoints, 1) / "model.safetensors") for each in (recorded, run)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_updates_that_only_hold_the_policy_to_the_start_model_do_not_keep_a_training_without_signal_going(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "recorded"
    folder.mkdir()
    for step in range(1, 5):
        samples = [replace(sample, reward=0.0) for sample in make_groups(2, 4, seed=step)]
        write_samples(folder / f"step_{step:06d}.jsonl", samples)
    loss, run = TRAINING.loss.model_copy(update={"kl_coef": 0.1}), RunDirectory(tmp_path / "run")
    assert train_on_steps(base_model, folder, run, num_steps=4, max_steps_without_signal=3, loss=loss) == 2
    assert [(line["skipped"], line["without_signal"]) for line in read_metrics(run.metrics)] == [(0.0, 1.0)] * 3
    [told] = [line["message"] for line in read_json_lines(run.events) if line["event"] == "failed"]
    assert told.startswith("step 3: 3 steps in a row made no update by rewards, only by the other terms of the loss")


def test_a_training_without_signal_ends_with_a_checkpoint_and_goes_on_only_when_it_is_told_to(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    folder, run = tmp_path / "recorded", RunDirectory(tmp_path / "run")
    folder.mkdir()
    run.root.mkdir()
    for step in range(1, 9):
        samples = [sample if step == 1 else replace(sample, reward=0.0) for sample in make_groups(2, 4, seed=step)]
        write_samples(folder / f"step_{step:06d}.jsonl", samples)

    def train_with(limit: int) -> tuple[int, list[int], str]:
        """The exit code, the steps of the checkpoints, and what the user is told."""
        training = TRAINING.model_copy(
            update={"num_steps": 8, "checkpoint_every": 100, "max_steps_without_signal": limit}
        )
        job = job_on(folder, base_model, training)
        run.job.write_text(job.model_dump_json())
        code = main(["rl", str(run.job)])
        told = [line["message"] for line in read_json_lines(run.events) if line["event"] == "failed"]
        return code, [load_manifest(path).step for path in list_checkpoints(run.checkpoints)], (told or [""])[-1]

    code, steps, told = train_with(3)
    assert (code, steps) == (2, [4])
    assert told.startswith("step 4: 3 steps in a row made no update, all rewards were 0 (")
    assert train_with(3) == (2, [4], told)
    assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2, 3, 4], "a second start sampled further steps"
    code, steps, told = train_with(6)
    assert (code, steps[-1]) == (2, 7)
    assert told.startswith("step 7: 6 steps in a row")
    assert train_with(0)[:2] == (0, [8])
    assert json.loads(run.result.read_text())["warning"].startswith("only 1 of 8 made an update")
    assert not any(line["event"] == "finished_early" for line in read_json_lines(run.events))


def test_a_rule_of_the_settings_ends_a_training_that_goes_on_without_it_to_the_same_weights(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "recorded"
    folder.mkdir()
    for step in range(1, 7):
        samples = [replace(sample, status=Status.TRUNCATED) for sample in make_groups(2, 4, seed=step)]
        write_samples(folder / f"step_{step:06d}.jsonl", samples)
    ended, whole = RunDirectory(tmp_path / "ended"), RunDirectory(tmp_path / "whole")
    assert train_on_steps(base_model, folder, ended, num_steps=6, stop_on=("all_truncated",)) == 2
    assert [load_manifest(path).step for path in list_checkpoints(ended.checkpoints)][-1] == 3
    [told] = [line["message"] for line in read_json_lines(ended.events) if line["event"] == "failed"]
    assert told.startswith(
        "step 3: all completions of 3 steps in a row were cut off: raise rollout.sampling.max_new_tok"
    )
    assert train_on_steps(base_model, folder, ended, num_steps=6, stop_on=("staleness",)) == 0
    assert train_on_steps(base_model, folder, whole, num_steps=6) == 0
    assert_equal_checkpoints(ended, whole, 6)
    [warned] = [line for line in read_json_lines(whole.events) if line["event"] == "warning"]
    assert (warned["rule"], warned["step"]) == ("all_truncated", 3)


@pytest.mark.parametrize(
    ("num_equal", "log_every", "kl_coef", "sentence"),
    [
        (1, 1, 0.0, None),
        (2, 1, 0.0, "only 1 of 3 made an update (completions of each prompt had equal rewards: 2): check the comp"),
        (3, 1, 0.0, "no step of 3 made an update (completions of each prompt had equal rewards: 3): check the comp"),
        (2, 3, 0.0, "only 1 of 2 that were logged made an update (completions of each prompt had equal rewards: 1): c"),
        (1, 1, 0.1, None),
        (2, 1, 0.1, "only 1 of 3 made an update by rewards, only by the other terms of the loss (completions of each"),
    ],
)
def test_a_training_of_which_many_steps_made_no_update_says_so(
    base_model: ModelConfig, tmp_path: Path, num_equal: int, log_every: int, kl_coef: float, sentence: str | None
) -> None:
    folder, run = tmp_path / "recorded", RunDirectory(tmp_path / "run")
    folder.mkdir()
    run.root.mkdir()
    for step in (1, 2, 3):
        samples = [replace(s, reward=0.0) if step <= num_equal else s for s in make_groups(2, 4, seed=step)]
        write_samples(folder / f"step_{step:06d}.jsonl", samples)
    settings = {"log_every": log_every, "loss": TRAINING.loss.model_copy(update={"kl_coef": kl_coef})}
    job = job_on(folder, base_model, TRAINING.model_copy(update=settings))
    run.job.write_text(job.model_dump_json())
    assert main(["rl", str(run.job)]) == 0
    warning = json.loads(run.result.read_text()).get("warning")
    assert warning is None if sentence is None else warning.startswith(sentence)


def write_steps(folder: Path, *, first_seed: int) -> Path:
    """Three recorded steps."""
    folder.mkdir()
    for step in (1, 2, 3):
        samples = make_groups(2, 4, seed=first_seed + step)
        (folder / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(s.to_json()) + "\n" for s in samples))
    return folder


def train_on_steps(base_model: ModelConfig, steps: Path, run: RunDirectory, **training: Any) -> int:
    """Do the job of training on recorded steps; returns its exit code."""
    settings = {"checkpoint_every": 1, "optim": RLOptimConfig(lr=1e-3, schedule="constant"), **training}
    job = RLJob(
        model=InputModel(name="base", model=base_model, digest=digest_model(base_model)),
        rollouts=InputFile(path=str(steps), digest=digest_path(steps)),
        training=RLTrainingConfig(**settings),
        resume_digest=digest_checkpoint(settings.get("resume_from", "")),
        rollout=RolloutConfig(),
        deployment=DeploymentConfig(trainer_threads=1),
    )
    run.root.mkdir(exist_ok=True)
    run.job.write_text(job.model_dump_json())
    return main(["rl", str(run.job)])


def test_a_run_goes_on_with_the_recorded_steps_that_it_began_with(base_model: ModelConfig, tmp_path: Path) -> None:
    """A place in the steps of one folder says nothing about those of another."""
    first, again, refused, other = (RunDirectory(tmp_path / name) for name in ("first", "again", "refused", "other"))
    steps, others = (write_steps(tmp_path / f"steps_{seed}", first_seed=seed) for seed in (0, 10))
    assert train_on_steps(base_model, steps, first, num_steps=2) == 0
    going_on = {"num_steps": 3, "resume_from": str(first.root)}
    assert train_on_steps(base_model, steps, again, **going_on) == 0
    assert sampled_tokens(again.samples / "step_000003.jsonl") == sampled_tokens(steps / "step_000003.jsonl")
    assert train_on_steps(base_model, others, refused, **going_on) != 0
    assert "trained with other settings" in refused.events.read_text()
    assert not refused.samples.exists()
    assert train_on_steps(base_model, others, other, **going_on, allow_changed=["data"]) == 0
    assert sampled_tokens(other.samples / "step_000003.jsonl") == sampled_tokens(others / "step_000001.jsonl")


def sampled_tokens(file: Path) -> list[list[int]]:
    return [sample.tokens for sample in read_rollouts(file, temperature=1.0)]


def test_a_folder_without_recorded_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no step_\*.jsonl: give the folder `samples` of an RL stage"):
        OfflineRollouts(tmp_path, ROLLOUT)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda line: '{"prompt": "1+1=?", "completion": "2"}\n', "is not a complete file of rollouts"),
        (lambda line: line[: len(line) // 2] + "\n", "is not a complete file of rollouts"),
        (lambda line: "[1]\n", "is not a complete file of rollouts"),
        (lambda line: "", "has no sampled token"),
    ],
)
def test_a_file_that_holds_no_rollouts_is_named(tmp_path: Path, damage: Callable[[str], str], words: str) -> None:
    path = tmp_path / "step_000001.jsonl"
    path.write_text(damage(json.dumps(make_groups(1, 2)[0].to_json()) + "\n"))
    with pytest.raises(DataError, match=f"{path} {words}"):
        read_rollouts(path, temperature=1.0)


@pytest.mark.parametrize("at", ["middle", "end"])
def test_half_of_a_recorded_step_is_not_taken_for_the_step(tmp_path: Path, at: str) -> None:
    path = tmp_path / "step_000001.jsonl"
    write_samples(path, make_groups(2, 2))
    content = path.read_bytes()
    assert len(read_rollouts(path, temperature=1.0)) == 4
    path.write_bytes(content[:-10] if at == "end" else content[: len(content) // 2] + b"\n")
    with pytest.raises(DataError, match=f"{path} is not a complete file of rollouts"):
        read_rollouts(path, temperature=1.0)
    path.write_bytes(content[:-1])  # some editors leave out the last newline
    assert len(read_rollouts(path, temperature=1.0)) == 4


def test_rollouts_of_another_tokenizer_are_refused_before_the_run(tmp_path: Path) -> None:
    samples = make_groups(2, 2)
    samples[3] = replace(samples[3], tokens=[*samples[3].tokens[:-1], 29])
    (tmp_path / "step_000001.jsonl").write_text("".join(json.dumps(s.to_json()) + "\n" for s in samples))
    assert check_rollouts(tmp_path, vocab_size=30, config=ROLLOUT).endswith("1 recorded steps, 2 groups, 4 samples")
    with pytest.raises(DataError, match="has the token id 29, but the model has only 29 embeddings"):
        check_rollouts(tmp_path, vocab_size=29, config=ROLLOUT)


def test_rollouts_that_are_longer_than_what_the_model_sees_are_refused_before_the_run(tmp_path: Path) -> None:
    samples = make_groups(2, 2)
    longest = max(len(sample.tokens) for sample in samples)
    (tmp_path / "step_000001.jsonl").write_text("".join(json.dumps(s.to_json()) + "\n" for s in samples))
    check_rollouts(tmp_path, vocab_size=30, config=ROLLOUT, max_tokens=longest)
    with pytest.raises(
        DataError, match=f"has a sample of {longest} tokens, but the model supports at most {longest - 1}"
    ):
        check_rollouts(tmp_path, vocab_size=30, config=ROLLOUT, max_tokens=longest - 1)


def at_temperature(temperature: float) -> RolloutConfig:
    return ROLLOUT.model_copy(update={"sampling": SamplingConfig(temperature=temperature)})


def test_rollouts_of_another_temperature_are_refused_before_the_run_and_in_it(tmp_path: Path) -> None:
    """Their log-probs are of another distribution than those of training: every ratio would be wrong."""
    run = RunDirectory(tmp_path)
    write_rollouts(run, 1, convert_to_batch(make_groups(2, 2)), temperature=0.7)
    check_rollouts(run.samples, vocab_size=30, config=at_temperature(0.7))
    asyncio.run(OfflineRollouts(run.samples, at_temperature(0.7)).generate_batch())
    words = r"step_000001\.jsonl was sampled at temperature 0\.7, but rollout\.sampling\.temperature is 1\.0"
    with pytest.raises(DataError, match=words):
        check_rollouts(run.samples, vocab_size=30, config=ROLLOUT)
    with pytest.raises(DataError, match=words):
        asyncio.run(OfflineRollouts(run.samples, ROLLOUT).generate_batch())


def test_rollouts_that_say_no_temperature_are_taken_as_they_are(tmp_path: Path) -> None:
    """Those of earlier versions, and those that a program wrote by itself."""
    steps = write_steps(tmp_path / "steps", first_seed=0)
    assert len(asyncio.run(OfflineRollouts(steps, at_temperature(0.7)).generate_batch()).samples) == 8


def offline_config(**data: str) -> Config:
    return Config(
        mode="rl", model=ModelConfig(path="m"), data=DataConfig(selection="s.jsonl", heldout="h.jsonl", **data)
    )


def test_a_configuration_has_prompts_or_recorded_rollouts() -> None:
    assert offline_config(rollouts="samples").data.prompts == ""
    with pytest.raises(ValidationError, match=r"data.prompts and data.rollouts exclude each other"):
        offline_config(prompts="p.jsonl", rollouts="samples")
    with pytest.raises(ValidationError, match=r"needs data.prompts"):
        offline_config()


def test_a_job_has_prompts_or_recorded_rollouts(base_model: ModelConfig) -> None:
    model = InputModel(name="base", model=base_model, digest="")
    with pytest.raises(ValidationError, match="an RL job has either prompts or rollouts"):
        RLJob(model=model, training=TRAINING, rollout=ROLLOUT)


def test_what_an_attempt_recorded_behind_the_step_that_is_done_again_is_no_part_of_the_recording(
    tmp_path: Path,
) -> None:
    for step in (8, 9, 10, 11, 9):
        write_rollouts(RunDirectory(tmp_path), step, convert_to_batch(make_groups(1, 2)), temperature=1.0)
    assert [path.name for path in OfflineRollouts(tmp_path / "samples", ROLLOUT).files] == [
        "step_000008.jsonl",
        "step_000009.jsonl",
    ]
