"""Which layers of a model get adapters, by their names.

Not here: the adapters themselves (model/lora.py). torch is not imported: this is asked before anything is rented or
started.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping

from rollouts_core.config import Config
from rollouts_core.errors import ConfigError
from rollouts_core.model.model_size import find_model_size

WITHOUT_ADAPTER = re.compile(r"embed|\bw[pt]e\b|\blm_head\b|\.experts\.\d")
"""In names of matrices: embeddings, the output head, and experts, which transformers makes one tensor of."""
READ_PAST_ADAPTERS = re.compile(r"(.*\.)(x|dt|out)_proj")
"""Names of the layers whose weights the kernels of a Mamba mixer read, and of `dt_proj` torch's too: an adapter of them
would not be trained."""
MAMBA_PARAMETERS = ("A_log", "D")
"""What a Mamba mixer has beside those layers, and linear attention has not both of."""
WEIGHTS_ALONE = re.compile(r".*\.(router\.classifier|altup\.correction_coefs)")
"""Names of the layers of which LongCat and Gemma 3n take no more than the weight, for the same reason."""
BEFORE_LAYER_NUMBER = re.compile(r"^.*?\.(?=\d+\.)")
MAX_SHOWN = 20


def linear_layers(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of the layers that adapters may be for, by name.

    Args:
        tensors: the shapes of a model's tensors by their names in its files.
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
    """Whether the model takes a layer's weight without calling the layer, by the names of its tensors."""
    if WEIGHTS_ALONE.fullmatch(layer):
        return True
    found = READ_PAST_ADAPTERS.fullmatch(layer)
    return found is not None and all(found[1] + name in tensors for name in MAMBA_PARAMETERS)


def is_target(layer: str, name: str) -> bool:
    """Whether a name of `lora.target_modules` is that of a layer, or its end, as peft reads it."""
    return f".{layer}".endswith(f".{name}")


def is_target_in_files(layer: str, name: str) -> bool:
    """`is_target` for a layer's name in files: what stands before its number may be called otherwise there."""
    return is_target(layer, BEFORE_LAYER_NUMBER.sub("", name))


def check_target_modules(
    names: Iterable[str],
    layers: Collection[str],
    *,
    setting: str = "lora.target_modules",
    matches: Callable[[str, str], bool] = is_target,
) -> None:
    """Raise ConfigError for a name that is that of no layer."""
    unknown = [name for name in names if not any(matches(layer, name) for layer in layers)]
    if not unknown:
        return
    known = sorted({layer.rpartition(".")[2] for layer in layers})
    shown = ", ".join(known[:MAX_SHOWN]) + ", ..." * (len(known) > MAX_SHOWN)
    these = "this name" if len(unknown) == 1 else "these names"
    raise ConfigError(
        f"{setting} {', '.join(unknown)}: the model has no linear layer of {these} that adapters could be for, it has "
        f"{shown}: name some of these, or leave the setting out for all of them"
    )


def check_adapters(config: Config) -> list[str]:
    """Compare the layers that adapters are for with those in the model's files; a sentence where that cannot be done.

    Models that bring their own code are left out: it may call its layers something else than its files do.

    Raises:
        ConfigError: the model has no such layer.
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
        reason = size.problem or "its files name no linear layers"
        return [f"{setting}: not compared with the layers of {config.model.path} ({reason})" for setting in named]
    for setting, names in named.items():
        check_target_modules(names, layers, setting=setting, matches=is_target_in_files)
    return []
