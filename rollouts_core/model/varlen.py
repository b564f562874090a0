"""Attention kernel for packed samples without a mask: torch's `varlen_attn`, registered in transformers.

    rows without a shared prompt   q, k, v of all samples end to end, and their bounds -> varlen_attn
    rows with a shared prompt      q, k, v of the rows, and a mask of T x T            -> sdpa

A kernel with a mask of T x T numbers also computes the masked scores. A kernel with the bounds of the samples computes
only scores inside samples.

B rows, M tokens of all samples, T positions of a row, H query heads, K key-value heads, D head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollouts_core.config import ModelConfig
from rollouts_core.errors import ConfigError
from rollouts_core.model.loading import find_unmasked_layers, load_hf_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VARLEN = "varlen"
"""Name of the `varlen_attn` kernel in transformers and in `policy.attention`."""
SDPA_BY_ROWS = "sdpa_by_rows"
"""Name in transformers of an sdpa kernel that uses only the masks of the caller.

transformers' own sdpa kernel creates a mask if it gets none. To do so, it tests for packed rows, which waits for the
GPU."""
MIN_CAPABILITY = (8, 0)
MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8
"""Largest head width that `varlen_attn` supports, and the multiple that widths must have. Heads whose width is not a
multiple are padded with zeros."""
UNKNOWN_TERMS = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments by which models change attention scores in ways that `varlen_attn` does not support."""


def find_varlen_attn() -> Callable[..., Tensor] | None:
    """torch's `varlen_attn`, or None if this version of torch lacks it or its support for sliding windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found: Callable[..., Any] = varlen_attn  # returns one tensor unless more results are requested
    return found if {"window_size", "scale"} <= _parameters(found) else None


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Parameter names of a function. Cached, because every layer needs them in every pass."""
    return frozenset(inspect.signature(function).parameters)


def attend_varlen(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,  # Any: arguments for other kernels
) -> tuple[Tensor, None]:
    """Causal attention, as (B, T, H, D). Uses the bounds of the samples if given, otherwise sdpa with the caller's
    mask.

    Args:
        cu_seq_lens_q: start of each sample in the row, and the end of the last sample.
        max_length_q: tokens of the longest sample.

    Raises:
        ConfigError: the model changes attention scores in a way that the kernel does not support.
    """
    if cu_seq_lens_q is None:
        attended, _ = sdpa_attention_forward(
            module, query_BHTD, key_BKTD, value_BKTD, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return attended, None
    _refuse_unknown_terms(dropout, others)
    assert query_BHTD.shape[0] == 1, "samples with bounds lie in one row"
    assert max_length_q is not None, "bounds come with the length of the longest sample"
    width, value_width = query_BHTD.shape[-1], value_BKTD.shape[-1]
    filled_width = -(-max(width, value_width) // HEAD_DIM_STEP) * HEAD_DIM_STEP
    dtype = half_precision(value_BKTD)
    query_MHD, key_MKD, value_MKD = (
        _fill_up(tensor[0].transpose(0, 1).to(dtype), filled_width) for tensor in (query_BHTD, key_BKTD, value_BKTD)
    )
    attend = find_varlen_attn()
    assert attend is not None, "use_varlen_attention requires it"
    num_sharers = query_MHD.shape[1] // key_MKD.shape[1]
    options: dict[str, Any] = {}  # Any: torch's keywords
    if num_sharers > 1 and "enable_gqa" in _parameters(attend):
        options["enable_gqa"] = True
    elif num_sharers > 1:
        key_MKD, value_MKD = (each.repeat_interleave(num_sharers, dim=1) for each in (key_MKD, value_MKD))
    attended_MHD = attend(
        query_MHD,
        key_MKD,
        value_MKD,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=width**-0.5 if scaling is None else scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **options,
    )
    return attended_MHD[None, ..., :value_width], None


def _refuse_unknown_terms(dropout: float, others: Mapping[str, Any]) -> None:
    if dropout or any(others.get(term) is not None for term in UNKNOWN_TERMS) or others.get("is_causal") is False:
        raise ConfigError(
            'policy.attention "varlen" does not support how this model changes attention scores: set "auto"'
        )


def half_precision(value: Tensor) -> torch.dtype:
    """Dtype for the attention products. Inputs may be float32, because norms and rotations can produce float32."""
    device_type = value.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else value.dtype


def _fill_up(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[-1]
    return nn.functional.pad(tensor, (0, missing)) if missing else tensor


def use_varlen_attention(hf_model: PreTrainedModel) -> None:
    """Switch a model to `varlen_attn`. First check with `why_not_varlen` that the model and machine support it."""
    # No mask function is registered, because transformers would then test for packed rows and wait for the GPU.
    AttentionInterface.register(VARLEN, attend_varlen)
    hf_model.set_attn_implementation(VARLEN)


def use_sdpa_by_rows(hf_model: PreTrainedModel) -> None:
    """Make a model with sdpa use only the caller's masks, if its attention allows this."""
    if hf_model.config._attn_implementation == "sdpa" and not _why_no_bounds(hf_model):
        AttentionInterface.register(SDPA_BY_ROWS, attend_varlen)
        hf_model.set_attn_implementation(SDPA_BY_ROWS)


def why_not_varlen(model: ModelConfig, *, device_type: str) -> str:
    """Reason why `varlen_attn` cannot train the model on this machine, as a clause, or "" if it can."""
    if find_varlen_attn() is None:
        return f"torch {torch.__version__} has no varlen_attn that supports sliding windows"
    if device_type != "cuda":
        return "it needs an NVIDIA GPU"
    if torch.version.hip or torch.cuda.get_device_capability() < MIN_CAPABILITY:
        return "it needs an NVIDIA GPU of compute capability 8.0 or higher"
    return why_unfit(model)


def why_unfit(model: ModelConfig) -> str:
    """Reason why `varlen_attn` cannot compute the model's attention, as a clause, or "" if it can.

    The model's settings do not show every kind of attention. Therefore `why_unfit` also runs the model once without
    values, on torch's meta device.
    """
    try:
        hf_model = load_hf_model(model, device="meta", dtype=torch.bfloat16)
    except ConfigError as error:
        return str(error)
    settings, name = hf_model.config.get_text_config(), hf_model.config.model_type
    if reason := _why_no_bounds(hf_model):
        return reason
    if getattr(settings, "attn_logit_softcapping", None):
        return f"{name} models cap attention scores"
    if getattr(settings, "attention_dropout", 0.0) or getattr(settings, "attn_pdrop", 0.0):
        return f"the model has attention dropout, which {VARLEN} lacks"
    use_varlen_attention(hf_model)
    return _why_trial_fails(hf_model)


def takes_flash_attention(model: ModelConfig) -> bool:
    """True if flash-attn's kernels, which support score caps, can compute the model's attention."""
    try:
        return not _why_no_bounds(load_hf_model(model, device="meta", dtype=torch.bfloat16))
    except ConfigError:
        return False


def _why_no_bounds(hf_model: PreTrainedModel) -> str:
    """Reason why a kernel that gets only the bounds of the samples cannot compute the model's attention, as a clause,
    or "" if a kernel with bounds can.
    """
    name = hf_model.config.model_type
    if not type(hf_model).__module__.startswith("transformers.") or not hf_model._supports_flash_attn:
        return f"{name} models are not known to have standard attention"
    if kind := find_unmasked_layers(hf_model.config):
        return f"{name} has {kind} layers"
    has_sinks = any(parameter.endswith("sinks") for parameter, _ in hf_model.named_parameters())
    return f"{name} models have attention sinks" if has_sinks else ""


@torch.no_grad()
def _why_trial_fails(hf_model: PreTrainedModel) -> str:
    widths: list[int] = []

    def note(
        module: nn.Module,
        query_BHTD: Tensor,
        key_BKTD: Tensor,
        value_BKTD: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[Tensor, None]:
        _refuse_unknown_terms(dropout, others)
        widths.append(max(query_BHTD.shape[-1], value_BKTD.shape[-1]))
        num_rows, num_heads, num_positions, _ = query_BHTD.shape
        return value_BKTD.new_empty(num_rows, num_positions, num_heads, value_BKTD.shape[-1]), None

    AttentionInterface.register(VARLEN, note)
    bounds = torch.zeros(3, dtype=torch.int32, device="meta")
    places = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    try:
        hf_model.base_model(
            input_ids=places,
            position_ids=places,
            use_cache=False,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=2,
            max_length_k=2,
        )
    except Exception:  # noqa: BLE001 - models raise any error on the meta device; sdpa may still train them
        return f"{hf_model.config.model_type} models change attention scores in a way that varlen does not support"
    finally:
        AttentionInterface.register(VARLEN, attend_varlen)
    if not widths:
        return f"{hf_model.config.model_type} models do not let transformers choose their attention kernel"
    return f"its heads have width {max(widths)}, the limit is {MAX_HEAD_DIM}" if max(widths) > MAX_HEAD_DIM else ""
