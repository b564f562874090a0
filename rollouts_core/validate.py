"""Find out before any training whether a configuration can work: models, data, prompts, rewards.

Not here: the form of settings (config.py), machines and ports (infra).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollouts_core.config import Config, ModelConfig
from rollouts_core.dataset import check_disjoint, load_prompts_from_jsonl, load_sft_dataset
from rollouts_core.errors import DataError
from rollouts_core.model import load_tokenizer
from rollouts_core.rewards import grade_sample
from rollouts_core.rollout import (
    build_pending_group,
    check_prompt_lengths,
    resolve_filter_fn,
    resolve_generate_fn,
    resolve_reward_fn,
)
from rollouts_core.types import Prompt, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def validate_config(config: Config) -> list[str]:
    """Check everything that can be checked without training; returns what was found, a sentence each.

    Raises:
        InputError: one sentence with what was expected, what was found and what to do.
    """
    tokenizer = load_tokenizer(config.model)
    check_model_vocabulary(config.model, tokenizer)
    findings = [f"model {config.model.path}: tokenizer with {len(tokenizer)} tokens"]
    if config.mode != "rl":
        findings.append(_check_demonstrations(config.data.sft, config, tokenizer))
    if config.evaluation.metric == "loss":
        findings += [
            _check_demonstrations(path, config, tokenizer) for path in (config.data.selection, config.data.heldout)
        ]
        return findings
    prompts = {"selection": config.data.selection, "heldout": config.data.heldout}
    if config.mode != "sft":
        prompts["prompts"] = config.data.prompts
    loaded = {name: _load_checked_prompts(path, config, tokenizer) for name, path in prompts.items()}
    check_disjoint(loaded["selection"], loaded["heldout"], names=("data.selection", "data.heldout"))
    check_functions(config, loaded["heldout"][0])
    return findings + [f"{prompts[name]}: {len(rows)} prompts" for name, rows in loaded.items()]


def check_model_vocabulary(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError when a local model embeds fewer tokens than its tokenizer has."""
    config_file = Path(model.path) / "config.json"
    if not config_file.is_file():  # a hub model: known only when it is loaded
        return
    vocab_size = json.loads(config_file.read_text()).get("vocab_size")
    if isinstance(vocab_size, int) and vocab_size < len(tokenizer):
        raise DataError(
            f"the tokenizer at {model.path} has {len(tokenizer)} tokens but the model embeds {vocab_size}: "
            "they do not belong together"
        )


def check_functions(config: Config, prompt: Prompt) -> None:
    """Find the user's functions, and grade an empty completion of `prompt`.

    Raises:
        ConfigError: a name that stands for nothing.
        RewardError: the reward function raised or returned no number.
    """
    resolve_filter_fn(config.rollout)
    if config.rollout.generate_fn != "":
        resolve_generate_fn(config.rollout)
    empty = replace(build_pending_group(prompt, group_index=0, size=1)[0], status=Status.COMPLETED)
    asyncio.run(grade_sample(empty, resolve_reward_fn(config.rollout)))


def _check_demonstrations(path: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> str:
    sft = config.training.sft
    samples = load_sft_dataset(path, tokenizer, max_length=sft.max_length, train_on=sft.train_on)
    num_trained = sum(1 for sample in samples for weight in sample.loss_mask if weight)
    num_cut = sum(sample.status is Status.TRUNCATED for sample in samples)
    cut = f", {num_cut} cut to {sft.max_length} tokens" if num_cut else ""
    return f"{path}: {len(samples)} demonstrations, {num_trained} trained tokens{cut}"


def _load_checked_prompts(path: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    prompts = load_prompts_from_jsonl(path)
    check_prompt_lengths(prompts, tokenizer, max_tokens=config.rollout.max_prompt_tokens, source=path)
    return prompts
