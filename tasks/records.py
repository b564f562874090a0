"""Records that stages of a run pass to each other. The records are small, because Prefect stores them as JSON.

Not here: planning stages (plan.py), running stages (stage.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rollouts.infra.ledger import LEDGER_FILE
from rollouts.infra.run_ids import short_id
from rollouts.tasks.trackers import TrackerName
from rollouts_core.config import EngineKind
from rollouts_core.stages import TRAININGS

Outcome = Literal["ran", "attached", "reused"]


class TaskRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunScope(TaskRecord):
    """The settings of a run that each of its stages needs."""

    run_id: str
    """The id of the Prefect flow run. The run's leases in the ledger have this id."""
    run_name: str
    """The run's name, as the user chose it."""
    store: str
    """Absolute path of the store."""
    fresh: tuple[str, ...] = ()
    """Names of stages that must not reuse results of another run."""
    stop_timeout_s: float = 600.0
    """A cancelled training may take this many seconds to save its last step."""
    publish: str = ""
    """Upload the results below this object store URL; empty uploads nothing."""
    publish_checkpoints: bool = False
    """Whether the checkpoints of a training are uploaded while the training runs."""
    report_to: tuple[TrackerName, ...] = ()
    """Trackers to which the metrics of trainings are sent, for example "wandb"."""

    @property
    def ledger_path(self) -> Path:
        """The SQLite file with leases, rentals and the model registry."""
        return Path(self.store) / LEDGER_FILE

    @property
    def output_dir(self) -> Path:
        """The folder of the run's report and checkpoint."""
        return Path(self.store) / "runs" / f"{self.run_name}-{short_id(self.run_id)}"

    @property
    def publication_url(self) -> str:
        """The URL of the run's results in an object store."""
        return f"{self.publish}/{self.run_name}"


def artifact_key(kind: str, scope: RunScope) -> str:
    """The key of a run's artifact in Prefect. Prefect's pages show the key as the title of the artifact."""
    name = re.sub(r"[^a-z0-9]+", "-", scope.run_name.lower()).strip("-")
    return f"{kind}-{name}-{short_id(scope.run_id)}"


class Stage(TaskRecord):
    """A step of a run, such as SFT: its job, the job's fingerprint, and the directory of its files."""

    name: str
    """The stage's name, for example sft, select-sft, rl."""
    fingerprint: str
    """Digest of everything that can change the result. Stages with equal fingerprints share their result."""
    run_dir: str
    """Absolute path of the stage's directory on this machine. A job on a remote node is mirrored to this directory."""
    job: dict[str, Any]  # Any: JSON
    """The content of job.json."""
    num_steps: int
    """Number of steps for which the job writes metrics, for the progress bar."""
    timeout_s: float
    """The job is stopped after this many seconds; 0 sets no limit."""
    begins_with: str = ""
    """Directory of the same stage, which another run ended early. This stage resumes from that stage's checkpoints."""

    @property
    def kind(self) -> str:
        """The subcommand of `python -m rollouts_core` that runs the job, for example "rl" or "eval"."""
        return str(self.job["kind"])

    @property
    def samples(self) -> bool:
        """Whether the stage is a training that requests completions from inference engines."""
        return self.trains and TRAININGS[self.kind].is_graded and not self.job["rollouts"]

    @property
    def trains(self) -> bool:
        return self.kind in TRAININGS


class StageRecord(TaskRecord):
    """The outcome of a finished stage."""

    stage: str
    fingerprint: str
    run_dir: str
    how: Outcome
    """ran: this run started the job. attached: the job was already running. reused: the stage was already finished."""
    why: str = ""
    """The reason for `how`, for messages, with the name of the other run if another run made the result."""
    began_at: float = 0.0
    """When this run began to wait for the stage, in seconds since 1970; 0 if the record came from Prefect's cache."""
    seconds: float
    """How many seconds this run waited for the stage."""
    result: dict[str, Any]  # Any: JSON
    """The content of result.json."""

    @classmethod
    def reused(cls, stage: Stage, result: dict[str, Any]) -> StageRecord:  # Any: JSON
        """The record of a stage that an earlier run finished."""
        return cls(
            stage=stage.name,
            fingerprint=stage.fingerprint,
            run_dir=stage.run_dir,
            how="reused",
            seconds=0.0,
            result=result,
        )


class EngineRecord(TaskRecord):
    """A running inference engine that answers requests."""

    kind: EngineKind = "embedded"
    version: str = ""
    """The version of the engine's package; empty for the embedded engine."""
    url: str
    run_dir: str
    node: str = ""
    """The name of the engine's node."""
    lease_url: str = ""
    """The URL at which a trainer on another node renews the engine's lease. Empty for a trainer on the same node."""

    @property
    def lease_file(self) -> str:
        """The file that the RL job touches to renew the engine's lease."""
        return f"{self.run_dir}/.job/lease"
