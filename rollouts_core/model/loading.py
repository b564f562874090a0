"""Load a language model and its tokenizer.

Not here: log-probs (policy.py), generation (embedded/, engines/), training state (backends/pytorch.py).
"""

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
"""What transformers raises where a folder lacks files, or has some of a kind of model that it does not know."""
BAD_SETTINGS = (StrictDataclassError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What it raises for a config.json with values that no model has, as they come."""
LARGE_LOGIT = 100.0
"""A cap bends logits of this size, whatever it is."""
KERNELS_OF_FLOAT32 = ("sdpa", "eager")
"""Attention kernels that compute in any number format."""
MASKED_LAYERS = {"full_attention", "sliding_attention"}
"""The kinds of layers in which a position reads what a mask lets it read, and nothing else."""
UNMASKED_MODELS = {"bloom", "openai-gpt", "rwkv", "xlstm"}
"""Models that heed no mask of which position of a row may read which, by their type: their settings do not show it."""
UNTOLD_MODELS = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "moshi", "mvp"),
    *("moss_transcribe_diarize", "musicgen", "musicgen_melody", "pegasus", "plbart", "prophetnet", "roformer"),
    *("trocr", "whisper", "xlnet"),
}
"""Models that cannot be told positions and count along the row, by their type."""
MODELS_OF_ROW_DISTANCES = {"gpt_neo", "mpt"}
"""Models that count how far back a token lies by its place in the row, whatever its position, by their type: only where
all tokens of a sample lie next to each other is that the same."""
MODELS_OF_SHORT_ROWS = {"big_bird", "gpt_neo", "mpt", "reformer"}
"""Models that compute no row of more tokens than they have positions, whatever the positions of its samples, by their
type: a table that is as large belongs to the row."""
GROWING_POSITIONS = ("rope", "rotary", "alibi", "mamba")
"""How settings begin of models that compute a position however far it is, or whose layers need none."""


class Positions(NamedTuple):
    """How long a sequence a model was made for."""

    num: int
    are_all: bool
    """Whether it has no further ones: each is a row of a table."""


def load_hf_model(
    config: ModelConfig, *, device: str = "cpu", dtype: torch.dtype = torch.float32, attention: str = "sdpa"
) -> PreTrainedModel:
    """The causal language model at `config.path`, in training mode; weights from safetensors, unless `allow_pickle`.

    Args:
        device: "meta" gives the model without values.
        dtype: number format of the weights.
        attention: the attention kernel, by its name in transformers; models without sdpa get eager instead of it.

    Raises:
        CheckpointError: nothing loadable lies there.
        ConfigError: the attention kernel is not installed, or the model does more to its logits than is known here.
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
            ignore_mismatched_sizes=True,  # told of below, in one sentence
            output_loading_info=True,
        )
    except ImportError as error:
        if attention in KERNELS_OF_FLOAT32:  # torch has them: it is something else that the model needs
            raise CheckpointError(_say_unloadable("model", config.path, error)) from error
        raise ConfigError(f"policy.attention {attention!r} cannot be used here: {first_line(error)}") from error
    except (*UNLOADABLE, *BAD_SETTINGS, SafetensorError, UnpicklingError) as error:
        raise CheckpointError(_say_unloadable("model", config.path, error)) from error
    if missing := sorted(loading["missing_keys"]):
        raise CheckpointError(f"the weights at {config.path} lack {len(missing)} tensors, {missing[0]} first")
    for name, found, expected in sorted(loading["mismatched_keys"])[:1]:
        raise CheckpointError(describe_other_shape(config.path, name, found, expected))
    check_tied_head(model, config.path)
    placed = model.to(device)
    check_logits(placed)
    return placed.train()


def find_other_shape(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> str:
    """How weights differ from what config.json says, in a sentence; empty where they do not, or nothing can tell.

    Experts are passed over: transformers puts those of some models together, or turns them, under one name.

    Args:
        shapes: those in the files, by name.
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
    """That a tensor in a model's files is not what its config.json makes it."""
    return (
        f"the weights at {path} are not of its config.json: {name} has shape {tuple(found)}, expected {tuple(expected)}"
    )


def check_tied_head(hf_model: PreTrainedModel, path: str) -> None:
    """Raise CheckpointError for a head that is not the embedding although config.json says so.

    transformers computes with both, and so would a training; engines make the head of the embedding.
    """
    head, embedding = hf_model.get_output_embeddings(), hf_model.get_input_embeddings()
    is_tied = getattr(hf_model.config.get_text_config(), "tie_word_embeddings", False) and hf_model._tied_weights_keys
    if is_tied and head is not None and head.weight is not embedding.weight:
        raise CheckpointError(describe_own_head(path))


def describe_own_head(path: str) -> str:
    """What is wrong with weights that have a head of their own against their config.json, and what to do."""
    return (
        f"the weights at {path} have an output head that differs from the embedding, and its config.json ties them: "
        "engines would leave that head out; set tie_word_embeddings = false there, or remove the head if it is a rest"
    )


def count_gpus() -> int:
    """The GPUs of this machine that torch can use."""
    return torch.cuda.device_count()


def default_device() -> str:
    """The first GPU where there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def find_logit_transform(hf_model: PreTrainedModel) -> LogitTransform:
    """What the model does between its head and its logits, by the settings of Cohere, Falcon-H1, Granite and Gemma."""
    settings = hf_model.config.get_text_config()
    scale = (getattr(settings, "logit_scale", None) or 1.0) * (getattr(settings, "lm_head_multiplier", None) or 1.0)
    divisor = getattr(settings, "logits_scaling", None) or 1.0
    return LogitTransform(scale / divisor, getattr(settings, "final_logit_softcapping", None))


def check_attention(hf_model: PreTrainedModel) -> None:
    """Raise ConfigError when the attention kernel would leave out the cap that a model puts on attention scores."""
    config = hf_model.config
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        raise ConfigError(
            f'policy.attention "sdpa" leaves out the cap of attention scores that {config.model_type} models have: set '
            'policy.attention = "eager", or a kernel of flash attention'
        )


@torch.no_grad()
def check_logits(hf_model: PreTrainedModel) -> None:
    """Raise ConfigError when the model's logits are not what `find_logit_transform` makes of its head's products.

    Log-probs are taken from hidden states and head (logprobs.py), so whatever else lies between them would be lost. It
    shows on two tokens, whose products are once taken as they are and once made so large that any cap bends them.

    Raises:
        DivergedError: the products are no numbers.
    """
    head = hf_model.get_output_embeddings()
    if head is None:
        raise _unknown_logits(hf_model, "it has no output head")
    if hf_model.base_model is hf_model:
        raise _unknown_logits(hf_model, "it has no decoder under the name that its class says")
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
            raise _unknown_logits(hf_model, "it has something between hidden states and logits")


def describe_diverged(path: str) -> str:
    """What is wrong with the weights of a folder that compute no numbers, and what to do."""
    return (
        f"the weights at {path} compute no numbers (NaN): they are damaged, or the training that made them diverged; "
        "take another checkpoint"
    )


@contextmanager
def _head_multiplied(head: nn.Module, factor: float) -> Iterator[None]:
    """While the block runs, the head gives `factor` times its products."""
    hook = head.register_forward_hook(lambda module, inputs, products: products * factor)
    try:
        yield
    finally:
        hook.remove()


def _unknown_logits(hf_model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"{hf_model.config.model_type} models cannot be trained here: {reason}, which log-probs would lack"
    )


def find_settings(config: ModelConfig) -> PreTrainedConfig | None:
    """What config.json at `config.path` says; None where it cannot be read, which whoever loads the model explains."""
    try:
        settings: PreTrainedConfig = AutoConfig.from_pretrained(
            config.path, revision=config.revision or None, trust_remote_code=config.trust_remote_code
        )
    except (ImportError, *UNLOADABLE, *BAD_SETTINGS):
        return None
    return settings


def check_settings(config: ModelConfig) -> None:
    """Raise CheckpointError for a config.json with values that no model has; of others whoever loads it tells."""
    try:
        AutoConfig.from_pretrained(
            config.path, revision=config.revision or None, trust_remote_code=config.trust_remote_code
        )
    except BAD_SETTINGS as error:
        path = Path(config.path) / "config.json"
        raise CheckpointError(
            f"{path} cannot be used: {describe_unloadable(error)}: mend it, or copy it again"
        ) from error
    except (ImportError, *UNLOADABLE):
        return


def find_unmasked_layers(settings: PreTrainedConfig) -> str:
    """A kind of a model's layers that pass something from position to position whatever a mask says; "" without any."""
    kinds = set(getattr(settings.get_text_config(), "layer_types", None) or ())
    return min(kinds - MASKED_LAYERS, default="")


def check_packable(settings: PreTrainedConfig, *, setting: str = "packing", shares_prompts: bool = False) -> None:
    """Raise ConfigError for a model in which samples of one row would see each other, or a shared prompt elsewhere.

    Args:
        setting: what to switch off.
        shares_prompts: whether samples of a row read one prompt, which lies next to the first of them only.
    """
    kind, model = find_unmasked_layers(settings), settings.model_type
    if has_alibi := model == "falcon" and settings.alibi:  # it makes ALiBi's slopes of a mask of padding alone
        model = "falcon with ALiBi"
    if kind or has_alibi or model in UNMASKED_MODELS | UNTOLD_MODELS:
        place = f"the {kind} layers of {model}" if kind else f"{model} models"
        raise ConfigError(f"packed rows would let samples see each other in {place}: set {setting} = false")
    if shares_prompts and settings.model_type in MODELS_OF_ROW_DISTANCES:
        raise ConfigError(
            f"in packed rows {settings.model_type} models would see a prompt that completions share further away than "
            f"it is: set {setting} = false"
        )


def check_not_quantized(config: ModelConfig) -> None:
    """Raise ConfigError for a model whose weights cannot be trained because they are quantized.

    Of packed integers transformers trains nothing but norms and embeddings, without a word; weights in FP8 or MXFP4 it
    loads into a number format of its own, which is another one than the training's.
    """
    settings = find_settings(config)
    quantization = getattr(settings, "quantization_config", None)
    if not isinstance(quantization, dict):
        return
    is_of_bitsandbytes = bool(quantization.get("load_in_4bit") or quantization.get("load_in_8bit"))
    method = quantization.get("quant_method") or ("bitsandbytes" if is_of_bitsandbytes else "")
    if method:
        raise ConfigError(
            f"model.path: the weights at {config.path} are quantized ({method}, by its config.json), and cannot be "
            "trained, nor adapters added to them here: give the model that they were made from, or a copy of it in "
            "bfloat16"
        )


def find_positions(config: ModelConfig) -> Positions | None:
    """The positions of the language model at `config.path`; None where its configuration does not say."""
    if (settings := find_settings(config)) is None:
        return None
    values = settings.get_text_config().to_dict()
    if isinstance(num := values.get("n_positions"), int):  # models that rotate by a table have one too
        return Positions(num, are_all=True)
    if settings.model_type == "mpt":  # its ALiBi is made for so many positions, unlike that of others
        return Positions(settings.max_seq_len, are_all=True)
    num = values.get("max_position_embeddings")
    grows = any(value for name, value in values.items() if name.startswith(GROWING_POSITIONS))
    return Positions(num, are_all=not grows) if isinstance(num, int) else None


def find_rotation_limit(config: ModelConfig) -> int | None:
    """The positions up to which a model rotates by its short factors; None where all lengths are rotated alike.

    transformers rotates all rows of a batch by the long factors as soon as one position lies beyond (LongRoPE).
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
    """None lets transformers take sdpa for the models that have it, and eager for the others."""
    return None if attention == "sdpa" else attention


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer at `config.path`, whose chat template has the values of `config.chat_template_kwargs`.

    Raises:
        DataError: none lies there, or it has no end-of-sequence token.
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
    # How it was loaded would be written into checkpoints, whose digests would differ with the environment.
    for circumstance in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(circumstance, None)
    return tokenizer


def _say_unloadable(what: str, path: str, error: Exception) -> str:
    """Also that there is no such folder: a misspelt one is taken for a name of the hub, of which the error speaks."""
    folder, reason = Path(path).absolute(), describe_unloadable(error)
    if folder.exists():
        return f"no {what} could be loaded from {path}: {reason}"
    return f"no {what} could be loaded from {path}: {reason.rstrip('.')}; and there is no folder {folder}"


def describe_unloadable(error: Exception) -> str:
    """What an error says; one about a setting has it in its second line, as its cause."""
    cause = error.__cause__ if isinstance(error, StrictDataclassError) else None
    return first_line(cause or error)


def check_vocabulary(num_embeddings: int, tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Raise DataError when the tokenizer can produce ids that the model has no embedding for."""
    if len(tokenizer) > num_embeddings:
        raise DataError(
            f"the tokenizer at {path} has {len(tokenizer)} tokens but the model embeds {num_embeddings}: "
            "they do not belong together"
        )


def count_token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest token id of a tokenizer: a model may have embeddings for more, which stand for nothing.

    The same as `len(tokenizer)`, unless ids are left out below the largest one.
    """
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token id to fill rows with; masks keep it out of everything."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)


def silence_progress_bars() -> None:
    """Keep the bars of loading and saving weights out of logs and terminals."""
    transformers_logging.disable_progress_bar()
