"""Attention kernel with a block mask: torch's FlexAttention, registered in transformers.

    segments, prompts and positions -> block mask: for blocks of 128 x 128 positions, which of them are computed
    q, k, v and the block mask      -> flex_attention

Like a mask of T x T numbers, a block mask separates the samples of a row and lets them share a prompt. With a block
mask, the kernel does not compute masked blocks. On a CPU, torch has no gradients of FlexAttention.

B rows, T positions of a row, H query heads, K key-value heads, D head width.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.utils import is_torch_flex_attn_available

from rollouts_core.batch import TrainBatch
from rollouts_core.config import ModelConfig
from rollouts_core.errors import ConfigError
from rollouts_core.model.loading import find_unmasked_layers, load_hf_model
from rollouts_core.model.varlen import half_precision

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedModel

FLEX = "flex"
"""Name of the FlexAttention kernel in transformers and in `policy.attention`."""


def attend_flex(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: BlockMask,
    **others: Any,  # Any: arguments for other kernels
) -> tuple[Tensor, Tensor | None]:
    """Compute attention, and return (B, T, H, D). transformers' FlexAttention kernel applies the model's score caps and
    attention sinks."""
    dtype = half_precision(value_BKTD)
    heads = (each.to(dtype) for each in (query_BHTD, key_BKTD, value_BKTD))
    return flex_attention_forward(module, *heads, attention_mask, **others)  # type: ignore[no-any-return]


def use_flex_attention(hf_model: PreTrainedModel) -> None:
    """Switch a model to FlexAttention. First check with `why_not_flex` that the model and machine support it."""
    # No mask function is registered, because transformers would then test for packed rows and wait for the GPU.
    AttentionInterface.register(FLEX, attend_flex)
    hf_model.set_attn_implementation(FLEX)


def block_mask(batch: TrainBatch, *, window: int | None = None) -> BlockMask:
    """The block mask of a batch, with the same rule as `batch.block_causal_mask`, for one kind of layer.

    Args:
        window: number of positions in the layers' sliding window, or None for full attention.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    num_rows, length = batch.segment_ids_BT.shape
    reach = length if window is None else window
    segments_BT, prompts_BT, positions_BT = batch.segment_ids_BT, batch.prompt_ids_BT, batch.position_ids_BT

    def may_read(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = segments_BT[row, key]
        is_own = (found == segments_BT[row, query]) | (found == prompts_BT[row, query])
        is_near = positions_BT[row, query] - positions_BT[row, key] < reach
        return (key <= query) & is_own & is_near

    device = segments_BT.device
    # compiled code does not store the T x T mask
    return create_block_mask(
        may_read, num_rows, None, length, length, device=str(device), _compile=device.type == "cuda"
    )


def why_not_flex(model: ModelConfig, *, device_type: str) -> str:
    """Reason why FlexAttention cannot train the model on this machine, as a clause, or "" if it can."""
    if not is_torch_flex_attn_available():
        return f"torch {torch.__version__} has no FlexAttention"
    if device_type != "cuda":
        return "it needs a GPU: torch has no gradients of FlexAttention on a CPU"
    if find_spec("triton") is None:
        return "it needs the package triton"
    try:
        return why_unfit(load_hf_model(model, device="meta", dtype=torch.bfloat16))
    except ConfigError as error:
        return str(error)


def why_unfit(hf_model: PreTrainedModel) -> str:
    """Reason why FlexAttention cannot compute the model's attention, as a clause, or "" if it can."""
    settings, name = hf_model.config.get_text_config(), hf_model.config.model_type
    if not type(hf_model).__module__.startswith("transformers.") or not hf_model._supports_flex_attn:
        return f"{name} models are not known to work with FlexAttention"
    if kind := find_unmasked_layers(hf_model.config):
        return f"{name} has {kind} layers"
    if getattr(settings, "attention_dropout", 0.0) or getattr(settings, "attn_pdrop", 0.0):
        return "the model has attention dropout, which FlexAttention lacks"
    return ""
