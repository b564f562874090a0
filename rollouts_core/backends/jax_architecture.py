"""Whether JAX can train a model, by the settings in its folder; without loading jax.

Not here: the model itself (jax_model.py), its training (jax.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from rollouts_core.config import ModelConfig
from rollouts_core.embedded.architecture import Architecture, load_architecture
from rollouts_core.errors import ConfigError


def load_jax_architecture(model: ModelConfig) -> Architecture:
    """The architecture of a model that JAX is to train.

    Raises:
        CheckpointError: no readable config.json, or a model of another family.
        ConfigError: a model of a hub, or one with dropout, which JAX does not do.
    """
    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(f'backend "jax" reads models from folders, {model.path} is none: download the model first')
    remedy = 'set policy.backend = "pytorch" for this model'
    architecture = load_architecture(folder, runner='backend "jax"', remedy=remedy)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if dropout := settings.get("attention_dropout"):
        raise ConfigError(f'{folder}: backend "jax" does not support attention_dropout {dropout}: {remedy}')
    return architecture
