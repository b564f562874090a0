"""Small records for tests: samples, prompts and configurations with only what a test is about.

Not here: fixtures (conftest.py).
"""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollouts_core.config import ModelConfig
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.quickstart import QuickstartSize
from rollouts_core.types import Prompt, Sample, Status

TINY_SIZE = QuickstartSize(
    num_digits=2,
    num_demonstrations=40,
    num_prompts=20,
    num_selection_prompts=6,
    num_heldout_prompts=8,
    hidden_size=16,
    num_layers=2,
)

NUM_PADDED = 91
"""Ids of a model whose vocabulary is padded: an odd number, so that no two processes have equal shares of its rows."""

TINY_MODEL: dict[str, Any] = {  # Any: settings
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
"""Settings of a transformers model of any family."""

OWN_CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM

class OwnConfig(Qwen3Config):
    model_type = "own"

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


STATE_OF_ITS_OWN = """
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].register_forward_hook(lambda layer, inputs, output: output + output.cumsum(dim=1) / 10)
"""
"""What lets `OWN_CODE` carry a state from position to position, whatever a mask says."""


def write_model_with_own_code(base_model: ModelConfig, folder: Path, *, further_code: str = "") -> ModelConfig:
    """The tiny Qwen3 as a model that nobody loads without running the code that lies beside it."""
    shutil.copytree(base_model.path, folder)
    (folder / "modeling_own.py").write_text(OWN_CODE + further_code)
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(settings))
    return ModelConfig(path=str(folder), trust_remote_code=True)


def write_tied(base_model: ModelConfig, folder: Path) -> Path:
    """The tiny Qwen3, whose head is not its embedding, with a config.json that says that it is."""
    shutil.copytree(base_model.path, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    return folder


def make_sample(
    tokens: Sequence[int] = (5, 7, 9),
    loss_mask: Sequence[float] | None = None,
    log_probs: Sequence[float] | None = None,
) -> Sample:
    """A sample of these tokens, of which all but the first are trained on unless a mask is given."""
    mask = [0.0] + [1.0] * (len(tokens) - 1) if loss_mask is None else list(loss_mask)
    return Sample(tokens=list(tokens), loss_mask=mask, rollout_log_probs=None if log_probs is None else list(log_probs))


def write_padded_model(base_model: ModelConfig, folder: Path) -> ModelConfig:
    """A random model with three times the ids that its tokenizer, that of `base_model`, has."""
    tokenizer = load_tokenizer(base_model)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    config = LlamaConfig(vocab_size=NUM_PADDED, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, **shape, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ModelConfig(path=str(folder))


def make_random_samples(num_samples: int, *, seed: int = 0, vocabulary: int = 25) -> list[Sample]:
    """Samples of 3 to 12 random tokens whose first two tokens are a prompt, with made-up rollout log-probs."""
    rng = random.Random(seed)
    lengths = [rng.randint(3, 12) for _ in range(num_samples)]
    return [
        make_sample(
            [rng.randrange(vocabulary) for _ in range(length)],
            [0.0, 0.0] + [1.0] * (length - 2),
            [0.0, 0.0] + [-3 * rng.random() for _ in range(length - 2)],
        )
        for length in lengths
    ]


def make_groups(num_groups: int, size: int, *, seed: int = 0, vocabulary: int = 25) -> list[Sample]:
    """Groups of random samples that share a prompt of 2 to 6 tokens; completions have 1 to 8, rewards differ."""
    rng = random.Random(seed)
    samples: list[Sample] = []
    for group in range(num_groups):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(2, 6))]
        for index in range(size):
            length = rng.randint(1, 8)
            sample = make_sample(
                prompt + [rng.randrange(vocabulary) for _ in range(length)],
                [0.0] * len(prompt) + [1.0] * length,
                [0.0] * len(prompt) + [-3 * rng.random() for _ in range(length)],
            )
            samples.append(replace(sample, group_index=group, index=index, reward=float(index % 2) + 0.1 * group))
    return samples


def make_group(rewards: Sequence[float | None], responses: Sequence[str] | None = None) -> list[Sample]:
    """Graded samples of one prompt; responses differ unless given."""
    texts = responses or [f"response {i}" for i in range(len(rewards))]
    return [
        Sample(response=text, tokens=[1, 2, 3], loss_mask=[0, 1, 1], reward=reward, index=i, status=Status.COMPLETED)
        for i, (reward, text) in enumerate(zip(rewards, texts, strict=True))
    ]


def make_prompts(num_prompts: int) -> list[Prompt]:
    """Prompts with ids p0, p1, ..."""
    return [Prompt(id=f"p{i}", messages=({"role": "user", "content": f"question {i}"},)) for i in range(num_prompts)]
