"""`evaluation`: how checkpoints are compared."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollouts_core.config.record import PLACEMENT, Finite, Record


class EvaluationConfig(Record):
    """Comparison of checkpoints, for selection and for the report."""

    metric: Literal["accuracy", "loss"] = "accuracy"
    """Mean reward on prompts, or mean loss on demonstrations."""
    engine: Literal["rollout", "embedded"] = "rollout"
    """Engine that completes the prompts. rollout: the engine of `rollout.engine`, restarted for each checkpoint.
    embedded: this project's own engine, on the CPU in float32."""
    max_prompts: int = Field(default=1024, ge=1)
    """Use only the first rows of a file, up to this number."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Completions per prompt; their rewards are averaged. With 2 or more, pass@k and majority@k are computed, too."""
    pass_reward: Finite = 1.0
    """A completion counts as right for pass@k and majority@k if its reward is at least this."""
    temperature: Annotated[Finite, Field(ge=0, le=10)] = 0.0
    """Softmax temperature; 0 takes the most likely token."""
    seed: int = Field(default=0, ge=0)
    """Seed of sampling, the same for every checkpoint."""
    max_p_value: Annotated[Finite, Field(gt=0, le=1)] = Field(default=0.01, json_schema_extra=PLACEMENT)
    """RL must beat the selected SFT checkpoint with at most this p-value, or the run fails; 1 accepts any result."""
