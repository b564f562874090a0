"""Find the layers of a model that can get adapters, by their names in the weight files.

This check runs before any machine is rented or started, so this file must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping

from rollouts_core.config import Config
from rollouts_core.errors import ConfigError
from rollouts_core.model.model_size import find_model_size

WITHOUT_ADAPTER = re.compile(r"embed|\bw[pt]e\b|\blm_head\b|\.experts\.\d")
"""Matches names of embeddings, the output head, and experts. transformers merges experts into one tensor."""
READ_PAST_ADAPTERS = re.compile(r"(.*\.)(x|dt|out)_proj")
"""Matches names of layers in Mamba mixers whose weights kernels read directly, without calling the layer.

An adapter on such a layer would not be trained. For `dt_proj` this holds even if no kernel is installed."""
MAMBA_PARAMETERS = ("A_log", "D")
"""A module with both parameters is a Mamba mixer. Linear attention lacks at least one of them."""
WEIGHTS_ALONE = re.compile(r".*\.(router\.classifier|altup\.correction_coefs)")
"""Matches names of layers in LongCat and Gemma 3n whose weight is also read without calling the layer."""
BEFORE_LAYER_NUMBER = re.compile(r"^.*?\.(?=\d+\.)")
MAX_SHOWN = 20


def linear_layers(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The layers that can get adapters: name -> shape of the weight.

    Args:
        tensors: shapes of the model's tensors by their names in the weight files.
    """
    return {
        name.removesuffix(".weight"): shape
        for name, shape in tensors.items()
        if len(shape) == 2
        and name.endswith(".weight")
        and not WITHOUT_ADAPTER.search(name)
        and not is_read_past_adapters(name.removesuffix(".weight"), tensors)
    }


def is_read_past_adapters(layer: str, tensors: Collection[str]) -> bool:
    """True if the model reads the layer's weight without calling the layer, judged by the tensors' names."""
    if WEIGHTS_ALONE.fullmatch(layer):
        return True
    found = READ_PAST_ADAPTERS.fullmatch(layer)
    return found is not None and all(found[1] + name in tensors for name in MAMBA_PARAMETERS)


def is_target(layer: str, name: str) -> bool:
    """True if a name in `lora.target_modules` equals the layer's name or the end of it, as in peft."""
    return f".{layer}".endswith(f".{name}")


def is_target_in_files(layer: str, name: str) -> bool:
    """Like `is_target`, but ignores the part of `name` before the layer's number, which may differ in weight files."""
    return is_target(layer, BEFORE_LAYER_NUMBER.sub("", name))


def check_target_modules(
    names: Iterable[str],
    layers: Collection[str],
    *,
    setting: str = "lora.target_modules",
    matches: Callable[[str, str], bool] = is_target,
) -> None:
    """Raise ConfigError if a name in a setting matches no layer.

    Args:
        names: names in the setting.
        layers: names of the model's layers that can get adapters.
        matches: decides if a layer matches a name.
    """
    unknown = [name for name in names if not any(matches(layer, name) for layer in layers)]
    if not unknown:
        return
    known = sorted({layer.rpartition(".")[2] for layer in layers})
    shown = ", ".join(known[:MAX_SHOWN]) + ", ..." * (len(known) > MAX_SHOWN)
    these = "this name" if len(unknown) == 1 else "these names"
    raise ConfigError(
        f"{setting} {', '.join(unknown)}: the model has no linear layer with {these} that supports adapters; it has "
        f"{shown}: use some of these names, or remove the setting to adapt all layers"
    )


def check_adapters(config: Config) -> list[str]:
    """Check that the target modules in the settings exist in the model's weight files.

    Models with their own code are skipped, because their layers may have other names than in the files. Returns a
    sentence for each setting that could not be checked.

    Raises:
        ConfigError: a target module matches no layer.
    """
    adapters = {name: training.policy.lora for name, training in config.trainings.items()}
    named = {
        f"training.{name}.policy.lora.target_modules": lora.target_modules
        for name, lora in adapters.items()
        if lora.rank and lora.target_modules
    }
    if not named or config.model.trust_remote_code:
        return []
    size = find_model_size(config.model)
    layers = linear_layers(size.tensors)
    if not layers:
        reason = size.problem or "its files contain no linear layers"
        return [f"{setting}: not compared with the layers of {config.model.path} ({reason})" for setting in named]
    for setting, names in named.items():
        check_target_modules(names, layers, setting=setting, matches=is_target_in_files)
    return []
