"""Convert a number of training steps to epochs for messages, and warn of too many epochs.

validate.py and demonstrations.py count prompts and rows.
"""

from __future__ import annotations

from rollouts_core.findings import Caution

MANY_EPOCHS_OF_SFT = 30
MANY_EPOCHS_OF_RL = 100
"""RL tolerates more epochs than SFT, because it samples new completions for a prompt in each epoch."""


def render_epochs(num_epochs: float) -> str:
    """A rounded number of epochs for messages: "0.02 epochs", "2.7 epochs", "2,667 epochs"."""
    digits = f"{num_epochs:.2g}" if num_epochs < 1 else f"{num_epochs:.1f}" if num_epochs < 10 else f"{num_epochs:,.0f}"
    return f"{digits} epoch{'s' * (digits != '1.0')}"


def describe_epochs(stage: str, num_steps: int, per_epoch: float, *, of_what: str, many: int) -> str:
    """A sentence about the number of epochs of a training. Above `many` epochs, the sentence is a warning.

    Args:
        stage: the training's settings, for example "training.sft".
        per_epoch: steps per epoch.
        of_what: the data of one epoch, for the message.
        many: the largest number of epochs without a warning.
    """
    num_epochs = num_steps / per_epoch
    said = f"{stage}.num_steps {num_steps:,} is about {render_epochs(num_epochs)} of {of_what}"
    if num_epochs <= many:
        return said
    enough = max(1, int(many * per_epoch))
    return Caution(f"{said}: a model memorizes the rows long before; for {many} epochs set num_steps = {enough}")
