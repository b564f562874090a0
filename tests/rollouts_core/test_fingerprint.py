"""Pins what makes work the same work: settings that matter and the content of inputs, not where things lie.

Without it a finished stage would be taken for another one's result, or be trained again because a folder moved.
"""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.checkpoint import load_manifest, new_checkpoint, step_directory
from rollouts_core.config import (
    AdvantageConfig,
    DeploymentConfig,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    PolicyConfig,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
    SFTTrainingConfig,
)
from rollouts_core.data.rows import digest_path
from rollouts_core.errors import ConfigError
from rollouts_core.fingerprint import (
    affecting_settings,
    digest_model,
    digest_plugins,
    fingerprint_job,
    training_settings,
)
from rollouts_core.job import EngineAddress, EvalJob, InputDataset, InputFile, InputModel, RLJob, SFTJob
from rollouts_core.rewards import exact_match
from rollouts_core.stages.planning import plugin_digest

BASE = InputModel(name="base", model=ModelConfig(path="base"), digest="m")
ROWS = InputFile(path="rows.jsonl", digest="d")


def make_job(**changes: Any) -> RLJob:
    """An RL job with some fields replaced."""
    fields: dict[str, Any] = {
        "model": BASE,
        "prompts": ROWS,
        "training": RLTrainingConfig(),
        "rollout": RolloutConfig(),
    }
    return RLJob(**{**fields, **changes})


def fingerprint(**changes: Any) -> str:
    """The identity of an RL job with some fields replaced."""
    return fingerprint_job("rl", make_job(**changes))


def test_a_fingerprint_is_sixteen_hex_digits() -> None:
    assert len(fingerprint()) == 16
    int(fingerprint(), base=16)


@pytest.mark.parametrize(
    "changes",
    [
        {"deployment": DeploymentConfig(trainer_gpu_ranks=(0, 1), trainer_threads=4, engine_port=3000)},
        {"engines": (EngineAddress(url="http://127.0.0.1:1", lease_file="lease"),)},
        {"prompts": InputFile(path="moved/rows.jsonl", digest="d")},
        {"model": InputModel(name="base", model=ModelConfig(path="moved/base"), digest="m")},
        {"training": RLTrainingConfig(log_every=7)},
        # What is lowered when memory ran out, so that the training goes on where it was.
        {"training": RLTrainingConfig(max_micro_batch_tokens=512)},
        {"training": RLTrainingConfig(policy=PolicyConfig(activation_checkpointing=True))},
        {"rollout": RolloutConfig(request_timeout_s=5.0)},
        {"rollout": RolloutConfig(silence_timeout_s=5.0)},
        # What is raised when it ended the training, so that it goes on where it was.
        {"rollout": RolloutConfig(reward_timeout_s=5.0)},
        {"rollout": RolloutConfig(generate_timeout_s=5.0)},
        {"rollout": RolloutConfig(max_refills=20)},
        {"training": RLTrainingConfig(max_skipped_updates=0)},
        {"training": RLTrainingConfig(max_steps_without_signal=0)},
    ],
)
def test_placement_does_not_change_the_fingerprint(changes: dict[str, Any]) -> None:
    assert fingerprint(**changes) == fingerprint()


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": InputFile(path="rows.jsonl", digest="other")},
        {"model": InputModel(name="base", model=ModelConfig(path="base"), digest="other")},
        {"model": InputModel(name="base", model=ModelConfig(path="base", revision="v2"), digest="m")},
        {"plugin_digest": "other"},
        {"training": RLTrainingConfig(num_steps=7)},
        {"training": RLTrainingConfig(replicate=1)},
        {"training": RLTrainingConfig(keep_checkpoints=3)},
        {"training": RLTrainingConfig(advantage=AdvantageConfig(baseline=0.5))},
        {"training": RLTrainingConfig(loss=LossConfig(clip_high=0.28))},
        {"training": RLTrainingConfig(optim=RLOptimConfig(lr=2e-6, schedule="constant"))},
        {"training": RLTrainingConfig(optim=RLOptimConfig(lr=1e-6, schedule="linear"))},
        {"rollout": RolloutConfig(seed=1)},
        {"rollout": RolloutConfig(reward_fn="exact_match")},
        {"rollout": RolloutConfig(sampling=SamplingConfig(temperature=0.9))},
        {"rollout": RolloutConfig(environment="math")},
    ],
)
def test_what_can_change_a_result_changes_the_fingerprint(changes: dict[str, Any]) -> None:
    assert fingerprint(**changes) != fingerprint()


def test_two_changes_have_two_fingerprints() -> None:
    jobs = [{"training": RLTrainingConfig(num_steps=n)} for n in range(1, 50)]
    assert len({fingerprint(**job) for job in jobs}) == 49


def test_writing_out_a_default_does_not_change_the_fingerprint() -> None:
    spelled_out = RLTrainingConfig(num_steps=RLTrainingConfig().num_steps, loss=LossConfig(clip_low=0.2))
    assert fingerprint(training=spelled_out, plugin_digest="") == fingerprint()


def test_a_new_field_with_a_default_does_not_change_old_fingerprints() -> None:
    assert affecting_settings(RLTrainingConfig(num_steps=7)) == {"num_steps": 7}


def test_a_function_and_its_name_have_one_fingerprint() -> None:
    by_name = RolloutConfig(reward_fn="rollouts_core.rewards:exact_match")
    assert fingerprint(rollout=RolloutConfig(reward_fn=exact_match)) == fingerprint(rollout=by_name)


def test_the_order_of_checkpoints_is_part_of_an_evaluation() -> None:
    models = [InputModel(name=n, model=ModelConfig(path="x"), digest=n) for n in ("a", "b")]
    both = [EvalJob(checkpoints=tuple(c), data=ROWS, evaluation=EvaluationConfig()) for c in (models, models[::-1])]
    assert fingerprint_job("eval", both[0]) != fingerprint_job("eval", both[1])


def test_what_counts_as_better_does_not_change_an_evaluation() -> None:
    jobs = [EvalJob(checkpoints=(BASE,), data=ROWS, evaluation=EvaluationConfig(max_p_value=p)) for p in (0.01, 0.05)]
    assert fingerprint_job("evaluate", jobs[0]) == fingerprint_job("evaluate", jobs[1])


@pytest.mark.parametrize("change", ["stage", "salt"])
def test_another_stage_or_salt_is_other_work(change: str) -> None:
    job = SFTJob(model=BASE, data=(InputDataset(path="rows.jsonl", digest="d"),), training=SFTTrainingConfig())
    other = fingerprint_job("warmup", job) if change == "stage" else fingerprint_job("sft", job, salt="again")
    assert other != fingerprint_job("sft", job)


def test_a_model_folder_is_known_by_its_files_wherever_it_lies(tmp_path: Path) -> None:
    for name, weights in [("one", "w"), ("two", "w"), ("three", "v")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(weights)
    one, two, three = (digest_model(ModelConfig(path=str(tmp_path / n))) for n in ("one", "two", "three"))
    assert one == two != three


def test_the_folder_of_a_model_that_grades_is_known_by_its_name_wherever_it_lies() -> None:
    """So a training that moves to another machine goes on; what is in the folder is part of the plugins' digest."""
    judge = {"kind": "judge", "url": "http://127.0.0.1:1/v1"}

    def settings_with(model: str, **reward: Any) -> dict[str, Any]:
        rollout = RolloutConfig.model_validate({"rewards": [{"kind": "classifier", "model": model, **reward}]})
        return training_settings(rollout)

    assert settings_with("/a/grader") == settings_with("/node/inputs/grader") != settings_with("/a/other")
    assert settings_with("a/judge", **judge) != settings_with("b/judge", **judge)


def test_a_checkpoint_is_known_by_its_manifest_without_the_trainers_state(tmp_path: Path) -> None:
    for step in (1, 2):
        with new_checkpoint(step_directory(tmp_path, step), step=step) as directory:
            (directory / "model.safetensors").write_text("w")
            (directory / "trainer").mkdir()
            (directory / "trainer" / "state.json").write_text(str(step))
    one, two = (digest_model(ModelConfig(path=str(step_directory(tmp_path, step)))) for step in (1, 2))
    assert one == two == load_manifest(step_directory(tmp_path, 1)).digest


@pytest.mark.parametrize("change", [{"path": "org/other"}, {"revision": "v2"}])
def test_a_hub_model_is_known_by_name_and_revision(change: dict[str, str]) -> None:
    model = ModelConfig(path="org/model", revision="v1")
    assert digest_model(model) == digest_model(model.model_copy())
    assert digest_model(model) != digest_model(model.model_copy(update=change))


def test_without_functions_of_the_users_there_is_no_plugin_digest() -> None:
    assert digest_plugins("", "exact_match") == ""


@pytest.mark.parametrize("shape", ["module", "package"])
def test_the_plugin_digest_follows_the_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    name = f"plugin_of_a_test_{shape}"
    path = tmp_path / f"{name}.py" if shape == "module" else tmp_path / name / "__init__.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = digest_plugins(f"{name}:f")
    assert digest_plugins("exact_match", f"{name}:g") == before != ""
    path.write_text("A = 2\n")
    assert digest_plugins(f"{name}:f") != before


def test_the_tasksets_of_verifiers_are_code_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tasks_of_a_test.py"
    path.write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    rollout = RolloutConfig(environment="verifiers", tasksets=("team/Tasks-of-a-test@2", "one-that-verifiers-has"))
    assert rollout.modules_named == {"rollout.tasksets.0": "tasks_of_a_test"}
    before = plugin_digest(rollout)
    path.write_text("A = 2\n")
    assert plugin_digest(rollout) != before != ""


@pytest.mark.parametrize("left", [".rewards.py.swp", ".DS_Store", ".ipynb_checkpoints/rewards.py", "node_modules/a.js"])
def test_what_editors_and_tools_leave_in_a_package_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """RL would be trained anew because a file of rewards is open in an editor, or is not any more."""
    package = tmp_path / "package_of_a_test_with_leftovers"
    for name in ("__init__.py", "rewards.py", "inner-data/words.txt", "inner/more.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = digest_plugins(f"{package.name}.rewards:f")
    assert before == hashlib.sha256(digest_path(package).encode()).hexdigest()
    (package / left).parent.mkdir(exist_ok=True)
    (package / left).write_text("1")
    assert digest_plugins(f"{package.name}.rewards:f") == before
    (package / "inner-data" / "words.txt").write_text("2")
    assert digest_plugins(f"{package.name}.rewards:f") != before


@pytest.mark.parametrize("changed", ["helpers_of_a_test.py", "folder_of_a_test/scores.py"])
def test_the_plugin_digest_follows_what_the_users_code_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    (tmp_path / "rewards_of_a_test.py").write_text("import helpers_of_a_test\nfrom folder_of_a_test import scores\n")
    for name in ("helpers_of_a_test.py", "folder_of_a_test/scores.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = digest_plugins("rewards_of_a_test:f")
    assert digest_plugins("rewards_of_a_test:f") == before
    (tmp_path / changed).write_text("A = 2\n")
    assert digest_plugins("rewards_of_a_test:f") != before


def test_a_package_that_cannot_be_found_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="the package 'no_such_package' cannot be found"):
        digest_plugins("no_such_package.rewards:f")
