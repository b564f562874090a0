"""Pins that what a run is said to need at least is what its training really holds.

Without it a machine could be rented that cannot hold the model, or a good one be refused.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.backends.pytorch import create_pytorch_backend
from rollouts_core.batch import build_batch
from rollouts_core.checks.needed_part import GIB, sum_bytes
from rollouts_core.checks.resource_needs import (
    KEPT_PUBLICATIONS,
    checkpoint_disk_bytes,
    engine_share,
    engine_warning,
    engine_weight_bytes,
    least_memory_bytes,
    needed_disk,
    shared_gpu_warning,
    state_parts,
    stored_weight_bytes,
    training_needs,
)
from rollouts_core.config import Config, EngineConfig, LoRAConfig, ModelConfig, OptimConfig, PolicyConfig
from rollouts_core.engines.launch import weights_dtype
from rollouts_core.engines.transfer.weight_sync import KEPT_VERSIONS
from rollouts_core.job import InputModel, ServeJob
from rollouts_core.model.model_size import ModelSize, find_model_size
from tests.rollouts_core.make import make_random_samples

BILLION = 10**9


def num_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def needed_bytes(num_parameters: int, policy: PolicyConfig, *, with_reference: bool, num_processes: int) -> int:
    return sum_bytes(state_parts(num_parameters, policy, with_reference=with_reference, num_processes=num_processes))


@pytest.mark.parametrize(("with_reference", "precision"), [(False, "float32"), (True, "float32"), (True, "bfloat16")])
def test_the_least_memory_is_what_weights_gradients_and_moments_take(
    base_model: ModelConfig, with_reference: bool, precision: Literal["float32", "bfloat16"]
) -> None:
    policy = PolicyConfig(precision=precision)
    backend = create_pytorch_backend(
        base_model,
        OptimConfig(),
        create_cross_entropy_loss(),
        num_steps=1,
        policy=policy,
        with_reference=with_reference,
        device="cpu",
    )
    batch = build_batch([[sample] for sample in make_random_samples(2)], pad_id=0)
    backend.forward_backward(batch)
    held = num_bytes(backend.model.parameters()) + num_bytes(weight.grad for weight in backend.model.parameters())
    backend.optim_step()
    moments = [value for state in backend.optimizer.state.values() for value in state.values() if value.ndim]
    held += num_bytes(moments)
    if backend.reference is not None:
        held += num_bytes(backend.reference.hf_model.parameters())
    num_parameters = find_model_size(base_model).num_parameters
    assert num_parameters == sum(weight.numel() for weight in backend.model.parameters())
    assert needed_bytes(num_parameters, policy, with_reference=with_reference, num_processes=1) == held


def test_adapters_spare_the_optimizer_and_processes_share() -> None:
    lora = PolicyConfig(precision="bfloat16", lora=LoRAConfig(rank=8))
    assert needed_bytes(8 * BILLION, lora, with_reference=True, num_processes=1) == 16 * BILLION
    full = needed_bytes(8 * BILLION, PolicyConfig(), with_reference=False, num_processes=8)
    assert full == 16 * BILLION


def test_a_run_needs_what_its_hungriest_stage_does(base_model: ModelConfig) -> None:
    size = find_model_size(base_model)
    settings = {
        "mode": "sft+rl",
        "model": {"path": base_model.path},
        "data": dict.fromkeys(("sft", "prompts", "selection", "heldout"), "x.jsonl"),
        "training": {
            "sft": {"num_steps": 30, "checkpoint_every": 10, "keep_checkpoints": 1, "policy": {"lora": {"rank": 4}}},
            "rl": {"num_steps": 5, "checkpoint_every": 5, "loss": {"kl_coef": 0.1}},
        },
    }
    config = Config.model_validate(settings)
    assert config.training.rl.with_reference
    assert least_memory_bytes(config, size) == size.num_parameters * 20
    kept = config.training.sft.keep_checkpoints + config.training.sft.keep_best
    assert checkpoint_disk_bytes(config, size) == size.num_parameters * (4 * kept + 12)
    assert least_memory_bytes(config, ModelSize()) == checkpoint_disk_bytes(config, ModelSize()) == 0


def test_a_checkpoint_of_adapters_on_bfloat16_weights_is_float32(base_model: ModelConfig, tmp_path: Path) -> None:
    policy = PolicyConfig(precision="bfloat16", lora=LoRAConfig(rank=4))
    backend = create_pytorch_backend(
        base_model, OptimConfig(), create_cross_entropy_loss(), num_steps=1, policy=policy, device="cpu"
    )
    asyncio.run(backend.save_checkpoint(tmp_path / "saved", {"step": 1}).result())
    saved = find_model_size(ModelConfig(path=str(tmp_path / "saved")))
    assert stored_weight_bytes(policy) == 2 and 0 < saved.num_file_bytes - 4 * saved.num_parameters < 10_000
    settings = {"num_steps": 1, "keep_checkpoints": 1, "policy": policy}
    config = config_of("sft", training={"sft": settings})
    assert checkpoint_disk_bytes(config, saved) == 4 * saved.num_parameters


@pytest.mark.parametrize(("dtype", "num_bytes_each"), [("auto", 2), ("bfloat16", 2), ("float32", 4)])
def test_merged_adapters_are_published_in_the_number_format_of_the_engine(dtype: str, num_bytes_each: int) -> None:
    training = {"rl": {"num_steps": 10, "policy": {"precision": "bfloat16", "lora": {"rank": 4}}}}
    config = config_of("rl", rollout={"engine": {"kind": "vllm", "dtype": dtype}}, training=training)
    parts = {part.name: part.num_bytes for part in needed_disk(config, LARGE)}
    assert parts["weights for engines"] == 2 * num_bytes_each * LARGE.num_parameters


LARGE = ModelSize(
    tensors={
        "model.embed_tokens.weight": (150_000, 4000),
        "lm_head.weight": (150_000, 4000),
        "layers": (7_000_000, 1000),
    },
    num_file_bytes=16 * BILLION,
    settings={
        "vocab_size": 150_000,
        "hidden_size": 4000,
        "intermediate_size": 12_000,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "dtype": "bfloat16",
    },
)
"""8.2 billion weights."""


def config_of(mode: str = "sft", **settings: Any) -> Config:  # Any: settings of every type
    data = dict.fromkeys(("sft", "prompts", "selection", "heldout"), "x.jsonl")
    return Config.model_validate({"mode": mode, "model": {"path": "org/model"}, "data": data, **settings})


def test_a_training_names_its_parts_and_what_lowers_them() -> None:
    policy = {"precision": "bfloat16"}
    [needs] = training_needs(config_of(training={"sft": {"policy": policy}}), LARGE)
    assert str(needs).startswith("training.sft takes about ")
    for part in ("weights 30.5", "gradients 30.5", "AdamW's moments 61.1", "activations of 8 rows of 2048 tokens "):
        assert part in str(needs)
    assert needs.least_bytes == 16 * LARGE.num_parameters < needs.expected_bytes
    warning = needs.warning("GPU 0, NVIDIA H200,", 141e9)
    assert (
        "GPU 0, NVIDIA H200, has only 131.3 GiB and may run out of memory: lower training.sft.micro_batch_size"
        in warning
    )
    assert "activation_checkpointing" in warning and "policy.lora" in warning
    assert needs.warning("GPU 0", needs.expected_bytes) == ""


def test_each_saving_lowers_what_a_training_takes() -> None:
    def expected(**sft: Any) -> int:  # Any: settings of every type
        return training_needs(config_of(training={"sft": sft}), LARGE)[0].expected_bytes

    plain = expected()
    assert expected(micro_batch_size=1) < expected(micro_batch_size=4) < plain
    assert expected(max_length=512) < plain
    assert expected(policy={"activation_checkpointing": True}) < 0.7 * plain
    assert expected(policy={"precision": "bfloat16", "lora": {"rank": 8}}) < 0.6 * expected(
        policy={"precision": "bfloat16"}
    )


def test_several_processes_share_the_weights_and_gather_layers() -> None:
    placement = {"trainer_gpu_ranks": tuple(range(8))}
    [needs] = training_needs(config_of(deployment=placement), LARGE)
    vocabulary, layer = 2 * 150_000 * 4000, 7 * BILLION // 36
    assert needs.least_bytes == 2 * LARGE.num_parameters
    parts = {part.name: part.num_bytes for part in needs.parts}
    assert parts["gathered layers"] == 4 * vocabulary + 2 * 4 * layer + 4 * (vocabulary + layer)
    assert training_needs(config_of(deployment=placement), LARGE, num_machines=2)[0].least_bytes == LARGE.num_parameters


def test_adapters_and_the_reference_count() -> None:
    def parts(**rl: Any) -> set[str]:  # Any: settings of every type
        return {part.name for part in training_needs(config_of("rl", training={"rl": rl}), LARGE)[0].parts}

    kl = {"kl_coef": 0.1}
    assert "the reference model" in parts(loss=kl) and "the reference model" not in parts()
    assert {"frozen weights", "adapters"} <= parts(loss=kl, policy={"lora": {"rank": 8}})
    assert "the reference model" not in parts(loss=kl, policy={"lora": {"rank": 8}})


def test_a_classifier_takes_memory_beside_the_trainer_of_rl_and_disk_once(tmp_path: Path) -> None:
    tiny = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    tiny.num_labels = 1
    LlamaForSequenceClassification(tiny).to(torch.bfloat16).save_pretrained(tmp_path / "grader")
    held = num_bytes(AutoModelForSequenceClassification.from_pretrained(tmp_path / "grader").parameters())
    grader = {"kind": "classifier", "model": str(tmp_path / "grader")}

    rewards = [grader, grader, {"kind": "judge", "url": "http://a:1", "model": "b"}]
    plain, graded = config_of("sft+rl"), config_of("sft+rl", rollout={"rewards": rewards})
    more = [
        with_graders.least_bytes - without.least_bytes
        for without, with_graders in zip(training_needs(plain, LARGE), training_needs(graded, LARGE), strict=True)
    ]
    assert more[0] == 0 and 2 * held <= more[1] <= 2 * held + 8192  # with the headers of its files
    assert [part.name for part in needed_disk(graded, LARGE)].count("classifier grader") == 1


def test_an_engine_needs_room_for_its_weights_and_a_request() -> None:
    def engines(mode: str = "rl", *, ranks: tuple[int, ...] = (1,), **deployment: Any) -> Config:  # Any: as above
        engine = {"kind": "sglang", "extra_args": ["--mem-fraction-static", "0.5"]}
        placement = {"trainer_gpu_ranks": (0,), "engine_gpu_ranks": ranks, **deployment}
        return config_of(mode, rollout={"engine": engine, "max_prompt_tokens": 1000}, deployment=placement)

    assert engine_weight_bytes(engines(), LARGE) == 2 * LARGE.num_parameters
    assert engine_weight_bytes(engines("sft+rl"), LARGE) == 2 * LARGE.num_parameters  # though SFT saves float32
    wide = config_of(
        "rl", rollout={"engine": {"kind": "vllm", "dtype": "float32"}}, deployment={"engine_gpu_ranks": (1,)}
    )
    assert engine_weight_bytes(wide, LARGE) == 4 * LARGE.num_parameters
    assert engine_weight_bytes(engines(ranks=(1, 2)), LARGE) == LARGE.num_parameters
    assert engine_weight_bytes(config_of("rl"), LARGE) == 0
    quantized = replace(LARGE, settings={**LARGE.settings, "quantization_config": {}})
    assert engine_weight_bytes(engines(), quantized) == 0
    assert least_memory_bytes(engines("rl", ranks=(1,), trainer_gpu_ranks=tuple(range(16))), LARGE) == (
        engine_weight_bytes(engines(), LARGE)
    )
    assert engine_share(engines()) == 0.5
    assert "larger share" in engine_warning(engines(), LARGE, 24 * GIB)
    assert engine_warning(engines(), LARGE, 80 * GIB) == ""
    shared = engines(ranks=(0,), colocated=True)
    assert "lower --mem-fraction-static" in engine_warning(shared, LARGE, 140 * GIB)
    assert engine_warning(shared, LARGE, 200 * GIB) == ""


@pytest.mark.parametrize(
    ("kind", "deployment", "arguments", "named"),
    [
        ("vllm", {}, (), "GPU 0 and keeps this memory.* --gpu-memory-utilization"),
        ("sglang", {"trainer_gpu_ranks": (1, 2), "engine_gpu_ranks": (2, 3)}, (), "GPU 2 .* --mem-fraction-static"),
        ("sglang", {}, ("--mem-fraction-static=0.4",), ""),
        ("vllm", {"colocated": True}, (), ""),
        ("vllm", {"engine_gpu_ranks": (1,)}, (), ""),
        ("vllm", {"trainer_processes": 2}, (), ""),
        ("embedded", {}, (), ""),
    ],
)
def test_an_engine_that_keeps_the_gpu_on_which_the_trainer_trains_is_warned_of(
    kind: str, deployment: dict[str, Any], arguments: tuple[str, ...], named: str
) -> None:
    rollout = {"engine": {"kind": kind, "extra_args": arguments}}
    warning = shared_gpu_warning(config_of("rl", rollout=rollout, deployment=deployment))
    assert re.search(named, warning) if named else warning == ""
    assert shared_gpu_warning(config_of("sft", rollout=rollout, deployment=deployment)) == ""


@pytest.mark.parametrize(
    "arguments",
    [("--dtype", "bfloat16"), ("--quantization=fp8",), ("--torchao-config", "int8wo"), ("--offload-backend",)],
)
def test_an_engine_that_is_told_to_hold_less_is_refused_no_gpu(arguments: tuple[str, ...]) -> None:
    rollout = {"engine": {"kind": "sglang", "dtype": "float32", "extra_args": arguments}}
    config = config_of("rl", rollout=rollout, deployment={"trainer_gpu_ranks": (0,), "engine_gpu_ranks": (1,)})
    assert engine_weight_bytes(config, LARGE) == 0


@pytest.mark.parametrize(
    ("settings", "num_bytes_each"),
    [
        ({"dtype": "float32"}, 2),
        ({"torch_dtype": "float16"}, 2),
        ({}, 2),
        ({"dtype": "bfloat16", "text_config": {"dtype": "float32"}}, 2),
    ],
)
def test_an_engine_holds_weights_in_the_format_that_it_is_started_with(
    settings: dict[str, Any], num_bytes_each: int, tmp_path: Path
) -> None:
    engine = EngineConfig(kind="sglang")
    placement = {"trainer_gpu_ranks": (0,), "engine_gpu_ranks": (1,)}
    config = config_of("rl", rollout={"engine": engine}, deployment=placement)
    size = ModelSize(tensors=LARGE.tensors, settings=settings)
    assert engine_weight_bytes(config, size) == num_bytes_each * size.num_parameters
    (tmp_path / "config.json").write_text(json.dumps(settings))
    served = InputModel(name="base", model=ModelConfig(path=str(tmp_path)), digest="")
    job = ServeJob(model=served, port=0, context_length=100, engine=engine)
    assert getattr(torch, weights_dtype(job.engine, tmp_path, on_gpu=True)).itemsize == num_bytes_each


def test_the_disk_holds_the_model_and_what_engines_read_too() -> None:
    rollout = {"engine": {"kind": "vllm"}}
    training = {"rl": {"num_steps": 10, "checkpoint_every": 10}}
    config = config_of("rl", rollout=rollout, training=training)
    parts = needed_disk(config, LARGE)
    assert {part.name: part.num_bytes for part in parts} == {
        "checkpoints": 12 * LARGE.num_parameters,
        "the model's files": LARGE.num_file_bytes,
        "weights for engines": 2 * 4 * LARGE.num_parameters,
    }
    assert KEPT_PUBLICATIONS == KEPT_VERSIONS
    assert [part.name for part in needed_disk(config, LARGE, sends_weights=True)] == [
        "checkpoints",
        "the model's files",
    ]
