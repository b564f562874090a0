"""What a backend puts into a checkpoint and takes out of it, with any number of processes.

Not here: the directory and its manifest (checkpoint.py), gathering what is spread over processes (fsdp.py).

    trainer/state.json             schedule, counters, random state of Python and numpy, the loop's state
    trainer/tensors.safetensors    `<parameter>/<quantity>` of the optimizer, `weight/<parameter>`, `rng/...`
    trainer/served.safetensors     RL between two publications: the weights that the engines serve
    adapter/                       the adapters once more, as PEFT loads them
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
"""What the loop's state calls the file that becomes `SERVED_WEIGHTS`."""
ADAPTER_FOLDER = "adapter"
POLICY_PREFIX = "hf_model."
"""Prefix of a policy before the names of its Hugging Face model."""
REDUCED = ("bfloat16", "float16")
"""Number formats that a config.json may name for weights that are saved as float32."""
HF_KEY = "hf/"
"""Marks the tensors of a snapshot that go into the Hugging Face files."""
WEIGHT_KEY = "weight/"
"""Marks weights that the Hugging Face files have no place for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTraining:
    """What a checkpoint says beside the weights of its Hugging Face files."""

    own_weights: dict[str, Tensor]
    """Those of `own_weights`."""
    moments: dict[str, Tensor]
    """Those of `optim.optimizer_tensors`."""
    random_tensors: dict[str, Tensor]
    """Those of `random_state.get_random_tensors`."""
    trainer: dict[str, Any]  # Any: JSON
    """`scheduler`, `num_optim_steps`, `random`, and the loop's state as `loop`."""


class SavesPretrained(Protocol):
    """What writes a model's Hugging Face files: a transformers model, or what stands for one."""

    def save_pretrained(self, save_directory: Path, *, state_dict: dict[str, Tensor]) -> object:
        """Write config.json and the weights in `state_dict`."""
        ...


def write_model_config(path: Path, model: PreTrainedModel) -> None:
    """The model's configuration as `save_pretrained` writes it, without the weights."""
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # the class of a model that is spread out
    config.to_json_file(path)
    state_float32(path)


def own_weights(policy: Policy) -> dict[str, Tensor]:
    """The weights that the Hugging Face files have no place for: adapters and value head."""
    named = policy.named_parameters()
    return {name: p for name, p in named if is_adapter_weight(name) or name.startswith("value_head.")}


def checkpoint_weights(hf_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights for the Hugging Face files under `HF_KEY`, one after another, adapters merged in: all float32.

    bfloat16 would round what adapters add away. Frozen weights in bfloat16 lose nothing as float32, and a model whose
    files have one number format loads as what its config.json says.
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
    """Write a directory that engines load as it is and that training resumes from.

    Args:
        trainer: content of trainer/state.json.
        tensors: in host memory; those under `HF_KEY` are the weights by their Hugging Face names.
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
            assert isinstance(model, PreTrainedModel), "a model in place of which files stand has no adapters"
            write_adapter_folder(directory / ADAPTER_FOLDER, model, adapters)
        # safetensors writes for the owner alone, and copies that others shall read keep the mode of the file.
        usual = stat.S_IMODE((directory / TRAINER_STATE).stat().st_mode)
        for weights in directory.rglob("*.safetensors"):
            weights.chmod(usual)


def state_float32(config: Path) -> None:
    """Have a config.json say that the weights are float32, also those of a part with settings of its own.

    transformers writes the number format of the model in training: with adapters that of the frozen weights.
    """

    def stated(settings: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        parts = {name: stated(value) for name, value in settings.items() if isinstance(value, dict)}
        return {**settings, **parts, **({"dtype": "float32"} if settings.get("dtype") in REDUCED else {})}

    settings = json.loads(config.read_text(encoding="utf-8"))
    if (changed := stated(settings)) != settings:
        config.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def write_ends_of_turn(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have whoever serves the model stop where its chat template ends a turn, beside where it stops anyway.

    A base model often ends sequences by a token that no template writes. Served with its settings, what was trained on
    conversations would go on behind its answers. Where there is a generation_config.json, it alone is asked.
    """
    files = [directory / name for name in ("generation_config.json", "config.json")]
    settings = [json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {} for file in files]
    given: Any = next((each["eos_token_id"] for each in settings if each.get("eos_token_id") is not None), [])  # JSON
    known = given if isinstance(given, list) else [given]
    ends = list(dict.fromkeys([*known, *stop_token_ids(tokenizer)]))
    if ends != known or (settings[0] and settings[0].get("eos_token_id") is None):
        files[0].write_text(json.dumps({**settings[0], "eos_token_id": ends}, indent=2) + "\n", encoding="utf-8")


def read_training_checkpoint(path: Path) -> SavedTraining:
    """What `write_training_checkpoint` wrote beside the Hugging Face files.

    Raises:
        CheckpointError: it is damaged, or can only be started from.
    """
    verify_checkpoint(path)
    if not (path / TRAINER_STATE).is_file():
        raise CheckpointError(f"{path} has no trainer state: it can be trained from, but not resumed")
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
    """The weights in the Hugging Face files of a checkpoint, by the names that `model` has for them, tied ones once.

    The model's own class reads them: some hold their weights in another form than they write, and code that lies in a
    checkpoint need not be trusted to read what it was trained to.

    Raises:
        CheckpointError: they are of another model.
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
            f"{type(model).__name__}, {missing[0]} first"
        )
    return base_weights(saved)


def check_named_tensors(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError when the values have other names or shapes."""
    if values.keys() != own.keys():
        raise CheckpointError(f"the weights are of another model: {sorted(values.keys() ^ own.keys())[:3]}")
    for name, value in values.items():
        if value.shape != own[name].shape:
            raise CheckpointError(f"{name} has shape {tuple(value.shape)}, expected {tuple(own[name].shape)}")
