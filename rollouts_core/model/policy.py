"""The policy in training: a causal language model that computes the log-probs of a batch's targets.

    batch -> decoder -> hidden states of the scored positions -> head, a piece at a time -> TokenScores

B rows of a micro-batch, T token positions, N scored tokens, H hidden size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rollouts_core.algorithms.loss import TokenScores
from rollouts_core.batch import TrainBatch, block_causal_mask, build_batch, place_samples
from rollouts_core.config import ModelConfig, PolicyConfig
from rollouts_core.errors import ConfigError, DataError
from rollouts_core.model.attention import use_written_out_attention
from rollouts_core.model.attention_choice import choose_kernel
from rollouts_core.model.flex import FLEX, block_mask, use_flex_attention, why_not_flex
from rollouts_core.model.loading import (
    KERNELS_OF_FLOAT32,
    MODELS_OF_ROW_DISTANCES,
    check_attention,
    check_not_quantized,
    check_packable,
    find_logit_transform,
    find_unmasked_layers,
    load_hf_model,
)
from rollouts_core.model.logprobs import linear_logprobs
from rollouts_core.model.lora import add_adapters, base_weights
from rollouts_core.model.rms_norm import use_fast_rms_norms
from rollouts_core.model.varlen import (
    SDPA_BY_ROWS,
    VARLEN,
    use_sdpa_by_rows,
    use_varlen_attention,
    why_not_varlen,
)
from rollouts_core.model.weight_sample import sample_weights
from rollouts_core.types import Sample

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedConfig, PreTrainedModel

    Mask = Tensor | BlockMask
    """An attention mask: for each position, the positions that it may read."""

KERNELS_WITHOUT_MASK = {VARLEN, "flash_attention_2", "flash_attention_3"}
"""Attention kernels that get the bounds (start and end) of each sample in a row instead of a mask."""
MIXED_SHARE, ROUNDED_MIXED_SHARE = 0.01, 0.2
"""Relative change of hidden states above which samples in a row are considered to affect each other.

`MIXED_SHARE` is for float32. `ROUNDED_MIXED_SHARE` is for bfloat16, whose coarser rounding can also make a router
select other experts."""


class Policy(nn.Module):
    """A Hugging Face causal language model with additions for training.

    Args:
        temperature: divisor of the logits before the softmax: in RL the sampling temperature of the rollouts, in SFT 1.
        with_entropies: also compute the entropy at every scored position.
        with_values: add a value head that predicts returns from hidden states. The head's weights start at 0.
        autocast_dtype: dtype of matrix products, or None to use the dtype of the weights.
        mixes_samples: True if samples in a row affect each other. The policy then refuses packed rows.
        num_tokens: the softmax covers only token ids below this number, or all ids of the model if None.
        start_sample: result of `sample_weights` for the start weights, without adapters, or None if not needed.
    """

    def __init__(
        self,
        hf_model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        with_entropies: bool = False,
        with_values: bool = False,
        autocast_dtype: torch.dtype | None = None,
        mixes_samples: bool = False,
        num_tokens: int | None = None,
        start_sample: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.hf_model = hf_model
        self.temperature = temperature
        self.with_entropies = with_entropies
        self.value_head = _create_value_head(hf_model) if with_values else None
        self.autocast_dtype = autocast_dtype
        self.mixes_samples = mixes_samples
        self.num_tokens = num_tokens
        self.start_sample: Mapping[str, Tensor] = start_sample or {}

    def forward(self, batch: TrainBatch) -> TokenScores:
        """Score the batch's targets.

        Raises:
            ConfigError: the batch has packed rows, but in this model samples in a row affect each other.
        """
        if batch.is_packed and self.mixes_samples:
            raise ConfigError(
                "samples in packed rows would affect each other: a test run of the model's own code showed this. "
                "Set packing = false"
            )
        device_type = batch.inputs_BT.device.type
        with torch.autocast(device_type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            return score_targets(
                self.hf_model,
                batch,
                temperature=self.temperature,
                with_entropies=self.with_entropies,
                value_head=self.value_head,
                num_tokens=self.num_tokens,
            )


def create_policy(
    model: ModelConfig,
    config: PolicyConfig,
    *,
    device: str = "cpu",
    temperature: float = 1.0,
    with_entropies: bool = False,
    with_values: bool = False,
    num_tokens: int | None = None,
    with_start_sample: bool = False,
) -> Policy:
    """Load a model from disk as a policy with the settings of `config`.

    Args:
        num_tokens: the softmax covers only token ids below this number.
        with_start_sample: fill `Policy.start_sample`. Filling it copies a part of each tensor from the device.

    Raises:
        CheckpointError: the path has no loadable model.
        ConfigError: the model or this machine does not support a setting, or the model is quantized.
    """
    check_not_quantized(model)
    autocast_dtype = None if config.precision == "float32" else torch.bfloat16
    has_adapters = config.lora.rank > 0
    stored_dtype = torch.bfloat16 if autocast_dtype and has_adapters else torch.float32
    kernel = find_kernel(model, config, device)
    hf_model = load_hf_model(model, device=device, dtype=stored_dtype, attention=loaded_kernel(kernel))
    check_attention(hf_model)
    has_own_code = not type(hf_model).__module__.startswith("transformers.")
    mixes_samples = has_own_code and device != "meta" and find_mixed_samples(hf_model)
    if autocast_dtype and hf_model.config._attn_implementation == "sdpa" and hf_model.device.type == "cpu":
        use_written_out_attention(hf_model)
    use_kernel(hf_model, kernel, hf_model.device.type)
    if hf_model.device.type == "cpu" and not config.compile:
        use_fast_rms_norms(hf_model)
    if has_adapters:
        add_adapters(hf_model, config.lora)
    if config.activation_checkpointing:
        recompute_activations(hf_model)
    if config.compile:
        hf_model.base_model.compile()
    return Policy(
        hf_model,
        temperature=temperature,
        with_entropies=with_entropies,
        with_values=with_values,
        autocast_dtype=autocast_dtype,
        mixes_samples=mixes_samples,
        num_tokens=num_tokens,
        start_sample=sample_weights(base_weights(hf_model)) if with_start_sample and device != "meta" else {},
    )


def find_kernel(model: ModelConfig, config: PolicyConfig, device: str) -> str:
    """The attention kernel for a device: the kernel that `policy.attention` names, or the choice for "auto".

    For "auto", this function never chooses flash-attn. With "auto", several samples in a row may share one prompt,
    which needs a mask, and flash-attn supports no masks. Only a job can choose flash-attn, before it builds batches.

    Raises:
        ConfigError: the named kernel (`varlen` or `flex`) cannot train this model on this device.
    """
    device_type = torch.device(device).type
    if config.attention == "auto":
        kernel = choose_kernel(model, config, device_type=device_type).kernel
        return kernel if kernel == VARLEN else "sdpa"
    reason = ""
    if config.attention == VARLEN:
        reason = why_not_varlen(model, device_type=device_type)
    if config.attention == FLEX:
        reason = why_not_flex(model, device_type=device_type)
    if reason:
        raise ConfigError(f'policy.attention "{config.attention}" cannot be used here: {reason}. Set it to "auto"')
    return config.attention


def loaded_kernel(kernel: str) -> str:
    """The kernel with which to load a model before `use_kernel`. Loading runs the model once, possibly on a CPU, which
    `varlen` and `flex` do not support."""
    return "sdpa" if kernel in (VARLEN, FLEX) else kernel


def use_kernel(hf_model: PreTrainedModel, kernel: str, device_type: str) -> None:
    """Switch a model that was loaded with `loaded_kernel` to the given kernel."""
    if kernel == VARLEN:
        use_varlen_attention(hf_model)
    elif kernel == FLEX:
        use_flex_attention(hf_model)
    elif device_type == "cuda":
        use_sdpa_by_rows(hf_model)


@torch.no_grad()
def find_mixed_samples(hf_model: PreTrainedModel) -> bool:
    """Test whether a sample's hidden states change if another sample is in the same row and shares its prompt.

    For transformers' own models, `check_packable` answers this from the settings. A model with its own code needs a
    test run: the code may ignore masks or positions, or carry a state that the settings do not mention.
    """
    if hf_model.config._attn_implementation not in KERNELS_OF_FLOAT32:
        return False
    samples = [Sample(tokens=[0, 1, 1, *ends], loss_mask=[0, 0, 0, 1, 1, 1]) for ends in ([1, 0, 1], [0, 0, 1])]
    shared, alone = build_batch([samples], pad_id=0, share_prompts=True), build_batch([samples[1:]], pad_id=0)
    place = place_samples(samples, share_prompts=True)[1]
    hf_model.eval()
    expected_TH = compute_hidden_states(hf_model, alone.to(hf_model.device))[0, place.num_shared :].float()
    try:
        found_TH = compute_hidden_states(hf_model, shared.to(hf_model.device))[0, place.own].float()
    except (ConfigError, RuntimeError, ValueError, TypeError, IndexError):  # the model does not support the mask
        return True
    finally:
        hf_model.train()
    tolerance = MIXED_SHARE if hf_model.dtype == torch.float32 else ROUNDED_MIXED_SHARE
    return bool((found_TH - expected_TH).norm() > tolerance * expected_TH.norm())


def recompute_activations(hf_model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass to save memory.

    Raises:
        ConfigError: the model's layers do not support recomputation.
    """
    options = {"use_reentrant": False}
    try:
        if hasattr(hf_model, "activation_checkpointing_enable"):
            hf_model.activation_checkpointing_enable(options)
        else:
            hf_model.gradient_checkpointing_enable(options)
    except ValueError as error:
        raise ConfigError(
            f"{hf_model.config.model_type} models do not support activation checkpointing: set "
            'policy.activation_checkpointing = false, or policy.on_out_of_memory = "stop" if the run switched it on '
            "itself"
        ) from error


def score_targets(
    hf_model: PreTrainedModel,
    batch: TrainBatch,
    *,
    temperature: float = 1.0,
    with_entropies: bool = False,
    value_head: nn.Linear | None = None,
    num_tokens: int | None = None,
) -> TokenScores:
    """Score the targets inside the batch's loss mask. The results are 0 at other positions.

    Args:
        num_tokens: the softmax covers only token ids below this number, or all ids of the model if None.

    Raises:
        DataError: a target's token id is not below `num_tokens`.
    """
    places_N = batch.layout.scored_N
    hidden_NH = compute_hidden_states(hf_model, batch).flatten(0, 1).index_select(0, places_N)
    head = hf_model.get_output_embeddings()
    targets_N = batch.targets_BT.flatten().index_select(0, places_N)
    head_VH, bias_V = head.weight, head.bias
    if num_tokens is not None and num_tokens < len(head_VH):
        check_targets(batch, num_tokens)
        head_VH, bias_V = head_VH[:num_tokens], None if bias_V is None else bias_V[:num_tokens]
    logprobs_N, entropies_N = linear_logprobs(
        hidden_NH,
        head_VH,
        targets_N,
        bias_V=bias_V,
        transform=find_logit_transform(hf_model),
        temperature=temperature,
        with_entropies=with_entropies,
    )
    values_N = None if value_head is None else _values(value_head, hidden_NH)
    return TokenScores(
        logprobs_BT=_scatter(logprobs_N, batch),
        entropies_BT=None if entropies_N is None else _scatter(entropies_N, batch),
        values_BT=None if values_N is None else _scatter(values_N, batch),
    )


def check_targets(batch: TrainBatch, num_tokens: int) -> None:
    """Raise DataError if a trained token id is not below `num_tokens`."""
    if (largest := batch.layout.largest_target) >= num_tokens:
        raise DataError(
            f"a sample trains on the token id {largest}, but the tokenizer has only ids below {num_tokens}: the "
            "generation of samples must exclude the other ids"
        )


def compute_logprobs(
    hf_model: PreTrainedModel, batch: TrainBatch, *, temperature: float = 1.0, num_tokens: int | None = None
) -> Tensor:
    """(B, T) log p(target | previous tokens of the same sample), nats, or 0 outside the loss mask."""
    return score_targets(hf_model, batch, temperature=temperature, num_tokens=num_tokens).logprobs_BT


def compute_hidden_states(hf_model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """(B, T, H) output of the decoder. Samples in a row do not affect each other."""
    kernel = hf_model.config._attn_implementation
    # shared prompts need a mask, with which varlen falls back to sdpa
    is_masked = kernel == VARLEN and batch.layout.shares_prompts
    if kernel in KERNELS_WITHOUT_MASK and not is_masked and not find_unmasked_layers(hf_model.config):
        return _hidden_states_without_padding(hf_model, batch)
    # Rows of one sample with padding on the right need no mask: causal attention never reads the padding.
    window = find_window(hf_model.config.get_text_config()) or math.inf
    is_windowed = kernel == SDPA_BY_ROWS and batch.inputs_BT.shape[1] > window
    needs_mask = batch.is_packed or is_windowed or kernel == FLEX
    attention_mask = build_attention_mask(hf_model, batch) if needs_mask else None
    hidden_BTH: Tensor = hf_model.base_model(
        input_ids=batch.inputs_BT,
        position_ids=batch.position_ids_BT,
        attention_mask=attention_mask,
        use_cache=False,
    ).last_hidden_state
    return hidden_BTH


def build_attention_mask(hf_model: PreTrainedModel, batch: TrainBatch) -> Mask | dict[str, Mask]:
    """The attention mask of packed rows. If some layers have a sliding window, a dict with one mask per kind of layer.

    Raises:
        ConfigError: the model has layers that carry a state from sample to sample despite a mask, or samples share a
            prompt and the model measures distances along the row.
    """
    check_packable(hf_model.config)
    if hf_model.config.model_type in MODELS_OF_ROW_DISTANCES:
        check_packable(hf_model.config, shares_prompts=batch.layout.shares_prompts)
    config = hf_model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = find_window(config)
    build: Callable[..., Mask] = partial(block_causal_mask, dtype=_mask_dtype(hf_model, batch.inputs_BT.device.type))
    if hf_model.config._attn_implementation == FLEX:
        build = block_mask
    if "sliding_attention" in kinds:
        return {kind: build(batch, window=window if kind == "sliding_attention" else None) for kind in kinds}
    sees_window = window and not getattr(config, "layer_types", None)
    return build(batch, window=window if sees_window else None)


def find_window(config: PreTrainedConfig) -> int | None:
    """Number of positions in the sliding window of the model's attention, or None if the model has no window.

    A window in config.json is ignored if the model's class ignores it, for example in a Mistral converted to a Llama.
    """
    kind = type(config)
    is_read = hasattr(kind, "sliding_window") or "sliding_window" in inspect.signature(kind).parameters
    has_own_code = not kind.__module__.startswith("transformers.")
    window: int | None = getattr(config, "sliding_window", None)
    return window if is_read or has_own_code else None


def _mask_dtype(hf_model: PreTrainedModel, device_type: str) -> torch.dtype:
    """Dtype of masks. Under autocast this is the kernel's dtype, because otherwise every layer would keep a converted
    copy of the mask."""
    is_sdpa = hf_model.config._attn_implementation in ("sdpa", SDPA_BY_ROWS, VARLEN)
    if is_sdpa and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    own: torch.dtype = hf_model.dtype
    return own


def _hidden_states_without_padding(hf_model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """(B, T, H) output of the decoder with kernels for variable lengths: all samples end to end in one row, without
    a mask."""
    layout = batch.layout
    assert not layout.shares_prompts, "these kernels cannot let samples share a prompt"
    hidden_1MH: Tensor = hf_model.base_model(
        input_ids=batch.inputs_BT.flatten().index_select(0, layout.tokens_M)[None],
        position_ids=batch.position_ids_BT.flatten().index_select(0, layout.tokens_M)[None],
        use_cache=False,
        cu_seq_lens_q=layout.bounds,
        cu_seq_lens_k=layout.bounds,
        max_length_q=layout.longest,
        max_length_k=layout.longest,
    ).last_hidden_state
    hidden_MH = hidden_1MH[0]
    flat_H = hidden_MH.new_zeros(batch.inputs_BT.numel(), hidden_MH.shape[-1])
    return flat_H.index_copy(0, layout.tokens_M, hidden_MH).view(*batch.inputs_BT.shape, -1)


def _scatter(values_N: Tensor, batch: TrainBatch) -> Tensor:
    """(B, T) tensor with the given values at the scored positions, and 0 elsewhere."""
    flat = torch.zeros(batch.inputs_BT.numel(), device=values_N.device)
    return flat.index_copy(0, batch.layout.scored_N, values_N).view(batch.inputs_BT.shape)


def _values(value_head: nn.Linear, hidden_NH: Tensor) -> Tensor:
    """(N,) predicted returns. Computed in float32 even under autocast: bfloat16 has only 8 significant bits."""
    with torch.autocast(hidden_NH.device.type, enabled=False):
        values_N: Tensor = value_head(hidden_NH.float()).squeeze(-1)
    return values_N


def _create_value_head(hf_model: PreTrainedModel) -> nn.Linear:
    head = nn.Linear(hf_model.get_output_embeddings().weight.shape[1], 1, device=hf_model.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
