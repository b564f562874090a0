"""`training.polish`."""

from __future__ import annotations

from pydantic import Field

from rollouts_core.config.sft import SFTTrainingConfig


class PolishConfig(SFTTrainingConfig):
    """Fine-tuning on the first demonstrations of each dataset."""

    num_rows: int = Field(default=16, ge=1)
    """Demonstrations per dataset."""
