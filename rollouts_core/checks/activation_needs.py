"""Estimate the GPU memory of a forward and backward pass besides weights, gradients and the optimizer.

Weights and optimizer are estimated in resource_needs.py. torch is not imported.

The table has the elements per token that autograd keeps for a layer of the Llama family, by saved tensor. The method is
that of arXiv:2205.05198 sec. 4, which has numbers for GELU, dropout and attention without a kernel. The sums are
compared with torch's allocations (tests/rollouts_core/checks/test_activation_needs.py).

    two norms         x, normalised x, and the result, which linear layers save     6 H
    attention         q before its norm, after it, and rotated; the output          4 Q
                      k likewise; v                                                 4 K
    feed-forward      gate, silu(gate), up, their product                           4 I

In float32 each takes 4 bytes. With bfloat16, x and normalised x stay float32, and each linear layer saves a copy of its
input: 26 H bytes, 4 x 4 and 5 x 2. The rest is bfloat16, but for the first of q and k: 10 Q + 10 K + 8 I.

Adapters lie beside frozen weights, which need no normalised x, q or k for their own gradients: 4 H + 3 Q + 3 K + 4 I
elements in float32. In bfloat16 x is copied to float32 in each norm and back before each adapter: 18 H bytes, 2 x 4 and
5 x 2, and 10 Q + 8 K + 8 I. Each adapter keeps its inner product, too.

If rows are packed, the kernel takes a mask of T x T. Keys and values are then repeated for the query heads that share
them, and autograd keeps the repeated tensors instead. `eager` keeps the T x T weights of each head.

With activation checkpointing, autograd keeps only the input of each layer. During the backward pass, the activations of
one layer at a time are computed again, and exist together with the gradients of gate and up. The memory of the head is
free by then. Copies of the layers' matrices in bfloat16 last until the end of the forward pass, before the gradient of
the head is made.

Logits are computed in pieces (model/logprobs.py): the vocabulary costs three pieces, and the gradient of the head, once
in float32 and once in the number format of the products. Under autocast that format costs a copy of trained matrices.
Between several processes, the embedding and the head are gathered with their gradients, and two layers.

T tokens of a row, H hidden size, Q and K width of all query and key heads, I feed-forward width, V vocabulary.
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
"""Float32 logits that are held at a time (model/logprobs.py)."""
NUM_PIECES = 3
"""Logits, their log-probs or gradient, and the gradient in the number format of the products."""
FORWARD_PIECES = 2
"""Logits, and the tensors from which their norm is computed."""
ADAPTERS_OF_LAYER = 7
"""Linear layers in a layer: of q, k, v, the attention's output, gate, up and down."""


class Rows(NamedTuple):
    """A micro-batch as large as the settings let it become."""

    num_tokens: int
    """Padded ones."""
    row_length: int
    """Tokens of its longest row."""
    has_mask: bool
    """True if samples share rows, so that the attention kernel needs a mask."""
    what: str
    """Description for messages."""


def sft_rows(sft: SFTTrainingConfig) -> Rows:
    """The micro-batch of SFT."""
    num_rows = min(sft.micro_batch_size, sft.batch_size)
    has_mask = sft.packing and sft.policy.takes_dense_masks
    return Rows(num_rows * sft.max_length, sft.max_length, has_mask, f"{num_rows} rows of {sft.max_length} tokens")


def rl_rows(rl: RLTrainingConfig, rollout: RolloutConfig) -> Rows:
    """The micro-batch of RL: the maximum number of tokens, or one row if a row is longer."""
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
    """Memory of a pass over a micro-batch on each device; empty if config.json does not give the model's shape."""
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
    """Memory of the tensors that autograd keeps: of layers, embedding, last norm and scored positions."""
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
    """Memory of one layer while its activations are computed again, with the gradients of gate and up."""
    gradients = 2 * (2 if policy.precision == "bfloat16" else 4) * shape.intermediate_size
    return rows.num_tokens * (layer_bytes_per_token(shape, policy, rows) + gradients)


def layer_bytes_per_token(shape: ModelShape, policy: PolicyConfig, rows: Rows) -> int:
    """Tensors that autograd keeps of one layer, per token of the micro-batch."""
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
    """Peak memory of log-probs and the gradient of the head."""
    pieces = NUM_PIECES * _piece_bytes(shape, num_tokens)
    if policy.lora.rank:
        return pieces
    width = 2 if policy.precision == "bfloat16" else 4
    return pieces + (4 + width) * shape.vocab_size * shape.hidden_size


def _piece_bytes(shape: ModelShape, num_tokens: int) -> int:
    return min(LOGITS_PIECE_BYTES, 4 * num_tokens * shape.vocab_size)


def copied_weight_bytes(size: ModelSize, shape: ModelShape, policy: PolicyConfig, rows: Rows) -> int:
    """Copies of the matrices in bfloat16 at the peak."""
    copies = 2 * _num_multiplied_weights(size, shape)
    if not policy.activation_checkpointing:
        return copies
    head = 2 * shape.vocab_size * shape.hidden_size
    forward = copies + FORWARD_PIECES * _piece_bytes(shape, rows.num_tokens)
    backward = max(head_bytes(shape, policy, rows.num_tokens), recomputed_bytes(shape, policy, rows))
    return max(head, forward - backward)


def adapter_bytes(size: ModelSize, policy: PolicyConfig) -> int:
    """Adapters with gradients and AdamW's moments, in float32: rank x (inputs + outputs) weights each."""
    named = policy.lora.target_modules
    layers = [
        shape
        for layer, shape in linear_layers(size.tensors).items()
        if not named or any(is_target_in_files(layer, name) for name in named)
    ]
    return 4 * 4 * policy.lora.rank * sum(map(sum, layers))


def gathered_bytes(size: ModelSize, shape: ModelShape, policy: PolicyConfig) -> int:
    """Memory of tensors gathered from other processes: embedding, head and two layers."""
    vocabulary = _num_vocabulary_weights(size, shape)
    layer = (size.num_parameters - vocabulary) // shape.num_layers
    width = 2 if policy.precision == "bfloat16" else 4
    gradients = 0 if policy.lora.rank else 4 * (vocabulary + layer)
    outside = 2 if policy.precision == "bfloat16" and policy.lora.rank else 4
    return outside * vocabulary + 2 * width * layer + gradients


def _num_multiplied_weights(size: ModelSize, shape: ModelShape) -> int:
    """Number of weights in matrices that multiply hidden states: all but the embedding, unless it is also the head."""
    matrices = sum(math.prod(each) for each in size.tensors.values() if len(each) >= 2)
    embeddings = sum(math.prod(each) for each in size.tensors.values() if each and each[0] == shape.vocab_size)
    return matrices - embeddings + shape.vocab_size * shape.hidden_size


def _num_vocabulary_weights(size: ModelSize, shape: ModelShape) -> int:
    is_tied = size.settings.get("tie_word_embeddings") is True
    tables = [math.prod(each) for each in size.tensors.values() if each and each[0] == shape.vocab_size]
    return max(tables, default=0) if is_tied else sum(tables)
