"""LoRA adapters through peft: add them to a model, switch them off, merge them, or scale them for publishing.

Source: arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rollouts_core.config import LoRAConfig
from rollouts_core.config.messages import first_line
from rollouts_core.embedded.adapters import DOWN, UP
from rollouts_core.errors import ConfigError
from rollouts_core.model.adapter_targets import check_target_modules, is_read_past_adapters, is_target

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel

ADAPTER = "default"
"""Name that peft gives to an adapter without a name."""
LINEAR_BY_NAME_ALONE = ("Router", "GroupedLinear")
"""Name endings of transformers classes that inherit from a linear layer but compute something else (Phi-MoE,
DeepSeek 4)."""
BASE_LAYER = ".base_layer."
"""Text that peft inserts into the name of an adapted layer's weight."""


def add_adapters(hf_model: PreTrainedModel, config: LoRAConfig) -> None:
    """Freeze the model and add trainable float32 adapters to its linear layers. New adapters do not change the model's
    output.

    Raises:
        ConfigError: peft is not installed, or a target module is not in the model.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("lora.rank is set but peft is not installed: run pip install 'rollouts[lora]'") from error
    layers = _linear_layers(hf_model)
    check_target_modules(config.target_modules, layers)
    targets = [
        layer
        for layer in layers
        if not config.target_modules or any(is_target(layer, name) for name in config.target_modules)
    ]
    hf_model.requires_grad_(False)
    # For known models, peft maps layers named like experts to fused experts, which `merged_weights` cannot merge.
    # Inside a module of our own, peft does not recognize the model and uses the names as given.
    held = nn.ModuleDict({"held": hf_model})
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=[f"held.{layer}" for layer in targets],
    )
    try:
        inject_adapter_in_model(settings, held)
    except ValueError as error:
        raise ConfigError(f"lora.target_modules: peft refuses the layers ({first_line(error)})") from error
    adapted = adapted_layers(hf_model).keys()
    assert adapted == set(targets), f"peft adapted other layers: {sorted(adapted ^ set(targets))[:3]}"
    for parameter in hf_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@contextmanager
def adapters_off(hf_model: nn.Module) -> Iterator[None]:
    """Inside the `with` block, switch the adapters off, so that the model computes with its start weights."""
    layers = adapted_layers(hf_model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(hf_model: nn.Module) -> dict[str, Tensor]:
    """The model's weights by Hugging Face name, with the adapters merged in. Tied weights occur once.

    Merged weights are float32 in host memory, because a GPU may not have room for all of them. Weights of layers
    without adapters are not copied.
    """
    adapted = {f"{name}.weight" for name in adapted_layers(hf_model)}
    return {name: tensor.cpu() if name in adapted else tensor for name, tensor in merge_each(hf_model)}


@torch.no_grad()
def merge_each(hf_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `merged_weights` one after another, on the model's device.

    A merged weight is float32 even if the frozen weight is bfloat16. Rounding to bfloat16 would lose changes below
    1/512 of a weight.
    """
    layers = {f"{name}.weight": layer for name, layer in adapted_layers(hf_model).items()}
    for name, base in base_weights(hf_model).items():
        delta = layers[name].get_delta_weight(ADAPTER) if name in layers else None
        yield name, base if delta is None else base.float() + delta.float()


@torch.no_grad()
def scaled_adapters(hf_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of the adapters for engines. Engines add B (A x) without a factor, so B is multiplied by alpha /
    rank."""
    for name, layer in adapted_layers(hf_model).items():
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        yield name + DOWN, down.detach().clone()
        yield name + UP, up.detach() * layer.scaling[ADAPTER]


@torch.no_grad()
def replace_weights(hf_model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the model's frozen weights by `weights`, and reset the adapters so that they change nothing."""
    for name, tensor in base_weights(hf_model).items():
        tensor.copy_(weights[name])
    reset_adapters(hf_model)


def base_weights(hf_model: nn.Module) -> dict[str, Tensor]:
    """The model's weights by Hugging Face name, without the adapters. Tied weights occur once."""
    named = {**dict(hf_model.named_parameters()), **_saved_buffers(hf_model)}
    return {name.replace(BASE_LAYER, "."): t.detach() for name, t in named.items() if not is_adapter_weight(name)}


@torch.no_grad()
def reset_adapters(hf_model: nn.Module) -> None:
    """Set B of every adapter to 0, so that the adapters do not change the model's output."""
    for name, parameter in hf_model.named_parameters():
        if is_adapter_weight(name) and ".lora_B." in name:
            parameter.zero_()


def is_adapter_weight(name: str) -> bool:
    """True if the parameter with this name belongs to an adapter."""
    return ".lora_" in name


def _linear_layers(hf_model: PreTrainedModel) -> list[str]:
    """Names of the linear layers that can get adapters.

    Layers whose weight is read without calling the layer are excluded: the output head (`logprobs.py`), and some layers
    of Mamba.
    """
    head = hf_model.get_output_embeddings()
    parameters = dict(hf_model.named_parameters())
    return [
        name
        for name, module in hf_model.named_modules()
        if _is_linear(module) and module is not head and not is_read_past_adapters(name, parameters)
    ]


def _is_linear(module: nn.Module) -> bool:
    """True if a module only multiplies by its weight. Some subclasses of linear layers route tokens to experts
    instead."""
    return isinstance(module, nn.Linear | Conv1D) and not type(module).__name__.endswith(LINEAR_BY_NAME_ALONE)


def adapted_layers(hf_model: nn.Module) -> dict[str, BaseTunerLayer]:
    """The layers with an adapter, by name."""
    return {name: module for name, module in hf_model.named_modules() if hasattr(module, "lora_A")}


def _saved_buffers(hf_model: nn.Module) -> dict[str, Tensor]:
    """Buffers (tensors that are not parameters) that checkpoints contain, for example the biases of a router."""
    saved = hf_model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in hf_model.named_buffers() if name in saved}
