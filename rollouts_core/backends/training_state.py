"""The content of a checkpoint, written and read by backends with any number of processes.

The directory and its manifest: `checkpoint.py`.

    trainer/state.json             schedule, counters, random state of Python and numpy, the loop's state
    trainer/tensors.safetensors    `<parameter>/<quantity>` of the optimizer, `weight/<parameter>`, `rng/...`
    trainer/served.safetensors     RL between two publications: the weights that the engines serve
    adapter/                       a second copy of the adapters, for PEFT
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollouts_core.backends.protocol import TrainingState
from rollouts_core.backends.random_state import is_random_state
from rollouts_core.checkpoint import new_checkpoint, verify_checkpoint
from rollouts_core.config.messages import first_line
from rollouts_core.data.chat import stop_token_ids
from rollouts_core.errors import CheckpointError
from rollouts_core.model.adapter_folder import write_adapter_folder
from rollouts_core.model.lora import base_weights, is_adapter_weight, merge_each
from rollouts_core.system.files import link_or_copy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollouts_core.model.policy import Policy

TRAINER_STATE = "trainer/state.json"
TRAINER_TENSORS = "trainer/tensors.safetensors"
SERVED_WEIGHTS = "trainer/served.safetensors"
SERVED_FILE = "served_file"
"""Key in the loop's state for the file that becomes `SERVED_WEIGHTS`."""
ADAPTER_FOLDER = "adapter"
POLICY_PREFIX = "hf_model."
"""A policy's prefix for the names of its Hugging Face model."""
REDUCED = ("bfloat16", "float16")
"""Number formats that a config.json may name although the weights are saved as float32."""
HF_KEY = "hf/"
"""Prefix of tensors for the Hugging Face files."""
WEIGHT_KEY = "weight/"
"""Prefix of weights that have no place in the Hugging Face files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTraining:
    """A checkpoint's content besides the weights of its Hugging Face files."""

    own_weights: dict[str, Tensor]
    """Tensors of `own_weights`."""
    moments: dict[str, Tensor]
    """Tensors of `optim.optimizer_tensors`."""
    random_tensors: dict[str, Tensor]
    """Tensors of `random_state.get_random_tensors`."""
    trainer: dict[str, Any]  # Any: JSON
    """`scheduler`, `num_optim_steps`, `random`, and the loop's state as `loop`."""


class SavesPretrained(Protocol):
    """Writes a model's Hugging Face files: a transformers model, or a replacement."""

    def save_pretrained(self, save_directory: Path, *, state_dict: dict[str, Tensor]) -> object:
        """Write config.json and the weights in `state_dict`."""
        ...


def write_model_config(path: Path, model: PreTrainedModel) -> None:
    """Write the model's configuration as `save_pretrained` does, without weights."""
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 renames the class of a spread model
    config.to_json_file(path)
    state_float32(path)


def own_weights(policy: Policy) -> dict[str, Tensor]:
    """The weights without a place in the Hugging Face files: adapters and value head."""
    named = policy.named_parameters()
    return {name: p for name, p in named if is_adapter_weight(name) or name.startswith("value_head.")}


def checkpoint_weights(hf_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights for the Hugging Face files under `HF_KEY`, one after another, adapters merged in, as float32.

    bfloat16 would round small adapter changes away. Frozen bfloat16 weights lose nothing as float32, and with one
    number format in all files a model loads as its config.json says.
    """
    for name, tensor in merge_each(hf_model):
        yield HF_KEY + name, tensor.float() if tensor.is_floating_point() else tensor


def write_training_checkpoint(
    path: Path,
    state: TrainingState,
    trainer: str,
    tensors: Mapping[str, Tensor],
    *,
    model: SavesPretrained,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write a checkpoint that engines can load and that training can resume.

    Args:
        trainer: content of trainer/state.json.
        tensors: in host memory; names with `HF_KEY` are the weights by Hugging Face name.
    """
    hf_weights = {name.removeprefix(HF_KEY): t for name, t in tensors.items() if name.startswith(HF_KEY)}
    others = {name: t for name, t in tensors.items() if not name.startswith(HF_KEY)}
    with new_checkpoint(
        path,
        step=int(state["step"]),
        score=state.get("score"),
        settings=state.get("settings"),
        is_early=state.get("is_early", False),
    ) as directory:
        model.save_pretrained(directory, state_dict=hf_weights)
        state_float32(directory / "config.json")
        tokenizer.save_pretrained(directory)
        write_ends_of_turn(directory, tokenizer)
        (directory / "trainer").mkdir()
        (directory / TRAINER_STATE).write_text(trainer, encoding="utf-8")
        save_file(others, directory / TRAINER_TENSORS)
        if served := state.get(SERVED_FILE):
            link_or_copy(Path(served), directory / SERVED_WEIGHTS)
        own = {name: t for name, t in others.items() if name.startswith(WEIGHT_KEY) and is_adapter_weight(name)}
        if adapters := {name.removeprefix(WEIGHT_KEY + POLICY_PREFIX): tensor for name, tensor in own.items()}:
            assert isinstance(model, PreTrainedModel), "only transformers models have adapters"
            write_adapter_folder(directory / ADAPTER_FOLDER, model, adapters)
        # safetensors makes files private to their owner; give them the mode of the other files.
        usual = stat.S_IMODE((directory / TRAINER_STATE).stat().st_mode)
        for weights in directory.rglob("*.safetensors"):
            weights.chmod(usual)


def state_float32(config: Path) -> None:
    """Set float32 as the weights' dtype in a config.json, including nested settings.

    transformers writes the training model's dtype, which with adapters is the dtype of the frozen weights.
    """

    def stated(settings: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        parts = {name: stated(value) for name, value in settings.items() if isinstance(value, dict)}
        return {**settings, **parts, **({"dtype": "float32"} if settings.get("dtype") in REDUCED else {})}

    settings = json.loads(config.read_text(encoding="utf-8"))
    if (changed := stated(settings)) != settings:
        config.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def write_ends_of_turn(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the turn ends of the chat template to the end tokens in the model's generation settings.

    A base model often ends sequences with a token that no template writes. With the base model's settings, an engine
    would generate on after each answer. If generation_config.json exists, engines ignore the end tokens in config.json.
    """
    files = [directory / name for name in ("generation_config.json", "config.json")]
    settings = [json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {} for file in files]
    given: Any = next((each["eos_token_id"] for each in settings if each.get("eos_token_id") is not None), [])  # JSON
    known = given if isinstance(given, list) else [given]
    ends = list(dict.fromkeys([*known, *stop_token_ids(tokenizer)]))
    if ends != known or (settings[0] and settings[0].get("eos_token_id") is None):
        files[0].write_text(json.dumps({**settings[0], "eos_token_id": ends}, indent=2) + "\n", encoding="utf-8")


def read_training_checkpoint(path: Path) -> SavedTraining:
    """Read what `write_training_checkpoint` wrote besides the Hugging Face files.

    Raises:
        CheckpointError: the checkpoint is damaged, or has no trainer state.
    """
    verify_checkpoint(path)
    if not (path / TRAINER_STATE).is_file():
        raise CheckpointError(f"{path} has no trainer state: training can start from it, but not resume")
    tensors = load_file(path / TRAINER_TENSORS)
    own = {name.removeprefix(WEIGHT_KEY): t for name, t in tensors.items() if name.startswith(WEIGHT_KEY)}
    random = {name: t for name, t in tensors.items() if is_random_state(name)}
    return SavedTraining(
        own_weights=own,
        moments={n: t for n, t in tensors.items() if n not in random and not n.startswith(WEIGHT_KEY)},
        random_tensors=random,
        trainer=json.loads((path / TRAINER_STATE).read_text(encoding="utf-8")),
    )


def read_hf_weights(path: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights in a checkpoint's Hugging Face files, by their names in `model`, tied weights once.

    The model's own class reads them: some classes load weights in another form than they save, and code inside a
    checkpoint is not run.

    Raises:
        CheckpointError: the weights belong to another model.
    """
    try:
        saved, loading = type(model).from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"the weights in {path} are not those of a {type(model).__name__}: {first_line(error)}"
        ) from error
    if missing := sorted(loading["missing_keys"]):
        raise CheckpointError(
            f"the weights in {path} are of another model: they lack {len(missing)} tensors of a "
            f"{type(model).__name__} (first: {missing[0]})"
        )
    return base_weights(saved)


def check_named_tensors(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if names or shapes differ."""
    if values.keys() != own.keys():
        raise CheckpointError(f"the weights are of another model: {sorted(values.keys() ^ own.keys())[:3]}")
    for name, value in values.items():
        if value.shape != own[name].shape:
            raise CheckpointError(f"{name} has shape {tuple(value.shape)}, expected {tuple(own[name].shape)}")
