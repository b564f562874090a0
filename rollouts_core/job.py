"""The content of job.json: one record per kind of job, with its settings and inputs.

The orchestrator builds these records, so this file must not import torch. A job names each input by its path and its
digest. Only the digest enters the job's fingerprint, because paths differ between machines.
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
from rollouts_core.engine_kinds.auto import CHOSEN_ON_NODE, WITHOUT_GPUS
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
    """Types of CSV columns by column name. Columns that are not listed are text."""


class InputDataset(DatasetConfig):
    """A dataset of demonstrations that an SFT job reads, with its digest."""

    digest: str
    """sha256 of the dataset's files, verified when the job opens the dataset. For a hub dataset: digest of its name and
    commit."""


class InputModel(Record):
    """A checkpoint that a job reads."""

    name: str
    """Name of the checkpoint in results, for example base or step_000100."""
    model: ModelConfig
    """Settings for loading the model."""
    digest: str
    """Digest of the checkpoint's content."""
    step: int = 0
    """Training steps before this checkpoint."""


class EngineAddress(Record):
    """Address and lease of an inference engine that an RL job uses."""

    kind: EngineKind = Field("embedded", validation_alias=AliasChoices("kind", "provider"))
    """Kind of the engine. In jobs that earlier versions wrote, the field is named `provider`."""
    version: str = ""
    """The version of the engine's package; empty for the engine of this project."""
    url: str
    """Base URL, reachable from the job."""
    lease_file: str
    """The engine's lease file, whose modification time the job updates every few seconds. The engine ends soon after
    these updates stop."""
    lease_url: str = ""
    """URL to which the job sends lease renewals if the lease file is on another node; empty if the job can write the
    file."""


class FurtherTrainer(Record):
    """A machine, other than the leader, that trains together with the leader."""

    name: str
    """Name of the machine, for messages."""
    host: str
    """IP address at which the machine's launcher waits for the leader's connection."""
    port: int = Field(ge=1, le=65535)
    """Port at which the machine's launcher waits for the leader's connection."""
    run_dir: str
    """Run directory of the job on that machine."""


class TrainingJob(Record):
    """Base class of the jobs that train a model."""

    kind: str
    """The name of the training's StageKind."""
    model: InputModel
    """The model to start from."""
    training: SFTTrainingConfig | RLTrainingConfig
    """The settings of the training."""
    resume_digest: str = ""
    """Digest of the checkpoint that `training.resume_from` names; empty if the setting is empty."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)
    """CPU threads and GPUs that the job uses."""
    further_trainers: tuple[FurtherTrainer, ...] = Field((), json_schema_extra=PLACEMENT)
    """The machines of the training without the leader. Each machine runs the same job."""
    node_rank: int = Field(0, ge=0, json_schema_extra=PLACEMENT)
    """Number of this machine. 0 is the leader, which runs the training loop and writes files. 1, 2, ... are the
    machines in `further_trainers`, in order."""

    @property
    @abstractmethod
    def inputs(self) -> dict[str, str]:
        """Digests of the model and the data, by the names that checkpoints record."""

    @property
    def graders(self) -> RolloutConfig | None:
        """The settings with which the job grades completions during training; None if the job grades no completions."""
        return None

    @property
    def modules_named(self) -> dict[str, str]:
        """The modules of the user's functions that the job calls, by the settings that name them."""
        return {}


class SFTJob(TrainingJob):
    """Fine-tune a model on demonstrations."""

    kind: Literal["sft"] = "sft"
    data: tuple[InputDataset, ...] = Field(min_length=1)
    """Datasets of demonstrations to train on."""
    eval_data: InputFile | None = None
    """Demonstrations whose loss is measured during training; None for no measurement."""
    streaming: bool = Field(False, json_schema_extra=PLACEMENT)
    """Whether the data are read and tokenized during training instead of before it."""
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
    """Folder of recorded rollouts to train on; None if the job samples completions for `prompts`."""
    training: RLTrainingConfig
    """The settings of RL."""
    rollout: RolloutConfig
    """Settings of sampling, grading and filtering."""
    plugin_digest: str = ""
    """Digest of the user's code and of local grading models that the settings name."""
    sends_adapters: bool = False
    """True: send LoRA adapters to engines that can load adapters. False: merge adapters into the weights before sending
    them."""
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
        """The settings with which the job grades completions; None for recorded rollouts, which already have
        rewards."""
        return self.rollout if self.prompts else None

    @property
    def modules_named(self) -> dict[str, str]:
        """The modules of the user's functions for sampling, grading, filtering and the loss, by the settings that name
        them."""
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
    """File of rows on which each checkpoint is scored."""
    evaluation: EvaluationConfig
    """Metric of the scores, and settings for sampling completions."""
    rollout: RolloutConfig = RolloutConfig()
    """Rewards and token limits of completions. Used only with the metric accuracy."""
    training: SFTTrainingConfig = SFTTrainingConfig()
    """Settings that choose the tokens of the loss. Used only with the metric loss."""
    is_selection: bool = Field(False, json_schema_extra=PLACEMENT)
    """True if the job selects a checkpoint of a training, False if it compares models. If a checkpoint computes NaN or
    infinite numbers, a selection skips the checkpoint, but a comparison ends with an error."""
    plugin_digest: str = ""
    """Digest of the user's code and of local grading models that the settings name."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)
    """CPU threads and GPUs that the job uses."""

    def _broken_rules(self) -> Iterator[str]:
        # Samples are stored and reused by the checkpoint's name, so different checkpoints need different names.
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
    """Largest number of rows of `prompts` that are used, from the start of the file."""
    plugin_digest: str = ""
    """Digest of the user's code and of local grading models that the settings name."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)
    """CPU threads and GPUs that the job uses."""


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
    """Id of the process that started the server. The server ends when that process ends. 0: the server depends on no
    process."""
    context_length: int = Field(ge=0)
    """Largest number of prompt and completion tokens of one request together. 0: as many as the model and the memory
    allow."""
    served_name: str = Field("", json_schema_extra=PLACEMENT)
    """Name of the model in users' requests, which contain text. Empty: a server for RL, which accepts token ids and new
    weights."""
    engine: EngineConfig = EngineConfig()
    """Kind and settings of the server."""
    adapter_rank: int = Field(0, ge=0)
    """Largest rank of LoRA adapters that the server must be able to load; 0 if it gets only full weights."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)
    """CPU threads and GPUs that the job uses."""


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
"""For each kind of job that does not train, its record class."""
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
    return _with_known_engine(parse_config(job_type(kind), settings, source=str(path)))


def _with_known_engine(job: Job) -> Job:
    """The job with the embedded engine in place of "auto", because only pipelines choose an engine on a node."""
    holder = job if isinstance(job, ServeJob) else getattr(job, "rollout", None)
    if holder is None or holder.engine.kind != CHOSEN_ON_NODE:
        return job
    known = holder.model_copy(update={"engine": holder.engine.model_copy(update={"kind": WITHOUT_GPUS})})
    return known if holder is job else job.model_copy(update={"rollout": known})
