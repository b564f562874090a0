"""The rules between `roll_back_on` and other settings of a training. SFT and RL share them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollouts_core.config.rl import RLTrainingConfig
    from rollouts_core.config.sft import SFTTrainingConfig


def roll_back_rules(training: SFTTrainingConfig | RLTrainingConfig) -> Iterator[str]:
    """Yield a sentence for each setting with which a rule in `roll_back_on` cannot roll back."""
    for rule in training.roll_back_on:
        if rule in training.stop_on:
            yield f'the rule "{rule}" is in stop_on and in roll_back_on, which exclude each other: remove one of them'
    if not training.roll_back_on:
        return
    if not training.keep_best:
        yield (
            "roll_back_on rolls back to the checkpoint with the best score, but with keep_best 0 no checkpoint gets a "
            "score: set keep_best to 1 or more, or remove roll_back_on"
        )
    if training.checkpoint_every >= training.num_steps:
        yield (
            "roll_back_on rolls back to the best earlier checkpoint, but with checkpoint_every "
            f"{training.checkpoint_every} and num_steps {training.num_steps} there is none: set checkpoint_every below "
            "num_steps, or remove roll_back_on"
        )
