"""Write and read the files of a training checkpoint. The content of the files does not depend on the number of
processes.

Not here: the checkpoint's directory and manifest (`checkpoint.py`).

    trainer/state.json             schedule, counters, random state of Python and numpy, state of the training loop
    trainer/tensors.safetensors    optimizer (`<parameter>/<quantity>`), `weight/<parameter>`, random state (`rng/...`)
    trainer/served.safetensors     only in RL: the weights that the engines served, if older than the policy's
    adapter/                       a second copy of the adapters in PEFT's format
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
"""Key in the training loop's state for the path of the file that becomes `SERVED_WEIGHTS`."""
ADAPTER_FOLDER = "adapter"
POLICY_PREFIX = "hf_model."
"""Prefix of parameter names in a policy for parameters of its Hugging Face model."""
REDUCED = ("bfloat16", "float16")
"""Dtypes in a config.json that are replaced by float32, because checkpoints have float32 weights."""
HF_KEY = "hf/"
"""Name prefix of tensors that go into the checkpoint's Hugging Face files."""
WEIGHT_KEY = "weight/"
"""Name prefix of weights that are not in the Hugging Face files: adapters and value head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTraining:
    """The content of a checkpoint besides the weights in its Hugging Face files."""

    own_weights: dict[str, Tensor]
    """Adapters and value head, as returned by the function `own_weights`."""
    moments: dict[str, Tensor]
    """State of the optimizer, as returned by `optim.optimizer_tensors`."""
    random_tensors: dict[str, Tensor]
    """Random state of torch, as returned by `random_state.get_random_tensors`."""
    trainer: dict[str, Any]  # Any: JSON
    """Keys: `scheduler`, `num_optim_steps`, `random`, and `loop` for the state of the training loop."""


class SavesPretrained(Protocol):
    """An object that writes a model's Hugging Face files: a transformers model, or `jax.ModelFiles`."""

    def save_pretrained(self, save_directory: Path, *, state_dict: dict[str, Tensor]) -> object:
        """Write config.json, and the weights in `state_dict`."""
        ...


def write_model_config(path: Path, model: PreTrainedModel) -> None:
    """Write the config.json that `save_pretrained` would write."""
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 renames the class of a sharded model
    config.to_json_file(path)
    state_float32(path)


def own_weights(policy: Policy) -> dict[str, Tensor]:
    """The weights of a policy that are not in the Hugging Face files: adapters and value head."""
    named = policy.named_parameters()
    return {name: p for name, p in named if is_adapter_weight(name) or name.startswith("value_head.")}


def checkpoint_weights(hf_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights for the Hugging Face files as float32, with merged adapters. Names begin with `HF_KEY`.

    With bfloat16, rounding would lose small changes by adapters. Frozen bfloat16 weights are written as float32 too, so
    that all weights have the dtype that config.json names.
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
        tensors: tensors in host memory. `HF_KEY` plus a Hugging Face name marks a weight for the Hugging Face files.
    """
    hf_weights = {name.removeprefix(HF_KEY): t for name, t in tensors.items() if name.startswith(HF_KEY)}
    others = {name: t for name, t in tensors.items() if not name.startswith(HF_KEY)}
    with new_checkpoint(
        path,
        step=int(state["step"]),
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
        # safetensors creates files that only their owner can read. Give these files the mode of the other files.
        usual = stat.S_IMODE((directory / TRAINER_STATE).stat().st_mode)
        for weights in directory.rglob("*.safetensors"):
            weights.chmod(usual)


def state_float32(config: Path) -> None:
    """Set the dtype of the weights in a config.json to float32, also in nested configurations.

    transformers writes the dtype of the model in training. With adapters, this is the dtype of the frozen weights.
    """

    def stated(settings: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        parts = {name: stated(value) for name, value in settings.items() if isinstance(value, dict)}
        return {**settings, **parts, **({"dtype": "float32"} if settings.get("dtype") in REDUCED else {})}

    settings = json.loads(config.read_text(encoding="utf-8"))
    if (changed := stated(settings)) != settings:
        config.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def write_ends_of_turn(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the tokens that end a turn in the chat template to the end tokens in generation_config.json.

    The end token of a base model is often not in the chat template. With the base model's settings, an engine would not
    stop after an answer. If generation_config.json exists, engines ignore the end tokens in config.json.
    """
    files = [directory / name for name in ("generation_config.json", "config.json")]
    settings = [json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {} for file in files]
    given: Any = next((each["eos_token_id"] for each in settings if each.get("eos_token_id") is not None), [])  # JSON
    known = given if isinstance(given, list) else [given]
    ends = list(dict.fromkeys([*known, *stop_token_ids(tokenizer)]))
    if ends != known or (settings[0] and settings[0].get("eos_token_id") is None):
        files[0].write_text(json.dumps({**settings[0], "eos_token_id": ends}, indent=2) + "\n", encoding="utf-8")


def read_training_checkpoint(path: Path) -> SavedTraining:
    """Read the training state in a checkpoint: everything except the weights in its Hugging Face files.

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
    """Read the weights in a checkpoint's Hugging Face files, by their names in `model`. Tied weights appear once.

    The model's own class reads the weights, because some classes save weights in another form than they keep in memory.
    Code inside the checkpoint is not run.

    Raises:
        CheckpointError: the weights belong to another model.
    """
    try:
        saved, loading = type(model).from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"the weights in {path} do not fit a {type(model).__name__}: {first_line(error)}"
        ) from error
    if missing := sorted(loading["missing_keys"]):
        raise CheckpointError(
            f"the weights in {path} are of another model: they lack {len(missing)} tensors of a "
            f"{type(model).__name__} (first: {missing[0]})"
        )
    return base_weights(saved)


def check_named_tensors(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if names or shapes of `values` differ from those of the model's own weights."""
    if values.keys() != own.keys():
        raise CheckpointError(f"the weights are of another model: {sorted(values.keys() ^ own.keys())[:3]}")
    for name, value in values.items():
        if value.shape != own[name].shape:
            raise CheckpointError(f"{name} has shape {tuple(value.shape)}, expected {tuple(own[name].shape)}")
