"""Compute the token scores of a batch with Llama and Qwen models, as JAX functions of the weights.

    batch -> embedding -> scan over layers -> hidden states -> sort scored positions first -> head, in pieces

The weights of all layers are stacked under one name, such as `model.layers.*.mlp.up_proj.weight`, and the layers run in
a scan. Therefore the compile time does not grow with the number of layers. Other files use the Hugging Face names of
the weights.

B rows, T token positions, N = B x T positions, L layers, H hidden size, Q query heads, K key heads, D width of a head,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from rollouts_core.batch import TrainBatch
from rollouts_core.embedded.architecture import Architecture
from rollouts_core.embedded.rotary import rotary_frequencies
from rollouts_core.model import logprobs

Params = dict[str, jax.Array]
"""Weights by name. Weights of the same name in all layers are stacked in one array."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYERS = "model.layers."
ALL_LAYERS = LAYERS + "*."
VALUE_WEIGHT, VALUE_BIAS = "value_head.weight", "value_head.bias"

SMALLEST_LENGTH = 16
"""Smallest number of positions to which a row is padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings of the compiled functions. JAX compiles once for each combination of settings."""

    architecture: Architecture
    """Shapes and settings of the model."""
    compute_dtype: str = "float32"
    """Dtype of the matrix products. Norms, softmax and residual stream are float32."""
    temperature: float = 1.0
    """Divisor of the logits."""
    with_entropies: bool = False
    """Compute the policy's entropies besides the log-probs."""
    recompute_layers: bool = False
    """Activation checkpointing: store only the inputs of layers, and recompute the rest in the backward pass."""
    num_tokens: int | None = None
    """The softmax includes only token ids below this number, or all token ids of the model if None."""
    untrained_input_id: int | None = None
    """Id of the padding token in config.json. As in transformers, the input embedding of this token gets no
    gradient."""


class PaddedBatch(NamedTuple):
    """The model's inputs of a `TrainBatch`, padded to one of a few sizes, because JAX compiles once per size."""

    inputs_BT: jax.Array
    position_ids_BT: jax.Array
    segment_ids_BT: jax.Array
    prompt_ids_BT: jax.Array
    targets_BT: jax.Array
    order_N: jax.Array
    """Indices of all positions of the flattened batch. Positions in the loss mask come first."""
    num_scored: jax.Array
    """Number of positions in the loss mask."""


class Scores(NamedTuple):
    """The `TokenScores` of a batch as JAX arrays."""

    logprobs_BT: jax.Array
    entropies_BT: jax.Array | None
    values_BT: jax.Array | None


def pad_batch(batch: TrainBatch) -> PaddedBatch:
    """Pad the rows and positions of a batch to sizes from `bucket_size`."""
    num_rows, length = batch.inputs_BT.shape
    shape = (bucket_size(num_rows), bucket_size(max(length, SMALLEST_LENGTH)))

    def pad(values_BT: Tensor) -> jax.Array:
        padded_BT = np.zeros(shape, dtype=np.int32)
        padded_BT[:num_rows, :length] = values_BT.numpy()
        return jnp.asarray(padded_BT)

    is_unscored_N = np.ones(shape, dtype=bool)
    is_unscored_N[:num_rows, :length] = (batch.loss_mask_BT == 0).numpy()
    return PaddedBatch(
        inputs_BT=pad(batch.inputs_BT),
        position_ids_BT=pad(batch.position_ids_BT),
        segment_ids_BT=pad(batch.segment_ids_BT),
        prompt_ids_BT=pad(batch.prompt_ids_BT),
        targets_BT=pad(batch.targets_BT),
        order_N=jnp.asarray(np.argsort(is_unscored_N, axis=None, kind="stable").astype(np.int32)),
        num_scored=jnp.int32(is_unscored_N.size - is_unscored_N.sum()),
    )


def bucket_size(count: int) -> int:
    """Round up by at most 25 % to a number with at most three significant bits: 1 to 8, 10, 12, 14, 16, 20, ..."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


def score_batch(params: Params, batch: PaddedBatch, settings: ModelSettings) -> Scores:
    """Compute the scores of target tokens in the loss mask. Other positions get 0, as in `policy.score_targets`."""
    with jax.default_matmul_precision("highest" if settings.compute_dtype == "float32" else "default"):
        hidden_BTH = compute_hidden_states(params, batch, settings)
        ordered_NH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1])[batch.order_N]
        targets_N = batch.targets_BT.reshape(-1)[batch.order_N]
        logprobs_N, entropies_N = score_in_pieces(params, ordered_NH, targets_N, batch.num_scored, settings)
        values_N = None
        if VALUE_WEIGHT in params:
            values_N = (ordered_NH @ params[VALUE_WEIGHT].T + params[VALUE_BIAS]).squeeze(-1)

    def put_back(scores_N: jax.Array) -> jax.Array:
        scored_N = jnp.where(jnp.arange(len(scores_N)) < batch.num_scored, scores_N, 0.0)
        return jnp.zeros_like(scored_N).at[batch.order_N].set(scored_N).reshape(batch.inputs_BT.shape)

    return Scores(
        logprobs_BT=put_back(logprobs_N),
        entropies_BT=put_back(entropies_N) if settings.with_entropies else None,
        values_BT=None if values_N is None else put_back(values_N),
    )


def compute_hidden_states(params: Params, batch: PaddedBatch, settings: ModelSettings) -> jax.Array:
    """Hidden states (B, T, H) after the last norm, float32. A sample attends only to itself and to its prompt."""
    a = settings.architecture
    keys_B1T = batch.segment_ids_BT[:, None, :]
    is_read_BTT = (batch.segment_ids_BT[:, :, None] == keys_B1T) | (batch.prompt_ids_BT[:, :, None] == keys_B1T)
    mask_B1TT = jnp.tril(is_read_BTT)[:, None]  # padding attends to padding, so that no query has an empty softmax
    rotation = _rotation(batch.position_ids_BT, a)

    def block(hidden_BTH: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        normed_BTH = _rms_norm(hidden_BTH, weights["input_layernorm.weight"], a)
        middle_BTH = hidden_BTH + _attend(normed_BTH, weights, mask_B1TT, rotation, settings)
        normed_BTH = _rms_norm(middle_BTH, weights["post_attention_layernorm.weight"], a)
        return middle_BTH + _feed_forward(normed_BTH, weights, settings), None

    layers = {name.removeprefix(ALL_LAYERS): w for name, w in params.items() if name.startswith(ALL_LAYERS)}
    embedded_BTH = params[EMBEDDING][batch.inputs_BT]
    if settings.untrained_input_id is not None:
        is_trained_BT1 = (batch.inputs_BT != settings.untrained_input_id)[:, :, None]
        embedded_BTH = jnp.where(is_trained_BT1, embedded_BTH, jax.lax.stop_gradient(embedded_BTH))
    hidden_BTH, _ = jax.lax.scan(jax.checkpoint(block) if settings.recompute_layers else block, embedded_BTH, layers)
    return _rms_norm(hidden_BTH, params["model.norm.weight"], a)


def score_in_pieces(
    params: Params, hidden_NH: jax.Array, targets_N: jax.Array, num_scored: jax.Array, settings: ModelSettings
) -> tuple[jax.Array, jax.Array]:
    """Log-probs (N,) and entropies (N,) of the first `num_scored` positions, without storing all logits.

    Pieces without a scored position are skipped. The backward pass recomputes the logits of the scored pieces.
    """
    head_VH = params.get(HEAD, params[EMBEDDING])[: settings.num_tokens]
    num_positions = len(targets_N)
    piece = min(num_positions, max(1, logprobs.MAX_PIECE_BYTES // (4 * len(head_VH))))
    num_pieces = -(-num_positions // piece)
    padding = num_pieces * piece - num_positions

    def score(hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_probs = jax.nn.log_softmax(_linear(hidden, head_VH, None, settings, jnp.float32) / settings.temperature)
        chosen = jnp.take_along_axis(log_probs, targets[:, None], axis=1).squeeze(1)
        entropies = -(jnp.exp(log_probs) * log_probs).sum(-1) if settings.with_entropies else jnp.zeros_like(chosen)
        return chosen, entropies

    def skip(hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(piece), jnp.zeros(piece)

    def step(_: None, part: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        start, hidden, targets = part
        return None, jax.lax.cond(start < num_scored, score, skip, hidden, targets)

    parts = (
        jnp.arange(num_pieces) * piece,
        jnp.pad(hidden_NH, ((0, padding), (0, 0))).reshape(num_pieces, piece, -1),
        jnp.pad(targets_N, (0, padding)).reshape(num_pieces, piece),
    )
    _, (logprobs_N, entropies_N) = jax.lax.scan(step if num_pieces == 1 else jax.checkpoint(step), None, parts)
    return logprobs_N.reshape(-1)[:num_positions], entropies_N.reshape(-1)[:num_positions]


def to_params(weights: Mapping[str, Tensor]) -> Params:
    """Copy weights to the device as float32, and stack the weights of the layers."""
    params = {name: _to_array(value) for name, value in weights.items() if not name.startswith(LAYERS)}
    of_layers = [name.removeprefix(LAYERS).partition(".") for name in weights if name.startswith(LAYERS)]
    num_layers = 1 + max((int(layer) for layer, _, _ in of_layers), default=-1)
    for suffix in dict.fromkeys(suffix for _, _, suffix in of_layers):
        layers = [weights[f"{LAYERS}{i}.{suffix}"] for i in range(num_layers)]
        params[ALL_LAYERS + suffix] = _to_array(torch.stack(layers))
    return params


def to_weights(params: Params) -> dict[str, Tensor]:
    """Copy weights to host memory, by Hugging Face name. The inverse of `to_params`."""
    weights: dict[str, Tensor] = {}
    for name, value in params.items():
        copied = torch.from_numpy(np.array(value))
        if name.startswith(ALL_LAYERS):
            suffix = name.removeprefix(ALL_LAYERS)
            weights |= {f"{LAYERS}{i}.{suffix}": layer for i, layer in enumerate(copied)}
        else:
            weights[name] = copied
    return weights


def _to_array(value: Tensor) -> jax.Array:
    return jnp.array(value.detach().float().numpy(), copy=True)  # a copy, because the optimizer step reuses this memory


def _attend(
    hidden_BTH: jax.Array,
    weights: Params,
    mask_B1TT: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    settings: ModelSettings,
) -> jax.Array:
    a = settings.architecture

    def project(part: str, num_heads: int) -> jax.Array:
        flat = _project(hidden_BTH, weights, f"self_attn.{part}_proj", settings)
        return flat.reshape(*flat.shape[:2], num_heads, a.head_dim)

    q_BTQD, k_BTKD, v_BTKD = project("q", a.num_heads), project("k", a.num_kv_heads), project("v", a.num_kv_heads)
    if a.has_qk_norm:
        q_BTQD = _rms_norm(q_BTQD, weights["self_attn.q_norm.weight"], a)
        k_BTKD = _rms_norm(k_BTKD, weights["self_attn.k_norm.weight"], a)
    dtype = settings.compute_dtype
    attended_BTQD = jax.nn.dot_product_attention(
        _rotate(q_BTQD, rotation).astype(dtype), _rotate(k_BTKD, rotation).astype(dtype), v_BTKD, mask=mask_B1TT
    )
    flat = attended_BTQD.reshape(*attended_BTQD.shape[:2], -1)
    return _project(flat, weights, "self_attn.o_proj", settings)


def _feed_forward(hidden_BTH: jax.Array, weights: Params, settings: ModelSettings) -> jax.Array:
    gate = _project(hidden_BTH, weights, "mlp.gate_proj", settings)
    up = _project(hidden_BTH, weights, "mlp.up_proj", settings)
    return _project(jax.nn.silu(gate) * up, weights, "mlp.down_proj", settings)


def _project(inputs: jax.Array, weights: Params, name: str, settings: ModelSettings) -> jax.Array:
    return _linear(inputs, weights[f"{name}.weight"], weights.get(f"{name}.bias"), settings)


def _linear(
    inputs: jax.Array,
    weight_OI: jax.Array,
    bias_O: jax.Array | None,
    settings: ModelSettings,
    output_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """inputs @ weight.T + bias, computed in `settings.compute_dtype`."""
    dtype = settings.compute_dtype
    outputs = jnp.einsum(
        "...i,oi->...o", inputs.astype(dtype), weight_OI.astype(dtype), preferred_element_type=output_dtype
    )
    return outputs if bias_O is None else outputs + bias_O.astype(outputs.dtype)


def _rms_norm(inputs: jax.Array, weight: jax.Array, architecture: Architecture) -> jax.Array:
    """RMS norm over the last dimension, computed in float32."""
    values = inputs.astype(jnp.float32)
    mean_square = jnp.square(values).mean(-1, keepdims=True)
    return values * jax.lax.rsqrt(mean_square + architecture.norm_eps) * weight


def _rotation(position_ids_BT: jax.Array, architecture: Architecture) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary embedding for each position, (B, T, 1, D / 2) each."""
    # torch computes the frequencies, as in the models' own training: rounding differences would grow with the position.
    frequencies = jnp.asarray(rotary_frequencies(architecture).numpy())
    angles = (position_ids_BT[:, :, None].astype(jnp.float32) * frequencies)[:, :, None]
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(heads: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Apply the rotary embedding to the pairs of dimensions (i, i + D / 2) of every head."""
    cos, sin = rotation
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
