"""Choose the attention kernel for `policy.attention = "auto"`. This file does not import torch.

float32, or no GPU                                          sdpa
RL in which sharing prompts is faster                       sdpa: sharing needs a mask
bfloat16, and torch's varlen_attn supports the model        varlen
bfloat16, and flash-attn is installed                       flash_attention_3, flash_attention_2
otherwise                                                   sdpa
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, cast

from rollouts_core.config import ModelConfig, PolicyConfig, RLTrainingConfig, RolloutConfig, SFTTrainingConfig
from rollouts_core.model.model_shape import ModelShape, read_shape

MAX_SHARERS = 4
"""Highest number of completions that share a prompt in one row of a batch.

With a higher number, prompts would be computed less often, but each row would attend over more masked positions."""
MASKED_COST = 3.0
"""Assumed cost of a product in a kernel with a mask, relative to a kernel without a mask. Not measured on a GPU."""


class Choice(NamedTuple):
    """An attention kernel, and the reason for choosing it."""

    kernel: str
    """A value of `policy.attention`."""
    reason: str
    """The reason as a clause for messages."""


Training = TypeVar("Training", bound=SFTTrainingConfig | RLTrainingConfig)


class SharedPrompts(NamedTuple):
    """Completions of RL that may share a prompt in a row: their number, and lengths in tokens."""

    prompt_tokens: int
    new_tokens: int
    num_samples: int


def shared_prompts(rl: RLTrainingConfig, rollout: RolloutConfig) -> SharedPrompts | None:
    """The completions that could share a prompt in a row, or None if the settings exclude sharing."""
    num_samples = min(MAX_SHARERS, rollout.n_samples_per_prompt)
    if not rl.packing or num_samples < 2:
        return None
    return SharedPrompts(rollout.max_prompt_tokens, rollout.sampling.max_new_tokens, num_samples)


def does_sharing_pay(shape: ModelShape, shared: SharedPrompts) -> bool:
    """True if computing a shared prompt only once saves more time than the mask costs.

    Estimate: a token costs two operations per weight of the layers, and four operations per attended token and element
    of the query. With a mask, a token attends to all tokens of its row. Without a mask, it attends only to earlier
    tokens of its sample.
    """
    weights = shape.num_layers * (
        2 * shape.hidden_size * (shape.query_size + shape.kv_size) + 3 * shape.hidden_size * shape.intermediate_size
    )
    per_token, per_pair = 2 * weights, 4 * shape.query_size * shape.num_layers
    alone = shared.prompt_tokens + shared.new_tokens
    together = shared.prompt_tokens + shared.num_samples * shared.new_tokens
    cost_alone = shared.num_samples * (per_token * alone + per_pair * alone**2 / 2)
    cost_together = per_token * together + MASKED_COST * per_pair * together**2
    return cost_together < cost_alone


def expected_kernel(policy: PolicyConfig, settings: Mapping[str, Any], shared: SharedPrompts | None) -> str:
    """The attention kernel that a run probably uses if its GPU supports `varlen`, for estimates before the run.

    Args:
        settings: content of the model's config.json.
        shared: completions that could share a prompt, or None without sharing.
    """
    if policy.attention != "auto":
        return policy.attention
    if policy.precision == "float32" or policy.backend == "jax":
        return "sdpa"
    shape = read_shape(settings)
    return "sdpa" if shape and shared and does_sharing_pay(shape, shared) else "varlen"


def with_kernel(training: Training, kernel: str) -> Training:
    """A copy of a stage's training settings with this attention kernel."""
    policy = training.policy.model_copy(update={"attention": kernel})
    return cast("Training", training.model_copy(update={"policy": policy}))


def choose_kernel(
    model: ModelConfig, policy: PolicyConfig, *, device_type: str, shared: SharedPrompts | None = None
) -> Choice:
    """Choose the kernel for `policy.attention = "auto"` on this machine.

    Args:
        device_type: type of the training device, such as "cpu" or "cuda".
        shared: completions that could share a prompt, or None without sharing.
    """
    if policy.precision == "float32":
        return Choice("sdpa", "the precision is float32")
    if device_type == "cpu":
        return Choice("sdpa", "training runs on a CPU")
    from rollouts_core.model.loading import find_settings

    found = find_settings(model)
    if expected_kernel(policy, found.to_dict() if found else {}, shared) == "sdpa":
        return Choice("sdpa", "sharing prompts needs a mask and is estimated to be faster than a kernel without a mask")
    return _choose_without_mask(model, device_type)


def _choose_without_mask(model: ModelConfig, device_type: str) -> Choice:
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    from rollouts_core.model.varlen import VARLEN, takes_flash_attention, why_not_varlen

    reason = why_not_varlen(model, device_type=device_type)
    if not reason:
        return Choice(VARLEN, "torch has a kernel that needs no mask")
    installed = {
        "flash_attention_3": is_flash_attn_3_available(),
        "flash_attention_2": is_flash_attn_2_available(),
    }
    kernel = next((name for name, is_installed in installed.items() if is_installed), "")
    if kernel and takes_flash_attention(model):
        return Choice(kernel, f"flash attention is installed, and varlen cannot be used: {reason}")
    return Choice(
        "sdpa", f"varlen cannot be used: {reason}; the memory of the mask grows with the square of the row length"
    )
