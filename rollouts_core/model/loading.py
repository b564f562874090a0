"""Load a language model and its tokenizer, and check that training supports the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rollouts_core.config import ModelConfig
from rollouts_core.config.messages import first_line
from rollouts_core.data.rendering import with_template_values
from rollouts_core.errors import CheckpointError, ConfigError, DataError, DivergedError
from rollouts_core.model.logprobs import LogitTransform, transform_logits
from rollouts_core.model.pickled_weights import refuse_pickled_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

UNLOADABLE = (OSError, ValueError, KeyError)
"""Exceptions that transformers raises for missing files and unknown model types."""
BAD_SETTINGS = (StrictDataclassError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that transformers raises for a config.json with impossible values."""
LARGE_LOGIT = 100.0
"""A logit so large that every cap used by published models changes it."""
KERNELS_OF_FLOAT32 = ("sdpa", "eager")
"""Attention kernels that support float32 and all other dtypes."""
MASKED_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers in which a position reads exactly the positions that the mask allows."""
UNMASKED_MODELS = {"bloom", "openai-gpt", "rwkv", "xlstm"}
"""Model types that ignore attention masks inside a row. The config.json of these models does not show it."""
UNTOLD_MODELS = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "moshi", "mvp"),
    *("moss_transcribe_diarize", "musicgen", "musicgen_melody", "pegasus", "plbart", "prophetnet", "roformer"),
    *("trocr", "whisper", "xlnet"),
}
"""Model types that take no position ids and count positions along the row instead."""
MODELS_OF_ROW_DISTANCES = {"gpt_neo", "mpt"}
"""Model types that compute the distance between tokens from their places in the row, whatever their position ids.

The result is correct only if all tokens of a sample are adjacent in the row."""
MODELS_OF_SHORT_ROWS = {"big_bird", "gpt_neo", "mpt", "reformer"}
"""Model types that refuse rows longer than their number of positions, even if all position ids are small.

These models have a table that is indexed by the row length."""
GROWING_POSITIONS = ("rope", "rotary", "alibi", "mamba")
"""Prefixes of settings that show that a model has no fixed number of positions, or needs no positions."""


class Positions(NamedTuple):
    """The number of positions for which a model was trained."""

    num: int
    are_all: bool
    """True if longer sequences are impossible, because the model stores one vector per position in a table."""


def load_hf_model(
    config: ModelConfig, *, device: str = "cpu", dtype: torch.dtype = torch.float32, attention: str = "sdpa"
) -> PreTrainedModel:
    """Load the causal language model at `config.path` in training mode. Reads only safetensors unless `allow_pickle` is
    set.

    Args:
        device: device of the model. "meta" builds the model without weights.
        dtype: dtype of the weights.
        attention: name of the attention kernel in transformers. Models without sdpa use eager instead of sdpa.

    Raises:
        CheckpointError: the path has no loadable model.
        ConfigError: the attention kernel is not installed, or the model transforms its logits in an unknown way.
    """
    if device == "meta":
        return _build_without_values(config, dtype=dtype, attention=attention)
    if not config.allow_pickle:
        refuse_pickled_weights(Path(config.path))
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            config.path,
            revision=config.revision or None,
            dtype=dtype,
            attn_implementation=_asked_attention(attention),
            trust_remote_code=config.trust_remote_code,
            use_safetensors=None if config.allow_pickle else True,
            ignore_mismatched_sizes=True,  # a wrong shape is reported below in one sentence
            output_loading_info=True,
        )
    except ImportError as error:
        if attention in KERNELS_OF_FLOAT32:  # torch contains these kernels, so the model needs a missing package
            raise CheckpointError(_say_unloadable("model", config.path, error)) from error
        raise ConfigError(f"policy.attention {attention!r} cannot be used here: {first_line(error)}") from error
    except (*UNLOADABLE, *BAD_SETTINGS, SafetensorError, UnpicklingError) as error:
        raise CheckpointError(_say_unloadable("model", config.path, error)) from error
    if missing := sorted(loading["missing_keys"]):
        raise CheckpointError(f"the weights at {config.path} lack {len(missing)} tensors, for example {missing[0]}")
    for name, found, expected in sorted(loading["mismatched_keys"])[:1]:
        raise CheckpointError(describe_other_shape(config.path, name, found, expected))
    check_tied_head(model, config.path)
    placed = model.to(device)
    check_logits(placed)
    return placed.train()


def find_other_shape(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> str:
    """Compare tensor shapes in weight files with config.json. Returns a sentence about the first difference.

    Returns "" if the shapes agree or cannot be compared. Experts are skipped, because in some models transformers
    merges or transposes their tensors but keeps the names.

    Args:
        shapes: shapes of the tensors in the files, by name.
    """
    try:
        expected = {name: tensor.shape for name, tensor in load_hf_model(config, device="meta").state_dict().items()}
    except (CheckpointError, ConfigError, ImportError, RuntimeError, *UNLOADABLE, *BAD_SETTINGS):
        return ""
    for name in sorted(expected.keys() & shapes.keys()):
        if "expert" not in name and tuple(shapes[name]) != tuple(expected[name]):
            return describe_other_shape(config.path, name, shapes[name], expected[name])
    return ""


def describe_other_shape(path: str, name: str, found: Sequence[int], expected: Sequence[int]) -> str:
    """Sentence for an error: a tensor's shape in the weight files contradicts config.json."""
    return (
        f"the weights at {path} do not match its config.json: {name} has shape {tuple(found)}, expected "
        f"{tuple(expected)}"
    )


def check_tied_head(hf_model: PreTrainedModel, path: str) -> None:
    """Check that the weights have no output head of their own if config.json ties it to the embedding.

    transformers would train both tensors, but engines would use the embedding as output head.

    Raises:
        CheckpointError: the weights contain a different output head.
    """
    head, embedding = hf_model.get_output_embeddings(), hf_model.get_input_embeddings()
    is_tied = getattr(hf_model.config.get_text_config(), "tie_word_embeddings", False) and hf_model._tied_weights_keys
    if is_tied and head is not None and head.weight is not embedding.weight:
        raise CheckpointError(describe_own_head(path))


def describe_own_head(path: str) -> str:
    """Sentence for an error: the weights have an output head that config.json ties to the embedding."""
    return (
        f"the weights at {path} have an output head that differs from the embedding, but its config.json ties them: "
        "engines would ignore the head. Set tie_word_embeddings = false in config.json, or remove the head if it is "
        "unused"
    )


def count_gpus() -> int:
    """Number of GPUs on this machine that torch can use."""
    return torch.cuda.device_count()


def default_device() -> str:
    """Device for a model: "cuda" if torch can use a GPU, otherwise "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def find_logit_transform(hf_model: PreTrainedModel) -> LogitTransform:
    """How the model converts products of its output head to logits, read from settings that Cohere, Falcon-H1, Granite
    and Gemma have in config.json."""
    settings = hf_model.config.get_text_config()
    scale = (getattr(settings, "logit_scale", None) or 1.0) * (getattr(settings, "lm_head_multiplier", None) or 1.0)
    divisor = getattr(settings, "logits_scaling", None) or 1.0
    return LogitTransform(scale / divisor, getattr(settings, "final_logit_softcapping", None))


def check_attention(hf_model: PreTrainedModel) -> None:
    """Raise ConfigError if the attention kernel would ignore the model's cap on attention scores."""
    config = hf_model.config
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        raise ConfigError(
            f'policy.attention "sdpa" does not apply the cap on attention scores of {config.model_type} models: set '
            'policy.attention = "eager", or a flash attention kernel'
        )


@torch.no_grad()
def check_logits(hf_model: PreTrainedModel) -> None:
    """Check that the model computes its logits as `find_logit_transform` says.

    Log-probs are computed from hidden states and the output head (`logprobs.py`), so any other transformation would be
    missing. The check compares the model's logits for two tokens twice: first unchanged, then with products of the head
    so large that any cap changes them.

    Raises:
        ConfigError: the model has no output head, or transforms hidden states or logits in an unknown way.
        DivergedError: the model's output is NaN.
    """
    head = hf_model.get_output_embeddings()
    if head is None:
        raise _unknown_logits(hf_model, "it has no output head")
    if hf_model.base_model is hf_model:
        raise _unknown_logits(hf_model, "its class does not name the attribute with its decoder")
    if hf_model.config._attn_implementation not in KERNELS_OF_FLOAT32:
        return
    hf_model.eval()
    token_ids = torch.arange(2, device=hf_model.device)[None]
    hidden = hf_model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    products = head(hidden.to(head.weight.dtype)).float()  # Mamba keeps its hidden states in float32
    if products.isnan().any():
        raise DivergedError(describe_diverged(hf_model.name_or_path))
    largest = max(float(products.abs().max()), torch.finfo(torch.float32).tiny)
    for factor in (1.0, LARGE_LOGIT / largest):
        with _head_multiplied(head, factor):
            logits = hf_model(input_ids=token_ids, use_cache=False).logits.float()
        expected = transform_logits(products * factor, find_logit_transform(hf_model))
        tolerance = 1e-3 if hf_model.dtype == torch.float32 else 2e-2
        if not torch.allclose(expected, logits, rtol=tolerance, atol=0.1 * tolerance * float(logits.abs().max())):
            raise _unknown_logits(hf_model, "it transforms hidden states or logits in an unknown way")


def describe_diverged(path: str) -> str:
    """Sentence for an error: the weights give NaN or infinite results."""
    return (
        f"the weights at {path} give no finite numbers: they are damaged, or their training diverged; use another "
        "checkpoint"
    )


@contextmanager
def _head_multiplied(head: nn.Module, factor: float) -> Iterator[None]:
    """Context manager that multiplies the output of the head by `factor`."""
    hook = head.register_forward_hook(lambda module, inputs, products: products * factor)
    try:
        yield
    finally:
        hook.remove()


def _unknown_logits(hf_model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"{hf_model.config.model_type} models cannot be trained here: {reason}, so log-probs would be wrong"
    )


def find_settings(config: ModelConfig) -> PreTrainedConfig | None:
    """The model's config.json, or None if unreadable. A later load of the model reports the reason."""
    try:
        settings: PreTrainedConfig = AutoConfig.from_pretrained(
            config.path, revision=config.revision or None, trust_remote_code=config.trust_remote_code
        )
    except (ImportError, *UNLOADABLE, *BAD_SETTINGS):
        return None
    return settings


def check_settings(config: ModelConfig) -> None:
    """Raise CheckpointError if config.json has impossible values. Other errors are reported when the model is
    loaded."""
    try:
        AutoConfig.from_pretrained(
            config.path, revision=config.revision or None, trust_remote_code=config.trust_remote_code
        )
    except BAD_SETTINGS as error:
        path = Path(config.path) / "config.json"
        raise CheckpointError(
            f"{path} cannot be used: {describe_unloadable(error)}: repair it, or copy it again"
        ) from error
    except (ImportError, *UNLOADABLE):
        return


def find_unmasked_layers(settings: PreTrainedConfig) -> str:
    """A kind of layer in the model that passes information between positions despite a mask, or "" if there is none."""
    kinds = set(getattr(settings.get_text_config(), "layer_types", None) or ())
    return min(kinds - MASKED_LAYERS, default="")


def check_packable(settings: PreTrainedConfig, *, setting: str = "packing", shares_prompts: bool = False) -> None:
    """Check that the model can compute packed rows, in which samples must not affect each other.

    Args:
        setting: name of the setting that the user should switch off.
        shares_prompts: True if samples of a row share a prompt. The prompt is then adjacent only to the first sample.

    Raises:
        ConfigError: samples in a row would affect each other, or the model would misplace a shared prompt.
    """
    kind, model = find_unmasked_layers(settings), settings.model_type
    if has_alibi := model == "falcon" and settings.alibi:  # Falcon computes ALiBi from the padding mask only
        model = "falcon with ALiBi"
    if kind or has_alibi or model in UNMASKED_MODELS | UNTOLD_MODELS:
        place = f"the {kind} layers of {model}" if kind else f"{model} models"
        raise ConfigError(f"samples in packed rows would affect each other in {place}: set {setting} = false")
    if shares_prompts and settings.model_type in MODELS_OF_ROW_DISTANCES:
        raise ConfigError(
            f"in packed rows, {settings.model_type} models would compute wrong distances to a shared prompt: set "
            f"{setting} = false"
        )


def check_not_quantized(config: ModelConfig) -> None:
    """Raise ConfigError for a model with quantized weights, which cannot be trained.

    With integer-quantized weights, transformers silently trains only norms and embeddings. It dequantizes FP8 and MXFP4
    weights to a dtype other than the training dtype.
    """
    settings = find_settings(config)
    quantization = getattr(settings, "quantization_config", None)
    if not isinstance(quantization, dict):
        return
    is_of_bitsandbytes = bool(quantization.get("load_in_4bit") or quantization.get("load_in_8bit"))
    method = quantization.get("quant_method") or ("bitsandbytes" if is_of_bitsandbytes else "")
    if method:
        raise ConfigError(
            f"model.path: the weights at {config.path} are quantized ({method}, by its config.json). They cannot be "
            "trained, and adapters cannot be added to them: use the original model, or a copy in bfloat16"
        )


def find_positions(config: ModelConfig) -> Positions | None:
    """The number of positions of the language model at `config.path`, or None if its config.json has no limit."""
    if (settings := find_settings(config)) is None:
        return None
    values = settings.get_text_config().to_dict()
    # this setting belongs to a table of positions, which even some models with rotary positions have
    if isinstance(num := values.get("n_positions"), int):
        return Positions(num, are_all=True)
    if settings.model_type == "mpt":  # unlike other models, MPT limits the positions of its ALiBi
        return Positions(settings.max_seq_len, are_all=True)
    num = values.get("max_position_embeddings")
    grows = any(value for name, value in values.items() if name.startswith(GROWING_POSITIONS))
    return Positions(num, are_all=not grows) if isinstance(num, int) else None


def find_rotation_limit(config: ModelConfig) -> int | None:
    """Highest position for which a model with LongRoPE uses its short factors, or None for models without LongRoPE.

    transformers uses the long factors for all rows of a batch as soon as one position is beyond this limit.
    """
    if (settings := find_settings(config)) is None:
        return None
    text = settings.get_text_config()
    rotation = getattr(text, "rope_parameters", None) or {}
    if rotation.get("rope_type") != "longrope":
        return None
    limit = rotation.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return int(limit) if limit else None


def _build_without_values(config: ModelConfig, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    try:
        settings = AutoConfig.from_pretrained(
            config.path, revision=config.revision or None, trust_remote_code=config.trust_remote_code
        )
    except (*UNLOADABLE, *BAD_SETTINGS) as error:
        raise CheckpointError(_say_unloadable("model", config.path, error)) from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            settings,
            dtype=dtype,
            attn_implementation=_asked_attention(attention),
            trust_remote_code=config.trust_remote_code,
        ).train()


def _asked_attention(attention: str) -> str | None:
    """The kernel name to pass to transformers. None lets transformers choose: sdpa if the model supports it,
    otherwise eager."""
    return None if attention == "sdpa" else attention


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer at `config.path`, and set the template variables in `config.chat_template_kwargs`.

    Raises:
        DataError: the path has no tokenizer, or the tokenizer has no end-of-sequence token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.path, revision=config.revision or None, trust_remote_code=config.trust_remote_code
        )
    except (*UNLOADABLE, *BAD_SETTINGS) as error:
        raise DataError(_say_unloadable("tokenizer", config.path, error)) from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer at {config.path} has no eos_token: completions could never end")
    tokenizer.chat_template = with_template_values(tokenizer.chat_template, config.chat_template_kwargs)
    # transformers would write these values into checkpoints, whose digests would then differ between machines.
    for circumstance in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(circumstance, None)
    return tokenizer


def _say_unloadable(what: str, path: str, error: Exception) -> str:
    """Sentence for an error: a model or tokenizer could not be loaded.

    transformers treats the path of a missing folder as a name on the hub, so the sentence says that no folder exists.
    """
    folder, reason = Path(path).absolute(), describe_unloadable(error)
    if folder.exists():
        return f"no {what} could be loaded from {path}: {reason}"
    return f"no {what} could be loaded from {path}: {reason.rstrip('.')}; and the folder {folder} does not exist"


def describe_unloadable(error: Exception) -> str:
    """First line of an exception. If the exception is about a value of config.json, first line of its cause."""
    cause = error.__cause__ if isinstance(error, StrictDataclassError) else None
    return first_line(cause or error)


def check_vocabulary(num_embeddings: int, tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Raise DataError if the tokenizer has more tokens than the model has embeddings."""
    if len(tokenizer) > num_embeddings:
        raise DataError(
            f"the tokenizer at {path} has {len(tokenizer)} tokens, but the model has only {num_embeddings} embeddings: "
            "use the tokenizer that belongs to the model"
        )


def count_token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's largest token id plus 1. Models often have more embeddings than token ids.

    The result exceeds `len(tokenizer)` if some smaller ids are unused.
    """
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's padding token, or else its end-of-sequence token. Masks exclude padding from every result."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)


def silence_progress_bars() -> None:
    """Switch off the progress bars of loading and saving weights, which would fill logs."""
    transformers_logging.disable_progress_bar()
