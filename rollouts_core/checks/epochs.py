"""Describe a number of steps as a number of epochs.

Rows and prompts are counted in validate.py.
"""

from __future__ import annotations

from rollouts_core.findings import Caution

MANY_EPOCHS_OF_SFT = 30
MANY_EPOCHS_OF_RL = 100
"""RL generates new completions of a prompt each time, so RL tolerates more epochs than SFT."""


def render_epochs(num_epochs: float) -> str:
    """A number of epochs rounded for reading, like "0.02", "2.7" and "2,667"."""
    digits = f"{num_epochs:.2g}" if num_epochs < 1 else f"{num_epochs:.1f}" if num_epochs < 10 else f"{num_epochs:,.0f}"
    return f"{digits} epoch{'s' * (digits != '1.0')}"


def describe_epochs(stage: str, num_steps: int, per_epoch: float, *, of_what: str, many: int) -> str:
    """The number of epochs in a stage's steps, as a sentence; a warning if the number is so large that it must be a
    mistake.

    Args:
        per_epoch: steps of an epoch.
        of_what: the data of an epoch, for the message.
        many: number of epochs from which a warning is returned.
    """
    num_epochs = num_steps / per_epoch
    said = f"{stage}.num_steps {num_steps:,} is about {render_epochs(num_epochs)} of {of_what}"
    if num_epochs <= many:
        return said
    enough = max(1, int(many * per_epoch))
    return Caution(f"{said}: a model memorizes the rows long before; for {many} epochs set num_steps = {enough}")
