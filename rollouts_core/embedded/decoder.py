"""Own the weights and the KV cache of one model, and turn token ids into next-token logits.

Not here: matrix products (projection.py), sampling (sampling.py), the assignment of requests to slots (running.py),
gradients.

    slot   KV cache (live prefix)      A step appends one token to each of the slots 0..B-1, and writes new prompts
     0     [k v k v k v . . . .]       into the slots from B on.
     1     [k v k v k v k v k .]       Logits are bitwise independent of the other sequences in the batch, because:
     2     [k v . . . . . . . .]       - matrix products have a multiple of `row_step` rows;
     3     (free)                      - the attention of each prompt is a separate call;
                                       - cached lengths are rounded up (`_attended_length`).

    cache: [layer, slot, position, key heads and value heads, D]

Letters: B decoding slots, P prompts, F tokens of a pass, N new entries of the cache, R rows with logits, T positions,
H query heads, K key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rollouts_core.config.messages import first_line
from rollouts_core.embedded.adapters import Place, adapter_projections, adapter_shapes, is_adapter, place_adapters
from rollouts_core.embedded.architecture import (
    Architecture,
    UnsupportedModelError,
    check_same_computation,
    load_architecture,
    tensor_shapes,
)
from rollouts_core.embedded.projection import Projection, choose_library, find_row_step
from rollouts_core.embedded.rotary import rotary_tables
from rollouts_core.embedded.scoring import PromptScorer
from rollouts_core.embedded.segments import SegmentAddress, read_segment
from rollouts_core.embedded.weights import check_tensors, digest_tensors, read_tensors, tensor_digest
from rollouts_core.errors import CheckpointError, NoMemoryError, RolloutsError

LENGTH_STEP = 32
"""Attention reads a multiple of this many positions. Libraries round the rest of an incomplete block differently."""
ATTENTION_BLOCK = 512
"""Number of positions per block in torch's attention, which adds up the results of its blocks. Libraries may split the
sum over a partly filled block differently, with another rounding. MKL with AVX-512 splits the sum above 256
positions."""
TRIAL_ROWS = 4
MAX_PASS_TOKENS = 8192
"""Highest number of prompt tokens in one forward pass, unless a single prompt is longer. Limits the memory of
activations."""
MAX_LOGITS_BYTES = 32 * 2**20
"""Limit of the memory for logits of a scored prompt, bytes. Longer prompts are scored in parts."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one transformer block. Projections with the same input are joined into one matrix."""

    attention_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None
    """RMS norm weights [H + K, D]: H equal rows for the query heads, then K equal rows for the key heads. None if the
    model has no norms of queries and keys."""
    output: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All weights of a model. `by_name` has views into the joined matrices under the checkpoint's tensor names."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Projection
    by_name: dict[str, Tensor]
    places: dict[str, Place]
    """The rows of each linear layer in its joined matrix, by layer name. All layers in this dict can have adapters."""

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All matrices of the model except the embedding."""
        return (*(projection for layer in self.layers for projection in layer.projections), self.head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The F tokens of one forward pass: first one token per decoding slot, then whole prompts."""

    num_decoding: int
    """B: the slots 0..B-1 get one token each, and these are the first B of the F tokens."""
    spans: list[tuple[int, int]]
    """Begin and end of each prompt among the F tokens. Equal prompts appear once."""
    ids_F: Tensor
    """Token ids."""
    places_F: Tensor
    """Position of each token in its sequence."""
    slots_N: Tensor
    """Slot of each new cache entry. Equal prompts share tokens of the pass, but each has its own cache entries."""
    slot_places_N: Tensor
    """Position of each new cache entry within its slot."""
    sources_N: Tensor | None
    """For each new cache entry, the index of its token among the F tokens. None if the N entries are the F tokens."""
    last_R: Tensor
    """Indices of the F tokens whose logits are returned: all decoding slots, and the last token of each prompt."""
    num_slots: int
    """Number of slots that the cache must have for this pass."""
    num_cached: int
    """Number of positions per slot that the cache must have for this pass."""
    scored: tuple[tuple[Tensor, PromptScorer], ...] = ()
    """Scorers, each with the indices of the F tokens whose logits it reads."""


class Decoder:
    """Weights and KV cache of one model; not thread-safe.

    Args:
        model_dir: a Hugging Face directory with config.json and safetensors weights.
        num_slots: number of sequences that can decode together.
        context_length: limit of the tokens of a prompt with its completion; None for the model's own limit.
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
        self._adapters: dict[str, Tensor] = {}
        """Tensors of the adapters that a trainer published, by name."""
        self._file_dtypes: dict[str, torch.dtype] = {}
        self._segment_ids: dict[str, str] = {}
        """Id of the segment from which each weight was read, by tensor name. Empty if the weights are not from
        segments."""
        self._cos_TD, self._sin_TD = rotary_tables(
            self.architecture, _round_up(self.context_length, LENGTH_STEP), dtype
        )
        self.row_step = find_row_step(self._weights.projections)
        self._exact_length = _find_exact_length(self.architecture, dtype, torch.get_num_threads())
        self._norm_eps = torch.tensor(self.architecture.norm_eps, dtype=dtype)
        self._kv = self._new_cache(self.row_step, LENGTH_STEP)
        self.load_weights(model_dir)

    @torch.inference_mode()
    def load_weights(self, model_dir: Path) -> None:
        """Replace all weights with the weights in `model_dir`. If `CheckpointError` is raised, all old weights stay.

        The KV cache stays unchanged. The caller decides which sequences to compute again.
        """
        with _failures_named(str(model_dir)):
            check_same_computation(model_dir, self.architecture)
            tensors = read_tensors(model_dir)
        self._replace_weights(tensors, source=str(model_dir))
        self._segment_ids = {}

    @torch.inference_mode()
    def load_segments(self, segments: Sequence[SegmentAddress], *, model_dir: Path) -> None:
        """Replace the weights with the tensors in segments. If `CheckpointError` is raised, all old weights stay.

        Tensors that are already loaded from the same segment are not read again, because a segment never changes.

        Args:
            model_dir: directory with the config.json of these weights.
        """
        with _failures_named(str(model_dir)):
            check_same_computation(model_dir, self.architecture)
        segment_ids = {name: segment.id for segment in segments for name in segment.names}
        kept = {name for name, found in segment_ids.items() if self._segment_ids.get(name) == found}
        if HEAD in segment_ids and self.architecture.ties_embeddings:
            kept -= {HEAD, EMBEDDING}  # `_replace_weights` compares the two tensors
        tensors: dict[str, Tensor] = {}
        for segment in segments:
            with _failures_named(segment.path):
                tensors |= read_segment(segment, [name for name in segment.names if name not in kept])
        self._replace_weights(tensors, kept=kept, source="the published segments")
        self._segment_ids = segment_ids

    @torch.inference_mode()
    def load_tensors(self, tensors: Mapping[str, Tensor], *, kept: Collection[str] = ()) -> None:
        """Replace all weights except `kept` with these tensors. If `CheckpointError` is raised, all old weights stay.

        Later digests of the weights are computed in the decoder's dtype, not in the dtype of the sent tensors, as in
        SGLang and vLLM.
        """
        if unknown := sorted(name for name in kept if name not in self._file_dtypes):
            raise CheckpointError(
                f"the sent update keeps {unknown[0]} unchanged, but the loaded model has no such tensor"
            )
        self._replace_weights(tensors, source="the sent weights", kept=kept)
        self._file_dtypes = dict.fromkeys([*kept, *tensors], self.dtype)
        self._segment_ids = {}

    def _replace_weights(self, tensors: Mapping[str, Tensor], *, source: str, kept: Collection[str] = ()) -> None:
        """Check all tensors, then replace all weights and adapters except `kept`."""
        views = self._weights.by_name
        adapters = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
        others = {name: tensor for name, tensor in tensors.items() if name not in adapters}
        shapes = {name: tuple(view.shape) for name, view in views.items() if name not in kept}
        if self.architecture.ties_embeddings and HEAD in tensors:
            if EMBEDDING in tensors and not torch.equal(tensors[HEAD], tensors[EMBEDDING]):
                raise CheckpointError(
                    f"{source}: {HEAD} differs from {EMBEDDING}, but the loaded model ties the two weights"
                )
            shapes[HEAD] = shapes[EMBEDDING]
        kept_adapters = {name: tensor for name, tensor in self._adapters.items() if name in kept}
        all_adapters = kept_adapters | adapters
        check_tensors(others, shapes, source=source)
        check_tensors(all_adapters, adapter_shapes(all_adapters, self._weights.places), source=source)
        for name in views.keys() & others.keys():
            views[name].copy_(others[name])
        if others:
            self._weights_changed()
        if adapters or len(kept_adapters) < len(self._adapters):
            self._adapters = kept_adapters | {name: tensor.clone() for name, tensor in adapters.items()}
            place_adapters(self._adapters, self._weights.places)
            projections = self._weights.projections
            self.row_step = find_row_step([*projections, *adapter_projections(projections)])
        kept_dtypes = {name: dtype for name, dtype in self._file_dtypes.items() if name in kept}
        self._file_dtypes = kept_dtypes | {name: tensor.dtype for name, tensor in tensors.items()}

    @property
    def num_weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._weights.by_name.values())

    @property
    def num_cache_bytes(self) -> int:
        """Memory of the KV cache, bytes. The cache grows with the number and length of sequences."""
        return self._kv.nbytes

    def weight_digests(self, digest: Callable[[Tensor], str] = tensor_digest) -> dict[str, str]:
        """A digest of each tensor of the current weights, by its name in checkpoints and in the dtype of its file."""
        views = {**self._weights.by_name, **self._adapters, HEAD: self._weights.head.weight_NK}
        return digest_tensors({name: views[name].to(dtype) for name, dtype in self._file_dtypes.items()}, digest)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Write the keys and values of `prompts` into the slots from 0 on; returns the next-token logits [P, V]."""
        nothing = torch.empty(0, dtype=torch.int64)
        return self.step(nothing, nothing, prompts)

    @torch.inference_mode()
    def step(
        self,
        token_ids_B: Tensor,
        positions_B: Tensor,
        prompts: Sequence[Sequence[int]] = (),
        *,
        scorers: Sequence[PromptScorer] = (),
    ) -> Tensor:
        """Append one token to each of the slots 0..B-1, and write prompts into the slots from B on.

        Args:
            token_ids_B: the token to append to each slot.
            positions_B: position of this token, which is the number of tokens already in the slot.
            prompts: token ids for the slots from B on. Equal prompts are computed once.
            scorers: objects that read logits of the prompts to compute log-probs.

        Returns:
            Next-token logits [B + P, V] of the slots 0..B-1, then of the prompts.
        """
        assert all(0 < len(prompt) <= self.context_length for prompt in prompts), (
            "a prompt is empty or longer than the context"
        )
        num_decoding, nothing = len(token_ids_B), token_ids_B[:0]
        first, *others = _split_prompts(prompts)
        logits = [self._run(_lay_out(token_ids_B, positions_B, first, first_slot=num_decoding, scorers=scorers))]
        slot = num_decoding + len(first)
        for more in others:
            logits.append(self._run(_lay_out(nothing, nothing, more, first_slot=slot, scorers=scorers)))
            slot += len(more)
        return torch.cat(logits) if others else logits[0]

    @torch.inference_mode()
    def move_slot(self, source: int, target: int, *, length: int) -> None:
        """Copy the keys and values of the first `length` positions of slot `source` to slot `target`."""
        self._kv[:, target, :length] = self._kv[:, source, :length]

    @torch.inference_mode()
    def clear_slot(self, slot: int) -> None:
        """Set the keys and values of a slot to 0. Otherwise a NaN or infinity there would spread to later sequences in
        the slot, even from masked positions."""
        self._kv[:, slot] = 0.0

    def _run(self, work: Pass) -> Tensor:
        """Compute a forward pass; returns the logits [B + P, V]. Scorers read the logits of their own positions."""
        self._reserve(work.num_slots, self._attended_length(work.num_cached))  # attention reads the rounded length
        num_tokens, num_rows = len(work.ids_F), len(work.last_R)
        ids_F, places_F = (_pad(values, self.row_step) for values in (work.ids_F, work.places_F))
        last_R = _pad(work.last_R, self.row_step)
        if work.scored:
            last_R = torch.cat([last_R, *(_pad(rows, self.row_step) for rows, _ in work.scored)])
        cells_N = work.slots_N * self._kv.shape[2] + work.slot_places_N
        hidden = F.embedding(ids_F, self._weights.embedding)
        cos, sin = self._cos_TD[places_F][:, None], self._sin_TD[places_F][:, None]
        bias = self._hide_later(places_F[: work.num_decoding])
        for layer, weights in enumerate(self._weights.layers):
            q_FHD, kv_FKD = self._project(hidden, weights, cos, sin)
            new_NKD = kv_FKD[:num_tokens] if work.sources_N is None else kv_FKD[work.sources_N]
            self._kv[layer].flatten(0, 1).index_copy_(0, cells_N, new_NKD)
            parts = [self._attend_cached(q_FHD[: work.num_decoding], layer, bias)] if work.num_decoding else []
            parts += [_attend_prompt(q_FHD[start:end], kv_FKD[start:end]) for start, end in work.spans]
            if len(hidden) > num_tokens:
                parts.append(hidden.new_zeros(len(hidden) - num_tokens, parts[0].shape[1]))
            attended = torch.cat(parts) if len(parts) > 1 else parts[0]
            if work.spans and weights is self._weights.layers[-1]:  # only these tokens have logits
                hidden, attended = hidden[last_R], attended[last_R]
            hidden = self._finish_block(hidden, attended, weights)
        end = num_rows + -num_rows % self.row_step
        for rows, scorer in work.scored:
            begin, end = end, end + len(rows) + -len(rows) % self.row_step
            self._score(hidden[begin:end], len(rows), scorer)
        return self._logits(hidden[: num_rows + -num_rows % self.row_step])[:num_rows]

    def _score(self, hidden: Tensor, num_rows: int, scorer: PromptScorer) -> None:
        """Compute the logits of the first `num_rows` rows in parts, and pass each part to the scorer."""
        num_bytes = self.architecture.vocab_size * hidden.element_size()
        step = _round_up(max(MAX_LOGITS_BYTES // num_bytes, 1), self.row_step)
        for begin in range(0, num_rows, step):
            scorer.read(self._logits(hidden[begin : begin + step])[: num_rows - begin])

    def _hide_later(self, places_B: Tensor) -> Tensor:
        """The bias of attention scores: minus infinity at positions after each sequence's current position."""
        length = self._attended_length(int(places_B.max()) + 1) if len(places_B) else 0
        return _hide_behind(places_B, length, self.dtype)

    def _attended_length(self, num_cached: int) -> int:
        """Number of positions that attention reads in every slot if the longest sequence has `num_cached` tokens."""
        in_last_block = (num_cached - 1) % ATTENTION_BLOCK + 1
        return _round_up(num_cached, LENGTH_STEP if in_last_block <= self._exact_length else ATTENTION_BLOCK)

    def _attend_cached(self, q_BHD: Tensor, layer: int, bias: Tensor) -> Tensor:
        """Attention of one token per slot over the slot's cached tokens, [B, H * D]."""
        return _attend_rows(q_BHD, self._kv[layer, : len(q_BHD), : bias.shape[-1]], bias)

    def _project(self, hidden: Tensor, weights: LayerWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries [..., H, D], and rotated keys joined with values [..., 2K, D]."""
        a = self.architecture
        num_rotated = a.num_heads + a.num_kv_heads
        normed = self._rms_norm(hidden, weights.attention_norm)
        qkv = weights.qkv(normed).view(*hidden.shape[:-1], -1, a.head_dim)
        qk = qkv[..., :num_rotated, :]
        normed_qk = qk if weights.qk_norm is None else self._rms_norm(qk, weights.qk_norm)
        torch.addcmul(normed_qk * cos, normed_qk.roll(a.head_dim // 2, -1), sin, out=qk)
        return qkv[..., : a.num_heads, :], qkv[..., a.num_heads :, :]

    def _finish_block(self, hidden: Tensor, attended: Tensor, weights: LayerWeights) -> Tensor:
        middle = weights.output(attended).add_(hidden)
        gate, up = weights.gate_up(self._rms_norm(middle, weights.mlp_norm)).chunk(2, -1)
        return weights.down(F.silu(gate).mul_(up)).add_(middle)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._weights.head(self._rms_norm(hidden, self._weights.norm))

    def _rms_norm(self, values: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension. In float32 it needs half of the operations of F.rms_norm."""
        if values.dtype != torch.float32:
            return F.rms_norm(values, values.shape[-1:], None, self.architecture.norm_eps) * weight
        length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self._norm_eps, length, length, value=1 / values.shape[-1])
        return mean_square.rsqrt_().mul(values).mul_(weight)

    def _weights_changed(self) -> None:
        """Recompute the values that are derived from the weights: packed matrices, and repeated rows of norms."""
        for projection in self._weights.projections:
            projection.forget_packed()
        num_heads = self.architecture.num_heads
        for layer in self._weights.layers:
            if layer.qk_norm is not None:
                layer.qk_norm[1:num_heads] = layer.qk_norm[0]
                layer.qk_norm[num_heads + 1 :] = layer.qk_norm[num_heads]

    def _reserve(self, num_slots: int, length: int) -> None:
        """Make the cache at least this large. The cache grows by doubling. On an error the old cache stays.

        Raises:
            NoMemoryError: the memory is too small for the larger cache.
        """
        old_slots, old_length = self._kv.shape[1:3]
        if num_slots <= old_slots and length <= old_length:
            return
        grown_slots = old_slots if num_slots <= old_slots else max(num_slots, 2 * old_slots)
        grown_length = old_length if length <= old_length else max(length, 2 * old_length)
        grown_slots = min(grown_slots, _round_up(self.num_slots, self.row_step))
        grown_length = min(grown_length, self._attended_length(self.context_length))
        try:
            grown = self._new_cache(grown_slots, grown_length)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError if memory is missing
            num_bytes = self._kv.nbytes // (old_slots * old_length) * grown_slots * grown_length
            raise NoMemoryError(
                f"the embedded engine has too little memory for a KV cache of {num_bytes / 2**30:.1f} GiB "
                f"for {grown_slots} completions of up to {grown_length} tokens each: lower "
                "deployment.max_running_requests, rollout.sampling.max_new_tokens or rollout.max_prompt_tokens, or "
                "use a machine with more memory"
            ) from error
        grown[:, :old_slots, :old_length] = self._kv
        self._kv = grown

    def _new_cache(self, num_slots: int, length: int) -> Tensor:
        a = self.architecture
        return torch.zeros(a.num_layers, num_slots, length, 2 * a.num_kv_heads, a.head_dim, dtype=self.dtype)


@contextmanager
def _failures_named(source: str) -> Iterator[None]:
    """Convert any error while reading files to CheckpointError, because a bad file must not stop the engine."""
    try:
        yield
    except RolloutsError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{source} cannot be read as a model ({problem}): publish it again") from error


def _lay_out(
    ids_B: Tensor,
    places_B: Tensor,
    prompts: Sequence[Sequence[int]],
    *,
    first_slot: int,
    scorers: Sequence[PromptScorer],
) -> Pass:
    """Lay out one token per slot 0..B-1, then the prompts without duplicates and without padding."""
    num_decoding = len(ids_B)
    slots_B = torch.arange(num_decoding)
    if not prompts:  # a fast path for most passes, which have no prompts
        return Pass(
            num_decoding=num_decoding,
            spans=[],
            ids_F=ids_B,
            places_F=places_B,
            slots_N=slots_B,
            slot_places_N=places_B,
            sources_N=None,
            last_R=slots_B,
            num_slots=num_decoding,
            num_cached=int(places_B.max()) + 1,
        )
    starts: dict[tuple[int, ...], int] = {}
    end = num_decoding
    for prompt in map(tuple, prompts):
        if prompt not in starts:
            starts[prompt] = end
            end += len(prompt)
    spans = [(start, start + len(prompt)) for prompt, start in starts.items()]
    sizes = [len(prompt) for prompt in prompts]
    sources = [torch.arange(starts[tuple(prompt)], starts[tuple(prompt)] + len(prompt)) for prompt in prompts]
    slots = torch.arange(first_slot, first_slot + len(prompts)).repeat_interleave(
        torch.tensor(sizes, dtype=torch.int64)
    )
    return Pass(
        num_decoding=num_decoding,
        spans=spans,
        ids_F=torch.cat((ids_B, torch.tensor([token for prompt in starts for token in prompt], dtype=torch.int64))),
        places_F=torch.cat((places_B, *(torch.arange(end - start) for start, end in spans))),
        slots_N=torch.cat((slots_B, slots)),
        slot_places_N=torch.cat((places_B, *map(torch.arange, sizes))),
        sources_N=torch.cat((slots_B, *sources)) if len(spans) < len(prompts) else None,
        last_R=torch.tensor([*range(num_decoding), *(starts[tuple(p)] + len(p) - 1 for p in prompts)]),
        num_slots=first_slot + len(prompts),
        num_cached=max(sizes + ([int(places_B.max()) + 1] if num_decoding else [])),
        scored=tuple(
            (torch.arange(starts[each.prompt] + each.start, starts[each.prompt] + len(each.prompt) - 1), each)
            for each in scorers
            if each.prompt in starts and not each.is_done
        ),
    )


def _hide_behind(places_B: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    bias = torch.zeros(len(places_B), 1, 1, length, dtype=dtype)
    return bias.masked_fill_((torch.arange(length) > places_B[:, None])[:, None, None], -math.inf)


def _attend_rows(q_BHD: Tensor, kv_BTKD: Tensor, bias: Tensor) -> Tensor:
    keys, values = kv_BTKD.transpose(1, 2).chunk(2, 1)
    queries = q_BHD.view(len(q_BHD), keys.shape[1], -1, q_BHD.shape[-1])
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias).reshape(len(q_BHD), -1)


@lru_cache
@torch.inference_mode()
def _find_exact_length(architecture: Architecture, dtype: torch.dtype, num_threads: int) -> int:
    """Longest partly filled block of attention whose result equals the result of a full, masked block, found by
    trial."""
    a, generator = architecture, torch.Generator().manual_seed(0)
    q_BHD = torch.randn(TRIAL_ROWS, a.num_heads, a.head_dim, generator=generator).to(dtype)
    shape = (TRIAL_ROWS, 2 * ATTENTION_BLOCK, 2 * a.num_kv_heads, a.head_dim)
    kv_BTKD = torch.randn(shape, generator=generator).to(dtype)

    def attend(num_held: Tensor, length: int) -> Tensor:
        return _attend_rows(q_BHD, kv_BTKD[:, :length], _hide_behind(num_held - 1, length, dtype))

    for length in range(LENGTH_STEP, ATTENTION_BLOCK, LENGTH_STEP):
        held = (torch.arange(TRIAL_ROWS) + 1) * length // TRIAL_ROWS
        for before in (0, ATTENTION_BLOCK):
            if not torch.equal(attend(before + held, before + length), attend(before + held, before + ATTENTION_BLOCK)):
                return length - LENGTH_STEP
    return ATTENTION_BLOCK


def _attend_prompt(q_THD: Tensor, kv_TKD: Tensor) -> Tensor:
    """Causal attention of one prompt, [T, H * D]. A separate call per prompt makes the result independent of other
    prompts."""
    queries, (keys, values) = q_THD.transpose(0, 1)[None], kv_TKD.transpose(0, 1)[None].chunk(2, 1)
    attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1).flatten(1)


def _split_prompts(prompts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Split prompts into lists of at most MAX_PASS_TOKENS tokens, in order. A longer prompt gets a list of its own."""
    parts: list[list[Sequence[int]]] = [[]]
    num_tokens = 0
    for prompt in prompts:
        if parts[-1] and num_tokens + len(prompt) > MAX_PASS_TOKENS:
            parts.append([])
            num_tokens = 0
        parts[-1].append(prompt)
        num_tokens += len(prompt)
    return parts


def _pad(values: Tensor, step: int) -> Tensor:
    missing = -len(values) % step
    return F.pad(values, (0, missing)) if missing else values


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _checked_context_length(architecture: Architecture, wanted: int | None, model_dir: Path) -> int:
    if wanted is None:
        return architecture.max_context_length
    if not 1 <= wanted <= architecture.max_context_length:
        raise UnsupportedModelError(
            f"{model_dir} supports a context length of 1 to {architecture.max_context_length} tokens, found "
            f"{wanted}: choose a length in this range"
        )
    return wanted


def _allocate_weights(architecture: Architecture, dtype: torch.dtype) -> ModelWeights:
    shapes = tensor_shapes(architecture)
    by_name: dict[str, Tensor] = {}
    places: dict[str, Place] = {}

    def allocate(*names: str) -> Tensor:
        """A tensor with the rows of all named tensors; `by_name` gets a view of the rows of each name."""
        sizes = [shapes[name][0] for name in names]
        joined = torch.zeros(sum(sizes), *shapes[names[0]][1:], dtype=dtype)
        by_name.update(zip(names, torch.split(joined, sizes), strict=True))
        return joined

    def allocate_projection(*names: str) -> Projection:
        biases = [f"{name}.bias" for name in names]
        bias = allocate(*biases) if biases[0] in shapes else None
        weight = allocate(*(f"{name}.weight" for name in names))
        projection = Projection(weight, bias, choose_library(weight))
        begin = 0
        for name in names:
            end = begin + len(by_name[f"{name}.weight"])
            places[name] = Place(projection=projection, begin=begin, end=end)
            begin = end
        return projection

    def allocate_qk_norm(prefix: str) -> Tensor | None:
        """A row per head. `by_name` has the first query row and the first key row; the other rows are copies."""
        if not architecture.has_qk_norm:
            return None
        a = architecture
        rows = torch.zeros(a.num_heads + a.num_kv_heads, a.head_dim, dtype=dtype)
        by_name.update({f"{prefix}q_norm.weight": rows[0], f"{prefix}k_norm.weight": rows[a.num_heads]})
        return rows

    def allocate_layer(prefix: str) -> LayerWeights:
        return LayerWeights(
            attention_norm=allocate(prefix + "input_layernorm.weight"),
            qkv=allocate_projection(*(f"{prefix}self_attn.{part}_proj" for part in "qkv")),
            qk_norm=allocate_qk_norm(prefix + "self_attn."),
            output=allocate_projection(prefix + "self_attn.o_proj"),
            mlp_norm=allocate(prefix + "post_attention_layernorm.weight"),
            gate_up=allocate_projection(*(f"{prefix}mlp.{part}_proj" for part in ("gate", "up"))),
            down=allocate_projection(prefix + "mlp.down_proj"),
        )

    embedding = allocate(EMBEDDING)
    layers = tuple(allocate_layer(f"model.layers.{layer}.") for layer in range(architecture.num_layers))
    norm = allocate("model.norm.weight")
    head_weight = embedding if architecture.ties_embeddings else allocate(HEAD)
    head = Projection(head_weight, None, choose_library(head_weight))
    return ModelWeights(embedding=embedding, layers=layers, norm=norm, head=head, by_name=by_name, places=places)
