"""Load a language model and its tokenizer.

Not here: log-probs (policy.py), generation (embedded/, engines/), training state (backends/pytorch.py).
"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rollouts_core.config import ModelConfig
from rollouts_core.errors import CheckpointError, ConfigError, DataError
from rollouts_core.messages import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""What configurations call a cap or a scale of logits (Gemma 2, Cohere, Granite, Falcon-H1)."""
KERNELS_OF_FLOAT32 = ("sdpa", "eager")
"""Attention kernels that compute in any number format."""


def load_hf_model(
    config: ModelConfig, *, device: str = "cpu", dtype: torch.dtype = torch.float32, attention: str = "sdpa"
) -> PreTrainedModel:
    """The causal language model at `config.path`, in training mode; weights from safetensors, unless `allow_pickle`.

    Args:
        device: "meta" gives the model without values.
        dtype: number format of the weights.
        attention: the attention kernel, by its name in transformers.

    Raises:
        CheckpointError: nothing loadable lies there.
        ConfigError: the attention kernel is not installed, or the model does more to its logits than a head.
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
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=None if config.allow_pickle else True,
            output_loading_info=True,
        )
    except ImportError as error:
        raise ConfigError(f"policy.attention {attention!r} cannot be used here: {first_line(error)}") from error
    except (OSError, ValueError, KeyError, SafetensorError, UnpicklingError) as error:
        raise CheckpointError(f"no model could be loaded from {config.path}: {first_line(error)}") from error
    if missing := sorted(loading["missing_keys"]):
        raise CheckpointError(f"the weights at {config.path} lack {len(missing)} tensors, {missing[0]} first")
    placed = model.to(device)
    check_plain_head(placed)
    return placed.train()


@torch.no_grad()
def check_plain_head(hf_model: PreTrainedModel) -> None:
    """Raise ConfigError when the model's logits are not its hidden states times its head.

    Log-probs are taken from hidden states and head (logprobs.py), so a cap or a scale between them would be lost. Caps
    that bend only large logits are known by their settings; whatever else a model does shows on two tokens.
    """
    config = hf_model.config
    found = [name for name in LOGIT_SETTINGS if getattr(config, name, None) not in (None, 1.0)]
    head = hf_model.get_output_embeddings()
    if not found and head is not None and config._attn_implementation in KERNELS_OF_FLOAT32:
        token_ids = torch.arange(2, device=hf_model.device)[None]
        hf_model.eval()
        logits = hf_model(input_ids=token_ids, use_cache=False).logits.float()
        plain = head(hf_model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state).float()
        if not torch.allclose(plain, logits, rtol=1e-3, atol=1e-4 * float(logits.abs().max())):
            found = ["something between hidden states and logits"]
    if found or head is None:
        reason = f"it has {found[0]}" if found else "it has no output head"
        raise ConfigError(f"{config.model_type} models cannot be trained here: {reason}, which log-probs would lack")


def _build_without_values(config: ModelConfig, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    try:
        settings = AutoConfig.from_pretrained(
            config.path, revision=config.revision or None, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"no model could be loaded from {config.path}: {first_line(error)}") from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            settings, dtype=dtype, attn_implementation=attention, trust_remote_code=config.trust_remote_code
        ).train()


def refuse_pickled_weights(path: Path) -> None:
    """Raise CheckpointError for a folder whose weights lie in pickled files alone, which can hold code."""
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickled and not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"the weights at {path} are pickled ({pickled[0]}), and a pickle can run code when it is loaded: convert "
            "them to safetensors, or set model.allow_pickle"
        )


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer at `config.path`.

    Raises:
        DataError: none lies there, or it has no end-of-sequence token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.path, revision=config.revision or None, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"no tokenizer could be loaded from {config.path}: {first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer at {config.path} has no eos_token: completions could never end")
    # How it was loaded would be written into checkpoints, whose digests would differ with the environment.
    for circumstance in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(circumstance, None)
    return tokenizer


def check_vocabulary(num_embeddings: int, tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Raise DataError when the tokenizer can produce ids that the model has no embedding for."""
    if len(tokenizer) > num_embeddings:
        raise DataError(
            f"the tokenizer at {path} has {len(tokenizer)} tokens but the model embeds {num_embeddings}: "
            "they do not belong together"
        )


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token id to fill rows with; masks keep it out of everything."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)


def silence_progress_bars() -> None:
    """Keep the bars of loading and saving weights out of logs and terminals."""
    transformers_logging.disable_progress_bar()
