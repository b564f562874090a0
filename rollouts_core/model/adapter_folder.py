"""Write a model's LoRA adapters as a folder that PEFT can load.

adapter/adapter_config.json           rank, scale, full names of the adapted layers, name of the start model
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
"""Prefix that PEFT adds to the names of a model's layers."""


def write_adapter_folder(folder: Path, hf_model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Write the adapters into `folder`, for `peft.PeftModel.from_pretrained(base, folder)`.

    Writes nothing, with a warning, if PEFT would load the adapters into other layers. In some mixture-of-experts
    models, PEFT maps layers with an expert's name (such as a shared expert) to the fused experts of transformers 5.

    Args:
        hf_model: the model with its adapters.
        weights: the adapters' weights by their names in `hf_model`, in host memory.
    """
    settings = describe_adapters(hf_model)
    if is_converted(settings, hf_model):
        logger.warning(
            "wrote no adapter folder: PEFT would load the adapters of this %s model into other layers (fused experts)",
            hf_model.config.model_type,
        )
        return
    folder.mkdir()
    listed = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.to_dict().items()}
    # sorted keys, so that equal settings give an equal digest in the manifest
    content = json.dumps(listed, indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(content, encoding="utf-8")
    named = {PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."): tensor.contiguous() for name, tensor in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def describe_adapters(hf_model: PreTrainedModel) -> LoraConfig:
    """PEFT's settings for the adapters that `lora.add_adapters` added to the model."""
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
    """True if PEFT would load the adapters into layers other than those from which they were saved."""
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # older versions of PEFT do not map layers
        return False
    converted = deepcopy(settings)
    try:
        conversion.convert_peft_config_for_transformers(
            converted, model=hf_model, conversions=conversion.get_model_conversion_mapping(hf_model)
        )
    except ValueError:  # PEFT would fuse layers of which only some have adapters
        return True
    return set(converted.target_modules or ()) != set(settings.target_modules or ())
