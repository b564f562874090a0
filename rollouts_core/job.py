"""What a job is asked to do: the content of job.json, one record per kind of job.

Not here: doing it (jobs/). Nothing here imports torch: the orchestrator
builds these records.

Inputs are named by path and digest; the digest is part of the job's identity, the path is not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

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
    """Where it lies."""
    digest: str
    """sha256 of its content, checked before it is used."""
    columns: dict[str, ColumnType] = Field(default_factory=dict)
    """Types of the columns of a CSV file that are not text."""


class InputDataset(DatasetConfig):
    """A dataset that a job reads, and how much of it."""

    digest: str
    """sha256 of its content, checked when it is opened; for a dataset of the hub, of its name and commit."""


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

    provider: EngineKind = "embedded"
    """What answers there."""
    version: str = ""
    """The version of its package; empty for the engine of this project."""
    url: str
    """Base URL, reachable from the job."""
    lease_file: str
    """File whose modification time the job renews, so that the engine outlives neither it nor a crash by long."""
    lease_url: str = ""
    """Where the job asks for that instead, since the file is on another node; empty where it is on the job's own."""


class FurtherTrainer(Record):
    """A further machine that trains together with the one that leads."""

    name: str
    """The machine, for people."""
    host: str
    """Its IP address in the network of all of them: its launcher waits there for the leader's."""
    port: int = Field(ge=1, le=65535)
    """The port at which it waits."""
    run_dir: str
    """Where its own job lies on it."""


class TrainingJob(Record):
    """Train a model: what the jobs of all trainings share."""

    kind: str
    """The name of the training's StageKind."""
    model: InputModel
    """The model to start from."""
    training: SFTTrainingConfig | RLTrainingConfig
    """The settings of the training."""
    resume_digest: str = ""
    """Digest of the checkpoint that training.resume_from names; empty where it names none."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)
    """Threads and devices."""
    further_trainers: tuple[FurtherTrainer, ...] = Field((), json_schema_extra=PLACEMENT)
    """The other machines that train together; they do the same job."""
    node_rank: int = Field(0, ge=0, json_schema_extra=PLACEMENT)
    """Which of the machines this is: 0 leads, and does all but computing; then come `further_trainers`."""

    @property
    @abstractmethod
    def inputs(self) -> dict[str, str]:
        """Digests of what is trained on and from, by the names that checkpoints have for it."""

    @property
    def graders(self) -> RolloutConfig | None:
        """The settings that name who grades completions during the training; None if no completion is graded."""
        return None

    @property
    def modules_named(self) -> dict[str, str]:
        """The modules of the user's own functions that the job calls, by the settings that name them."""
        return {}


class SFTJob(TrainingJob):
    """Fine-tune a model on demonstrations."""

    kind: Literal["sft"] = "sft"
    data: tuple[InputDataset, ...] = Field(min_length=1)
    """Demonstrations."""
    eval_data: InputFile | None = None
    """Demonstrations whose loss is taken now and then."""
    streaming: bool = Field(False, json_schema_extra=PLACEMENT)
    """Whether they are read and tokenized while training."""
    training: SFTTrainingConfig
    """The settings of SFT."""

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of what is trained on and from, by the names that checkpoints have for it."""
        return {"model": self.model.digest, "data": digest_datasets(self.data)}


class RLJob(TrainingJob):
    """Improve a model by reinforcement learning: against engines, or from recorded rollouts."""

    kind: Literal["rl"] = "rl"
    prompts: InputFile | None = None
    """What completions are sampled for."""
    rollouts: InputFile | None = None
    """The folder of recorded rollouts, where nothing is sampled."""
    training: RLTrainingConfig
    """The settings of RL."""
    rollout: RolloutConfig
    """How completions are sampled, graded and filtered."""
    plugin_digest: str = ""
    """Digest of the user's own packages that the settings name."""
    engines: tuple[EngineAddress, ...] = Field((), json_schema_extra=PLACEMENT)
    """The engines that sample."""

    def _broken_rules(self) -> Iterator[str]:
        if (self.prompts is None) == (self.rollouts is None):
            yield "an RL job has either prompts or rollouts"

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of what is trained on and from, by the names that checkpoints have for it."""
        data = self.prompts or self.rollouts
        assert data is not None, "a job has one of them"
        rows = digest_datasets([data]) if data.columns else data.digest
        return {"model": self.model.digest, "data": rows, "plugins": self.plugin_digest}

    @property
    def graders(self) -> RolloutConfig | None:
        """The settings that name who grades; recorded rollouts are graded already."""
        return self.rollout if self.prompts else None

    @property
    def modules_named(self) -> dict[str, str]:
        """Those of sampling, grading, filtering and the loss."""
        return {**self.rollout.modules_named, **self.training.modules_named}

    @property
    def replicated_rollout(self) -> RolloutConfig:
        """`rollout` with the seed of this replicate, from which every random number of the stage follows."""
        seed = replicate_seed(self.rollout.seed, self.training.replicate)
        return self.rollout.model_copy(update={"seed": seed})


class EvalJob(Record):
    """Score checkpoints on the same rows, and name the best."""

    kind: Literal["eval"] = "eval"
    checkpoints: tuple[InputModel, ...] = Field(min_length=1)
    """What is scored, in order of training."""
    data: InputFile
    """The rows that all are scored on."""
    evaluation: EvaluationConfig
    """The metric, and how completions are sampled."""
    rollout: RolloutConfig = RolloutConfig()
    """Who grades, and the token limits; for the metric accuracy."""
    training: SFTTrainingConfig = SFTTrainingConfig()
    """What enters the loss; for the metric loss."""
    is_selection: bool = Field(False, json_schema_extra=PLACEMENT)
    """Whether one of them is to be chosen, so that one whose weights compute no numbers is left out; where they are
    compared, it ends the job. Changes no score."""
    plugin_digest: str = ""
    """Digest of the user's own packages that the settings name."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)
    """Threads and devices."""

    def _broken_rules(self) -> Iterator[str]:
        """What a checkpoint said lies under its name, and is taken from there by whoever asks for it again."""
        digests: dict[str, str] = {}
        for each in self.checkpoints:
            if digests.setdefault(each.name, each.digest) != each.digest:
                yield f"two checkpoints are called {each.name}: results tell them apart by their names"


class GenerateJob(Record):
    """Sample completions of prompts and write them down, graded."""

    kind: Literal["generate"] = "generate"
    model: InputModel
    """The model that samples."""
    prompts: InputFile
    """What completions are sampled for."""
    rollout: RolloutConfig
    """How completions are sampled and graded."""
    max_prompts: int = Field(1024, ge=1)
    """At most this many rows are used, from the start of the file."""
    plugin_digest: str = ""
    """Digest of the user's own packages that the settings name."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)
    """Threads and devices."""


class ServeJob(Record):
    """Serve a model over HTTP."""

    kind: Literal["serve"] = "serve"
    model: InputModel
    """What is served."""
    host: str = Field("127.0.0.1", json_schema_extra=PLACEMENT)
    """Address to listen on."""
    port: int = Field(ge=0, le=65535, json_schema_extra=PLACEMENT)
    """Port to listen on."""
    lease_port: int = Field(0, ge=0, le=65535, json_schema_extra=PLACEMENT)
    """Port at which a trainer on another node renews the lease; 0 where it is on the same one."""
    parent_pid: int = Field(0, ge=0, json_schema_extra=PLACEMENT)
    """The process that started the server and with which it ends; 0 where it ends by itself."""
    context_length: int = Field(ge=2)
    """Prompt and completion tokens of one request at most."""
    engine: EngineConfig = EngineConfig()
    """By which server."""
    deployment: DeploymentConfig = Field(DeploymentConfig(), json_schema_extra=PLACEMENT)
    """Threads and devices."""


Job = TrainingJob | EvalJob | GenerateJob | ServeJob


def modules_named(job: Job) -> dict[str, str]:
    """The modules of the user's own functions that a job calls, by the settings that name them."""
    if isinstance(job, ServeJob):
        return {}
    return job.modules_named if isinstance(job, TrainingJob) else job.rollout.modules_named


OTHER_JOBS: dict[str, type[EvalJob] | type[GenerateJob] | type[ServeJob]] = {
    "eval": EvalJob,
    "generate": GenerateJob,
    "serve": ServeJob,
}
"""Jobs that train nothing, by their kinds."""
JOB_KINDS = (*TRAININGS, *OTHER_JOBS)


def job_type(kind: str) -> type[Job]:
    """The record of a kind of job.

    Raises:
        KeyError: there is no such kind.
    """
    if kind in OTHER_JOBS:
        return OTHER_JOBS[kind]
    found: type[TrainingJob] = load(TRAININGS[kind].job)
    return found


def load_job(path: Path) -> Job:
    """The job in a job.json.

    Raises:
        ConfigError: it is missing or does not describe a job; one sentence that names the key.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give the path of a job.json")
    settings = read_settings(path)
    kind = settings.get("kind")
    if kind not in JOB_KINDS:
        raise ConfigError(f"{path} has the kind {kind!r}: expected one of {', '.join(JOB_KINDS)}")
    return parse_config(job_type(kind), settings, source=str(path))
