"""Read the architecture of a model from a Hugging Face config.json, and refuse unsupported models.

Not here: reading weights (weights.py), the forward pass (decoder.py, backends/jax_model.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollouts_core.errors import CheckpointError
from rollouts_core.system.regular_files import read_file

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DEFAULT_CONTEXT = dict(zip(SUPPORTED_ARCHITECTURES, (2048, 131072, 32768, 32768), strict=True))
"""Context length by architecture that transformers assumes if config.json has no max_position_embeddings."""
DEFAULT_WINDOW = 4096
"""Sliding window that transformers assumes if the config.json of a Mistral model has none."""
MAX_CONFIG_BYTES = 16 * 2**20
"""Limit of the size of a config.json, bytes. Normal files have a few kilobytes."""


class UnsupportedModelError(CheckpointError):
    """This project's own forward passes do not support the model."""


class RopeScaling(NamedTuple):
    """The `llama3` scaling of rotary frequencies. The scale of a pair of dimensions depends on its number of rotations
    (turns) within the context length of pretraining."""

    factor: float
    """Divisor of the frequency of pairs with at most `low_turns` turns."""
    low_turns: float
    high_turns: float
    """Pairs with at least this many turns keep their frequency. Frequencies of pairs between `low_turns` and
    `high_turns` are interpolated."""
    pretrained_length: int
    """Context length of pretraining, tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shapes and settings of one decoder-only model of the Llama family."""

    name: str
    """Name of the model's class in transformers, for instance `Qwen3ForCausalLM`."""
    model_type: str
    """Name of the model family in transformers, for instance `qwen3`."""
    num_layers: int
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the feed-forward layer."""
    num_heads: int
    num_kv_heads: int
    """Number of key and value heads; divides `num_heads`."""
    head_dim: int
    """Width of one attention head."""
    vocab_size: int
    """Number of token ids. All ids are below this number."""
    norm_eps: float
    """Epsilon that every RMS norm adds to the mean square."""
    rope_theta: float
    """Base of the rotary embedding."""
    rope_scaling: RopeScaling | None
    """Scaling of the rotary frequencies; None for rope type `default`."""
    max_context_length: int
    """Number of positions for which the model was trained."""
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    """True if query and key heads have RMS norms."""
    ties_embeddings: bool
    """True if the output projection is the embedding matrix."""
    eos_token_ids: tuple[int, ...]
    """Ids of the tokens that end a completion."""


def load_architecture(
    model_dir: Path,
    *,
    runner: str = "the embedded engine",
    remedy: str = "use the engine SGLang or vLLM for this model",
) -> Architecture:
    """Read the architecture of the checkpoint in `model_dir`.

    Args:
        runner: name of the component that runs the model, for error messages.
        remedy: advice for the user, for error messages.

    Raises:
        CheckpointError: config.json is missing or unreadable.
        UnsupportedModelError: the model has a setting that the forward passes do not support.
    """
    config = read_json(model_dir / "config.json")
    try:
        names = config["architectures"]
        if unsupported := _find_unsupported(names[0], config):
            found, supported = unsupported
            raise UnsupportedModelError(
                f"{model_dir}: {runner} does not support {found}; it supports {supported}: {remedy}"
            )
        return _describe(names[0], config, read_end_token_ids(model_dir))
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{model_dir}: config.json is not a complete config of a model ({error!r}): copy the checkpoint again"
        ) from error


def _describe(name: str, config: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Architecture:  # Any: JSON
    is_llama, is_mistral, is_qwen2, is_qwen3 = (name == each for each in SUPPORTED_ARCHITECTURES)
    has_attention_bias = not is_mistral and bool(config.get("attention_bias", False))
    num_heads = config["num_attention_heads"]
    return Architecture(
        name=name,
        model_type=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or (128 if is_qwen3 else config["hidden_size"] // num_heads),
        vocab_size=config["vocab_size"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=_rope(config).get("rope_theta", config.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(config),
        max_context_length=config.get("max_position_embeddings", DEFAULT_CONTEXT[name]),
        has_qkv_bias=is_qwen2 or has_attention_bias,
        has_output_bias=not is_qwen2 and has_attention_bias,
        has_mlp_bias=is_llama and bool(config.get("mlp_bias", False)),
        has_qk_norm=is_qwen3,
        ties_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=eos_token_ids,
    )


def read_end_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Read the ids of end tokens from config.json and generation_config.json. Returns the ids of both files, as SGLang
    does.

    Raises:
        CheckpointError: a file cannot be read. generation_config.json may be missing.
    """
    generation_file = model_dir / "generation_config.json"
    generation_config = read_json(generation_file) if generation_file.exists() else {}
    token_ids: set[int] = set()
    for source in (read_json(model_dir / "config.json"), generation_config):
        value = source.get("eos_token_id")
        token_ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(token_ids))


def check_same_computation(model_dir: Path, loaded: Architecture) -> None:
    """Raise `CheckpointError` if the config.json in `model_dir` differs from the loaded model in its computation.

    Equal shapes of weights are not enough: rotary embedding or the number of heads may differ.
    """
    try:
        has_config = (model_dir / "config.json").exists()
    except OSError as error:
        raise CheckpointError(
            f"{model_dir} cannot be read ({error}): give a directory that this process may read"
        ) from error
    if not has_config:
        return
    found = load_architecture(model_dir)
    for name in ("name", "num_heads", "num_kv_heads", "head_dim", "norm_eps", "rope_theta", "rope_scaling"):
        if getattr(found, name) != getattr(loaded, name):
            raise CheckpointError(
                f"{model_dir} is of a model with {name} {getattr(found, name)}, but the loaded model has "
                f"{getattr(loaded, name)}: start an engine with this model instead"
            )


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint, by name. A tied output projection has no tensor."""
    a = architecture
    q_size, kv_size = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for layer in range(a.num_layers):
        prefix = f"model.layers.{layer}."
        projections = {
            "self_attn.q_proj": (q_size, a.hidden_size, a.has_qkv_bias),
            "self_attn.k_proj": (kv_size, a.hidden_size, a.has_qkv_bias),
            "self_attn.v_proj": (kv_size, a.hidden_size, a.has_qkv_bias),
            "self_attn.o_proj": (a.hidden_size, q_size, a.has_output_bias),
            "mlp.gate_proj": (a.intermediate_size, a.hidden_size, a.has_mlp_bias),
            "mlp.up_proj": (a.intermediate_size, a.hidden_size, a.has_mlp_bias),
            "mlp.down_proj": (a.hidden_size, a.intermediate_size, a.has_mlp_bias),
        }
        for name, (num_out, num_in, has_bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (num_out, num_in)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (num_out,)
        shapes[prefix + "input_layernorm.weight"] = (a.hidden_size,)
        shapes[prefix + "post_attention_layernorm.weight"] = (a.hidden_size,)
        if a.has_qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (a.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (a.head_dim,)
    shapes["model.norm.weight"] = (a.hidden_size,)
    if not a.ties_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return shapes


def _find_unsupported(name: str, config: Mapping[str, Any]) -> tuple[str, str] | None:  # Any: JSON
    """The first unsupported setting in a config and the supported values, as text; None if all settings are
    supported."""
    rope = _rope(config)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    activation = config.get("hidden_act", "silu")
    is_mistral = name == "MistralForCausalLM"
    has_window = config.get("sliding_window", DEFAULT_WINDOW) if is_mistral else config.get("use_sliding_window")
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    checks = [
        (name in SUPPORTED_ARCHITECTURES, f"architecture {name}", ", ".join(SUPPORTED_ARCHITECTURES)),
        (rope_type in ("default", "llama3"), f"rope type {rope_type!r}", "rope types 'default' and 'llama3'"),
        (partial == 1.0, f"partial_rotary_factor {partial}", "rotation of whole heads"),
        (activation == "silu", f"activation {activation!r}", "activation 'silu'"),
        (not (has_window or layer_types), "sliding-window attention", "full attention"),
        (not config.get("quantization_config"), "quantized weights", "float32, bfloat16 and float16 weights"),
    ]
    return next(((found, supported) for is_fine, found, supported in checks if not is_fine), None)


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:  # Any: JSON
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_scaling(config: Mapping[str, Any]) -> RopeScaling | None:  # Any: JSON
    rope = _rope(config)
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return None
    return RopeScaling(
        factor=rope["factor"],
        low_turns=rope["low_freq_factor"],
        high_turns=rope["high_freq_factor"],
        pretrained_length=rope.get("original_max_position_embeddings") or config["max_position_embeddings"],
    )


def read_json(path: Path) -> dict[str, Any]:  # Any: JSON
    """Read a JSON object from a file. Raises CheckpointError if this fails."""
    try:
        content = json.loads(read_file(path, max_bytes=MAX_CONFIG_BYTES))
    except FileNotFoundError as error:
        within = path.parent / "checkpoint"  # for a hint if the user gave the folder of a run
        meant = within if (within / path.name).is_file() else "the folder of a Hugging Face checkpoint"
        raise CheckpointError(f"{path.parent} has no {path.name}: give {meant}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}): give a model directory") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} has no JSON object: give a model directory")
    return content
