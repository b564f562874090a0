"""Pins which backend the settings create, and what is said where they ask for something that it cannot do.

Without it a run could train with another library than its fingerprint says.
"""

import sys

import pytest
from pydantic import ValidationError

from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.backends.create import create_backend
from rollouts_core.backends.pytorch import PyTorchTrainingBackend
from rollouts_core.config import LoRAConfig, ModelConfig, OptimConfig, PolicyConfig, SFTTrainingConfig
from rollouts_core.errors import ConfigError
from rollouts_core.fingerprint import affecting_settings


def test_pytorch_is_the_backend_unless_another_is_named(base_model: ModelConfig) -> None:
    backend = create_backend(base_model, OptimConfig(), create_cross_entropy_loss(), num_steps=1)
    assert isinstance(backend, PyTorchTrainingBackend)


def test_the_policys_settings_reach_the_backend(base_model: ModelConfig) -> None:
    policy = PolicyConfig(precision="bfloat16")
    backend = create_backend(base_model, OptimConfig(), create_cross_entropy_loss(), num_steps=1, policy=policy)
    assert isinstance(backend, PyTorchTrainingBackend)
    assert str(backend.policy.autocast_dtype) == "torch.bfloat16"


@pytest.mark.parametrize("is_kept", [True, False])
def test_only_the_trained_policy_keeps_a_sample_of_its_start_and_only_where_it_is_needed(
    base_model: ModelConfig, is_kept: bool
) -> None:
    backend = create_backend(
        base_model,
        OptimConfig(),
        create_cross_entropy_loss(),
        num_steps=1,
        with_reference=True,
        with_start_sample=is_kept,
    )
    assert isinstance(backend, PyTorchTrainingBackend) and backend.reference is not None
    assert bool(backend.start_sample) == is_kept
    assert not backend.reference.start_sample


def test_a_backend_that_is_not_installed_is_named_with_its_remedy(
    base_model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("rollouts_core.backends.jax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax", None)  # importing it fails
    with pytest.raises(ConfigError, match=r"JAX is not installed: run pip install 'rollouts\[jax\]'"):
        create_backend(
            base_model, OptimConfig(), create_cross_entropy_loss(), num_steps=1, policy=PolicyConfig(backend="jax")
        )


@pytest.mark.parametrize(
    ("setting", "value"), [("lora", LoRAConfig(rank=4)), ("compile", True), ("attention", "eager")]
)
def test_settings_that_jax_does_not_have_are_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(ValidationError, match=rf'backend "jax" has no {setting} setting: remove it'):
        PolicyConfig.model_validate({"backend": "jax", setting: value})


def test_the_backend_is_part_of_a_trainings_identity() -> None:
    with_jax = SFTTrainingConfig(policy=PolicyConfig(backend="jax"))
    assert affecting_settings(with_jax) == {"policy": {"backend": "jax"}}
