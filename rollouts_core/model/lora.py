"""Low-rank adapters through peft: put them into a model, switch them off, merge them into what is exported.

Not here: which weights the optimizer gets (backends/optim.py), checkpoints (backends/pytorch.py).
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
from rollouts_core.errors import ConfigError
from rollouts_core.model.adapter_targets import check_target_modules, is_read_past_adapters, is_target

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel

ADAPTER = "default"
"""What peft calls an adapter without a name."""
LINEAR_BY_NAME_ALONE = ("Router", "GroupedLinear")
"""How classes of transformers end that inherit from a linear layer and compute something else (Phi-MoE, DeepSeek 4)."""
BASE_LAYER = ".base_layer."
"""Where peft puts the weight that an adapter belongs to."""


def add_adapters(hf_model: PreTrainedModel, config: LoRAConfig) -> None:
    """Freeze the model and give its linear layers trainable float32 adapters, which change nothing at first.

    Raises:
        ConfigError: peft is not installed, or the model lacks one of the target modules.
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
    # peft turns layers that are called like experts into the experts of models that it knows, and merged_weights cannot
    # merge those: behind a name of ours it does not know which model this is, and takes the names as they are.
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
    """The model as it was before its adapters were trained, as long as the block runs."""
    layers = adapted_layers(hf_model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(hf_model: nn.Module) -> dict[str, Tensor]:
    """The weights by their Hugging Face names, tied ones once, adapters merged in; the others are not copied.

    Merged ones are float32, and in host memory: a GPU may have no room for all of them beside the model.
    """
    adapted = {f"{name}.weight" for name in adapted_layers(hf_model)}
    return {name: tensor.cpu() if name in adapted else tensor for name, tensor in merge_each(hf_model)}


@torch.no_grad()
def merge_each(hf_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The same one after another, each where the model is.

    A merged weight is float32 whatever the frozen one is: rounded to bfloat16, it equals the frozen weight wherever the
    adapter moved that by less than half of the distance to the next number, 1 in 512.
    """
    layers = {f"{name}.weight": layer for name, layer in adapted_layers(hf_model).items()}
    for name, base in base_weights(hf_model).items():
        delta = layers[name].get_delta_weight(ADAPTER) if name in layers else None
        yield name, base if delta is None else base.float() + delta.float()


@torch.no_grad()
def replace_weights(hf_model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Make `weights` what the model computes with: they become the frozen ones, and the adapters change nothing."""
    for name, tensor in base_weights(hf_model).items():
        tensor.copy_(weights[name])
    reset_adapters(hf_model)


def base_weights(hf_model: nn.Module) -> dict[str, Tensor]:
    """The weights by their Hugging Face names as the model holds them, tied ones once, without what adapters add."""
    named = {**dict(hf_model.named_parameters()), **_saved_buffers(hf_model)}
    return {name.replace(BASE_LAYER, "."): t.detach() for name, t in named.items() if not is_adapter_weight(name)}


@torch.no_grad()
def reset_adapters(hf_model: nn.Module) -> None:
    """Let the adapters change nothing."""
    for name, parameter in hf_model.named_parameters():
        if is_adapter_weight(name) and ".lora_B." in name:
            parameter.zero_()


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def _linear_layers(hf_model: PreTrainedModel) -> list[str]:
    """Names of the linear layers but those of which only the weight is used: the output head (logprobs.py), Mamba's."""
    head = hf_model.get_output_embeddings()
    parameters = dict(hf_model.named_parameters())
    return [
        name
        for name, module in hf_model.named_modules()
        if _is_linear(module) and module is not head and not is_read_past_adapters(name, parameters)
    ]


def _is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies with its weight and no more; some that inherit from linear layers choose experts."""
    return isinstance(module, nn.Linear | Conv1D) and not type(module).__name__.endswith(LINEAR_BY_NAME_ALONE)


def adapted_layers(hf_model: nn.Module) -> dict[str, BaseTunerLayer]:
    """Layers with an adapter, by name."""
    return {name: module for name, module in hf_model.named_modules() if hasattr(module, "lora_A")}


def _saved_buffers(hf_model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds beside parameters, the biases of a router for instance."""
    saved = hf_model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in hf_model.named_buffers() if name in saved}
