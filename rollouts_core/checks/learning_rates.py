"""Warn of learning rates that are unusual for the size of the model.

Larger models need smaller learning rates. Adam changes every weight by about the learning rate. The output of a layer
then changes by the learning rate times the layer's width, which grows like the square root of the model's size. The
thresholds are above all usual values: 1e-2 for the 20 thousand weights of our test model, 6e-4 for 125 million weights
from scratch (arXiv:2005.14165, table 2.1), 1e-5 for fine-tuning billions of weights. Adapters need about ten times as
much.
"""

from __future__ import annotations

import math

from rollouts_core.config import Config, OptimConfig, PolicyConfig
from rollouts_core.findings import Caution
from rollouts_core.model.model_size import find_model_size
from rollouts_core.stages import kind_of, label_of

MAX_LR_OF_A_BILLION = 5e-4
"""Threshold for SFT of all weights of a model with 1e9 weights. The threshold is proportional to 1 / sqrt(number of
weights)."""
MAX_LR = 0.1
"""Threshold for the smallest models, and for models of unknown size."""
MOST_WEIGHTS = 1e12
"""Number of weights of the largest model. Learning rates below the threshold of this size need no check, so the size of
the model in use is not read."""
LORA_FACTOR = 10.0
"""Usual learning rate for adapters divided by the usual learning rate for all weights."""


def check_learning_rates(config: Config) -> list[str]:
    """A warning for each training with a far too large learning rate, and a remark for each that is small for
    adapters."""
    found: list[str] = []
    for name, training in config.trainings.items():
        found += _of_stage(name, training.optim, training.policy, config)
    return found


def largest_usual_lr(num_weights: float, stage: str, *, has_adapters: bool) -> float:
    """The learning rate above which a training probably diverges.

    Args:
        num_weights: size of the model; 0 if unknown.
        stage: name of the training stage.
        has_adapters: whether adapters (LoRA) are trained instead of all weights.
    """
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
