"""Own the weights and the KV cache of one model, and turn token ids into next-token logits.

Not here: choosing tokens (sampling.py), which request sits in which slot (running.py), gradients.

    slot   KV cache (live prefix)      prefill: prompts -> some slots       step: one token for slots 0..B-1
     0     [k v k v k v . . . .]
     1     [k v k v k v k v k .]       A row's result does not depend on the other rows, bit for bit: matrix
     2     [k v . . . . . . . .]       products have a multiple of `row_step` rows and lengths are rounded up to
     3     (free)                      LENGTH_STEP, so that a row meets the same arithmetic in every batch.

Letters: B rows, U different prompts, T positions, S cached positions, H query heads, K key-value heads,
D head width, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rollouts_core.embedded.architecture import (
    Architecture,
    UnsupportedModelError,
    check_same_computation,
    load_architecture,
    tensor_shapes,
)
from rollouts_core.embedded.segments import SegmentAddress, read_segment
from rollouts_core.embedded.weights import check_tensors, digest_tensors, read_tensors
from rollouts_core.errors import CheckpointError

logger = logging.getLogger(__name__)

ROW_STEPS = (4, 8, 16, 32)
"""BLAS computes rows in blocks, and left-over rows with another kernel, which rounds differently. How many rows a block
has depends on the processor and on the width of the product; fewer are faster where few requests run."""
TRIAL_ROWS, TRIAL_COLUMNS = 128, 256
LENGTH_STEP = 32
"""Attention over a multiple of 32 positions has no odd-sized tail, which would round differently."""
MAX_PREFILL_TOKENS = 8192
"""Padded positions per prefill pass; bounds the memory of activations."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The tensors of one block as decoding uses them: projections of one input are one matrix."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All tensors of a model, and views into them under the checkpoint's names."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    by_name: dict[str, Tensor]


class Decoder:
    """Weights and KV cache of one model; not thread-safe.

    Args:
        model_dir: a Hugging Face directory with config.json and safetensors weights.
        num_slots: rows that can decode together.
        context_length: prompt and completion together; the model's own limit where None.
        dtype: number format of weights, cache and activations.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        num_slots: int,
        context_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        assert num_slots >= 1, f"{num_slots} slots"
        self.architecture = load_architecture(model_dir)
        self.context_length = _checked_context_length(self.architecture, context_length, model_dir)
        self.num_slots = num_slots
        self.dtype = dtype
        self._weights = _allocate_weights(self.architecture, dtype)
        self._file_dtypes: dict[str, torch.dtype] = {}
        self._segment_ids: dict[str, str] = {}
        """Which segment each tensor came from; empty where they came from a model directory."""
        self._cos_TD, self._sin_TD = _rotary_tables(
            self.architecture, _round_up(self.context_length, LENGTH_STEP), dtype
        )
        self.row_step = find_row_step(self.architecture, dtype)
        self._kv = self._new_cache(self.row_step, LENGTH_STEP)
        self.load_weights(model_dir)

    @torch.inference_mode()
    def load_weights(self, model_dir: Path) -> None:
        """Replace every weight by those in `model_dir`, or raise `CheckpointError` and keep all old ones.

        The KV cache is left as it is: its owner decides which rows to compute again.
        """
        check_same_computation(model_dir, self.architecture)
        self._replace_weights(read_tensors(model_dir), source=str(model_dir))
        self._segment_ids = {}

    @torch.inference_mode()
    def load_segments(self, segments: Sequence[SegmentAddress], *, model_dir: Path) -> None:
        """Replace the weights by those in segments, or raise `CheckpointError` and keep all old ones.

        Tensors that came from the same segment before are kept: a segment never changes.

        Args:
            model_dir: directory with the config.json that goes with them.
        """
        check_same_computation(model_dir, self.architecture)
        segment_ids = {name: segment.id for segment in segments for name in segment.names}
        kept = {name for name, found in segment_ids.items() if self._segment_ids.get(name) == found}
        if HEAD in segment_ids and self.architecture.ties_embeddings:
            kept -= {HEAD, EMBEDDING}  # they are compared with each other
        tensors: dict[str, Tensor] = {}
        for segment in segments:
            tensors |= read_segment(segment, [name for name in segment.names if name not in kept])
        self._replace_weights(tensors, kept=kept, source="the published segments")
        self._segment_ids = segment_ids

    def _replace_weights(self, tensors: Mapping[str, Tensor], *, source: str, kept: Collection[str] = ()) -> None:
        """Replace all weights but those that are kept, after all checks."""
        views = self._weights.by_name
        shapes = {name: tuple(view.shape) for name, view in views.items() if name not in kept}
        if self.architecture.ties_embeddings and HEAD in tensors:
            if EMBEDDING in tensors and not torch.equal(tensors[HEAD], tensors[EMBEDDING]):
                raise CheckpointError(f"{source}: {HEAD} differs from {EMBEDDING}, the loaded model ties them")
            shapes[HEAD] = shapes[EMBEDDING]
        check_tensors(tensors, shapes, source=source)
        for name in views.keys() & tensors.keys():
            views[name].copy_(tensors[name])
        kept_dtypes = {name: dtype for name, dtype in self._file_dtypes.items() if name in kept}
        self._file_dtypes = kept_dtypes | {name: tensor.dtype for name, tensor in tensors.items()}

    def weight_digests(self) -> dict[str, str]:
        """sha256 per tensor of the weights in use, under the names and in the number format of their file."""
        views = {**self._weights.by_name, HEAD: self._weights.head}
        return digest_tensors({name: views[name].to(dtype) for name, dtype in self._file_dtypes.items()})

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Fill `slots` with the KV of `prompts` and return the logits after each prompt's last token.

        Equal prompts are computed once.

        Returns:
            logits_BV in the order of `prompts`.
        """
        assert len(prompts) == len(slots), f"{len(prompts)} prompts for {len(slots)} slots"
        assert all(0 < len(prompt) <= self.context_length for prompt in prompts), "prompt of an unusable length"
        logits_BV = torch.empty(len(prompts), self.architecture.vocab_size, dtype=self.dtype)
        for rows in _prefill_passes(prompts):
            different = list(dict.fromkeys(tuple(prompts[row]) for row in rows))
            place = {prompt: index for index, prompt in enumerate(different)}
            sources_B = torch.tensor([place[tuple(prompts[row])] for row in rows])
            slots_B = torch.tensor([slots[row] for row in rows])
            logits_BV[rows] = self._prefill_pass(different, sources_B, slots_B)[sources_B]
        return logits_BV

    @torch.inference_mode()
    def step(self, token_ids_B: Tensor, positions_B: Tensor, *, num_cached: int) -> Tensor:
        """Append one token to each of the slots 0..B-1 and return the logits after it.

        Args:
            token_ids_B: the token of each slot.
            positions_B: where it goes: the number of tokens that the slot already holds.
            num_cached: at least the largest position plus one.

        Returns:
            logits_BV.
        """
        num_rows = len(token_ids_B)
        num_padded, length = _round_up(num_rows, self.row_step), _round_up(num_cached, LENGTH_STEP)
        self._reserve(num_padded, length)
        ids_B, places_B = (F.pad(values, (0, num_padded - num_rows)) for values in (token_ids_B, positions_B))
        hidden = F.embedding(ids_B, self._weights.embedding)
        cos, sin = self._cos_TD[places_B][:, None], self._sin_TD[places_B][:, None]
        rows_B = torch.arange(num_padded)
        bias = torch.zeros(num_padded, 1, 1, length, dtype=self.dtype)
        bias.masked_fill_((torch.arange(length) > places_B[:, None])[:, None, None], -math.inf)
        for layer, weights in enumerate(self._weights.layers):
            q_BHD, kv_BKD = self._project(hidden, weights, cos, sin)
            self._kv[layer][rows_B, :, places_B] = kv_BKD
            keys, values = self._kv[layer, :num_padded, :, :length].chunk(2, 1)
            queries = q_BHD.reshape(num_padded, keys.shape[1], -1, q_BHD.shape[-1])
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
            hidden = self._finish_block(hidden, attended.reshape(num_padded, -1), weights)
        return self._logits(hidden)[:num_rows]

    @torch.inference_mode()
    def move_slot(self, source: int, target: int, *, length: int) -> None:
        """Copy the first `length` cached positions of one slot over another."""
        self._kv[:, target, :, :length] = self._kv[:, source, :, :length]

    def _prefill_pass(self, prompts: list[tuple[int, ...]], sources_B: Tensor, slots_B: Tensor) -> Tensor:
        """Logits after each of the different `prompts`; slot slots_B[i] gets the KV of prompt sources_B[i]."""
        length = _round_up(max(map(len, prompts)), LENGTH_STEP)
        ids_UT = torch.tensor([prompt + (0,) * (length - len(prompt)) for prompt in prompts])
        self._reserve(int(slots_B.max()) + 1, length)
        cos, sin = self._cos_TD[:length, None], self._sin_TD[:length, None]
        hidden = F.embedding(ids_UT, self._weights.embedding)
        for layer, weights in enumerate(self._weights.layers):
            q_UTHD, kv_UTKD = self._project(hidden, weights, cos, sin)
            kv_UKTD = kv_UTKD.transpose(1, 2)
            self._kv[layer][slots_B, :, :length] = kv_UKTD[sources_B]
            keys, values = kv_UKTD.chunk(2, 1)
            attended = F.scaled_dot_product_attention(
                q_UTHD.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True
            )
            hidden = self._finish_block(hidden, attended.transpose(1, 2).flatten(2), weights)
        last_U = torch.tensor([len(prompt) - 1 for prompt in prompts])
        last_hidden = hidden[torch.arange(len(prompts)), last_U]
        padded = F.pad(last_hidden, (0, 0, 0, _round_up(len(prompts), self.row_step) - len(prompts)))
        return self._logits(padded)[: len(prompts)]

    def _project(self, hidden: Tensor, weights: LayerWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries [..., H, D] and, joined, rotated keys and values [..., 2K, D]."""
        a = self.architecture
        num_rotated = a.num_heads + a.num_kv_heads
        normed = F.rms_norm(hidden, (a.hidden_size,), weights.attention_norm, a.norm_eps)
        qkv = F.linear(normed, weights.qkv, weights.qkv_bias).view(*hidden.shape[:-1], -1, a.head_dim)
        qk = qkv[..., :num_rotated, :]
        if weights.q_norm is not None and weights.k_norm is not None:
            q = F.rms_norm(qk[..., : a.num_heads, :], (a.head_dim,), weights.q_norm, a.norm_eps)
            k = F.rms_norm(qk[..., a.num_heads :, :], (a.head_dim,), weights.k_norm, a.norm_eps)
            qk = torch.cat((q, k), -2)
        rotated = torch.addcmul(qk * cos, qk.roll(a.head_dim // 2, -1), sin)
        qkv[..., :num_rotated, :] = rotated
        return qkv[..., : a.num_heads, :], qkv[..., a.num_heads :, :]

    def _finish_block(self, hidden: Tensor, attended: Tensor, weights: LayerWeights) -> Tensor:
        a = self.architecture
        middle = hidden + F.linear(attended, weights.output, weights.output_bias)
        normed = F.rms_norm(middle, (a.hidden_size,), weights.mlp_norm, a.norm_eps)
        gate, up = F.linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, -1)
        return middle + F.linear(F.silu(gate) * up, weights.down, weights.down_bias)

    def _logits(self, hidden: Tensor) -> Tensor:
        a = self.architecture
        return F.linear(F.rms_norm(hidden, (a.hidden_size,), self._weights.norm, a.norm_eps), self._weights.head)

    def _reserve(self, num_slots: int, length: int) -> None:
        """Grow the cache by doubling until it has this many slots and positions."""
        old_slots, old_length = self._kv.shape[1], self._kv.shape[3]
        if num_slots <= old_slots and length <= old_length:
            return
        grown_slots = old_slots if num_slots <= old_slots else max(num_slots, 2 * old_slots)
        grown_length = old_length if length <= old_length else max(length, 2 * old_length)
        grown = self._new_cache(
            min(grown_slots, _round_up(self.num_slots, self.row_step)),
            min(grown_length, _round_up(self.context_length, LENGTH_STEP)),
        )
        grown[:, :old_slots, :, :old_length] = self._kv
        self._kv = grown

    def _new_cache(self, num_slots: int, length: int) -> Tensor:
        a = self.architecture
        return torch.zeros(a.num_layers, num_slots, 2 * a.num_kv_heads, length, a.head_dim, dtype=self.dtype)


def find_row_step(architecture: Architecture, dtype: torch.dtype) -> int:
    """The smallest of `ROW_STEPS` whose multiples meet the same arithmetic in all products of the model."""
    a = architecture
    widths = {a.hidden_size, a.num_heads * a.head_dim, a.intermediate_size}
    return max(_exact_row_step(width, dtype, torch.get_num_threads()) for width in widths)


@lru_cache
@torch.inference_mode()
def _exact_row_step(width: int, dtype: torch.dtype, num_threads: int) -> int:
    """The same for products with an inner dimension of `width`, by trial."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TRIAL_ROWS, width, generator=generator).to(dtype)
    weights = torch.randn(TRIAL_COLUMNS, width, generator=generator).to(dtype)
    whole = F.linear(rows, weights)
    for step in ROW_STEPS:
        counts = range(step, TRIAL_ROWS, step)
        if all(torch.equal(F.linear(rows[:count], weights), whole[:count]) for count in counts):
            return step
    logger.warning(
        "with %d threads, products of width %d are rounded differently with more rows: completions may differ in their "
        "last digits with what else runs; use one thread where they must not",
        num_threads,
        width,
    )
    return ROW_STEPS[-1]


def _prefill_passes(prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Row numbers grouped by rounded length, so that a prompt's padding depends on nothing but itself."""
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(_round_up(len(prompt), LENGTH_STEP), []).append(row)
    for length, rows in by_length.items():
        num_rows = max(MAX_PREFILL_TOKENS // length, 1)
        for start in range(0, len(rows), num_rows):
            yield rows[start : start + num_rows]


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _checked_context_length(architecture: Architecture, wanted: int | None, model_dir: Path) -> int:
    if wanted is None:
        return architecture.max_context_length
    if not 1 <= wanted <= architecture.max_context_length:
        raise UnsupportedModelError(
            f"{model_dir} was made for 1 to {architecture.max_context_length} positions, found a context length "
            f"of {wanted}: choose one in that range"
        )
    return wanted


def _rotary_tables(architecture: Architecture, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos_TD, and sin_TD with the sign of the half that it multiplies."""
    exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), 1.0 / architecture.rope_theta**exponents)
    sin = angles.sin()
    return torch.cat((angles, angles), -1).cos().to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def _allocate_weights(architecture: Architecture, dtype: torch.dtype) -> ModelWeights:
    shapes = tensor_shapes(architecture)
    by_name: dict[str, Tensor] = {}

    def allocate(*names: str) -> Tensor:
        """One tensor that holds the named ones stacked by rows; each name becomes a view of it."""
        sizes = [shapes[name][0] for name in names]
        joined = torch.zeros(sum(sizes), *shapes[names[0]][1:], dtype=dtype)
        by_name.update(zip(names, torch.split(joined, sizes), strict=True))
        return joined

    def allocate_optional(*names: str) -> Tensor | None:
        return allocate(*names) if names[0] in shapes else None

    def allocate_layer(prefix: str) -> LayerWeights:
        qkv = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        gate_up = [f"{prefix}mlp.{part}_proj" for part in ("gate", "up")]
        return LayerWeights(
            attention_norm=allocate(prefix + "input_layernorm.weight"),
            qkv=allocate(*(f"{name}.weight" for name in qkv)),
            qkv_bias=allocate_optional(*(f"{name}.bias" for name in qkv)),
            q_norm=allocate_optional(prefix + "self_attn.q_norm.weight"),
            k_norm=allocate_optional(prefix + "self_attn.k_norm.weight"),
            output=allocate(prefix + "self_attn.o_proj.weight"),
            output_bias=allocate_optional(prefix + "self_attn.o_proj.bias"),
            mlp_norm=allocate(prefix + "post_attention_layernorm.weight"),
            gate_up=allocate(*(f"{name}.weight" for name in gate_up)),
            gate_up_bias=allocate_optional(*(f"{name}.bias" for name in gate_up)),
            down=allocate(prefix + "mlp.down_proj.weight"),
            down_bias=allocate_optional(prefix + "mlp.down_proj.bias"),
        )

    embedding = allocate(EMBEDDING)
    layers = tuple(allocate_layer(f"model.layers.{layer}.") for layer in range(architecture.num_layers))
    norm = allocate("model.norm.weight")
    head = embedding if architecture.ties_embeddings else allocate(HEAD)
    return ModelWeights(embedding=embedding, layers=layers, norm=norm, head=head, by_name=by_name)
