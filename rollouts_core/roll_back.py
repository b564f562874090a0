"""The record of a rollback: a rule in `roll_back_on` warned, so the result of the training is its best checkpoint.

Not here: the rules (warning_rules.py), the scores of checkpoints (run_checkpoints.py).

    the rule warns -> the step is saved, with the record in its state -> event `rolled_back` -> result.json
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

ROLLED_BACK = "rolled_back"
"""The name of the event, and the key of the record in result.json and in the state of a checkpoint."""


class RollBack(BaseModel):
    """The rollback of a training, as `rolled_back` in result.json stores it."""

    rule: str
    from_step: int
    """The last trained step, after which the rule warned."""
    num_steps: int
    """Number of planned steps."""
    step: int
    """The step of the best checkpoint."""
    metric: str
    """The metric that ranks the checkpoints: reward, reward_unfiltered or eval_loss."""
    value: float
    """The value of the metric for the weights of the best checkpoint."""

    @property
    def sentence(self) -> str:
        """Text for messages and reports, without a full stop."""
        return (
            f"the rule {self.rule} rolled the training back from step {self.from_step} of {self.num_steps} to the best "
            f"checkpoint, step {self.step} ({self.metric} {self.value:.4g})"
        )


def read_roll_back(record: Mapping[str, Any]) -> RollBack | None:  # Any: JSON
    """The rollback in the content of result.json or in the state of a checkpoint; None without a rollback."""
    found = record.get(ROLLED_BACK)
    return RollBack.model_validate(found) if found else None
