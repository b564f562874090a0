"""Decide whether engines get adapters unmerged, and remember where the frozen weights were published.

Not here: publishing (weight_sync.py), asking an engine which adapters it takes (sglang.py, vllm.py).

    "beside"   the published version has adapters as tensors; the weights are sent once             the embedded engine
    "folder"   requests name a folder of adapters in PEFT's form; the weights are sent once         SGLang, vLLM
    ""         adapters are merged into the weights; the weights are sent at each publication       all engines
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from safetensors.torch import save_file
from torch import Tensor

from rollouts_core.embedded.adapters import DOWN, largest_rank, merge_published
from rollouts_core.embedded.weights import read_tensors
from rollouts_core.engine_kinds.spec import AdapterForm
from rollouts_core.engines.transfer.checksums import read_config
from rollouts_core.system.concurrency import gather
from rollouts_core.system.files import new_directory

logger = logging.getLogger(__name__)


PEFT_PREFIX = "base_model.model."
"""PEFT's prefix for the names of a model's layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedWeights:
    """One published version: a folder of adapters, and the directory of the frozen weights."""

    version: str
    """Name of the version. Requests name the adapter by it."""
    folder: Path
    """Folder of the adapters in PEFT's format."""
    adapters: Mapping[str, Tensor]
    """The tensors of the adapters in host memory."""
    model_dir: Path
    """The directory of the frozen weights."""
    base_version: str
    """The version of the frozen weights without adapters."""

    def write(self, directory: Path) -> None:
        """Make `directory` a model directory that holds the weights with merged adapters."""
        save_file(merge_published({**read_tensors(self.model_dir), **self.adapters}), directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(read_config(self.model_dir)), encoding="utf-8")


def write_scaled_folder(folder: Path, adapters: Mapping[str, Tensor]) -> None:
    """Write published adapters in PEFT's form. The matrices B contain the scale, so the settings have alpha = rank."""
    rank = largest_rank(adapters)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": sorted({name.removesuffix(DOWN).rpartition(".")[2] for name in adapters if DOWN in name}),
    }
    with new_directory(folder) as directory:
        named = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in adapters.items()}
        save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that may take adapters without merging them into the weights."""

    async def adapter_form(self, rank: int) -> AdapterForm:
        """The form in which the server takes adapters of this rank, or empty if the server takes none or is
        unreachable."""
        ...


async def common_form(engines: Sequence[object], rank: int) -> AdapterForm:
    """The form in which all engines take adapters of this rank, or empty if an engine takes none, or the engines
    differ."""
    known = [engine for engine in engines if isinstance(engine, TakesAdapters)]
    forms = set(await gather([partial(engine.adapter_form, rank) for engine in known]))
    return forms.pop() if len(forms) == 1 and len(known) == len(engines) else ""


@dataclass(slots=True, kw_only=True)
class PublishedBase:
    """Remembers where the frozen weights of the published adapters were published."""

    place: object = None
    """Identifies the published copy of the frozen weights, for example by its path, or None if the next publication of
    adapters must include the frozen weights."""
    form: AdapterForm | None = None
    """The form in which adapters were last published, or None before the first publication."""

    def note_form(self, form: AdapterForm, *, num_bytes: int) -> None:
        """Log the form in which adapters are sent, at the first publication and after each change."""
        if form == self.form:
            return
        self.form = form
        if form:
            logger.info("adapters are sent as adapters: %.3g MB in each publication", num_bytes / 1e6)
        else:
            logger.info("adapters are merged into the weights for the engines, which take no adapters")
