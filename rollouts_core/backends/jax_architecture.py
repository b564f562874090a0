"""Check whether JAX can train a model, by the settings in its folder, without importing jax."""

from __future__ import annotations

import json
from pathlib import Path

from rollouts_core.config import ModelConfig
from rollouts_core.embedded.architecture import Architecture, load_architecture
from rollouts_core.errors import ConfigError


def load_jax_architecture(model: ModelConfig) -> Architecture:
    """The architecture of a model for JAX.

    Raises:
        CheckpointError: config.json is unreadable, or the model is of another family.
        ConfigError: the model is on the hub, or has dropout, which the JAX backend does not support.
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
