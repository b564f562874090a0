"""Warn of a learning rate far from those usual for the model's size.

Larger models need smaller learning rates: Adam changes every weight by about the learning rate, and a layer's output by
that times its width, which grows like the root of the model's size. Usual learning rates lie below the limit of this
file: from the 20 thousand weights of our tests at 1e-2, over 125 million at 6e-4 from scratch (arXiv:2005.14165, table
2.1), to fine-tuning of billions at 1e-5. Adapters take about ten times as much.
"""

from __future__ import annotations

import math

from rollouts_core.config import Config, OptimConfig, PolicyConfig
from rollouts_core.findings import Caution
from rollouts_core.model.model_size import find_model_size
from rollouts_core.stages import kind_of, label_of

MAX_LR_OF_A_BILLION = 5e-4
"""Threshold for SFT of all weights of a model with 1e9 weights; for others it scales with the root of their size."""
MAX_LR = 0.1
"""Threshold for the smallest models, and for models of unknown size."""
MOST_WEIGHTS = 1e12
"""An upper bound on model sizes: a learning rate below its threshold needs no look at the model's size."""
LORA_FACTOR = 10.0
"""Ratio of usual learning rates of adapters to those of all weights."""


def check_learning_rates(config: Config) -> list[str]:
    """A warning for each stage whose learning rate is far too large; a remark if it is small for adapters."""
    found: list[str] = []
    for name, training in config.trainings.items():
        found += _of_stage(name, training.optim, training.policy, config)
    return found


def largest_usual_lr(num_weights: float, stage: str, *, has_adapters: bool) -> float:
    """The learning rate above which a stage probably diverges for this model size; 0 weights mean an unknown size."""
    of_all = MAX_LR_OF_A_BILLION * math.sqrt(1e9 / num_weights) if num_weights else MAX_LR
    of_stage = of_all * kind_of(stage).learning_rates.share * (LORA_FACTOR if has_adapters else 1.0)
    return min(of_stage, MAX_LR)


def _of_stage(stage: str, optim: OptimConfig, policy: PolicyConfig, config: Config) -> list[str]:
    has_adapters = policy.lora.rank > 0
    rates = kind_of(stage).learning_rates
    usual = rates.of_adapters if has_adapters else rates.of_all
    if has_adapters and 0 < optim.lr <= rates.low_for_adapters:
        return [
            f"training.{stage}.optim.lr {optim.lr:g} is a learning rate for training all weights; adapters usually "
            f"need a larger one, {usual}"
        ]
    if optim.lr <= largest_usual_lr(MOST_WEIGHTS, stage, has_adapters=has_adapters):
        return []
    num_weights = find_model_size(config.model).num_parameters
    largest = largest_usual_lr(num_weights, stage, has_adapters=has_adapters)
    if optim.lr <= largest:
        return []
    size = f"of {num_weights:,} weights " if num_weights else ""
    trained = "adapters" if has_adapters else "all weights"
    return [
        Caution(
            f"training.{stage}.optim.lr {optim.lr:g} is so large that training most probably ruins the model: above "
            f"{largest:.1g} a model {size}rarely learns. For {label_of(stage)} of {trained} of a large language "
            f"model, usual values are {usual}"
        )
    ]
