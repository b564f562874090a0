"""The content of job.json: one record per kind of job, with its settings and inputs.

The orchestrator builds these records, so this file must not import torch. Inputs are named by path and digest; the
digest is part of the job's identity, the path is not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field

from rollouts_core.config import (
    PLACEMENT,
    DatasetConfig,
    DeploymentConfig,
    EngineConfig,
    EngineKind,
    EvaluationConfig,
    ModelConfig,
    Record,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
    parse_config,
    read_settings,
)
from rollouts_core.config.data import ColumnType
from rollouts_core.errors import ConfigError
from rollouts_core.fingerprint import digest_datasets
from rollouts_core.seeds import replicate_seed
from rollouts_core.stages import TRAININGS
from rollouts_core.stages.kind import load


class InputFile(Record):
    """A data file that a job reads."""

    path: str = Field(json_schema_extra=PLACEMENT)
    """Path of the file."""
    digest: str
    """sha256 of the content, verified before use."""
    columns: dict[str, ColumnType] = Field(default_factory=dict)
    """Types of the columns of a CSV file that are not text."""


class InputDataset(DatasetConfig):
    """A dataset that a job reads, and its share of the rows."""

    digest: str
    """sha256 of the content, verified when opened; for a dataset of the hub, the digest of its name and commit."""


class InputModel(Record):
    """A checkpoint that a job reads."""

    name: str
    """Name in results: base, or step_000100."""
    model: ModelConfig
    """Settings for loading the model."""
    digest: str
    """Digest of its content."""
    step: int = 0
    """Training steps before this checkpoint."""


class EngineAddress(Record):
    """An engine that a job may use."""

    kind: EngineKind = Field("embedded", validation_alias=AliasChoices("kind", "provider"))
    """Kind of the engine. In jobs that earlier versions wrote, the field is named `provider`."""
    version: str = ""
    """The version of the engine's package; empty for the engine of this project."""
    url: str
    """Base URL, reachable from the job."""
    lease_file: str
    """File whose modification time the job renews. The engine ends soon after the renewals stop."""
    lease_url: str = ""
    """URL to renew the lease if the file is on another node; empty if the job can write the file."""


class FurtherTrainer(Record):
    """Another machine that trains together with the leader."""

    name: str
    """Name of the machine, for messages."""
    host: str
    """IP address in the common network; the machine's launcher waits there for the leader."""
    port: int = Field(ge=1, le=65535)
    """Port of the waiting launcher."""
    run_dir: str
    """Run directory of the job on that machine."""


class TrainingJob(Record):
    """Train a model: the common part of all training jobs."""

    kind: str
    """The name of the training's StageKind."""
    model: InputModel
    """The model to start from."""
    training: SFTTrainingConfig | RLTrainingConfig
    """The settings of the training."""
    resume_digest: str = ""
    """Digest of the checkpoint in training.resume_from; empty without one."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)
    """Threads and devices."""
    further_trainers: tuple[FurtherTrainer, ...] = Field((), json_schema_extra=PLACEMENT)
    """The other machines of the training; each runs the same job."""
    node_rank: int = Field(0, ge=0, json_schema_extra=PLACEMENT)
    """Number of this machine. 0 is the leader, which runs the loop and writes files; `further_trainers` follow."""

    @property
    @abstractmethod
    def inputs(self) -> dict[str, str]:
        """Digests of the model and the data, by the names that checkpoints record."""

    @property
    def graders(self) -> RolloutConfig | None:
        """The settings that grade completions during the training; None if the job grades nothing."""
        return None

    @property
    def modules_named(self) -> dict[str, str]:
        """The modules of the user's functions that the job calls, by the settings that name them."""
        return {}


class SFTJob(TrainingJob):
    """Fine-tune a model on demonstrations."""

    kind: Literal["sft"] = "sft"
    data: tuple[InputDataset, ...] = Field(min_length=1)
    """Demonstrations."""
    eval_data: InputFile | None = None
    """Demonstrations for the evaluation loss."""
    streaming: bool = Field(False, json_schema_extra=PLACEMENT)
    """Whether the data are read and tokenized during training."""
    training: SFTTrainingConfig
    """The settings of SFT."""

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of the model and the data, by the names that checkpoints record."""
        return {"model": self.model.digest, "data": digest_datasets(self.data)}


class RLJob(TrainingJob):
    """Improve a model by reinforcement learning: against engines, or from recorded rollouts."""

    kind: Literal["rl"] = "rl"
    prompts: InputFile | None = None
    """Prompts to sample completions for."""
    rollouts: InputFile | None = None
    """Folder of recorded rollouts, if the job samples nothing."""
    training: RLTrainingConfig
    """The settings of RL."""
    rollout: RolloutConfig
    """Settings of sampling, grading and filtering."""
    plugin_digest: str = ""
    """Digest of the user's own packages that the settings name."""
    sends_adapters: bool = False
    """Adapters reach the engines as adapters if these can take them, instead of merged into the weights."""
    engines: tuple[EngineAddress, ...] = Field((), json_schema_extra=PLACEMENT)
    """The engines that generate completions."""

    def _broken_rules(self) -> Iterator[str]:
        if (self.prompts is None) == (self.rollouts is None):
            yield "an RL job has either prompts or rollouts"

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of the model, the data and the user's code, by the names that checkpoints record."""
        data = self.prompts or self.rollouts
        assert data is not None, "_broken_rules checked it"
        rows = digest_datasets([data]) if data.columns else data.digest
        return {"model": self.model.digest, "data": rows, "plugins": self.plugin_digest}

    @property
    def graders(self) -> RolloutConfig | None:
        """The settings of grading; recorded rollouts already have rewards."""
        return self.rollout if self.prompts else None

    @property
    def modules_named(self) -> dict[str, str]:
        """The modules of sampling, grading, filtering and the loss."""
        return {**self.rollout.modules_named, **self.training.modules_named}

    @property
    def replicated_rollout(self) -> RolloutConfig:
        """`rollout` with the seed of this replicate; all random numbers of the stage derive from it."""
        seed = replicate_seed(self.rollout.seed, self.training.replicate)
        return self.rollout.model_copy(update={"seed": seed})


class EvalJob(Record):
    """Score checkpoints on the same rows and name the best."""

    kind: Literal["eval"] = "eval"
    checkpoints: tuple[InputModel, ...] = Field(min_length=1)
    """Checkpoints to score, in order of training."""
    data: InputFile
    """Rows for all checkpoints."""
    evaluation: EvaluationConfig
    """Metric and sampling settings."""
    rollout: RolloutConfig = RolloutConfig()
    """Rewards and token limits, for the metric accuracy."""
    training: SFTTrainingConfig = SFTTrainingConfig()
    """Settings of the loss, for the metric loss."""
    is_selection: bool = Field(False, json_schema_extra=PLACEMENT)
    """Whether the job selects a checkpoint. A selection skips a checkpoint with non-finite numbers; a comparison ends
    with an error. Does not change scores."""
    plugin_digest: str = ""
    """Digest of the user's own packages that the settings name."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)
    """Threads and devices."""

    def _broken_rules(self) -> Iterator[str]:
        # Samples are stored, and requested again, by the checkpoint's name.
        digests: dict[str, str] = {}
        for each in self.checkpoints:
            if digests.setdefault(each.name, each.digest) != each.digest:
                yield f"two different checkpoints are called {each.name}: give them different names"


class GenerateJob(Record):
    """Sample completions of prompts and store them with their rewards."""

    kind: Literal["generate"] = "generate"
    model: InputModel
    """Model to sample from."""
    prompts: InputFile
    """Prompts to sample completions for."""
    rollout: RolloutConfig
    """Settings of sampling and grading."""
    max_prompts: int = Field(1024, ge=1)
    """Highest number of rows used, from the start of the file."""
    plugin_digest: str = ""
    """Digest of the user's own packages that the settings name."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)
    """Threads and devices."""


class ServeJob(Record):
    """Serve a model over HTTP."""

    kind: Literal["serve"] = "serve"
    model: InputModel
    """Model to serve."""
    host: str = Field("127.0.0.1", json_schema_extra=PLACEMENT)
    """Address to listen on."""
    port: int = Field(ge=0, le=65535, json_schema_extra=PLACEMENT)
    """Port to listen on."""
    lease_port: int = Field(0, ge=0, le=65535, json_schema_extra=PLACEMENT)
    """Port for lease renewals by a trainer on another node; 0 if the trainer is on this node."""
    parent_pid: int = Field(0, ge=0, json_schema_extra=PLACEMENT)
    """Process id of the starter; the server ends when that process ends. 0: no such process."""
    context_length: int = Field(ge=0)
    """Highest number of prompt and completion tokens of one request. 0: as many as the model and the memory allow."""
    served_name: str = Field("", json_schema_extra=PLACEMENT)
    """Name of the model in people's requests, which have texts. Empty: the server is for RL, and takes token ids and
    new weights."""
    engine: EngineConfig = EngineConfig()
    """Kind and settings of the server."""
    adapter_rank: int = Field(0, ge=0)
    """Highest rank of adapters that the server must take; 0 if it gets weights alone."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)
    """Threads and devices."""


Job = TrainingJob | EvalJob | GenerateJob | ServeJob


def modules_named(job: Job) -> dict[str, str]:
    """The modules of the user's functions that a job calls, by the settings that name them."""
    if isinstance(job, ServeJob):
        return {}
    return job.modules_named if isinstance(job, TrainingJob) else job.rollout.modules_named


OTHER_JOBS: dict[str, type[EvalJob] | type[GenerateJob] | type[ServeJob]] = {
    "eval": EvalJob,
    "generate": GenerateJob,
    "serve": ServeJob,
}
"""The kinds of jobs that do not train."""
JOB_KINDS = (*TRAININGS, *OTHER_JOBS)


def job_type(kind: str) -> type[Job]:
    """The record class of a kind of job.

    Raises:
        KeyError: unknown kind.
    """
    if kind in OTHER_JOBS:
        return OTHER_JOBS[kind]
    found: type[TrainingJob] = load(TRAININGS[kind].job)
    return found


def load_job(path: Path) -> Job:
    """Read a job.json.

    Raises:
        ConfigError: the file is missing or does not describe a job.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give the path of a job.json")
    settings = read_settings(path)
    kind = settings.get("kind")
    if kind not in JOB_KINDS:
        raise ConfigError(f"{path} has the kind {kind!r}: expected one of {', '.join(JOB_KINDS)}")
    return parse_config(job_type(kind), settings, source=str(path))
