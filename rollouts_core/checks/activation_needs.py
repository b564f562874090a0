"""Estimate the GPU memory of a forward and backward pass, besides weights, gradients and optimizer state.

resource_needs.py estimates weights, gradients and optimizer state. This module does not import torch.

The table lists the tensors that autograd keeps of one layer (Llama family) until the backward pass, in elements per
token. H: hidden size. Q, K: width of all query and all key heads. I: feed-forward width. The method is that of
arXiv:2205.05198 sec. 4. tests/rollouts_core/checks/test_activation_needs.py compares the sums with torch's allocations.

    two norms         x, normalised x, and the result, which linear layers save     6 H
    attention         q before its norm, after it, and rotated; the output          4 Q
                      k before its norm, after it, and rotated; v                   4 K
    feed-forward      gate, silu(gate), up, their product                           4 I

float32: 4 bytes per element.
bfloat16: x and normalised x stay float32, and linear layers save bfloat16 copies of their inputs: 26 H bytes (4 x 4 +
5 x 2). q and k before their norms are float32, the other tensors bfloat16: 10 Q + 10 K + 8 I bytes.

Adapters (LoRA): the weights of the layer are frozen, so autograd does not keep normalised x, q and k for the gradients
of the norms. float32: 4 H + 3 Q + 3 K + 4 I elements. bfloat16: each norm copies x to float32, and each adapter copies
it back: 18 H bytes (2 x 4 + 5 x 2), and 10 Q + 8 K + 8 I bytes. Each adapter also keeps its inner product.

Packed rows: kernels without variable lengths get a mask of T x T (T: tokens of a row). Keys and values are then
repeated for the query heads that share them, and autograd keeps the repeated tensors. `eager` keeps T x T weights per
head.

Activation checkpointing: autograd keeps only the input of each layer. The backward pass computes the activations of one
layer at a time again, and holds them together with the gradients of gate and up. The memory of the head is free by
then. bfloat16 copies of the layers' matrices exist until the forward pass ends, before the head's gradient exists.

Head: logits are computed in pieces (model/logprobs.py). Three pieces exist at a time, and the head's gradient exists in
float32 and in the number format of the matrix products. Under autocast, trained matrices also have a copy in this
format. With several processes, the embedding, the head and two layers are gathered, with their gradients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rollouts_core.checks.needed_part import Part
from rollouts_core.config import PolicyConfig, RLTrainingConfig, RolloutConfig, SFTTrainingConfig
from rollouts_core.model.adapter_targets import is_target_in_files, linear_layers
from rollouts_core.model.attention_choice import MAX_SHARERS
from rollouts_core.model.model_shape import ModelShape, read_shape
from rollouts_core.model.model_size import ModelSize

LOGITS_PIECE_BYTES = 256 << 20
"""Bytes of one piece of float32 logits (model/logprobs.py)."""
NUM_PIECES = 3
"""Pieces that exist at a time: logits, their log-probs or gradient, the gradient in the format of the products."""
FORWARD_PIECES = 2
"""Pieces that exist during the forward pass: logits, and the tensors for their norm."""
ADAPTERS_OF_LAYER = 7
"""Linear layers in a transformer layer: q, k, v, the attention's output, gate, up, down. Each linear layer can have an
adapter."""


class Rows(NamedTuple):
    """The size of the largest micro-batch that the settings permit."""

    num_tokens: int
    """Tokens of the micro-batch, including padding."""
    row_length: int
    """Tokens of the longest row."""
    has_mask: bool
    """True if samples share rows, so that the attention kernel needs a mask."""
    what: str
    """Description for messages, for example "8 rows of 2048 tokens"."""


def sft_rows(sft: SFTTrainingConfig) -> Rows:
    num_rows = min(sft.micro_batch_size, sft.batch_size)
    has_mask = sft.packing and sft.policy.takes_dense_masks
    return Rows(num_rows * sft.max_length, sft.max_length, has_mask, f"{num_rows} rows of {sft.max_length} tokens")


def rl_rows(rl: RLTrainingConfig, rollout: RolloutConfig) -> Rows:
    """The largest micro-batch of RL: `max_micro_batch_tokens`, or one row if a single row is longer."""
    longest = rollout.max_prompt_tokens + rollout.sampling.max_new_tokens
    if rl.shares_prompts:
        num_sharers = min(MAX_SHARERS, rollout.n_samples_per_prompt)
        shared = rollout.max_prompt_tokens + num_sharers * rollout.sampling.max_new_tokens
        row_length = max(longest, min(shared, rl.max_micro_batch_tokens))
    else:
        row_length = longest
    num_tokens = max(rl.max_micro_batch_tokens, row_length)
    has_mask = rl.packing and rl.policy.takes_dense_masks
    return Rows(num_tokens, row_length, has_mask, f"{num_tokens} tokens in rows of up to {row_length}")


def activation_parts(size: ModelSize, policy: PolicyConfig, rows: Rows, *, num_processes: int) -> list[Part]:
    """Memory of a forward and backward pass over a micro-batch, on each device.

    Returns an empty list if config.json does not give the shape of the model.
    """
    shape = read_shape(size.settings)
    if shape is None:
        return []
    has_mixed_formats = policy.precision == "bfloat16" and not policy.lora.rank
    parts = {
        f"activations of {rows.what}": activation_bytes(shape, policy, rows),
        "logits and the gradient of the head": head_bytes(shape, policy, rows.num_tokens),
    }
    if policy.lora.rank:
        parts["adapters"] = adapter_bytes(size, policy)
    if num_processes > 1:
        parts["gathered layers"] = gathered_bytes(size, shape, policy)
    elif has_mixed_formats:
        parts["weights as bfloat16"] = copied_weight_bytes(size, shape, policy, rows)
    return [Part(name, num_bytes, is_certain=False) for name, num_bytes in parts.items()]


def activation_bytes(shape: ModelShape, policy: PolicyConfig, rows: Rows) -> int:
    """Bytes of the tensors that autograd keeps until the backward pass, including embedding and last norm."""
    has_bfloat16_residual = policy.precision == "bfloat16" and policy.lora.rank > 0
    residual = (2 if has_bfloat16_residual else 4) * shape.hidden_size
    is_again = policy.activation_checkpointing
    layers = shape.num_layers * (residual if is_again else layer_bytes_per_token(shape, policy, rows))
    # The head's memory is freed before a layer is computed again.
    again = recomputed_bytes(shape, policy, rows) if is_again else 0
    beside_head = max(0, again - head_bytes(shape, policy, rows.num_tokens))
    around = 5 * 4 * shape.hidden_size + (4 * rows.row_length if rows.has_mask else 0)
    return rows.num_tokens * (layers + around) + beside_head


def recomputed_bytes(shape: ModelShape, policy: PolicyConfig, rows: Rows) -> int:
    """Bytes of one layer's activations, computed again in the backward pass, with the gradients of gate and up."""
    gradients = 2 * (2 if policy.precision == "bfloat16" else 4) * shape.intermediate_size
    return rows.num_tokens * (layer_bytes_per_token(shape, policy, rows) + gradients)


def layer_bytes_per_token(shape: ModelShape, policy: PolicyConfig, rows: Rows) -> int:
    """Bytes of the tensors that autograd keeps of one layer, per token of the micro-batch."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.query_size, shape.kv_size
    is_bfloat16 = policy.precision == "bfloat16"
    is_eager = policy.attention == "eager"
    width = 2 if is_bfloat16 else 4
    if policy.lora.rank:
        kept = (
            18 * hidden + 10 * queries + 8 * keys + 8 * inner
            if is_bfloat16
            else 4 * (4 * hidden + 3 * (queries + keys) + 4 * inner)
        )
        kept += ADAPTERS_OF_LAYER * width * policy.lora.rank
    elif is_bfloat16:
        kept = 26 * hidden + 10 * (queries + keys) + 8 * inner
    else:
        kept = 4 * (6 * hidden + 4 * (queries + keys + inner))
    if (rows.has_mask or is_eager) and keys < queries:
        kept += 2 * width * (queries - keys)
    if is_eager:
        kept += shape.num_heads * rows.row_length * (6 if is_bfloat16 else 4)
    return kept


def head_bytes(shape: ModelShape, policy: PolicyConfig, num_tokens: int) -> int:
    """Peak bytes of the logits' pieces and of the head's gradient."""
    pieces = NUM_PIECES * _piece_bytes(shape, num_tokens)
    if policy.lora.rank:
        return pieces
    width = 2 if policy.precision == "bfloat16" else 4
    return pieces + (4 + width) * shape.vocab_size * shape.hidden_size


def _piece_bytes(shape: ModelShape, num_tokens: int) -> int:
    return min(LOGITS_PIECE_BYTES, 4 * num_tokens * shape.vocab_size)


def copied_weight_bytes(size: ModelSize, shape: ModelShape, policy: PolicyConfig, rows: Rows) -> int:
    """Bytes that bfloat16 copies of the weight matrices add to the peak of memory."""
    copies = 2 * _num_multiplied_weights(size, shape)
    if not policy.activation_checkpointing:
        return copies
    head = 2 * shape.vocab_size * shape.hidden_size
    forward = copies + FORWARD_PIECES * _piece_bytes(shape, rows.num_tokens)
    backward = max(head_bytes(shape, policy, rows.num_tokens), recomputed_bytes(shape, policy, rows))
    return max(head, forward - backward)


def adapter_bytes(size: ModelSize, policy: PolicyConfig) -> int:
    """Bytes of LoRA adapters with their gradients and AdamW's moments, in float32.

    An adapter has rank x (inputs + outputs) weights.
    """
    named = policy.lora.target_modules
    layers = [
        shape
        for layer, shape in linear_layers(size.tensors).items()
        if not named or any(is_target_in_files(layer, name) for name in named)
    ]
    return 4 * 4 * policy.lora.rank * sum(map(sum, layers))


def gathered_bytes(size: ModelSize, shape: ModelShape, policy: PolicyConfig) -> int:
    """Bytes of weights gathered from other processes: embedding, head and two layers, with their gradients."""
    vocabulary = _num_vocabulary_weights(size, shape)
    layer = (size.num_parameters - vocabulary) // shape.num_layers
    width = 2 if policy.precision == "bfloat16" else 4
    gradients = 0 if policy.lora.rank else 4 * (vocabulary + layer)
    outside = 2 if policy.precision == "bfloat16" and policy.lora.rank else 4
    return outside * vocabulary + 2 * width * layer + gradients


def _num_multiplied_weights(size: ModelSize, shape: ModelShape) -> int:
    """Number of weights in matrices that multiply hidden states: all matrices and the head, but not the embedding."""
    matrices = sum(math.prod(each) for each in size.tensors.values() if len(each) >= 2)
    embeddings = sum(math.prod(each) for each in size.tensors.values() if each and each[0] == shape.vocab_size)
    return matrices - embeddings + shape.vocab_size * shape.hidden_size


def _num_vocabulary_weights(size: ModelSize, shape: ModelShape) -> int:
    is_tied = size.settings.get("tie_word_embeddings") is True
    tables = [math.prod(each) for each in size.tensors.values() if each and each[0] == shape.vocab_size]
    return max(tables, default=0) if is_tied else sum(tables)
