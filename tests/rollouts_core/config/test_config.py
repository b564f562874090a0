"""Pins what a person who writes a configuration meets: one sentence per mistake, and files that come back unchanged.

Without it a misspelt key would be ignored and a run would train with a default nobody chose.
"""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rollouts_core import config as config_module
from rollouts_core.config import (
    AdvantageConfig,
    Config,
    DataConfig,
    DatasetConfig,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    Record,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
    SFTTrainingConfig,
    TrainingConfig,
    name_of_function,
    parse_config,
)
from rollouts_core.config.files import read_record, resolve_paths
from rollouts_core.errors import ConfigError
from rollouts_core.filters import check_any_success
from rollouts_core.mistakes import Mistakes
from rollouts_core.rewards import exact_match

ALL_RECORDS = [kind for kind in vars(config_module).values() if isinstance(kind, type) and issubclass(kind, Record)]
MINIMAL: dict[str, Any] = {
    "model": {"path": "base"},
    "data": {"sft": "a.jsonl", "prompts": "b.jsonl", "selection": "c.jsonl", "heldout": "d.jsonl"},
}


def with_setting(key: str, value: object) -> dict[str, Any]:
    """The minimal settings with one more, `key` being a path of names."""
    settings: dict[str, Any] = json.loads(json.dumps(MINIMAL))
    *sections, name = key.split(".")
    section = settings
    for part in sections:
        section = section.setdefault(part, {})
    section[name] = value
    return settings


def parse(settings: dict[str, Any]) -> Config:
    """The settings as a configuration from a file named pipeline.toml."""
    return parse_config(Config, settings, source="pipeline.toml")


def make_full_config(directory: Path) -> Config:
    """A configuration that sets something in every section, with absolute paths."""
    files = {name: str(directory / f"{name}.jsonl") for name in ("sft", "prompts", "selection", "heldout")}
    return Config(
        model=ModelConfig(path=str(directory / "base"), revision="v2"),
        data=DataConfig(**files),
        training=TrainingConfig(
            sft=SFTTrainingConfig(num_steps=7, optim=OptimConfig(betas=(0.8, 0.9), eps=1e-6)),
            rl=RLTrainingConfig(loss=LossConfig(clip_high=0.28), optim=RLOptimConfig(schedule="linear")),
        ),
        rollout=RolloutConfig(reward_fn="exact_match", sampling=SamplingConfig(temperature=0.7)),
        evaluation=EvaluationConfig(max_p_value=1.0),
    )


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("training.sft.num_stepz", 5, r"unknown key training\.sft\.num_stepz; did you mean num_steps\?"),
        ("training.sft.lr", 1, r"unknown key training\.sft\.lr; did you mean training\.sft\.optim\.lr\?"),
        ("training.rl.learning_rate", 1, r"unknown key .*; did you mean training\.rl\.optim\.lr\?"),
        ("training.sft.weight_deacy", 1, r"unknown key .*; did you mean training\.sft\.optim\.weight_decay\?"),
        ("rollout.temprature", 1, r"unknown key .*; did you mean rollout\.sampling\.temperature\?"),
        ("modle", {}, r"unknown key modle; did you mean model\?"),
        ("rollout.sampling.temprature", 1, r"unknown key rollout\.sampling\.temprature; did you mean temperature\?"),
        ("training.rl.loss.zzz", 1, r"unknown key .*zzz; known are aggregation, clip_high, clip_low, .*"),
        ("training.sft.num_steps", "many", r"training\.sft\.num_steps: input should be a valid integer.* found 'many'"),
        ("training.sft.num_steps", True, r"training\.sft\.num_steps: input should be a valid integer, found True"),
        ("training.sft.num_steps", "3", r"training\.sft\.num_steps: input should be a valid integer, found '3'"),
        ("training.sft.packing", 1, r"training\.sft\.packing: input should be a valid boolean, found 1"),
        ("training.sft.packing", "yes", r"training\.sft\.packing: input should be a valid boolean, found 'yes'"),
        ("training.sft.optim.lr", "1e-3", r"training\.sft\.optim\.lr: input should be a valid number, found '1e-3'"),
        ("evaluation.max_prompts", 2**63, r"evaluation\.max_prompts: must be a number of at most 9223372036854775807"),
        ("training.sft.optim.lr", True, r"training\.sft\.optim\.lr: input should be a valid number, found True"),
        ("training.sft.optim.betas", [0.9, "0.9"], r"training\.sft\.optim\.betas\.1: .*valid number, found '0\.9'"),
        ("deployment.trainer_gpu_ranks", [True], r"deployment\.trainer_gpu_ranks\.0: .*valid integer, found True"),
        ("data.sft", 3, r"data\.sft: input should be a valid string, found 3"),
        ("data.sft", [], r'mode "sft\+rl" needs data\.sft'),
        ("data.sft", ["a"], r"data\.sft\.0: expected a table of settings, found 'a'"),
        ("data.sft", [{"path": "a"}, {"repeat": 2}], r"data\.sft\.1\.path is missing"),
        ("data.sft", [{"path": "a", "max_sampels": 2}], r"unknown key data\.sft\.0\.max_sampels; did you mean max_s"),
        ("data.sft", [{"path": "a", "repeat": 0}], r"data\.sft\.0\.repeat: .*greater than 0, found 0"),
        ("data.sft", [{"path": "a", "max_samples": "9"}], r"data\.sft\.0\.max_samples: .*valid integer, found '9'"),
        ("training.sft.num_steps", 0, r"training\.sft\.num_steps: .*greater than or equal to 1, found 0"),
        ("training.sft.optim.lr", -1.0, r"training\.sft\.optim\.lr: .*found -1\.0"),
        ("training.sft.optim.lr", float("nan"), r"training\.sft\.optim\.lr"),
        ("training.rl.advantage.baseline", float("inf"), r"training\.rl\.advantage\.baseline: must be a finite number"),
        (
            "training.rl.loss.dual_clip",
            0.5,
            r"training\.rl\.loss: dual_clip must be above 1, .* found 0\.5",
        ),
        ("training.rl.loss.aggregation", "constant_length", r"training\.rl\.loss: .* needs constant_length"),
        ("training.rl.algorithm", "verl-dappo", r"training\.rl\.algorithm: .*'verl-dapo'.*found 'verl-dappo'"),
        ("training.sft.optim.betas", [0.9, 1.0], r"training\.sft\.optim\.betas\.1: .*less than 1, found 1\.0"),
        ("training.sft", 3, r"training\.sft: .*found 3"),
        ("mode", "dpo", r"mode: .*'sft', 'rl' or 'sft\+rl', found 'dpo'"),
        ("model.path", "", r"model\.path: .*found ''"),
        (
            "training.sft",
            {"batch_size": 6, "micro_batch_size": 4},
            r"training\.sft: batch_size 6 is not a multiple of .* 4",
        ),
        ("rollout.reward_fn", 5, r"rollout\.reward_fn: .*found 5$"),
        ("deployment", {"trainer_gpu_ranks": [0, 1], "trainer_processes": 3}, r"deployment: trainer_processes 3 needs"),
        ("deployment.engine_port", 70000, r"deployment\.engine_port: .*found 70000"),
        (
            "deployment",
            {"engine_port": 65535, "num_engines": 2},
            r"deployment: engine_port 65535 with num_engines 2 .* port 65536, .*: give 65534 or less",
        ),
        (
            "rollout.engine",
            {"kind": "vllm", "context_length": 24},
            r"rollout\.engine: engine\.context_length 24 is too short .* weights of vllm: set it to 26 or more",
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_file_and_key(key: str, value: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^pipeline\.toml: {sentence}") as caught:
        parse(with_setting(key, value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rl", "rollout", "sentence"),
    [
        ({"num_minibatches": 9}, {}, r"num_minibatches 9 exceeds the 8 groups of a step"),
        ({"num_minibatches": 8}, {}, ""),
        ({"algorithm": "verl-dapo"}, {"batch_size": 2}, r"num_minibatches \d+ exceeds the 2 groups"),
        (
            {"reward_shaping": {"max_response_tokens": 640, "overlong_buffer_tokens": 128}},
            {},
            r"applies above 512 tokens .*max_new_tokens 512 keeps all .*: set max_response_tokens to 512",
        ),
        ({"reward_shaping": {"max_response_tokens": 640, "overlong_buffer_tokens": 129}}, {}, ""),
        ({"reward_shaping": {"max_response_tokens": 640}}, {}, ""),
    ],
)
def test_what_no_batch_of_rollouts_can_have_is_refused(
    rl: dict[str, Any], rollout: dict[str, Any], sentence: str
) -> None:
    settings = {**MINIMAL, "training": {"rl": rl}, "rollout": {"batch_size": 8, **rollout}}
    with pytest.raises(ConfigError, match=sentence) if sentence else nullcontext():
        parse(settings)
    parse({**settings, "mode": "sft"})


def test_an_algorithm_whose_penalty_is_for_longer_completions_says_all_that_has_to_be_set() -> None:
    """Only the limit was named, which the buffer of 4096 tokens then refused, with the limit as its remedy."""
    settings = {**MINIMAL, "rollout": {"sampling": {"max_new_tokens": 512}}}
    words = "set max_response_tokens to 512 and overlong_buffer_tokens to a part of it, like 128$"
    with pytest.raises(ConfigError, match=words):
        parse({**settings, "training": {"rl": {"algorithm": "verl-dapo"}}})
    shaping = {"max_response_tokens": 512}
    with pytest.raises(
        ConfigError, match=r"overlong_buffer_tokens 4096 must not exceed .* the buffer to a part of it$"
    ):
        parse({**settings, "training": {"rl": {"algorithm": "verl-dapo", "reward_shaping": shaping}}})
    parse(
        {
            **settings,
            "training": {
                "rl": {"algorithm": "verl-dapo", "reward_shaping": {**shaping, "overlong_buffer_tokens": 128}}
            },
        }
    )


@pytest.mark.parametrize(
    ("eval_every", "checkpoint_every", "said"),
    [
        (4, 3, r"checkpoint_every to 4 or 8, or training\.sft\.eval_every to 1 or 3$"),
        (4, 10, r"checkpoint_every to 8 or 12, or training\.sft\.eval_every to 2 or 5$"),
        (30, 20, r"checkpoint_every to 30 or 60, or training\.sft\.eval_every to 10 or 20$"),
        (5, 10, ""),
        (10, 10, ""),
    ],
)
def test_the_best_are_kept_only_if_each_checkpoint_is_evaluated(
    eval_every: int, checkpoint_every: int, said: str
) -> None:
    sft = {"eval_every": eval_every, "checkpoint_every": checkpoint_every, "keep_best": 1}
    settings = {**with_setting("data.sft_eval", "e.jsonl"), "training": {"sft": sft}}
    if said:
        with pytest.raises(ConfigError, match=said):
            parse(settings)
    else:
        parse(settings)
    parse({**settings, "training": {"sft": {**sft, "keep_best": 0}}})
    with pytest.raises(ConfigError, match=r"their loss on data\.sft_eval, which is not set: set data\.sft_eval; or"):
        parse({**MINIMAL, "training": {"sft": {**sft, "eval_every": 1}}})


@pytest.mark.parametrize(
    ("rollout", "found"),
    [
        ({"max_staleness": 2}, r"rollout\.max_staleness 2"),
        ({"max_partial_staleness": 1, "over_sampling_factor": 2.0}, r"rollout\.max_partial_staleness 1"),
    ],
)
def test_the_best_of_rl_are_kept_only_if_each_checkpoint_samples_alone(rollout: dict[str, Any], found: str) -> None:
    settings = {**MINIMAL, "rollout": rollout, "training": {"rl": {"keep_best": 1}}}
    with pytest.raises(ConfigError, match=rf"training\.rl\.keep_best 1 .* with {found} other weights sample too: set"):
        parse(settings)
    with pytest.raises(ConfigError, match="other weights sample too: remove roll_back_on, set keep_best to 0"):
        parse({**settings, "training": {"rl": {"keep_best": 1, "roll_back_on": ["reward_halved"]}}})
    parse({**settings, "training": {"rl": {"keep_best": 0}}})


@pytest.mark.parametrize(("stage", "rule"), [("rl", "reward_halved"), ("sft", "loss_risen")])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"keep_best": 0}, "with keep_best 0 no checkpoint gets a score: set keep_best to 1 or more, or remove roll_b"),
        (
            {"checkpoint_every": 20},
            "checkpoint_every 20 and num_steps 20 there is none: set checkpoint_every below",
        ),
        (
            {"stop_on": True},
            'the rule "{rule}" is in stop_on and in roll_back_on, which exclude each other: remove',
        ),
        ({}, ""),
    ],
)
def test_a_rollback_needs_checkpoints_with_scores_and_no_other_action_of_its_rule(
    stage: str, rule: str, changed: dict[str, Any], said: str
) -> None:
    kept = {"num_steps": 20, "checkpoint_every": 10, "keep_best": 1, **({"eval_every": 10} if stage == "sft" else {})}
    training = {**kept, "roll_back_on": [rule], **changed, **({"stop_on": [rule]} if "stop_on" in changed else {})}
    settings = {**with_setting("data.sft_eval", "e.jsonl"), "training": {stage: training}}
    if said:
        with pytest.raises(ConfigError, match=rf"training\.{stage}: .*{re.escape(said.format(rule=rule))}"):
            parse(settings)
    else:
        parse(settings)


def test_completions_without_another_to_compare_with_are_refused() -> None:
    settings = with_setting("rollout.n_samples_per_prompt", 1)
    with pytest.raises(ConfigError, match=r"needs rollout\.n_samples_per_prompt of 2 or more, found 1"):
        parse(settings)
    parse({**settings, "training": {"rl": {"advantage": {"estimator": "constant", "baseline": 0.5}}}})


@pytest.mark.parametrize(
    "filters", [{"filter_fn": "reward_nonzero_std"}, {"filters": [{"name": "quality_and_diversity"}]}]
)
def test_a_filter_that_keeps_no_completion_without_another_is_refused(filters: dict[str, Any]) -> None:
    """Every prompt would be dropped, until `max_refills` ends the run."""
    alone = {"training": {"rl": {"advantage": {"estimator": "gae"}}}, "rollout": {"n_samples_per_prompt": 1}}
    parse({**MINIMAL, **alone, "rollout": {"n_samples_per_prompt": 1, "filter_fn": "min_reward"}})
    parse({**MINIMAL, **alone, "rollout": {"n_samples_per_prompt": 2, **filters}})
    with pytest.raises(ConfigError, match="keeps prompts whose completions have different rewards"):
        parse({**MINIMAL, **alone, "rollout": {"n_samples_per_prompt": 1, **filters}})


def test_a_baseline_alone_is_the_estimator_that_subtracts_it() -> None:
    config = RLTrainingConfig(baseline=0.5, sync_every=2)  # type: ignore[call-arg]
    assert config == RLTrainingConfig(advantage=AdvantageConfig(estimator="constant", baseline=0.5), sync_every=2)
    assert RLTrainingConfig.model_validate(config.model_dump()) == config
    assert config.baseline == 0.5


@pytest.mark.parametrize("other", [{"advantage": {"estimator": "group_mean"}}, {"algorithm": "verl-grpo"}])
def test_a_baseline_beside_another_way_to_take_advantages_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"baseline is short for advantage .* give only one of them"):
        RLTrainingConfig.model_validate({"baseline": 0.5, **other})


def test_the_schedule_spans_every_update_of_every_step() -> None:
    assert RLTrainingConfig(num_steps=5, num_minibatches=4, num_epochs=2).num_optim_steps == 40


@pytest.mark.parametrize(
    ("argument", "is_refused"),
    [
        *(
            (each, True)
            for each in ("--host", "--hos=0.0.0.0", "--port=9", "--model", "--model-path", "--model_path=m")
        ),
        *((each, False) for each in ("--model-impl", "--hf-overrides", "--port-args", "--max-model-len", "0.0.0.0")),
    ],
)
def test_an_engines_address_and_model_are_no_further_arguments(argument: str, is_refused: bool) -> None:
    """Without it --host would open an engine to other machines without a key."""
    settings = with_setting("rollout.engine", {"kind": "vllm", "extra_args": [argument, "x"]})
    words = f"engine.extra_args contains {argument}, which is set already: remove it"
    with pytest.raises(ConfigError, match=words) if is_refused else nullcontext():
        parse(settings)


@pytest.mark.parametrize("section", ["model", "data"])
def test_a_missing_section_is_one_sentence(section: str) -> None:
    settings = {name: value for name, value in MINIMAL.items() if name != section}
    with pytest.raises(ConfigError, match=rf"^pipeline\.toml: {section} is missing$"):
        parse(settings)


def test_several_mistakes_stand_in_the_order_of_the_file() -> None:
    settings = {"modle": {}, **with_setting("training.sft.num_steps", 0)}
    with pytest.raises(
        ConfigError, match=r"^pipeline\.toml: unknown key modle.*\npipeline\.toml: training\.sft\.num_steps: "
    ):
        parse(settings)


ENGINE = {
    "kind": "embedded",
    "python": "/p",
    "extra_args": ["--api-key=x"],
    "weight_transfer": "nccl",
    "router_url": "http://r",
    "router_python": "/p",
}
GPUS = {"trainer_gpu_ranks": [0], "engine_gpu_ranks": [1, 2, 3], "num_engines": 2}
AHEAD = {"max_staleness": 1, "over_sampling_factor": 2.0, "max_partial_staleness": 1}
LIMITS = {"weight_low": 2.0, "weight_high": 1.0, "mask": "token"}
BROKEN_RULES: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "rollout",
        {"reward_fn": "exact_match", "rewards": [{"name": "exact_match"}], **AHEAD},
        ["reward_fn and rewards", "over_sampling_factor 2 has", "max_partial_staleness 1 has an effect only with"],
    ),
    (
        "rollout.engine",
        ENGINE,
        [
            *("engine.python", "engine.extra_args is", 'engine.weight_transfer "nccl"'),
            *("engine.router_url", "engine.extra_args contains a key"),
        ],
    ),
    (
        "training.rl.policy",
        {"backend": "jax", "attention": "flash_attention_2", "compile": True, "lora": {"rank": 4}},
        [
            'attention "flash_attention_2" needs',
            *(f'backend "jax" has no {name}' for name in ("lora", "compile", "attention")),
        ],
    ),
    (
        "training.rl.loss.mismatch",
        LIMITS,
        ["weight_low 2 must be below", 'mask "token" needs limits'],
    ),
    (
        "training.rl.loss",
        {"dual_clip": 0.5, "aggregation": "constant_length"},
        ["dual_clip must be above 1", 'aggregation "constant_length" needs'],
    ),
    (
        "deployment",
        {**GPUS, "colocated": True, "trainer_processes": 2},
        ["engine_gpu_ranks names 3", "colocated needs", "trainer_processes 2"],
    ),
    ("data", {"prompts": {"file": "p"}, "heldout": {}}, ["prompts: expected a path", "heldout: expected a path"]),
]


@pytest.mark.parametrize(("section", "settings", "broken"), BROKEN_RULES, ids=[each[0] for each in BROKEN_RULES])
def test_every_rule_that_a_record_breaks_is_told_at_once(
    section: str, settings: dict[str, Any], broken: list[str]
) -> None:
    mistakes = Mistakes(ConfigError)
    read_record(Config, with_setting(section, settings), mistakes, source="pipeline.toml")
    said = mistakes.describe().splitlines()
    assert [line for line in said if not line.startswith(f"pipeline.toml: {section}: ")] == []
    rules = [line.removeprefix(f"pipeline.toml: {section}: ") for line in said]
    assert all(rule.startswith(words) for rule, words in zip(rules, broken, strict=True)), rules


@pytest.mark.parametrize(
    ("mode", "missing"),
    [
        ("sft", "sft"),
        ("rl", "prompts"),
        ("sft+rl", "sft"),
        ("sft+rl", "prompts"),
        *[(mode, name) for mode in ("sft", "rl", "sft+rl") for name in ("selection", "heldout")],
    ],
)
def test_a_mode_names_the_data_it_lacks(mode: str, missing: str) -> None:
    settings = with_setting("mode", mode)
    del settings["data"][missing]
    with pytest.raises(ConfigError, match=rf'mode "{mode[:3]}.*" needs data\.{missing}: (demonstrations|prompts)\b'):
        parse(settings)


def test_the_mode_sft_says_that_its_checkpoints_can_be_compared_on_demonstrations() -> None:
    settings = with_setting("mode", "sft")
    del settings["data"]["selection"]
    with pytest.raises(
        ConfigError, match=r'needs data\.selection: prompts, or with `evaluation\.metric = "loss"` demonstrations, that'
    ):
        parse(settings)


@pytest.mark.parametrize(("mode", "unused"), [("sft", "prompts"), ("rl", "sft")])
def test_a_mode_does_not_ask_for_data_it_does_not_use(mode: str, unused: str) -> None:
    settings = with_setting("mode", mode)
    del settings["data"][unused]
    assert parse(settings).mode == mode


@pytest.mark.parametrize("mode", ["rl", "sft+rl"])
def test_rl_compares_by_accuracy(mode: str) -> None:
    settings = {**with_setting("evaluation.metric", "loss"), "mode": mode}
    with pytest.raises(ConfigError, match=r'evaluation\.metric cannot be "loss"'):
        parse(settings)
    assert parse({**settings, "mode": "sft"}).evaluation.metric == "loss"


def test_rl_does_not_sample_greedily() -> None:
    settings = with_setting("rollout.sampling.temperature", 0)
    with pytest.raises(ConfigError, match="temperature above 0"):
        parse(settings)
    assert parse({**settings, "mode": "sft"}).rollout.sampling.temperature == 0


def with_temperature(kind: str, name: str, temperature: float) -> dict[str, Any]:
    """The minimal settings with an engine of that kind, and one of the temperatures."""
    settings = with_setting(name, temperature)
    settings.setdefault("rollout", {})["engine"] = {"kind": kind}
    return settings


@pytest.mark.parametrize("name", ["rollout.sampling.temperature", "evaluation.temperature"])
def test_vllm_is_asked_for_no_temperature_that_it_refuses(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} 2\.5 is above 2, the limit of vLLM: lower it"):
        parse(with_temperature("vllm", name, 2.5))
    parse(with_temperature("vllm", name, 2.0))
    parse(with_temperature("sglang", name, 2.5))


def test_a_temperature_that_vllm_is_not_asked_for_may_be_any() -> None:
    """This project's own engine compares the checkpoints, or nothing is sampled for RL."""
    embedded = with_temperature("vllm", "evaluation.temperature", 2.5)
    embedded["evaluation"]["engine"] = "embedded"
    parse(embedded)
    parse({**with_temperature("vllm", "rollout.sampling.temperature", 2.5), "mode": "sft"})


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse(MINIMAL).training.sft.num_steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["pipeline.toml", "pipeline.json"])
def test_a_saved_configuration_comes_back_unchanged(tmp_path: Path, name: str) -> None:
    config = make_full_config(tmp_path)
    config.save(tmp_path / name)
    assert Config.load(tmp_path / name) == config


@pytest.mark.parametrize("name", ["pipeline.toml", "pipeline.json"])
def test_saving_a_loaded_configuration_writes_the_same_file(tmp_path: Path, name: str) -> None:
    make_full_config(tmp_path).save(tmp_path / name)
    Config.load(tmp_path / name).save(tmp_path / f"again-{name}")
    assert (tmp_path / f"again-{name}").read_text() == (tmp_path / name).read_text()


def test_defaults_are_not_written(tmp_path: Path) -> None:
    parse(MINIMAL).save(tmp_path / "pipeline.json")
    assert json.loads((tmp_path / "pipeline.json").read_text()) == MINIMAL


def test_data_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "configs" / "base").mkdir(parents=True)
    path = tmp_path / "configs" / "pipeline.json"
    path.write_text(json.dumps(with_setting("data.sft", "../sft.jsonl")))
    config = Config.load(path)
    assert config.data.sft == str(tmp_path / "sft.jsonl")
    assert config.data.prompts == str(tmp_path / "configs" / "b.jsonl")
    assert config.model.path == str(tmp_path / "configs" / "base")


def test_several_datasets_are_a_list_of_tables(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "pipeline.toml").write_text(
        'model.path = "base"\ndata = {prompts = "b.jsonl", selection = "c.jsonl", heldout = "d.jsonl", sft = [\n'
        '{path = "a.jsonl", max_samples = 100, repeat = 2}, {path = "folder", repeat = 0.5}, {path = "org/name"}]}\n'
    )
    config = Config.load(tmp_path / "pipeline.toml")
    assert config.demonstrations == (
        DatasetConfig(path=str(tmp_path / "a.jsonl"), max_samples=100, repeat=2.0),
        DatasetConfig(path=str(tmp_path / "folder"), repeat=0.5),
        DatasetConfig(path="org/name"),
    )
    config.save(tmp_path / "again.toml")
    assert Config.load(tmp_path / "again.toml") == config


def test_one_path_is_a_mixture_of_one() -> None:
    assert parse(MINIMAL).demonstrations == (DatasetConfig(path=parse(MINIMAL).data.sft),)


@pytest.mark.parametrize(
    ("given", "stays"),
    [("org/name", True), ("org/name.jsonl", False), ("./org/name", False), ("org/here", False), ("name", False)],
)
def test_demonstrations_of_the_hub_keep_their_name(tmp_path: Path, given: str, stays: bool) -> None:
    (tmp_path / "org" / "here").mkdir(parents=True)
    (tmp_path / "pipeline.json").write_text(json.dumps(with_setting("data.sft", given)))
    expected = given if stays else str(tmp_path / given)
    assert Config.load(tmp_path / "pipeline.json").data.sft == expected


@pytest.mark.parametrize("path", ["Qwen/Qwen3-0.6B", "/elsewhere/model"])
def test_a_model_that_is_no_folder_beside_the_file_keeps_its_name(tmp_path: Path, path: str) -> None:
    (tmp_path / "pipeline.json").write_text(json.dumps(with_setting("model.path", path)))
    assert Config.load(tmp_path / "pipeline.json").model.path == path


@pytest.mark.parametrize("name", ["p.toml", "p.json"])
def test_a_byte_order_mark_is_no_part_of_a_configuration(tmp_path: Path, name: str) -> None:
    saved = Config.model_validate(with_setting("model.path", "Qwen/Qwen3-0.6B"))
    saved.save(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert Config.load(tmp_path / name).model.path == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.toml", b"[model\n", "is not valid TOML"),
        ("p.json", b"{", "is not valid JSON"),
        ("p.toml", b"\xff\xfe", "is not valid TOML"),
        ("p.json", b"[]", "must contain a table of settings, found list"),
        ("p.toml", b"", "model is missing"),
        ("p.toml", b'model = "x"\ndata = 3\n', r"model: .*found 'x'\n.*p\.toml: data: .*found 3"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_sentence(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}:? {sentence}"):
        Config.load(tmp_path / name)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml does not exist"):
        Config.load(tmp_path / "none.toml")


@pytest.mark.parametrize("record", ALL_RECORDS)
def test_every_field_has_a_docstring(record: type[BaseModel]) -> None:
    assert [name for name, field in record.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("record", ALL_RECORDS)
def test_a_json_schema_can_be_made_for_the_form(record: type[BaseModel]) -> None:
    for mode in ("validation", "serialization"):
        json.dumps(record.model_json_schema(mode=mode))


def test_the_form_asks_for_a_function_by_name() -> None:
    properties = RolloutConfig.model_json_schema()["properties"]
    assert {properties[name]["type"] for name in ("generate_fn", "reward_fn", "filter_fn")} == {"string"}


def test_a_function_is_written_by_module_and_name() -> None:
    rollout = RolloutConfig(reward_fn=exact_match, filter_fn=check_any_success)
    assert rollout.model_dump(mode="json")["reward_fn"] == "rollouts_core.rewards:exact_match"
    assert rollout.model_dump(mode="json")["filter_fn"] == "rollouts_core.filters:check_any_success"


def test_a_name_stays_a_name() -> None:
    assert name_of_function("exact_match") == "exact_match"
    assert RolloutConfig(reward_fn="my_rewards:length").model_dump(mode="json")["reward_fn"] == "my_rewards:length"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["config", "types", "job", "fingerprint"])
def test_the_orchestrator_does_not_import_torch(module: str) -> None:
    code = (
        f"import sys, rollouts_core.{module}; "
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy'} & sys.modules.keys()))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout == "[]\n"


def test_a_checkpoint_to_go_on_from_is_relative_to_the_file(tmp_path: Path) -> None:
    settings = {
        "mode": "sft",
        "model": {"path": "hub/model"},
        "data": {"sft": "a", "selection": "b", "heldout": "c"},
        "training": {"sft": {"resume_from": "stages/sft-1", "num_steps": 7}, "rl": {}},
    }
    (tmp_path / "c.json").write_text(json.dumps(settings))
    training = Config.load(tmp_path / "c.json").training
    assert training.sft.resume_from == str(tmp_path / "stages/sft-1")
    assert (training.sft.num_steps, training.rl.resume_from) == (7, "")


@pytest.mark.parametrize(
    ("reward", "is_folder"),
    [
        ({"kind": "classifier", "model": "graders/a"}, True),
        ({"kind": "reward_model", "url": "http://a:1", "model": "./graders/a"}, True),
        ({"kind": "judge", "url": "http://a:1/generate", "model": "graders/a"}, True),
        ({"kind": "judge", "url": "http://a:1/v1", "model": "graders/a"}, False),
        ({"kind": "classifier", "model": "/elsewhere/a"}, False),
    ],
)
def test_the_folder_of_a_model_that_grades_is_relative_to_the_file(
    tmp_path: Path, reward: dict[str, Any], is_folder: bool
) -> None:
    """Jobs run in folders of their own."""
    (tmp_path / "graders" / "a").mkdir(parents=True)
    (tmp_path / "c.json").write_text(json.dumps(with_setting("rollout.rewards", [{}, reward])))
    rewards = Config.load(tmp_path / "c.json").rollout.rewards
    assert rewards[1].model == (str(tmp_path / "graders" / "a") if is_folder else reward["model"])


@pytest.mark.parametrize("path", ["./" + "x" * 300, "org/" + "x" * 300, "é" * 200, "x/" * 3000])
@pytest.mark.parametrize("section", ["data", "model", "training", "rollout"])
def test_a_path_that_no_file_system_takes_is_named_in_part(tmp_path: Path, section: str, path: str) -> None:
    """To look whether it exists is an error of the operating system."""
    every: dict[str, dict[str, Any]] = {
        "data": {"data": {"sft": path}},
        "model": {"model": {"path": path}},
        "training": {"training": {"rl": {"resume_from": path}}},
        "rollout": {"rollout": {"rewards": [{"kind": "classifier", "model": path}]}},
    }
    with pytest.raises(ConfigError, match="is too long for a path or name") as caught:
        resolve_paths(every[section], tmp_path)
    assert len(str(caught.value)) < 200
