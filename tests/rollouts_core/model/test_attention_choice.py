"""Pins what `policy.attention = "auto"` stands for, and that it changes no identity.

Without it packed rows on a GPU would take a mask of their length squared although torch can do without, or a stage that
is finished would be trained again because a default has another name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollouts_core.config import ModelConfig, PolicyConfig, RLTrainingConfig, RolloutConfig, SFTTrainingConfig
from rollouts_core.fingerprint import affecting_settings, training_settings
from rollouts_core.model import varlen
from rollouts_core.model.attention_choice import (
    Choice,
    SharedPrompts,
    choose_kernel,
    does_sharing_pay,
    expected_kernel,
    shared_prompts,
)
from rollouts_core.model.model_shape import read_shape
from rollouts_core.model.policy import find_kernel
from rollouts_core.run_checkpoints import changed_settings, check_same_settings

HALF = PolicyConfig(precision="bfloat16")
QWEN_600M = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
}
LONG_PROMPT, SHORT_PROMPT = SharedPrompts(4096, 128, 4), SharedPrompts(256, 2048, 4)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine say that it has a GPU and these packages."""

    def has(*, varlen_attn: bool = True, capability: tuple[int, int] = (9, 0), flash: tuple[int, ...] = ()) -> None:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
        if not varlen_attn:
            monkeypatch.setattr(varlen, "find_varlen_attn", lambda: None)
        for version in (2, 3):
            name = f"transformers.utils.is_flash_attn_{version}_available"
            monkeypatch.setattr(name, lambda version=version: version in flash)

    return has


@pytest.mark.parametrize(
    ("machine", "expected", "reason"),
    [
        ({}, "varlen", "needs no mask"),
        ({"varlen_attn": False}, "sdpa", "has no varlen_attn that supports sliding windows; the memory of"),
        ({"varlen_attn": False, "flash": (2, 3)}, "flash_attention_3", "has no varlen_attn"),
        ({"varlen_attn": False, "flash": (2,)}, "flash_attention_2", "has no varlen_attn"),
        ({"capability": (7, 5)}, "sdpa", "compute capability 8.0"),
        ({"flash": (2,)}, "varlen", ""),
    ],
)
def test_a_gpu_takes_the_first_kernel_that_fits(
    base_model: ModelConfig, on_gpu: Callable[..., None], machine: dict[str, Any], expected: str, reason: str
) -> None:
    on_gpu(**machine)
    choice = choose_kernel(base_model, HALF, device_type="cuda")
    assert choice.kernel == expected and reason in choice.reason


@pytest.mark.parametrize(
    ("policy", "device_type", "shared"),
    [(PolicyConfig(), "cuda", None), (HALF, "cpu", None), (HALF, "cuda", SharedPrompts(16, 1, 4))],
)
def test_elsewhere_it_is_sdpa(
    base_model: ModelConfig,
    on_gpu: Callable[..., None],
    policy: PolicyConfig,
    device_type: str,
    shared: SharedPrompts | None,
) -> None:
    on_gpu()
    assert choose_kernel(base_model, policy, device_type=device_type, shared=shared).kernel == "sdpa"


@pytest.mark.parametrize(
    ("machine", "expected"),
    [({}, "varlen"), ({"varlen_attn": False, "flash": (2, 3)}, "sdpa"), ({"flash": (2,)}, "varlen")],
)
def test_a_policy_of_auto_takes_a_kernel_that_takes_the_mask_of_shared_prompts(
    base_model: ModelConfig, on_gpu: Callable[..., None], machine: dict[str, Any], expected: str
) -> None:
    on_gpu(**machine)
    assert RLTrainingConfig(policy=HALF).shares_prompts
    assert find_kernel(base_model, HALF, "cuda") == expected


def test_a_long_prompt_is_worth_a_mask_and_a_short_one_is_not() -> None:
    shape = read_shape(QWEN_600M)
    assert shape is not None
    # 4 x 4,224 tokens become 4,608: 4.7e13 operations become 2.0e13 and those of the mask's 4,608 x 4,608 pairs.
    assert does_sharing_pay(shape, LONG_PROMPT)
    assert not does_sharing_pay(shape, SHORT_PROMPT)
    assert expected_kernel(HALF, QWEN_600M, LONG_PROMPT) == "sdpa"
    assert expected_kernel(HALF, QWEN_600M, SHORT_PROMPT) == expected_kernel(HALF, QWEN_600M, None) == "varlen"
    assert expected_kernel(PolicyConfig(), QWEN_600M, None) == "sdpa"


def test_what_completions_could_share_follows_the_settings() -> None:
    rollout = RolloutConfig(n_samples_per_prompt=8, max_prompt_tokens=100)
    assert shared_prompts(RLTrainingConfig(packing=False), rollout) is None
    assert shared_prompts(RLTrainingConfig(), rollout.model_copy(update={"n_samples_per_prompt": 1})) is None
    assert shared_prompts(RLTrainingConfig(), rollout) == (100, rollout.sampling.max_new_tokens, 4)


@pytest.mark.parametrize("kernel", ["auto", "sdpa", "varlen"])
def test_kernels_that_auto_may_stand_for_leave_no_trace_in_identities(kernel: str) -> None:
    for record in (SFTTrainingConfig, RLTrainingConfig):
        training = record(policy=PolicyConfig(precision="bfloat16", attention=kernel))
        assert affecting_settings(training) == {"policy": {"precision": "bfloat16"}}
        assert training_settings(training) == {"policy.precision": "bfloat16"}


@pytest.mark.parametrize("kernel", ["eager", "flex", "flash_attention_2", "flash_attention_3"])
def test_stages_of_the_other_kernels_keep_their_identity(kernel: str) -> None:
    training = SFTTrainingConfig(policy=PolicyConfig(precision="bfloat16", attention=kernel))
    assert affecting_settings(training)["policy"] == {"precision": "bfloat16", "attention": kernel}


def test_a_checkpoint_of_another_kernel_is_gone_on_from(tmp_path: Any) -> None:
    saved = {"policy.attention": "flash_attention_2", "lr": 1.0}
    assert changed_settings(saved, {"lr": 1.0}) == ["policy.attention"]
    assert check_same_settings(saved, {"lr": 1.0}, allowed=(), checkpoint=tmp_path) == ["policy.attention"]


@pytest.mark.parametrize("kernel", ["varlen", "flex", "flash_attention_2"])
def test_kernels_of_half_precision_are_refused_in_float32(kernel: str) -> None:
    with pytest.raises(ValueError, match=f'attention "{kernel}" needs precision = "bfloat16"'):
        PolicyConfig(attention=kernel)


def test_jax_takes_its_own_attention() -> None:
    assert PolicyConfig(backend="jax", attention="sdpa").attention == "sdpa"
    with pytest.raises(ValueError, match="has no attention setting"):
        PolicyConfig(backend="jax", attention="eager")


def test_a_choice_names_its_reason(base_model: ModelConfig) -> None:
    assert choose_kernel(base_model, HALF, device_type="cpu") == Choice("sdpa", "training runs on a CPU")
