"""Check a local model: its files are complete, its tokenizer fits, and its context length suffices."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from rollouts_core.backends.jax_architecture import load_jax_architecture
from rollouts_core.checks.resource_needs import PARALLEL_ARGUMENTS
from rollouts_core.config import Config, EngineConfig, ModelConfig
from rollouts_core.config.messages import first_line
from rollouts_core.embedded.architecture import load_architecture
from rollouts_core.embedded.weights import open_tensors
from rollouts_core.engine_kinds import ENGINES
from rollouts_core.engines.transfer.checksums import EMBEDDING, HEAD, check_can_be_untied, is_tied
from rollouts_core.errors import CheckpointError, ConfigError, DataError
from rollouts_core.findings import Caution
from rollouts_core.model.loading import (
    MODELS_OF_SHORT_ROWS,
    check_packable,
    check_settings,
    describe_own_head,
    find_other_shape,
    find_positions,
    find_rotation_limit,
    find_settings,
)
from rollouts_core.model.model_size import INDEX, WHOLE
from rollouts_core.model.pickled_weights import refuse_pickled_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

MODEL_FILES = {
    "configuration": ["config.json"],
    "tokenizer": ["tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken"],
}
"""Files that a model's folder must have besides weights. For each purpose, one of the patterns must match."""
DROPOUT = re.compile(r"(?<!classifier_)(?<!summary_first_)(?<!summary_last_)(dropout|_pdrop)")
"""Matches names of dropout settings in config.json, except dropout of a classification head."""
LFS_POINTER = b"version https://git-lfs"
"""First bytes of a Git LFS pointer. A clone without Git LFS has such a pointer in place of each weight file."""


def check_model_files(config: Config) -> None:
    """Check that the files of a local model are complete and readable.

    A hub name in `model.path` passes the check only if the run generates no completions, because engines need a folder.

    Raises:
        CheckpointError, ConfigError: the model's folder is missing, incomplete or unreadable.
    """
    folder = Path(config.model.path)
    is_generating = config.evaluation.metric == "accuracy"
    if folder.is_file():
        raise ConfigError(f"model.path: {folder} is a file: give the folder of a Hugging Face checkpoint")
    if not folder.is_dir():
        is_path = config.model.path.startswith(("/", ".", "~"))
        if is_generating or is_path:
            name = folder if len(folder.parts) > 1 else Path("ORGANISATION") / folder
            hub = "" if is_path else f"; to download it from the hub: hf download {name} --local-dir {folder}"
            raise ConfigError(
                f"model.path: {folder} is not a folder: give the folder of a Hugging Face checkpoint{hub}"
            )
        return
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"model.path: {folder} contains only adapters of PEFT, without the model: merge them into the model with "
            "merge_and_unload(), save model and tokenizer with save_pretrained(), and give that folder"
        )
    for what, patterns in MODEL_FILES.items():
        if not any(path for pattern in patterns for path in folder.glob(pattern)):
            raise CheckpointError(
                f"model.path: {folder} has no {what} ({' or '.join(patterns)}): give a complete checkpoint"
            )
    check_settings(config.model)
    _check_weights(folder, config)


def check_generable(config: Config) -> None:
    """Raise ConfigError if engines do not support the model, or if its context is too short for prompt and completion.

    The model's folder must be complete (`check_model_files`).
    """
    if config.evaluation.metric != "accuracy":
        return
    num_positions = count_positions(config)
    if config.is_graded:
        longest, engine = config.rollout.max_prompt_tokens, config.rollout.engine
        prompts = f"prompts of {longest} tokens (rollout.max_prompt_tokens)"
        check_positions(prompts, longest, num_positions, config, engine=engine)


def check_updatable(config: Config) -> None:
    """Raise CheckpointError if the engine of RL needs a separate output head, and the model's head cannot be untied.

    A tied head shares its weights with the embedding. The model's folder must be complete (`check_model_files`).
    """
    folder = Path(config.model.path)
    is_updated = config.samples_for_training
    if is_updated and config.rollout.engine.spec.needs_own_head and folder.is_dir() and is_tied(folder):
        check_can_be_untied(folder)


def check_shared_heads(config: Config) -> None:
    """Raise ConfigError if the model's attention heads cannot be divided evenly over the GPUs of one engine."""
    placement, engine = config.deployment, config.rollout.engine
    samples_for_rl = config.samples_for_training
    is_asked = not engine.spec.is_own and (samples_for_rl or not config.evaluation_engine.spec.is_own)
    is_divided_otherwise = any(sign in argument for argument in engine.extra_args for sign in PARALLEL_ARGUMENTS)
    num_gpus = len(placement.engine_gpu_ranks) // placement.num_engines
    settings = find_settings(config.model) if is_asked and num_gpus > 1 and not is_divided_otherwise else None
    text = None if settings is None else _find_text_settings(settings)
    num_heads = getattr(text, "num_attention_heads", None)
    if not isinstance(num_heads, int):
        return
    num_shared = getattr(text, "num_key_value_heads", None) or num_heads
    fitting = [
        num
        for num in range(1, num_heads + 1)
        if num_heads % num == 0 and (num_shared % num == 0 or num % num_shared == 0)
    ]
    if num_gpus not in fitting:
        raise ConfigError(
            f"deployment.engine_gpu_ranks: {num_gpus} GPUs of an engine cannot share the {num_heads} heads of the "
            f"model at {config.model.path} ({num_shared} key-value heads) evenly: use "
            f"{max(num for num in fitting if num < num_gpus)} GPUs per engine, or set deployment.num_engines"
        )


def _check_weights(folder: Path, config: Config) -> None:
    """Raise CheckpointError if weights are missing, damaged, or in a format that a stage of the run cannot read."""
    paths = sorted(folder.glob("*.safetensors"))
    holders: dict[str, Path] = {}
    shapes: dict[str, list[int]] = {}
    for path in paths:
        if not os.access(path, os.R_OK):
            raise CheckpointError(f"model.path: {path} cannot be read (Permission denied)")
        try:
            with open_tensors(path) as tensors:
                found = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(_say_damaged(path, error)) from error
        shapes |= found
        holders |= {name: path for name in (HEAD, EMBEDDING) if name in found}
    _check_shards(folder)
    if problem := find_other_shape(config.model, shapes):
        raise CheckpointError(f"model.path: {problem}")
    if len(holders) == 2 and (settings := find_settings(config.model)) is not None:
        _check_tied_head(folder, holders, settings)
    if paths:
        return
    if not config.model.allow_pickle:
        refuse_pickled_weights(folder)
    if not any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(f"model.path: {folder} has no weights (*.safetensors): give a complete checkpoint")
    if config.evaluation.metric == "accuracy" and config.evaluation_engine.spec.is_own:
        raise CheckpointError(
            f"model.path: the weights at {folder} are pickled, which the embedded engine does not read: convert them "
            "to safetensors"
        )
    if jax := _stages_of_jax(config):
        raise CheckpointError(
            f'model.path: the weights at {folder} are pickled, which {jax[0]}.policy.backend "jax" does not read: '
            'convert them to safetensors, or set backend = "pytorch"'
        )


def _check_tied_head(folder: Path, holders: Mapping[str, Path], settings: PreTrainedConfig) -> None:
    """Raise CheckpointError if config.json ties head and embedding, but the two tensors in the files differ.

    Args:
        holders: the files of the two tensors, by tensor name.
    """
    if not getattr(settings.get_text_config(), "tie_word_embeddings", False):
        return
    tensors = []
    for name, path in holders.items():
        with open_tensors(path) as file:
            tensors.append(file.get_tensor(name))
    if not tensors[0].equal(tensors[1]):
        raise CheckpointError(f"model.path: {describe_own_head(str(folder))}")


def _stages_of_jax(config: Config) -> list[str]:
    """The names of the sections `training.sft` and `training.rl` whose training uses JAX."""
    return [f"training.{name}" for name, each in config.trainings.items() if each.policy.backend == "jax"]


def _check_shards(folder: Path) -> None:
    """Raise CheckpointError if a weight file in the index is missing, for example after an interrupted download."""
    index = folder / INDEX
    if (folder / WHOLE).is_file() or not index.is_file():  # loaders ignore the index if the single weight file exists
        return
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read ({first_line(error)}): copy it again") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"model.path: {folder} lacks {missing[0]}{more} of the {len(names)} weight files listed in {INDEX}: "
            "download or copy the model again"
        )


def _say_damaged(path: Path, error: OSError | SafetensorError) -> str:
    if path.is_file():
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        if is_pointer:
            return (
                f"{path} is a Git LFS pointer instead of the weights: download them with `git lfs pull` in its folder"
            )
    return f"{path} is truncated or damaged ({first_line(error)}): copy it again"


def check_jax_model(config: Config) -> None:
    """Check that a training with JAX is possible.

    Raises:
        CheckpointError: the JAX backend does not support the model.
        ConfigError: the trainer has several processes. JAX supports only one.
    """
    if not (jax := _stages_of_jax(config)):
        return
    placement = config.deployment
    if placement.num_trainer_processes > 1:
        setting = "trainer_processes" if placement.trainer_processes else "trainer_gpu_ranks"
        raise ConfigError(
            f'deployment.{setting}: {jax[0]}.policy.backend "jax" trains in one process, found '
            f'{placement.num_trainer_processes}: use one GPU, or set backend = "pytorch"'
        )
    load_jax_architecture(config.model)


def check_language_model(config: Config) -> list[Caution]:
    """Warn if the model is multimodal, because only its language model is trained.

    Raises:
        ConfigError: transformers cannot load the model as a language model.
    """
    settings = find_settings(config.model)
    if settings is None or (config.model.trust_remote_code and getattr(settings, "auto_map", None)):
        return []
    text = _find_text_settings(settings)
    if text is None or type(settings) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"model.path: {config.model.path} is a {settings.model_type} model, which transformers cannot load as a "
            "language model (AutoModelForCausalLM): use a model of a supported type"
        )
    has_parts = text is not settings
    if not has_parts or MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)].config_class is type(settings):
        return []
    return [
        Caution(
            f"model.path: only the language model inside the {settings.model_type} model at {config.model.path} is "
            "trained. Checkpoints contain only this part, so they cannot read images"
        )
    ]


def _find_text_settings(settings: PreTrainedConfig) -> PreTrainedConfig | None:
    """The configuration of the language model inside a model; None if several parts of the model process text, as in
    MusicGen."""
    try:
        text: PreTrainedConfig = settings.get_text_config()
    except ValueError:
        return None
    return text


def check_packing(config: Config) -> None:
    """Raise ConfigError for packing (samples that share rows) if the model would mix the samples, or has too few
    positions."""
    given = [f"training.{name}.packing" for name, each in config.trainings.items() if each.packing]
    if given and (settings := find_settings(config.model)) is not None:
        check_packable(settings, setting=" and ".join(given))
        if config.is_graded:
            shares_prompts = config.training.rl.shares_prompts
            check_packable(settings, setting="training.rl.packing", shares_prompts=shares_prompts)
        if config.reads("sft") and config.training.sft.packing and settings.model_type in MODELS_OF_SHORT_ROWS:
            _check_row_length(config)


def _check_row_length(config: Config) -> None:
    """Raise ConfigError if packed rows of SFT are longer than the model's number of positions.

    RL needs no check, because its packed rows are not longer than the longest sample.
    """
    positions, max_length = find_positions(config.model), config.training.sft.max_length
    if positions is not None and max_length - 1 > positions.num:
        raise ConfigError(
            f"training.sft.max_length: packed rows of {max_length} tokens need {max_length - 1} positions, but the "
            f"model at {config.model.path} has {positions.num}: set it to {positions.num + 1} or less"
        )


def count_positions(config: Config) -> int | None:
    """The model's number of positions, or None if config.json does not limit them.

    Raises:
        CheckpointError: the embedded engine evaluates the model, but does not support it.
    """
    folder = Path(config.model.path)
    if config.evaluation_engine.spec.is_own:
        installed = " and ".join(f'"{name}"' for name, each in ENGINES.items() if not each.is_own)
        others = f"rollout.engine.kind {installed} support other models"
        loss = ', and evaluation.metric = "loss" compares any model' if not config.is_graded else ""
        is_chosen = not config.rollout.engine.spec.is_own
        return load_architecture(
            folder,
            runner="evaluation by the embedded engine",
            remedy='remove evaluation.engine = "embedded"' if is_chosen else others + loss,
        ).max_context_length
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    return next(filter(None, (read_model_number(folder, name) for name in names)), None)


def check_positions(
    prompts: str, num_prompt_tokens: int, num_positions: int | None, config: Config, *, engine: EngineConfig
) -> None:
    """Raise ConfigError if prompts of this length with their completions exceed the model's number of positions.

    Args:
        num_positions: the model's number of positions; None if unlimited or unknown.
        engine: the engine that completes the prompts.
    """
    max_new_tokens = config.rollout.sampling.max_new_tokens
    needed = num_prompt_tokens + max_new_tokens + engine.spec.reserved_tokens
    if num_positions is not None and needed > num_positions:
        raise ConfigError(
            f"{prompts} with completions of {max_new_tokens} (rollout.sampling.max_new_tokens) need {needed} "
            f"positions, but the model at {config.model.path} has {num_positions}: lower one of the lengths"
        )


def warn_of_dropout(config: Config) -> list[Caution]:
    """Warn of dropout in RL. Engines have no dropout, so its effect on log-probs looks like a change of the weights."""
    if not config.is_graded:
        return []
    consequence = (
        "but engines do not, so the loss treats the difference in log-probs as a change of the weights, and clips it"
    )
    found: list[Caution] = []
    lora = config.training.rl.policy.lora
    if lora.rank and lora.dropout:
        dropped = f"training.rl.policy.lora.dropout {lora.dropout:g} drops inputs of adapters while they are trained"
        found.append(Caution(f"{dropped}, {consequence}: leave it out"))
    settings = find_settings(config.model)
    if settings is None:
        return found
    values = settings.get_text_config().to_dict()
    shares = {name: value for name, value in values.items() if DROPOUT.search(name) and isinstance(value, float)}
    named = ", ".join(f"{name} {value:g}" for name, value in shares.items() if value > 0)
    if named:
        dropped = f"training.rl: the model at {config.model.path} drops activations while it is trained ({named} in its"
        found.append(Caution(f"{dropped} config.json), {consequence}: set these to 0 there"))
    return found


def check_longest(source: str, num_tokens: int, model: ModelConfig) -> list[Caution]:
    """Warn if the longest demonstration exceeds the context length of the model.

    Raises:
        ConfigError: the model cannot compute as many positions as the demonstration needs.
    """
    positions, num_needed = find_positions(model), num_tokens - 1  # the last token is not an input
    if positions is None or num_needed <= positions.num:
        limit = find_rotation_limit(model)
        remedy = f"set training.sft.max_length to {(limit or 0) + 1} or less"
        return _warn_of_rotation(f"{source}: a demonstration of {num_tokens} tokens", num_needed, limit, model, remedy)
    longest = (
        f"{source}: a demonstration of {num_tokens} tokens needs {num_needed} positions, but the model at {model.path}"
    )
    remedy = f"set training.sft.max_length to {positions.num + 1} or less"
    if positions.are_all:
        raise ConfigError(f"{longest} has {positions.num}: {remedy}")
    return [Caution(f"{longest} was made for {positions.num}: tokens beyond that teach it little; {remedy}")]


def warn_of_long_completions(config: Config) -> list[Caution]:
    """Warn if long completions would change the log-probs of shorter completions in the same micro-batch.

    Only models with longrope do this: they use longer rotation factors for a whole batch if one row is long.
    """
    if not config.is_graded:
        return []
    num_tokens = config.rollout.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    what = f"training.rl: prompts and completions of {num_tokens} tokens"
    remedy = "lower rollout.max_prompt_tokens or rollout.sampling.max_new_tokens"
    return _warn_of_rotation(what, num_tokens - 1, find_rotation_limit(config.model), config.model, remedy)


def _warn_of_rotation(what: str, num_needed: int, limit: int | None, model: ModelConfig, remedy: str) -> list[Caution]:
    if limit is None or num_needed <= limit:
        return []
    return [
        Caution(
            f"{what} exceed the {limit} positions up to which the model at {model.path} uses its short rotation "
            "factors (longrope). Shorter texts in the same micro-batch then also get the long factors, which changes "
            f"their log-probs: {remedy}"
        )
    ]


def check_model_vocabulary(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a local model has an embedding for each token of its tokenizer, and for its padding token.

    Raises:
        DataError: the tokenizer has more tokens than the model has embeddings.
        CheckpointError: the id of the padding token has no embedding.
    """
    vocab_size, folder = num_embedded_tokens(model), Path(model.path)
    padding = read_model_number(folder, "pad_token_id")
    if vocab_size is not None and padding is not None and padding >= vocab_size:
        raise CheckpointError(
            f"model.path: pad_token_id in {folder / 'config.json'} is {padding}, but the model embeds {vocab_size} "
            "tokens: set it to the pad token of the tokenizer, or to null"
        )
    if vocab_size is not None and vocab_size < len(tokenizer):
        raise DataError(
            f"the tokenizer at {model.path} has {len(tokenizer)} tokens, but the model has only {vocab_size} "
            "embeddings: use the tokenizer that belongs to the model"
        )


def num_embedded_tokens(model: ModelConfig) -> int | None:
    """The number of token embeddings of a local model. None if unknown, as for a model on a hub."""
    return read_model_number(Path(model.path), "vocab_size")


def read_model_number(folder: Path, name: str) -> int | None:
    """A number in a model's config.json or in its section `text_config`. None if the number is missing.

    Raises:
        CheckpointError: the file cannot be read.
    """
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        number = {**settings, **settings.get("text_config", {})}.get(name)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a model's configuration ({first_line(error)}): copy it again") from error
    return number if isinstance(number, int) else None
