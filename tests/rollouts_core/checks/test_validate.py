"""Pins what is found of a whole configuration before any training, and the steps of its stages.

Without it a run would fail hours later, or do without a word what nobody meant.
"""

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedTokenizerBase,
)

from rollouts_core.checkpoint import new_checkpoint
from rollouts_core.checks import cpu_formats
from rollouts_core.checks.function_checks import check_functions
from rollouts_core.checks.model_checks import check_positions, count_positions
from rollouts_core.checks.resumed import check_resumed, check_resumed_inputs
from rollouts_core.checks.validate import (
    check_prompt_epochs,
    validate_config,
    validate_evaluation,
    warn_of_own_generation,
    warn_of_uncorrected_age,
)
from rollouts_core.config import Config, DataConfig, ModelConfig, RewardConfig, RLTrainingConfig, RolloutConfig
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.errors import CheckpointError, ConfigError, DataError, InputError
from rollouts_core.findings import Caution
from rollouts_core.fingerprint import SEMANTICS_VERSION
from rollouts_core.job import InputFile, InputModel, RLJob
from rollouts_core.rollout.generate import check_prompt_lengths
from rollouts_core.run_checkpoints import describe_settings
from tests.rollouts_core.checks.configurations import make_config, with_rollout, write_rows
from tests.rollouts_core.make import make_prompts


@pytest.mark.parametrize(
    ("batch_size", "num_steps", "said", "num_cautions"),
    [
        (15, 10, ["training.rl.num_steps 10 is about 5.0 epochs of the 30 prompts"], 0),
        (512, 4, ["training.rl.num_steps 4 is about 68 epochs of", "rollout.batch_size 512 exceeds the 30"], 1),
        (512, 100, ["training.rl.num_steps 100 is about 1,707 epochs of", "a step uses the same prompt several"], 2),
    ],
)
def test_how_often_rl_sees_its_prompts_is_said(
    batch_size: int, num_steps: int, said: list[str], num_cautions: int
) -> None:
    config = with_rollout(batch_size=batch_size)
    training = config.training.model_copy(update={"rl": RLTrainingConfig(num_steps=num_steps)})
    findings = check_prompt_epochs(config.model_copy(update={"training": training}), 30)
    assert [words in finding for words, finding in zip(said, findings, strict=True)] == [True] * len(said)
    assert sum(isinstance(finding, Caution) for finding in findings) == num_cautions


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_rows_that_are_trained_on_are_not_among_those_that_keep_a_checkpoint(
    tmp_path: Path, base_model: ModelConfig, metric: str
) -> None:
    prompts = [{"prompt": f"{place}+1=?", "completion": "2", "answer": "2"} for place in range(5)]
    rows = {"sft": prompts[:2], "sft_eval": [prompts[1]], "selection": [prompts[3]], "heldout": [prompts[4]]}
    data = {name: write_rows(tmp_path / f"{name}.jsonl", each) for name, each in rows.items()}
    settings = {"mode": "sft", "model": base_model.model_dump(), "data": data, "evaluation": {"metric": metric}}
    rollout = {"environment": "arithmetic", "sampling": {"max_new_tokens": 8}}
    config = Config.model_validate({**settings, "rollout": rollout})
    with pytest.raises(DataError, match=r"1 of 1 rows of data\.sft_eval are also trained on \(row 1 is row 2 of "):
        validate_config(config)
    write_rows(tmp_path / "sft_eval.jsonl", [prompts[2]])
    validate_config(config)


def test_the_cpu_of_a_machine_that_does_not_train_is_not_checked(
    tmp_path: Path, base_model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu_formats, "measure_factor", lambda: 32.0)
    rows = {"sft": ["1+1=?"], "selection": ["2+1=?"], "heldout": ["3+1=?"]}
    answered = {"completion": "2", "answer": "2"}
    data = {
        name: write_rows(tmp_path / f"{name}.jsonl", [{"prompt": each, **answered} for each in asked])
        for name, asked in rows.items()
    }
    training = {"sft": {"policy": {"precision": "bfloat16"}}}
    rollout = {"environment": "arithmetic", "sampling": {"max_new_tokens": 8}}
    config = Config.model_validate(
        {"mode": "sft", "model": base_model.model_dump(), "data": data, "training": training, "rollout": rollout}
    )
    for trains_here in (True, False):
        findings = validate_config(config, trains_here=trains_here)
        assert any("32 times slower" in finding for finding in findings) is trains_here


def test_tools_of_prompts_that_the_policy_is_not_told_of_are_said(tmp_path: Path, base_model: ModelConfig) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows: dict[str, list[dict[str, Any]]] = {
        "sft": [{"prompt": "1+1=?", "completion": "2", "tools": tools}],
        "selection": [{"prompt": "2+1=?", "answer": "3", "tools": None}],
        "heldout": [{"prompt": "3+1=?", "answer": "4"}, {"prompt": "4+1=?", "answer": "5", "tools": tools}],
    }
    data = {name: write_rows(tmp_path / f"{name}.jsonl", each) for name, each in rows.items()}
    rollout = {"environment": "arithmetic", "sampling": {"max_new_tokens": 8}}
    config = Config.model_validate({"mode": "sft", "model": base_model.model_dump(), "data": data, "rollout": rollout})
    said = f"{data['heldout']}: 1 of 2 prompts (row 2 first) have `tools`, which the policy does not see"
    for findings in (validate_config(config), validate_evaluation(config, [base_model])):
        assert [each.startswith(said) for each in findings if "`tools`" in each] == [True]


@pytest.mark.parametrize(
    ("metric", "row", "problem"),
    [
        ("loss", {"prompt": "1+1=?"}, "completion"),
        ("accuracy", {"prompt": "1+1=?"}, "has no `answer`"),
    ],
)
def test_an_evaluation_without_a_usable_model_reads_its_held_out_rows_alone(
    tmp_path: Path, metric: str, row: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names no other file, and the current folder is none."""
    monkeypatch.chdir(tmp_path)
    base = make_config("sft.jsonl").model_dump()
    rollout = {"environment": "arithmetic", "sampling": {"max_new_tokens": 8}}
    config = Config.model_validate({**base, "rollout": rollout, "evaluation": {"metric": metric}})
    heldout = write_rows(tmp_path / "heldout.jsonl", [row])
    config = config.model_copy(update={"data": DataConfig(heldout=heldout)})
    with pytest.raises(InputError) as refused:
        validate_evaluation(config, [ModelConfig(path=str(tmp_path / "gone"))])
    [of_model, of_rows] = str(refused.value).splitlines()
    assert of_model.startswith("model.path: ") and "gone" in of_model
    assert of_rows.startswith(f"data.heldout: {heldout}, row 1") and problem in of_rows
    with pytest.raises(InputError) as refused:  # as if no model had the name
        validate_evaluation(config, [])
    assert str(refused.value) == of_rows


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{{ m.content }}", "drops text of the role 'tool'"),
        (
            "{{ m.content }}{% for c in m.tool_calls or [] %}call {{ c.function | tojson }}{% endfor %}",
            "which none of the dialects hermes, .* can parse",
        ),
    ],
)
def test_a_chat_template_that_calls_and_hides_otherwise_than_is_known_is_refused(
    written: str, said: str, tmp_path: Path, base_model: ModelConfig
) -> None:
    """In RL and in evaluations the policy would not be answered, or not see the answer."""
    model = tmp_path / "model"
    shutil.copytree(base_model.path, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages if m.role != 'tool' %}<|{{ m.role }}|>WRITTEN<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}".replace("WRITTEN", written)
    )
    rows: dict[str, list[dict[str, Any]]] = {
        "sft": [{"prompt": "1+1=?", "completion": "2"}],
        "selection": [{"prompt": "2+1=?", "answer": "3"}],
        "heldout": [{"prompt": "3+1=?", "answer": "4"}],
    }
    data = {name: write_rows(tmp_path / f"{name}.jsonl", each) for name, each in rows.items()}
    rollout = {"environment": "calculator", "sampling": {"max_new_tokens": 8}}
    config = Config.model_validate({"mode": "sft", "model": {"path": str(model)}, "data": data, "rollout": rollout})
    for check in (validate_config, lambda config: validate_evaluation(config, [config.model])):
        with pytest.raises(DataError, match=said):
            check(config)


def test_prompts_that_the_chat_template_leaves_out_are_told(tmp_path: Path, base_model: ModelConfig) -> None:
    """The policy would answer to nothing, in RL as in every evaluation."""
    model = tmp_path / "model"
    shutil.copytree(base_model.path, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    asked = [[{"role": role, "content": f"{i}+{i}=?"}] for i, role in enumerate(("user", "human", "human", "user"))]
    rows: dict[str, list[dict[str, Any]]] = {
        "sft": [{"prompt": "9+9=?", "completion": "2"}],
        "selection": [{"messages": asked[0], "answer": "0"}],
        "heldout": [{"messages": each, "answer": "2", "system": "+"} for each in asked[1:]],
    }
    data = {name: write_rows(tmp_path / f"{name}.jsonl", each) for name, each in rows.items()}
    rollout = {"environment": "arithmetic", "sampling": {"max_new_tokens": 8}}
    config = Config.model_validate({"mode": "sft", "model": {"path": str(model)}, "data": data, "rollout": rollout})
    said = [
        f"{data['heldout']}: in 2 of 3 rows (row 1 first) the chat template leaves out the messages of the role",
        f"{data['heldout']}: 3 of 3 rows (row 1 first) have `system`, which the model does not see",
    ]
    for findings in (validate_config(config), validate_evaluation(config, [config.model])):
        warned = [each for each in findings if "leaves out" in each or ", which the model does not see" in each]
        assert [each.startswith(words) for each, words in zip(warned, said, strict=True)] == [True, True]


def test_a_long_prompt_behind_an_empty_line_is_named_by_its_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1"}\n\n{"prompt": "' + "1" * 50 + '"}\n')
    with pytest.raises(DataError, match=r"p\.jsonl, row 3: the prompt 'p-3' has 53 tokens"):
        check_prompt_lengths(load_prompts_from_jsonl(path), tokenizer, max_tokens=20, source=str(path))


def test_a_grader_that_is_not_available_is_found_before_the_run(tokenizer: PreTrainedTokenizerBase) -> None:
    service = RewardConfig(kind="http", url="http://127.0.0.1:9/score", max_retries=0)
    with pytest.raises(ConfigError, match=r"cannot be graded.* on prompt 'p0': http://127.0.0.1:9/score gave"):
        check_functions(with_rollout(rewards=(service,)), make_prompts(1), tokenizer)


def test_a_reward_model_without_its_label_is_found_before_the_run(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"id2label": {"0": "bad", "1": "good"}}')
    served = RewardConfig(kind="reward_model", url="http://127.0.0.1:9", model=str(tmp_path), max_retries=0)
    with pytest.raises(ConfigError, match=r"to the label whose score is the reward: .* has the labels bad, good$"):
        check_functions(with_rollout(rewards=(served,)), make_prompts(1), tokenizer)
    labelled = served.model_copy(update={"label": "good"})
    with pytest.raises(ConfigError, match=r"cannot be graded.*: http://127.0.0.1:9/v1/models gave no reward in 1"):
        check_functions(with_rollout(rewards=(labelled,)), make_prompts(1), tokenizer)


@pytest.mark.parametrize(
    ("loss", "is_said"),
    [
        ({}, False),
        ({"ratio_base": "old"}, True),
        ({"objective": "reinforce"}, True),
        ({"objective": "reinforce", "mismatch": {"weight": "token"}}, False),
    ],
)
@pytest.mark.parametrize("setting", ["max_staleness", "max_partial_staleness"])
def test_training_on_old_completions_without_a_correction_is_said(
    setting: str, loss: dict[str, Any], is_said: bool
) -> None:
    config = with_rollout(**{setting: 2}, over_sampling_factor=2.0 if setting == "max_partial_staleness" else 1.0)
    training = config.training.model_copy(update={"rl": RLTrainingConfig.model_validate({"loss": loss})})
    findings = warn_of_uncorrected_age(config.model_copy(update={"training": training}))
    assert bool(findings) == is_said
    assert not findings or f"rollout.{setting} 2" in findings[0]
    assert not findings or 'nothing in training.rl.loss corrects for that: set ratio_base = "rollout"' in findings[0]


@pytest.mark.parametrize(("generate_fn", "is_said"), [("", False), ("my_agents:solve", True)])
def test_completions_that_only_rl_sees_are_told(generate_fn: str, is_said: bool) -> None:
    found = warn_of_own_generation(with_rollout(generate_fn=generate_fn))
    told = "my_agents:solve generates only the completions of RL. Checkpoints are compared on completions of the engine"
    assert [told in sentence for sentence in found] == [True] * is_said


@pytest.mark.parametrize(
    ("sync_every", "ratio_base", "is_said"), [(4, "old", True), (4, "rollout", False), (1, "old", False)]
)
def test_weights_that_are_published_every_few_steps_alone_make_completions_old_too(
    sync_every: int, ratio_base: str, is_said: bool
) -> None:
    rl = RLTrainingConfig.model_validate({"sync_every": sync_every, "loss": {"ratio_base": ratio_base}})
    config = with_rollout()
    training = config.training.model_copy(update={"rl": rl})
    findings = warn_of_uncorrected_age(config.model_copy(update={"training": training}))
    assert [finding.partition(" trains")[0] for finding in findings] == ["training.rl.sync_every 4"] * is_said


def test_a_checkpoint_of_other_settings_is_refused_before_anything_is_provisioned(tmp_path: Path) -> None:
    before = make_config("a.jsonl", seed=1, optim={"lr": 1e-3}).training.sft
    settings = describe_settings(before, {"data.0": "a digest", "model": "another"})
    with new_checkpoint(tmp_path / "step_000010", step=10, settings=settings) as folder:
        (folder / "model.safetensors").write_bytes(b"weights")
    again: dict[str, Any] = {"resume_from": str(tmp_path / "step_000010"), "seed": 1, "num_steps": 20}
    check_resumed(make_config("a.jsonl", **again, optim={"lr": 1e-3}))
    check_resumed(make_config("a.jsonl", **again, optim={"lr": 1e-3}, log_every=3))
    check_resumed(make_config("a.jsonl", **again, optim={"lr": 1e-2}, allow_changed=["optim"]))
    check_resumed(make_config("a.jsonl", **{**again, "resume_from": "s3://bucket/step_000010"}))
    with pytest.raises(CheckpointError, match=r"trained with other settings.*optim\.lr was 0\.001 and is 0\.01"):
        check_resumed(make_config("a.jsonl", **again, optim={"lr": 1e-2}))
    check_resumed(make_config("a.jsonl", **{**again, "num_steps": 10}, optim={"lr": 1e-3}))
    with pytest.raises(CheckpointError, match="is at step 10, num_steps is 9: raise num_steps"):
        check_resumed(make_config("a.jsonl", **{**again, "num_steps": 9}, optim={"lr": 1e-3}))
    with pytest.raises(CheckpointError, match="nowhere"):
        check_resumed(make_config("a.jsonl", **{**again, "resume_from": str(tmp_path / "nowhere")}))


def test_a_checkpoint_that_sampled_or_graded_otherwise_is_refused_before_anything_is_provisioned(
    tmp_path: Path,
) -> None:
    sampled = RolloutConfig(reward_fn="exact_match", n_samples_per_prompt=4)
    settings = describe_settings(RLTrainingConfig(), {"plugins": "a digest"}, rollout=sampled)
    for name, named in (("a", settings), ("b", {**settings, "semantics": 1})):
        with new_checkpoint(tmp_path / name / "step_000010", step=10, settings=named) as folder:
            (folder / "model.safetensors").write_bytes(b"weights")

    def check(name: str = "a", *, allow_changed: Sequence[str] = (), **rollout: Any) -> None:
        rl = {"resume_from": str(tmp_path / name), "allow_changed": allow_changed}
        config = make_config("a.jsonl").model_copy(update={"mode": "rl", "rollout": RolloutConfig(**rollout)})
        training = config.training.model_copy(update={"rl": RLTrainingConfig.model_validate(rl)})
        check_resumed(config.model_copy(update={"training": training}))

    check(reward_fn="exact_match", n_samples_per_prompt=4)
    check(reward_fn="exact_match", n_samples_per_prompt=4, request_timeout_s=7.0)
    check(reward_fn="exact_match", allow_changed=["rollout.n_samples_per_prompt"])
    with pytest.raises(CheckpointError, match=r"rollout\.n_samples_per_prompt was 4 and is its default"):
        check(reward_fn="exact_match")
    with pytest.raises(CheckpointError, match=f"semantics was 1 and is {SEMANTICS_VERSION}"):
        check("b", reward_fn="exact_match", n_samples_per_prompt=4)


def test_a_checkpoint_that_read_something_else_is_refused_before_anything_is_provisioned(tmp_path: Path) -> None:
    named = {"model": "m", "data": "d", "plugins": "p"}
    for name, inputs in (("a", named), ("older", {"model": "m"})):
        with new_checkpoint(tmp_path / name / "step_000010", step=10, settings=inputs) as folder:
            (folder / "model.safetensors").write_bytes(b"weights")

    def check(*changed: str, of: str = "a", knows_model: bool = True, allow_changed: Sequence[str] = ()) -> None:
        read = named | dict.fromkeys(changed, "other")
        resumed = {"resume_from": str(tmp_path / of), "allow_changed": allow_changed}
        training = RLTrainingConfig.model_validate(resumed if of else {})
        job = RLJob(
            model=InputModel(name="base", model=ModelConfig(path="m"), digest=read["model"]),
            prompts=InputFile(path="p.jsonl", digest=read["data"]),
            training=training,
            rollout=RolloutConfig(),
            plugin_digest=read["plugins"],
        )
        check_resumed_inputs(job, knows_model=knows_model)

    check()
    check("data", of="")
    check("data", "plugins", of="older")
    check("plugins", allow_changed=["plugins"])
    check("model", knows_model=False)
    for name in named:
        with pytest.raises(CheckpointError, match=rf"{name}.* was .{name[0]}. and is .other."):
            check(name)


@pytest.mark.parametrize("source", ["prompts", "rollouts"])
def test_a_checkpoint_of_a_replicate_is_gone_on_with_by_the_same_replicate(tmp_path: Path, source: str) -> None:
    rollout, prompts = RolloutConfig(seed=3), InputFile(path="p.jsonl", digest="")
    model = InputModel(name="base", model=ModelConfig(path="m"), digest="")
    job = RLJob(model=model, prompts=prompts, training=RLTrainingConfig(replicate=1), rollout=rollout)
    sampled = job.replicated_rollout if source == "prompts" else rollout  # as the jobs of the two have it
    settings = describe_settings(job.training, {}, rollout=sampled)
    with new_checkpoint(tmp_path / "step_000010", step=10, settings=settings) as folder:
        (folder / "model.safetensors").write_bytes(b"weights")

    def check(replicate: int) -> None:
        config = make_config("a.jsonl").model_copy(update={"mode": "rl", "rollout": rollout})
        data = config.data.model_copy(update={source: "p.jsonl"})
        rl = RLTrainingConfig(replicate=replicate, resume_from=str(tmp_path / "step_000010"))
        training = config.training.model_copy(update={"rl": rl})
        check_resumed(config.model_copy(update={"data": data, "training": training}))

    check(1)
    with pytest.raises(CheckpointError, match="replicate was 1 and is 2"):
        check(2)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bogus", r"; known are allow_changed, batch_size, "),
        ("optm", r"; did you mean optim\?"),
        ("optim.lrr", r"; did you mean optim\.lr\?"),
        ("lr", r"; did you mean optim\.lr\?"),
        ("rollout", "; known are"),  # SFT samples nothing
    ],
)
@pytest.mark.parametrize("resume_from", ["", "s3://bucket/step_000010"])
def test_what_is_allowed_to_change_has_a_name_that_there_is(name: str, meant: str, resume_from: str) -> None:
    allowing: dict[str, Any] = {"resume_from": resume_from, "allow_changed": ["optim.lr", name]}
    with pytest.raises(ConfigError, match=rf"training\.sft\.allow_changed: unknown setting {name}{meant}"):
        check_resumed(make_config("a.jsonl", **allowing))


def test_every_name_that_a_refusal_may_list_may_be_allowed_to_change(tmp_path: Path) -> None:
    names = ["optim", "optim.lr", "policy.lora.rank", "batch_size", "data", "samples", "model", "semantics"]
    check_resumed(make_config("a.jsonl", allow_changed=names))
    rl = RLTrainingConfig.model_validate(
        {"allow_changed": ["rollout", "rollout.sampling.temperature", "plugins", "loss"]}
    )
    config = with_rollout()
    training = config.training.model_copy(update={"rl": rl})
    check_resumed(config.model_copy(update={"mode": "rl", "training": training}))
    settings = describe_settings(make_config("a.jsonl").training.sft, {}) | {"optim.of_another_version": 3}
    with new_checkpoint(tmp_path / "step_000010", step=10, settings=settings) as folder:
        (folder / "model.safetensors").write_bytes(b"weights")
    again: dict[str, Any] = {"resume_from": str(tmp_path / "step_000010"), "num_steps": 20}
    check_resumed(make_config("a.jsonl", **again, allow_changed=["optim.of_another_version"]))


@pytest.mark.parametrize(
    ("sections", "refusal"),
    [
        (
            {"rollout": {"engine": {"kind": "embedded"}}},
            r"does not support architecture GemmaFor.*: rollout\.engine\.kind \"sglang\" and .*\"loss\" compares any",
        ),
        ({"rollout": {"engine": {"kind": "vllm"}}}, ""),
        (
            {"rollout": {"engine": {"kind": "vllm"}}, "evaluation": {"engine": "embedded"}},
            r'GemmaFor.*: remove evaluation\.engine = "embedded"',
        ),
        (
            {"rollout": {"engine": {"kind": "vllm"}, "sampling": {"max_new_tokens": 60}}},
            r"need 71 positions, but the model at .* has 64",
        ),
        (
            {"rollout": {"engine": {"kind": "vllm"}, "sampling": {"max_new_tokens": 60}}, "name": "n_positions"},
            r"need 71 positions, but the model at .* has 64",
        ),
        (
            {"rollout": {"engine": {"kind": "vllm"}, "sampling": {"max_new_tokens": 60}}, "name": "max_seq_len"},
            r"need 71 positions, but the model at .* has 64",
        ),
    ],
)
def test_a_model_is_compared_by_an_engine_that_can_compute_it(
    tmp_path: Path, sections: dict[str, Any], refusal: str
) -> None:
    name = sections.get("name", "max_position_embeddings")
    settings = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", name: 64}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    rollout = {"sampling": {"max_new_tokens": 30}, **sections.get("rollout", {})}
    others = {key: section for key, section in sections.items() if key not in ("rollout", "name")}
    model, data = {"path": str(tmp_path)}, make_config("a.jsonl").data
    config = Config.model_validate({"mode": "sft", "model": model, "data": data, "rollout": rollout, **others})
    expected = pytest.raises((CheckpointError, ConfigError), match=refusal) if refusal else nullcontext()
    with expected:
        check_positions("prompts of 10 tokens", 10, count_positions(config), config, engine=config.evaluation_engine)
