"""What a job is asked to do: the content of job.json, one record per kind of job.

Not here: doing it (run_job.py). Nothing here imports torch: the orchestrator builds these records.

Inputs are named by path and digest; the digest is part of the job's identity, the path is not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from rollouts_core.config import (
    PLACEMENT,
    DeploymentConfig,
    EvaluationConfig,
    ModelConfig,
    Record,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
)
from rollouts_core.errors import ConfigError


class InputFile(Record):
    """A data file that a job reads."""

    path: str = Field(json_schema_extra=PLACEMENT)
    """Where it lies."""
    digest: str
    """sha256 of its content, checked before it is used."""


class InputModel(Record):
    """A checkpoint that a job reads."""

    name: str
    """What results call it: base, or step_000100."""
    model: ModelConfig
    """How it is loaded."""
    digest: str
    """Digest of its content."""
    step: int = 0
    """Training steps behind it."""


class EngineAddress(Record):
    """An engine that a job may use."""

    url: str
    """Base URL, reachable from the job."""
    lease_file: str
    """File whose modification time the job renews, so that the engine outlives neither it nor a crash by long."""


class SFTJob(Record):
    """Fine-tune a model on demonstrations."""

    kind: Literal["sft"] = "sft"
    model: InputModel
    data: InputFile
    training: SFTTrainingConfig
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)


class RLJob(Record):
    """Improve a model by reinforcement learning against engines."""

    kind: Literal["rl"] = "rl"
    model: InputModel
    prompts: InputFile
    training: RLTrainingConfig
    rollout: RolloutConfig
    plugin_digest: str = ""
    """Digest of the user's own packages that the settings name."""
    engines: tuple[EngineAddress, ...] = Field((), json_schema_extra=PLACEMENT)
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)


class EvalJob(Record):
    """Score checkpoints on the same rows, and name the best."""

    kind: Literal["eval"] = "eval"
    checkpoints: tuple[InputModel, ...] = Field(min_length=1)
    data: InputFile
    evaluation: EvaluationConfig
    rollout: RolloutConfig = RolloutConfig()
    """Who grades, and the token limits; for the metric accuracy."""
    training: SFTTrainingConfig = SFTTrainingConfig()
    """What enters the loss; for the metric loss."""
    plugin_digest: str = ""
    """Digest of the user's own packages that the settings name."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)


class GenerateJob(Record):
    """Sample completions of prompts and write them down, graded."""

    kind: Literal["generate"] = "generate"
    model: InputModel
    prompts: InputFile
    rollout: RolloutConfig
    max_prompts: int = Field(1024, ge=1)
    plugin_digest: str = ""
    """Digest of the user's own packages that the settings name."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)


class ServeJob(Record):
    """Serve a model over HTTP by the embedded engine."""

    kind: Literal["serve"] = "serve"
    model: InputModel
    host: str = Field("127.0.0.1", json_schema_extra=PLACEMENT)
    port: int = Field(ge=0, le=65535, json_schema_extra=PLACEMENT)
    context_length: int = Field(ge=2)
    """Prompt and completion tokens of one request at most."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)


Job = SFTJob | RLJob | EvalJob | GenerateJob | ServeJob


def load_job(path: Path) -> Job:
    """The job in a job.json.

    Raises:
        ConfigError: it is missing or does not describe a job.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give the path of a job.json")
    adapter: TypeAdapter[Job] = TypeAdapter(Annotated[Job, Field(discriminator="kind")])
    try:
        return adapter.validate_python(json.loads(path.read_text()))
    except (ValueError, ValidationError) as error:
        raise ConfigError(f"{path} is not a job that this version understands: {error}") from error
