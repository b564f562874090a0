"""Pins what is said about demonstrations before any training: what was found, and what will not work.

Without it a run would fail hours later on a row, or train on a handful of rows without a word.
"""

import json
import math
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    JambaConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    SeedOssConfig,
)

from rollouts_core.checkpoint import new_checkpoint
from rollouts_core.checks import validate
from rollouts_core.checks.function_checks import check_functions
from rollouts_core.checks.model_checks import check_packing, check_positions, count_positions, warn_of_dropout
from rollouts_core.checks.validate import (
    check_answers,
    check_demonstrations,
    check_num_rows,
    check_promotion,
    check_prompt_epochs,
    check_resumed,
    validate_config,
    warn_of_own_generation,
    warn_of_repeated_rows,
    warn_of_uncorrected_age,
)
from rollouts_core.comparison import compare_paired
from rollouts_core.config import Config, ModelConfig, PolicyConfig, RewardConfig, RLTrainingConfig, RolloutConfig
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.environments import ENVIRONMENTS
from rollouts_core.errors import CheckpointError, ConfigError, DataError
from rollouts_core.findings import Caution
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.model.policy import create_policy
from rollouts_core.rewards import REWARDS
from rollouts_core.rollout.generate import check_prompt_lengths
from rollouts_core.saving import describe_settings
from rollouts_core.types import Sample
from tests.rollouts_core.make import make_prompts

SUM = {"prompt": "1+1=?", "completion": "2"}
SUM_MESSAGES = [{"role": "user", "content": "1+1=?"}]
GOOD_ROWS: dict[str, dict[str, Any]] = {
    "arithmetic": {"answer": "-713"},
    "calculator": {"answer": "#### 1,234.5"},
    "code": {"tests": [{"stdin": "", "stdout": "1"}]},
    "countdown": {"numbers": [1, "2"], "target": 3},
    "json_schema": {"schema": {"type": "object"}, "answer": {"a": 1}},
    "math": {"answer": "x+1"},
    "multiple_choice": {"answer": "(b)"},
    "text_transformation": {"operation": "reverse", "text": "abc"},
}
"""A row that each environment accepts; the other two have no row of their own, or the same check."""
NUM_TOKENS = 10
"""Tokens of a sum."""
COMPARED = ("sft_eval", "selection", "heldout")
"""The demonstrations that are not trained on."""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """A JSONL file of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_config(sft: object, *, streaming: bool = False, **training: Any) -> Config:
    """A configuration that is about demonstrations."""
    return Config.model_validate(
        {
            "mode": "sft",
            "model": {"path": "m"},
            "data": {"sft": sft, "streaming": streaming, "selection": "s", "heldout": "h"},
            "training": {"sft": {"max_length": 20, "batch_size": 2, "micro_batch_size": 1, **training}},
        }
    )


def test_each_dataset_is_described(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first = write_rows(tmp_path / "a.jsonl", [SUM] * 6)
    second = write_rows(tmp_path / "b.jsonl", [{"text": "1" * n} for n in (5, 30, 9)])
    config = make_config([{"path": first, "max_samples": 5}, {"path": second}])
    assert check_demonstrations(config, tokenizer)[:-1] == [
        f"{first}: 5 demonstrations, 10 trained tokens",
        f"{second}: 3 demonstrations, 36 trained tokens, 1 cut",
    ]


def test_rows_that_will_be_left_out_are_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "1" * n} for n in (15, 30, 15, 15)])
    findings = check_demonstrations(make_config(path, on_overlong="drop"), tokenizer)
    assert findings[0] == f"{path}: 3 demonstrations, 48 trained tokens, 1 left out for their length"


def test_a_dataset_that_would_be_left_out_whole_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "1" * 30}] * 3)
    with pytest.raises(DataError, match=r"a\.jsonl: all 3 rows are longer than training\.sft\.max_length"):
        check_demonstrations(make_config(path, on_overlong="drop"), tokenizer)


@pytest.mark.parametrize(
    ("num_steps", "training", "said"),
    [
        (4, {}, "training.sft.num_steps 4 is about 4.0 epochs of about 2 packed rows"),
        (4, {"packing": False}, "training.sft.num_steps 4 is about 2.0 epochs of about 4 rows"),
        (1, {"packing": False, "batch_size": 1}, "training.sft.num_steps 1 is about 0.25 epochs of about 4 rows"),
        (30, {}, "training.sft.num_steps 30 is about 30 epochs of about 2 packed rows"),
        (10, {"max_length": 400}, "training.sft.num_steps 10 is about 20 epochs of about 1 packed rows"),
        (100_000, {}, "training.sft.num_steps 100,000 is about 100,000 epochs of about 2 packed rows: a model learns"),
    ],
)
def test_what_a_number_of_steps_means_is_said_and_warned_of_where_it_is_absurd(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, num_steps: int, training: dict[str, Any], said: str
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [SUM] * 4)  # 40 tokens: two rows of 20
    finding = check_demonstrations(make_config(path, num_steps=num_steps, **training), tokenizer)[-1]
    assert finding.startswith(said)
    assert isinstance(finding, Caution) == (num_steps > 30)


def test_the_steps_that_a_warning_of_many_epochs_names_are_not_warned_of(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [SUM] * 7)
    finding = check_demonstrations(make_config(path, num_steps=1000), tokenizer)[-1]
    named = int(finding.rpartition("num_steps = ")[2])
    assert isinstance(finding, Caution)
    assert not isinstance(check_demonstrations(make_config(path, num_steps=named), tokenizer)[-1], Caution)


@pytest.mark.parametrize(
    ("batch_size", "num_steps", "said", "num_cautions"),
    [
        (15, 10, ["training.rl.num_steps 10 is about 5.0 epochs of the 30 prompts"], 0),
        (512, 4, ["training.rl.num_steps 4 is about 68 epochs of", "rollout.batch_size 512 is more than the 30"], 1),
        (512, 100, ["training.rl.num_steps 100 is about 1,707 epochs of", "a step sees the same prompt several"], 2),
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


def turns(*said: dict[str, Any] | str) -> dict[str, Any]:
    """A row in which the assistant says this, each time it is asked."""
    answers = [{"role": "assistant", **({"content": each} if isinstance(each, str) else each)} for each in said]
    return {"messages": [each for answer in answers for each in ({"role": "user", "content": "1"}, answer)]}


@pytest.mark.parametrize(
    ("row", "train_on", "is_empty"),
    [
        (SUM | {"completion": ""}, "all_assistant", True),
        (SUM | {"completion": "2"}, "all_assistant", False),
        (turns(" \n"), "all_assistant", True),
        (turns("", "2"), "all_assistant", True),
        (turns("", "2"), "last_assistant", False),
        (turns("2", ""), "last_assistant", True),
        (turns({"content": None, "tool_calls": [{"function": {"name": "add"}}]}), "all_assistant", False),
        (turns({"content": "", "reasoning_content": "2"}), "all_assistant", False),
        ({"prompt": turns("")["messages"] + SUM_MESSAGES, "completion": "2"}, "all_assistant", False),
    ],
)
def test_rows_in_which_the_assistant_says_nothing_are_told(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], train_on: str, is_empty: bool
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [SUM, row, row])
    found, *told = check_demonstrations(make_config(path, train_on=train_on, max_length=40, packing=False), tokenizer)
    told = [each for each in told if isinstance(each, Caution) and "says nothing" in each]
    assert found.startswith(f"{path}: 3 demonstrations")
    words = f"{path}: in 2 of 3 rows (row 2 first) the assistant says nothing, which teaches"
    assert [each.startswith(words) for each in told] == [True] * is_empty


CALLS = {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
WRITES_CALLS = "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("row", "train_on", "unwritten"),
    [
        (turns(CALLS, "2"), "all_assistant", ["tool_calls"]),
        (turns(CALLS, "2"), "last_assistant", []),
        (turns({"content": "2", "reasoning_content": "1+1"}), "all_assistant", ["reasoning_content"]),
        ({"prompt": turns(CALLS)["messages"] + SUM_MESSAGES, "completion": "2"}, "all_assistant", []),
        (turns("2"), "all_assistant", []),
    ],
)
def test_what_the_chat_template_leaves_out_of_turns_that_are_trained_on_is_told(
    tmp_path: Path, base_model: ModelConfig, row: dict[str, Any], train_on: str, unwritten: list[str]
) -> None:
    own_tokenizer = load_tokenizer(base_model)
    path = write_rows(tmp_path / "a.jsonl", [SUM, row, row])
    config = make_config(path, train_on=train_on, max_length=80, packing=False)
    told = [each for each in check_demonstrations(config, own_tokenizer) if "leaves out" in each]
    words = f"{path}: in 2 of 3 rows (row 2 first) the assistant has"
    assert [each.startswith(f"{words} `{key}`") for each, key in zip(told, unwritten, strict=True)] == [True] * len(
        told
    )
    own_tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.reasoning_content }}"
        + WRITES_CALLS
        + "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert not any("leaves out" in each for each in check_demonstrations(config, own_tokenizer))


@pytest.mark.parametrize(("repeat", "packing", "is_said"), [(1, True, True), (1, False, False), (2, True, False)])
def test_a_step_of_more_rows_than_an_epoch_has_is_said(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, repeat: float, packing: bool, is_said: bool
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [SUM] * 4)  # 40 tokens: two rows of 20
    config = make_config([{"path": path, "repeat": repeat}], packing=packing, batch_size=4)
    said = [finding for finding in check_demonstrations(config, tokenizer) if "a step sees demonstrations" in finding]
    assert (
        said
        == [
            "training.sft.batch_size 4 is more than the about 2 rows of 20 tokens of an epoch: "
            "a step sees demonstrations several times"
        ]
        * is_said
    )


def test_of_streamed_data_only_the_first_rows_are_checked(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "NUM_STREAMED_ROWS_CHECKED", 7)
    path = write_rows(tmp_path / "a.jsonl", [SUM] * 9 + [{"broken": 1}])
    finding, _ = check_demonstrations(make_config(path, streaming=True), tokenizer)
    assert finding == f"{path}: 7 demonstrations in the first 7 of 10 rows, 14 trained tokens"
    with pytest.raises(DataError, match="row 10: expected `messages`"):
        check_demonstrations(make_config(path), tokenizer)


@pytest.mark.parametrize("packing", [True, False])
def test_streamed_data_of_which_the_first_rows_are_all_left_out_are_warned_of(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    monkeypatch.setattr(validate, "NUM_STREAMED_ROWS_CHECKED", 2)
    path = write_rows(tmp_path / "a.jsonl", [{**SUM, "completion": "2" * 50}] * 2 + [SUM])
    config = make_config(path, streaming=True, packing=packing, on_overlong="drop")
    first, second = check_demonstrations(config, tokenizer)
    assert first.startswith(f"{path}: 0 demonstrations in the first 2 of 3 rows") and isinstance(second, Caution)


MODELS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(n_positions=16),
    "gptj": GPTJConfig(n_positions=16),
    "opt": OPTConfig(max_position_embeddings=16),
    "llama": LlamaConfig(max_position_embeddings=16),
    "jamba": JambaConfig(max_position_embeddings=16),
    "bloom": BloomConfig(),
    "falcon": FalconConfig(alibi=True),
}
"""Tables of learned, and of computed, positions; positions that go on; and none at all."""


@pytest.mark.parametrize(
    ("mode", "packing", "named"),
    [
        ("sft", {}, r"training\.sft\.packing = false"),
        ("sft+rl", {}, r"training\.sft\.packing and training\.rl\.packing = false"),
        ("sft+rl", {"sft": {"packing": False}}, r"training\.rl\.packing = false"),
        ("sft", {"sft": {"packing": False}}, ""),
    ],
)
@pytest.mark.parametrize("family", ["jamba", "bloom", "falcon"])
def test_a_model_that_heeds_no_mask_is_refused_where_rows_are_packed(
    tmp_path: Path, family: str, mode: str, packing: dict[str, Any], named: str
) -> None:
    MODELS[family].save_pretrained(tmp_path)
    data = dict.fromkeys(("sft", "prompts", "selection", "heldout"), "rows.jsonl")
    settings = {"mode": mode, "model": {"path": str(tmp_path)}, "data": data, "training": packing}
    place = {
        "jamba": "the linear_attention layers of jamba",
        "bloom": "bloom models",
        "falcon": "falcon with ALiBi models",
    }[family]
    words = f"see each other in {place}: set {named}"
    with pytest.raises(ConfigError, match=words) if named else nullcontext():
        check_packing(Config.model_validate(settings))


@pytest.mark.parametrize(
    ("mode", "rl", "is_refused"),
    [
        ("sft", {}, False),
        ("rl", {}, True),
        ("sft+rl", {}, True),
        ("sft+rl", {"packing": False}, False),
        ("rl", {"policy": {"attention": "flash_attention_2", "precision": "bfloat16"}}, False),
    ],
)
def test_a_model_that_counts_distances_along_the_row_is_refused_where_completions_share_a_prompt(
    tmp_path: Path, mode: str, rl: dict[str, Any], is_refused: bool
) -> None:
    GPTNeoConfig().save_pretrained(tmp_path)
    data = dict.fromkeys(("sft", "prompts", "selection", "heldout"), "rows.jsonl")
    settings = {"mode": mode, "model": {"path": str(tmp_path)}, "data": data, "training": {"rl": rl}}
    words = r"gpt_neo models would see a prompt .* further away .*: set training\.rl\.packing = false"
    with pytest.raises(ConfigError, match=words) if is_refused else nullcontext():
        check_packing(Config.model_validate(settings))


@pytest.mark.parametrize(
    ("settings", "mode", "named"),
    [
        (SeedOssConfig(), "rl", "(attention_dropout 0.1, residual_dropout 0.1 in its config.json)"),
        (GPT2Config(embd_pdrop=0.0), "sft+rl", "(resid_pdrop 0.1, attn_pdrop 0.1 in its config.json)"),
        (GPT2Config(), "sft", ""),
        (GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), "rl", ""),  # classifiers of it still would
        (GPTNeoConfig(), "rl", ""),
        (LlamaConfig(), "rl", ""),
    ],
)
def test_dropout_is_warned_of_where_the_loss_compares_with_an_engine(
    tmp_path: Path, settings: PreTrainedConfig, mode: str, named: str
) -> None:
    """Of a small GPT-2 with 0.1, 28 to 37 % of all tokens were clipped before the first update."""
    settings.save_pretrained(tmp_path)
    data = dict.fromkeys(("sft", "prompts", "selection", "heldout"), "rows.jsonl")
    config = Config.model_validate({"mode": mode, "model": {"path": str(tmp_path)}, "data": data})
    assert [named in sentence for sentence in warn_of_dropout(config)] == [True] * bool(named)


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
    ],
)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_quantized_model_is_refused_before_a_training_and_by_it(
    quickstart_dir: Path, tmp_path: Path, quantization: dict[str, Any], method: str, is_loaded: bool
) -> None:
    """Where bitsandbytes is installed nothing but norms and embeddings would be trained, without a word."""
    folder = tmp_path / "quantized"
    shutil.copytree(quickstart_dir / "base_model", folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": quantization}))
    config = with_rollout(environment="arithmetic").model_copy(update={"model": ModelConfig(path=str(folder))})
    with pytest.raises(ConfigError, match=rf"{folder} are quantized \({method}, .*give the model that they were made"):
        create_policy(config.model, PolicyConfig()) if is_loaded else validate_config(config)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("max_length", [17, 18, 60])
def test_demonstrations_that_are_longer_than_what_the_model_sees_are_refused_or_told(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, family: str, max_length: int
) -> None:
    MODELS[family].save_pretrained(tmp_path)
    path = write_rows(tmp_path / "a.jsonl", [SUM, {"text": "1" * 40}, SUM])
    config = make_config(path, max_length=max_length)
    config = config.model_copy(update={"model": ModelConfig(path=str(tmp_path))})
    num_needed = min(max_length, 41) - 1
    found = f"a demonstration of {num_needed + 1} tokens needs {num_needed} positions, the model at {tmp_path}"
    if max_length > 17 and family in ("gpt2", "gptj", "opt"):
        with pytest.raises(ConfigError, match=f"{found} has 16: set training.sft.max_length to 17 or less"):
            check_demonstrations(config, tokenizer)
        return
    told = [sentence for sentence in check_demonstrations(config, tokenizer) if "positions" in sentence]
    assert [sentence.partition(":")[2].strip() for sentence in told] == [
        f"{found} was made for 16: what lies beyond teaches it little; set training.sft.max_length to 17 or less"
    ] * (max_length > 17 and family in ("llama", "jamba"))


@pytest.mark.parametrize("longest", ["sft_eval", "selection", "heldout"])
def test_rows_whose_loss_is_compared_fit_the_model_too(tmp_path: Path, base_model: ModelConfig, longest: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base_model.path, folder)
    GPT2Config(n_positions=16).save_pretrained(folder)
    rows = {name: [{**SUM, "prompt": f"{place}+1=?"}] for place, name in enumerate(("sft", *COMPARED))}
    rows[longest].append({"text": "1" * 20})
    data = {name: write_rows(tmp_path / f"{name}.jsonl", each) for name, each in rows.items()}
    config = Config.model_validate(
        {"mode": "sft", "model": {"path": str(folder)}, "data": data, "evaluation": {"metric": "loss"}}
    )
    with pytest.raises(ConfigError, match=rf"{longest}\.jsonl: a demonstration of 21 tokens needs 20 positions"):
        validate_config(config)


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


def with_rollout(**rollout: Any) -> Config:
    """A configuration that is about grading."""
    return make_config("sft.jsonl").model_copy(update={"rollout": RolloutConfig(**rollout)})


@pytest.mark.parametrize(
    ("rollout", "metadata", "sentence"),
    [
        ({"environment": "countdown"}, {"numbers": [1]}, "p0' has no `target`, which countdown compares"),
        ({"environment": "calculator"}, {}, "p0' has no `answer`, which calculator compares"),
        ({"rewards": (RewardConfig(name="last_number"),)}, {}, "p0' has no `answer`, which last_number compares"),
        ({"environment": "math"}, {"solution": "7"}, r"completions with; did you mean solution\? call it answer$"),
        ({"environment": "math"}, {"reward_model": {"ground_truth": "7"}}, "did you mean ground_truth of reward_model"),
        ({"environment": "code", "reward_fn": "rollouts_core.rewards:exact_match"}, {}, ""),
        ({"environment": "countdown"}, {"numbers": [1], "target": 1}, ""),
    ],
)
def test_a_prompt_without_what_its_grader_needs_is_named(
    rollout: dict[str, Any], metadata: dict[str, Any], sentence: str
) -> None:
    prompts = [replace(make_prompts(1)[0], metadata=metadata)]
    if not sentence:
        check_answers(prompts, with_rollout(**rollout), source="p.jsonl")
        return
    with pytest.raises(DataError, match=sentence):
        check_answers(prompts, with_rollout(**rollout), source="p.jsonl")


@pytest.mark.parametrize(
    ("environment", "row", "sentence"),
    [
        ("arithmetic", {"answer": "seven"}, "expected a number as `answer`, like 713, found 'seven'"),
        ("calculator", {"answer": "about 7"}, "the row's answer 'about 7' is no number"),
        ("code", {"tests": []}, "the row has no tests: every program would pass"),
        ("code", {"tests": "  "}, "the row has no tests: every program would pass"),
        ("code", {"tests": 3}, "expected `tests` to be a list or Python code, found int"),
        ("code", {"tests": "assert f(1) =="}, "`tests` is no Python .*: no program would pass"),
        ("code", {"tests": [{"stdin": "1"}]}, 'test 1 must be {"stdin": ..., "stdout": ...}, found'),
        ("countdown", {"numbers": "1 2", "target": 3}, "expected `numbers` to be a list of numbers, found '1 2'"),
        ("countdown", {"numbers": [1, "two"], "target": 3}, "expected a number, found 'two'"),
        ("json_schema", {"schema": {"type": "objekt"}}, "`schema` is no JSON Schema: 'objekt'"),
        ("json_schema", {"schema": {"$ref": "#/$defs/x"}}, r"`schema` refers to '/\$defs/x', which is not in it"),
        ("json_schema", {"schema": {"items": {"$ref": "x.json"}}}, "`schema` refers to 'x.json'"),
        ("json_schema", {"schema": {"type": "object"}, "answer": "{"}, "the answer '{' is no JSON"),
        ("json_schema", {"schema": {"type": "string"}, "answer": "Rome"}, r'quotes of its own, "\\"Rome\\""'),
        ("json_schema", {"schema": {"type": "object"}, "answer": True}, "schema: True is not of type 'object'"),
        ("json_schema", {"schema": {"type": "object"}, "answer": [1]}, "does not keep to the row's own schema"),
        ("math", {"answer": "$ "}, "the row's answer .* is empty without spaces, units and marks"),
        ("multiple_choice", {"answer": "42"}, "expected a letter from A to J as `answer`, found '42'"),
        (
            "text_transformation",
            {"operation": "revers", "text": "x"},
            "unknown operation 'revers'; did you mean reverse",
        ),
    ],
)
def test_a_later_row_that_cannot_be_graded_is_named(
    tmp_path: Path, environment: str, row: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    good = {"prompt": "x", **GOOD_ROWS[environment]}
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps({**good, **row})}\n")
    prompts = load_prompts_from_jsonl(path)
    check_answers(prompts[:1], with_rollout(environment=environment), source=str(path))
    with pytest.raises(DataError, match=f"prompts.jsonl, row 3: prompt 'prompts-3' cannot be graded: .*{sentence}"):
        check_answers(prompts, with_rollout(environment=environment), source=str(path))


def test_every_environment_that_ships_checks_its_rows_and_accepts_good_ones(tmp_path: Path) -> None:
    assert {*GOOD_ROWS, "verifiers", "math_verify"} == {*ENVIRONMENTS}
    for environment in GOOD_ROWS:
        assert hasattr(ENVIRONMENTS[environment](), "check_row")


def test_an_answer_without_a_number_is_named_where_numbers_are_compared(tmp_path: Path) -> None:
    prompts = load_prompts_from_jsonl(write_rows(tmp_path / "p.jsonl", [{"prompt": "x", "answer": "none"}]))
    with pytest.raises(DataError, match=r"row 1: .* last_number compares numbers, and the answer 'none' has none"):
        check_answers(prompts, with_rollout(reward_fn="last_number"), source="p.jsonl")


@pytest.mark.parametrize(
    "rollout",
    [
        *({"environment": name} for name in ("arithmetic", "calculator", "math", "math_verify", "multiple_choice")),
        *({"reward_fn": name} for name in REWARDS),
        {"rewards": (RewardConfig(name="my_rewards:right"), RewardConfig(name="exact_match"))},
    ],
)
@pytest.mark.parametrize(("answer", "kind"), [(["37"], "list"), ({"value": 37}, "object"), ([], "list")])
def test_an_answer_that_is_json_is_refused_where_texts_are_compared(
    tmp_path: Path, rollout: dict[str, Any], answer: object, kind: str
) -> None:
    """It would be the text `["37"]`, which no completion that is right equals."""
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "x", "answer": "37"}, {"prompt": "y", "answer": answer}])
    grader = rollout.get("environment") or rollout.get("reward_fn") or "exact_match"
    sentence = f"p.jsonl, row 2: prompt 'p-2' cannot be graded: its `answer` is a JSON {kind}, and {grader} compares"
    with pytest.raises(DataError, match=sentence):
        check_answers(load_prompts_from_jsonl(path)[1:], with_rollout(**rollout), source=path)


def test_an_answer_that_looks_like_json_is_a_text_to_compare_with(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "x", "answer": "[1, 2]"}])
    check_answers(load_prompts_from_jsonl(path), with_rollout(environment="math"), source=path)


@pytest.mark.parametrize("rollout", [{"reward_fn": "my_rewards:right"}, {"environment": "code"}])
def test_an_answer_that_is_json_is_left_to_who_reads_it_or_ignores_it(tmp_path: Path, rollout: dict[str, Any]) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "x", "answer": ["37"], **GOOD_ROWS["code"]}])
    check_answers(load_prompts_from_jsonl(path), with_rollout(**rollout), source=path)


@pytest.mark.parametrize(
    ("schema", "answer", "right", "wrong"),
    [
        ("object", {"a": [1, None]}, '{"a": [1, null]}', '{"a": [1, 0]}'),
        ("boolean", True, "true", "false"),
        ("boolean", False, "false", "true"),
        ("number", 2.5, "2.50", "2"),
    ],
)
def test_an_answer_that_is_json_is_graded_as_json(
    tmp_path: Path, schema: str, answer: Any, right: str, wrong: str
) -> None:
    row = {"prompt": "x", "schema": {"type": schema}, "answer": answer}
    [prompt] = load_prompts_from_jsonl(write_rows(tmp_path / "p.jsonl", [row]))
    check_answers([prompt], with_rollout(environment="json_schema"), source="p.jsonl")
    for response, reward in ((right, 1.0), (wrong, 0.0)):
        sample = Sample(response=response, metadata={**prompt.metadata, "answer": prompt.answer})
        assert ENVIRONMENTS["json_schema"]().grade(sample) == reward


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
    with pytest.raises(ConfigError, match=r"set label to the one whose score is the reward: .* are bad, good$"):
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
    told = "my_agents:solve makes the completions of RL alone: checkpoints are compared by what embedded completes"
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


@pytest.mark.parametrize("max_p_value", [0.01, 0.05, 0.2, 1.0])
def test_so_few_rows_that_no_difference_could_count_are_refused(max_p_value: float) -> None:
    """Without it RL runs for days, and its verdict was certain before it began."""
    enough = max(1, math.ceil(-math.log2(max_p_value)))
    assert compare_paired([0.0] * (enough + 1), [1.0] * (enough + 1)).p_value < max_p_value
    check_num_rows(enough, max_p_value, source="data.heldout", setting="evaluation.max_p_value")
    if max_p_value < 1:
        assert compare_paired([0.0] * (enough - 1), [1.0] * (enough - 1)).p_value > max_p_value
        with pytest.raises(ConfigError, match=rf"data\.heldout gives {enough - 1} rows .* give {enough} rows or more"):
            check_num_rows(enough - 1, max_p_value, source="data.heldout", setting="evaluation.max_p_value")


def test_a_p_value_that_no_comparison_has_is_refused() -> None:
    least = compare_paired([0.0] * 50, [1.0] * 50).p_value
    check_num_rows(50, least, source="data.heldout", setting="evaluation.max_p_value")
    with pytest.raises(ConfigError, match=r"max_p_value 4\.9995e-05 lets nothing count: .* below 0\.0001: raise it"):
        check_num_rows(50, least / 2, source="data.heldout", setting="evaluation.max_p_value")


def with_heldout_rows(tmp_path: Path, num_rows: int, **rollout: Any) -> Config:  # Any: settings of every type
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}", "answer": "{number}"}}\n' for number in range(num_rows)))
    config = with_rollout(**(rollout or {"environment": "math"}))
    return config.model_copy(update={"data": config.data.model_copy(update={"heldout": str(path)})})


def test_rows_that_can_never_show_a_better_model_are_refused_and_others_say_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.heldout gives 6 rows .* retrain\.max_p_value .* give 7 rows or more"):
        check_promotion(with_heldout_rows(tmp_path, 6), margin=0.0, max_p_value=0.01)
    [sentence] = check_promotion(with_heldout_rows(tmp_path, 7), margin=0.0, max_p_value=0.01)
    assert "at least 7 of 7 held-out prompts" in sentence
    [sentence] = check_promotion(with_heldout_rows(tmp_path, 200), margin=0.05, max_p_value=0.01)
    assert "at least 20 of 200 held-out prompts right that the other gets wrong" in sentence
    assert check_promotion(with_heldout_rows(tmp_path, 1), margin=5.0, max_p_value=1.0) == [], "everything counts"


def test_of_a_long_file_only_the_rows_that_are_compared_count(tmp_path: Path) -> None:
    config = with_heldout_rows(tmp_path, 200)
    few = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"max_prompts": 6})})
    with pytest.raises(ConfigError, match=r"data\.heldout gives 6 rows"):
        check_promotion(few, margin=0.0, max_p_value=0.01)


def test_held_out_rows_that_are_there_twice_are_told(tmp_path: Path) -> None:
    """Without it a file that was appended to itself makes noise look like an improvement."""
    config = with_heldout_rows(tmp_path, 10)
    assert warn_of_repeated_rows(config) == []
    heldout = Path(config.data.heldout)
    once = heldout.read_text()
    heldout.write_text(once + '{"id": "another", "answer": "9", "prompt": "9"}\n{"prompt": "9", "answer": "10"}\n')
    [warning] = warn_of_repeated_rows(config)
    assert warning.startswith("data.heldout: 1 of 12 rows say the same as one before them (row 11 is row 10): each")
    heldout.write_text(once * 2)
    [warning] = warn_of_repeated_rows(config)
    assert "10 of 20 rows" in warning and "(row 11 is row 1, row 12 is row 2, row 13 is row 3, ...)" in warning
    compared = config.evaluation.model_copy(update={"max_prompts": 10})
    assert warn_of_repeated_rows(config.model_copy(update={"evaluation": compared})) == [], "not compared on"


def test_a_margin_that_rewards_cannot_differ_by_is_refused_only_where_that_is_known(tmp_path: Path) -> None:
    assert check_promotion(with_heldout_rows(tmp_path, 50), margin=0.99, max_p_value=0.01)
    with pytest.raises(ConfigError, match=r"retrain\.margin 1 lets no model into production: rewards are between 0"):
        check_promotion(with_heldout_rows(tmp_path, 50), margin=1.0, max_p_value=0.01)
    for rewards in ({"reward_fn": "my.module:reward"}, {"rewards": [{"weight": 5.0}]}, {"environment": "my:World"}):
        assert check_promotion(with_heldout_rows(tmp_path, 50, **rewards), margin=1.0, max_p_value=0.01) == []


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
    with pytest.raises(CheckpointError, match="is of step 10, num_steps is 9: raise num_steps"):
        check_resumed(make_config("a.jsonl", **{**again, "num_steps": 9}, optim={"lr": 1e-3}))
    with pytest.raises(CheckpointError, match="nowhere"):
        check_resumed(make_config("a.jsonl", **{**again, "resume_from": str(tmp_path / "nowhere")}))


@pytest.mark.parametrize(
    ("sections", "refusal"),
    [
        (
            {},
            r"does not support architecture MistralFor.*: rollout\.engine\.kind \"sglang\" and .*\"loss\" compares any",
        ),
        ({"rollout": {"engine": {"kind": "vllm"}}}, ""),
        (
            {"rollout": {"engine": {"kind": "vllm"}}, "evaluation": {"engine": "embedded"}},
            r'MistralFor.*: leave evaluation\.engine = "embedded" out',
        ),
        (
            {"rollout": {"engine": {"kind": "vllm"}, "sampling": {"max_new_tokens": 60}}},
            r"need 71 positions, the model at .* has 64",
        ),
        (
            {"rollout": {"engine": {"kind": "vllm"}, "sampling": {"max_new_tokens": 60}}, "name": "n_positions"},
            r"need 71 positions, the model at .* has 64",
        ),
    ],
)
def test_a_model_is_compared_by_an_engine_that_can_compute_it(
    tmp_path: Path, sections: dict[str, Any], refusal: str
) -> None:
    name = sections.get("name", "max_position_embeddings")
    settings = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", name: 64}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    rollout = {"sampling": {"max_new_tokens": 30}, **sections.get("rollout", {})}
    others = {key: section for key, section in sections.items() if key not in ("rollout", "name")}
    model, data = {"path": str(tmp_path)}, make_config("a.jsonl").data
    config = Config.model_validate({"mode": "sft", "model": model, "data": data, "rollout": rollout, **others})
    expected = pytest.raises((CheckpointError, ConfigError), match=refusal) if refusal else nullcontext()
    with expected:
        check_positions(
            "prompts of 10 tokens", 10, count_positions(config), config, engine=config.evaluation_engine.kind
        )
