"""Write the adapters of a model as a folder that PEFT loads.

Not here: putting adapters into a model, or merging them (lora.py), the rest of a checkpoint (training_state.py).

    adapter/adapter_config.json           rank, scale, layers by their whole names, the model that training started from
    adapter/adapter_model.safetensors     base_model.model.<layer>.lora_{A,B}.weight, float32
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from rollouts_core.model.lora import ADAPTER, adapted_layers

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

PEFT_PREFIX = "base_model.model."
"""Prefix of PEFT before the names of a model's layers."""


def write_adapter_folder(folder: Path, hf_model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Make `folder` one that `peft.PeftModel.from_pretrained(base, folder)` loads.

    Writes nothing if PEFT would load the adapters into other layers: in some mixtures of experts PEFT maps layers with
    the names of experts, for example a shared expert, to the fused experts of transformers 5.

    Args:
        hf_model: has the adapters.
        weights: those of the adapters by their names in `hf_model`, in host memory.
    """
    settings = describe_adapters(hf_model)
    if is_converted(settings, hf_model):
        logger.warning("no adapter folder: PEFT takes adapters of %s for those of experts", hf_model.config.model_type)
        return
    folder.mkdir()
    listed = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.to_dict().items()}
    content = json.dumps(listed, indent=2, sort_keys=True) + "\n"  # in a fixed order: manifests list its digest
    (folder / "adapter_config.json").write_text(content, encoding="utf-8")
    named = {PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."): tensor.contiguous() for name, tensor in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def describe_adapters(hf_model: PreTrainedModel) -> LoraConfig:
    """PEFT's settings of the adapters that `lora.add_adapters` put into a model."""
    from peft import LoraConfig

    layers = adapted_layers(hf_model)
    first = next(iter(layers.values()))
    return LoraConfig(
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=hf_model.name_or_path,
        r=first.r[ADAPTER],
        lora_alpha=first.lora_alpha[ADAPTER],
        lora_dropout=getattr(first.lora_dropout[ADAPTER], "p", 0.0),
        target_modules=sorted(layers),
        fan_in_fan_out=isinstance(first.get_base_layer(), Conv1D),
    )


def is_converted(settings: LoraConfig, hf_model: PreTrainedModel) -> bool:
    """Whether PEFT would load the adapters of a model into other layers."""
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # older versions leave settings as they are
        return False
    converted = deepcopy(settings)
    try:
        conversion.convert_peft_config_for_transformers(
            converted, model=hf_model, conversions=conversion.get_model_conversion_mapping(hf_model)
        )
    except ValueError:  # only some of the layers that it would fuse have adapters
        return True
    return set(converted.target_modules or ()) != set(settings.target_modules or ())
