"""`evaluation`: how checkpoints are evaluated and compared."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollouts_core.config.record import PLACEMENT, Finite, Record


class EvaluationConfig(Record):
    """How checkpoints are evaluated, for selection and for the report."""

    metric: Literal["accuracy", "loss"] = "accuracy"
    """accuracy: mean reward of completions of prompts. loss: mean loss on demonstrations."""
    engine: Literal["rollout", "embedded"] = "rollout"
    """Engine that completes the prompts. rollout: the engine in `rollout.engine`, restarted for each checkpoint.
    embedded: this project's own engine, on the CPU in float32."""
    max_prompts: int = Field(default=1024, ge=1)
    """Use at most this number of rows of a file, from the beginning."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Completions per prompt. The prompt's score is their mean reward. With 2 or more, pass@k and majority@k are also
    computed."""
    pass_reward: Finite = 1.0
    """For pass@k and majority@k, a completion is right if its reward is at least this value."""
    temperature: Annotated[Finite, Field(ge=0, le=10)] = 0.0
    """Temperature of sampling. 0: always the most likely token."""
    seed: int = Field(default=0, ge=0)
    """Seed of sampling, the same for every checkpoint."""
    max_p_value: Annotated[Finite, Field(gt=0, le=1)] = Field(default=0.01, json_schema_extra=PLACEMENT)
    """Largest p-value with which RL counts as better than the selected SFT checkpoint. Above this p-value, the run
    fails. 1: accept any result."""
