"""Pins that what people know from TRL, verl, slime and OpenRLHF leads them to the setting that says the same here.

Without it `num_generations` would be answered with "did you mean generate_fn?", and a hint could name a setting that is
gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rollouts.flows.form import Pipeline, RunOptions, parse_pipeline
from rollouts.infra.node import NODE_TYPES
from rollouts_core.config import Config
from rollouts_core.config.foreign_names import FOREIGN_NAMES, STAGE, find_foreign_name
from rollouts_core.config.messages import nested_record
from rollouts_core.errors import ConfigError
from rollouts_core.stages import TRAININGS
from tests.kit.small_pipeline import small_settings

SECTION = re.compile(rf"\b(?:{'|'.join([*Config.model_fields, 'run', 'node'])})\.[a-zA-Z_.]*\w")
"""A setting in a hint."""


def keys_of(record: type[BaseModel], prefix: str) -> Iterator[str]:
    """All settings of a record and of its sections, by their whole names."""
    for name in record.model_fields:
        yield f"{prefix}{name}"
        if below := nested_record(record, name):
            yield from keys_of(below, f"{prefix}{name}.")


@cache
def all_keys() -> frozenset[str]:
    """All settings that a file may have, but for those of its optional tables."""
    nodes = [key for node in NODE_TYPES.values() for key in keys_of(node, "node.")]
    return frozenset((*keys_of(Config, ""), *keys_of(RunOptions, "run."), *nodes))


def settings_in(hint: str) -> set[str]:
    """The settings that a hint names, in every stage that it is about."""
    return {setting for stage in TRAININGS for setting in SECTION.findall(hint.replace(STAGE, f"training.{stage}"))}


def parse_small(**overrides: Any) -> Pipeline:  # Any: settings of every type
    return parse_pipeline(small_settings(**overrides), Path("small.toml"))


@pytest.mark.parametrize("hint", sorted(set(FOREIGN_NAMES.values())))
def test_every_setting_that_a_hint_names_exists(hint: str) -> None:
    assert settings_in(hint) and settings_in(hint) <= all_keys()


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_a_foreign_name_is_no_setting_of_ours_at_its_place(name: str) -> None:
    """One with a section is none of that section's; one without is none of any section's."""
    assert not [key for key in all_keys() if f".{key}".endswith(f".{name}")]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("data__train", "here it is data.sft (demonstrations) or data.prompts (prompts of RL)"),
        ("rollout__num_generations", "did you mean rollout.n_samples_per_prompt?"),
        ("training__rl__num_generations", "did you mean rollout.n_samples_per_prompt?"),
        (
            "training__rl__beta",
            "here it is training.rl.loss.kl_coef (a term of the loss) or training.rl.reward_shaping",
        ),
        ("training__rl__loss__beta", "here it is training.rl.loss.kl_coef"),
        ("training__rl__optim__beta", "did you mean training.rl.optim.betas?"),
        ("training__rl__kl_coef", "here it is training.rl.loss.kl_coef"),
        ("training__sft__gradient_accumulation_steps", "here it is training.sft.micro_batch_size or"),
        ("training__sft__warmup_ratio", "here it is training.sft.optim.num_warmup_steps, a number of steps"),
        ("training__rl__max_completion_length", "did you mean rollout.sampling.max_new_tokens?"),
        ("rollout__max_tokens", "did you mean rollout.sampling.max_new_tokens?"),
        ("rollout__sampling__max_tokens", "did you mean rollout.sampling.max_new_tokens?"),
        ("training__rl__group_size", "did you mean rollout.n_samples_per_prompt?"),
        ("training__sft__num_epochs", "training counts optimizer steps. An epoch is rows / training.sft.batch_size"),
        ("training__sft__num_train_epochs", "here it is training.sft.num_steps: training counts"),
        ("training__rl__epochs", "here it is training.rl.num_steps: training counts"),
        ("learning_rate", "here it is training.sft.optim.lr, and the same in training.rl"),
        ("run__output_dir", "did you mean run.store?"),
        ("training__sft__report_to", "did you mean run.report_to?"),
        ("training__sft__policy__lora__r", "did you mean training.sft.policy.lora.rank?"),
        ("deployment__gpu_ranks", "here it is deployment.trainer_gpu_ranks (the trainer's) and deployment.engine_gpu"),
        ("actor_rollout_ref", "here it is model.path (the model), training.rl (the actor) and rollout.engine"),
        ("training__rl__top_p", "here it is no setting: the loss compares log-probs of the whole distribution"),
        ("rollout__custom_generate_function_path", "did you mean rollout.generate_fn?"),
        ("rollout__n_samples_per_eval_prompt", "did you mean evaluation.samples_per_prompt?"),
        ("rollout__name", "did you mean rollout.engine.kind?"),
        ("rollout__engine__url", "here it is no setting: a run starts and ends its own engines of rollout.engine.kind"),
        ("rollout__engine__tensor_parallel_size", "here it is deployment.engine_gpu_ranks (GPUs)"),
        ("deployment__num_gpus", "here it is deployment.trainer_gpu_ranks (the trainer's) and deployment.engine_gpu"),
        ("wandb", "did you mean run.report_to?"),
        ("run__tensorboard", "did you mean run.report_to?"),
        ("rollout__use_dynamic_batch_size", "did you mean training.rl.max_micro_batch_tokens?"),
    ],
)
def test_a_name_of_another_system_leads_to_the_setting_here(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_small(**{key: 1})
    assert f"unknown key {key.replace('__', '.')}; " in str(refused.value) and meant in str(refused.value)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training__rl__temperature", "did you mean rollout.sampling.temperature or evaluation.temperature?"),
        ("training__rl__batch_size", "did you mean training.sft.batch_size or rollout.batch_size?"),
        ("training__rl__weight_decay", "did you mean training.rl.optim.weight_decay?"),
        ("rollout__micro_batch_size", "did you mean training.sft.micro_batch_size?"),
        ("rollout__use_rollout_logprobs", "known are batch_size, "),
        ("max_length", "did you mean training.sft.max_length?"),
    ],
)
def test_a_setting_of_ours_in_another_table_leads_to_its_own(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_small(**{key: 1})
    assert f"unknown key {key.replace('__', '.')}; {meant}" in str(refused.value)


def test_of_several_unknown_keys_at_the_top_each_is_named() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_small(learning_rate=1e-5, num_generations=8)
    assert [line.split("; ")[0] for line in str(refused.value).splitlines()] == [
        "small.toml: unknown key learning_rate",
        "small.toml: unknown key num_generations",
    ]


def test_a_name_that_nobody_uses_is_none_of_another_system() -> None:
    assert find_foreign_name(["training", "sft", "zzz"]) is None


@pytest.mark.parametrize(
    ("node", "meant"),
    [
        ({"host": "me@box"}, 'that is a setting of node.kind = "ssh", this one is "local"'),
        ({"max_usd": 5.0}, 'that is a setting of node.kind = "rented", this one is "local"'),
        ({"key_file": "k"}, 'that is a setting of node.kind = "ssh" or "instance" or "rented", this one is'),
        ({"gpu_types": ["H100"]}, 'node.query.gpu_types is a setting of node.kind = "rented", this one is'),
        ({"kind": "rented", "max_usd": 5.0, "gpu_types": ["H100"]}, "did you mean node.query.gpu_types?"),
    ],
)
def test_a_setting_of_another_kind_of_node_leads_to_that(
    node: dict[str, Any],  # Any: settings of every type
    meant: str,
) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_small(node=node)
    assert f"; {meant}" in str(refused.value)


@pytest.mark.parametrize(("provider", "cloud"), [("runpod", "runpod"), ("vast", "vast"), ("aws", "sky")])
def test_a_cloud_as_the_kind_of_the_node_is_told_how_to_rent(provider: str, cloud: str) -> None:
    with pytest.raises(ConfigError, match=rf'set node\.kind = "rented" and node\.query\.providers = \["{cloud}"\]'):
        parse_small(node__kind=provider)


@pytest.mark.parametrize("cloud", ["aws", "gcp", "google", "azure", "kubernetes"])
def test_a_cloud_among_the_providers_that_are_asked_leads_to_sky(cloud: str) -> None:
    node = {"kind": "rented", "max_usd": 1.0, "query": {"providers": ["runpod", cloud]}}
    with pytest.raises(ConfigError) as refused:
        parse_small(node=node)
    assert f"node.query.providers: {cloud} is reached through SkyPilot: name the provider sky" in str(refused.value)


@pytest.mark.parametrize(("former", "now"), [("ssh", "ssh"), ("provision", "rented")])
def test_the_former_name_of_the_kind_of_a_node_is_told_the_present_one(former: str, now: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_small(node={"provider": former})
    assert f'node.provider is now node.kind: write kind = "{now}"' in str(refused.value)


def test_a_kind_of_node_that_is_no_cloud_is_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"node\.kind is 'slurm': expected one of local, ssh, instance, rented$"):
        parse_small(node__kind="slurm")
