"""Text of the reference page on sizes: GPU memory and bytes per step of RL, for three models.

    shapes of models -> rollouts_core.checks (the estimates of `rollouts validate`) -> tables

Not here: a user's own model and settings, which `rollouts validate` computes.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollouts_core.checks.activation_needs import adapter_bytes
from rollouts_core.checks.needed_part import GIB
from rollouts_core.checks.placement_plan import placed_work, plan_placement
from rollouts_core.checks.resource_needs import (
    BFLOAT16_BYTES,
    ENGINE_SHARE,
    FLOAT32_BYTES,
    MOMENTS,
    training_needs,
)
from rollouts_core.config import Config
from rollouts_core.errors import ConfigError
from rollouts_core.model.model_size import ModelSize

# From the config.json of each model on the Hugging Face hub: hidden size, layers, query heads, key heads, width of the
# feed-forward layers, whether embedding and output head are tied.
SHAPES = {
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, True),
    "Qwen3-8B": (4096, 36, 32, 8, 12288, False),
    "Qwen3-32B": (5120, 64, 64, 8, 25600, False),
}
HEAD_DIM, VOCABULARY = 128, 151_936
"""Equal for the models of `SHAPES`."""
RANK = 16
"""Rank of the adapters in all linear layers."""
GPU_GIB, GPUS_OF_MACHINE, NUM_MACHINES = 80, 8, 8
GBITS = (100, 10, 1)
"""Speeds of links, 10^9 bits per second."""
ADAPTER_STATE = 4
"""Weight, gradient and two moments: float32 numbers per weight of an adapter."""
SETTINGS = {
    "mode": "rl",
    "model": {"path": "folder/of-the-model"},
    "data": {"prompts": "prompts.jsonl", "selection": "selection.jsonl", "heldout": "heldout.jsonl"},
    "rollout": {
        "environment": "math",
        "max_prompt_tokens": 1024,
        "sampling": {"max_new_tokens": 4096},
        "engine": {"kind": "sglang"},
    },
}


def sizes_page() -> str:
    """The page with all tables."""
    largest, num_gpus = size_of(*SHAPES["Qwen3-32B"]), GPUS_OF_MACHINE * NUM_MACHINES
    return f"""# Sizes

This page shows the GPU memory and the bytes per step that RL needs for three models. `make docs` computes the figures
with the estimates of `rollouts validate`, which prints them for your model and settings. The figures have not been
measured on a GPU.

All figures are for GPUs of {GPU_GIB} GiB, prompts of up to 1,024 tokens, completions of up to 4,096 tokens,
`precision = "bfloat16"`, `activation_checkpointing = true`, and the default `max_micro_batch_tokens`.

## Memory of each GPU

For up to {GPUS_OF_MACHINE} GPUs, the rows show the placement that a run chooses by itself. For {num_gpus}
GPUs, they show [{NUM_MACHINES} machines](../clusters.md), of which as few as possible train.

| model | trained | GPUs | trainer | engines |
|---|---|---|---|---|
{chr(10).join(rows_of_memory())}

## Bytes of a step

A step publishes its weights to each engine: all weights in bfloat16, or adapters of rank {RANK} in float32. The seconds
are for all weights, one engine, and a link that carries nothing else. A checkpoint of a full training has the weights
and AdamW's moments in float32.

| model | all weights | {" | ".join(f"seconds at {gbit} Gbit/s" for gbit in GBITS)} | adapters | checkpoint |
|---|---|{"---|" * len(GBITS)}---|---|
{chr(10).join(rows_of_bytes())}

## Up to which size

Take this product for models up to about 32B parameters, on one machine or a few. Three properties of the design set the
limit:

- The trainer divides weights and optimizer state among its GPUs (FSDP), but not the computation of a layer. The
  activations of a micro-batch must therefore fit on one GPU.
- The leader collects a checkpoint in its host memory: {checkpoint_bytes(largest) / 1e9:,.0f} GB for Qwen3-32B.
- The leader sends the weights to each engine over its own link. Four engines of Qwen3-32B need four times the seconds
  of the table.

For larger models, and for models with many experts, take a system with tensor, pipeline and expert parallelism: the
[comparison](../comparison.md) names them.
"""


def size_of(
    hidden: int, num_layers: int, num_heads: int, num_kv_heads: int, intermediate: int, is_tied: bool
) -> ModelSize:
    """The tensors of a Qwen2 or Qwen3 model by name, without biases and the norms of heads."""
    queries, keys = num_heads * HEAD_DIM, num_kv_heads * HEAD_DIM
    layer = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    tensors = {f"model.layers.{i}.{name}": shape for i in range(num_layers) for name, shape in layer.items()}
    tensors["model.embed_tokens.weight"] = (VOCABULARY, hidden)
    if not is_tied:
        tensors["lm_head.weight"] = (VOCABULARY, hidden)
    settings = {
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": intermediate,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": is_tied,
    }
    return ModelSize(tensors=tensors, settings=settings)


def config_of(*, rank: int, **deployment: object) -> Config:
    """Settings of RL with `SETTINGS`, with adapters if `rank` is above 0."""
    policy = {"precision": "bfloat16", "activation_checkpointing": True, "lora": {"rank": rank}}
    return Config.model_validate({**SETTINGS, "training": {"rl": {"policy": policy}}, "deployment": deployment})


def rows_of_memory() -> Iterator[str]:
    for name, shape in SHAPES.items():
        size = size_of(*shape)
        for trained, rank in (("all weights", 0), ("adapters", RANK)):
            for num_gpus in (1, 2, GPUS_OF_MACHINE):
                yield f"| {name} | {trained} | {num_gpus} | {on_one_machine(size, rank, num_gpus)} |"
            yield f"| {name} | {trained} | {GPUS_OF_MACHINE * NUM_MACHINES} | {on_machines(size, rank)} |"


def on_one_machine(size: ModelSize, rank: int, num_gpus: int) -> str:
    """The cells for trainer and engines of the placement that a run plans."""
    try:
        plan = plan_placement(config_of(rank=rank), size, dict.fromkeys(range(num_gpus), GPU_GIB * GIB))
    except ConfigError:
        return "does not fit |"
    engines = describe_engines(plan.num_engines, plan.gpus_per_engine, plan.engine_bytes)
    turns = ", in turns with the trainer" if plan.is_colocated else ""
    return f"{describe_trainer(len(plan.trainer_ranks), plan.trainer_bytes)} | {engines}{turns}"


def on_machines(size: ModelSize, rank: int) -> str:
    """The cells for trainer and engines on separate machines."""
    ranks = list(range(GPUS_OF_MACHINE))
    for num_trainers in range(1, NUM_MACHINES):
        for num_shared in (1, 2, 4, 8):
            number = GPUS_OF_MACHINE // num_shared
            config = config_of(rank=rank, trainer_gpu_ranks=ranks, engine_gpu_ranks=ranks, num_engines=number)
            [needed] = training_needs(config, size, num_machines=num_trainers)
            engine_bytes = placed_work(config, size)[-1].num_bytes
            if needed.expected_bytes < 0.95 * GPU_GIB * GIB and engine_bytes < ENGINE_SHARE * GPU_GIB * GIB:
                trainer = describe_trainer(num_trainers * GPUS_OF_MACHINE, needed.expected_bytes)
                num_engines = (NUM_MACHINES - num_trainers) * number
                return f"{trainer} | {describe_engines(num_engines, num_shared, engine_bytes)}"
    return "does not fit |"


def describe_trainer(num_gpus: int, num_bytes: int) -> str:
    return f"{num_gpus} GPU{'s' * (num_gpus > 1)}, {num_bytes / GIB:.0f} GiB each"


def describe_engines(number: int, num_shared: int, num_bytes: int) -> str:
    gpus = f" of {num_shared} GPUs" if num_shared > 1 else ""
    return f"{number} engine{'s' * (number > 1)}{gpus}, {num_bytes / GIB:.0f} GiB per GPU"


def rows_of_bytes() -> Iterator[str]:
    for name, shape in SHAPES.items():
        size = size_of(*shape)
        num_bytes = BFLOAT16_BYTES * size.num_parameters
        adapters = adapter_bytes(size, config_of(rank=RANK).training.rl.policy) // ADAPTER_STATE
        seconds = " | ".join(f"{8 * num_bytes / (gbit * 1e9):,.1f}" for gbit in GBITS)
        yield (
            f"| {name} | {num_bytes / 1e9:.1f} GB | {seconds} | {adapters / 1e9:.2f} GB | "
            f"{checkpoint_bytes(size) / 1e9:,.0f} GB |"
        )


def checkpoint_bytes(size: ModelSize) -> int:
    """Bytes of weights and moments, on disk and in the leader's host memory."""
    return (1 + MOMENTS) * FLOAT32_BYTES * size.num_parameters
