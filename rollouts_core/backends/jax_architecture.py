"""Check from a model's config.json whether the JAX backend can train the model, without importing jax."""

from __future__ import annotations

import json
from pathlib import Path

from rollouts_core.config import ModelConfig
from rollouts_core.embedded.architecture import Architecture, load_architecture
from rollouts_core.errors import ConfigError


def load_jax_architecture(model: ModelConfig) -> Architecture:
    """Read the architecture of a model, and refuse models that the JAX backend does not support.

    Raises:
        CheckpointError: config.json cannot be read, or the model's family is not supported.
        ConfigError: the model is on the hub instead of in a folder, or it has dropout.
    """
    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(f'backend "jax" reads models from folders, not {model.path}: download the model first')
    remedy = 'set policy.backend = "pytorch" for this model'
    architecture = load_architecture(folder, runner='backend "jax"', remedy=remedy)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if dropout := settings.get("attention_dropout"):
        raise ConfigError(f'{folder}: backend "jax" does not support attention_dropout {dropout}: {remedy}')
    return architecture
