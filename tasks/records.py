"""The records that stages pass to each other. Prefect stores these records, so they are small and can become JSON.

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

How = Literal["ran", "attached", "reused"]


class TaskRecord(BaseModel):
    """The base of all records of this package."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunScope(TaskRecord):
    """Facts about a run that each of its stages needs."""

    run_id: str
    """The id of the flow run. The run's leases carry this id."""
    run_name: str
    """The run's name for users."""
    store: str
    """Absolute path of the store."""
    fresh: tuple[str, ...] = ()
    """Stages that must not reuse results of another run."""
    stop_timeout_s: float = 600.0
    """The most seconds that a training gets to save its last step when it is stopped."""
    publish: str = ""
    """URL below which results are published; empty publishes nothing."""
    publish_checkpoints: bool = False
    """Whether the checkpoints of a training are published while the training runs."""
    report_to: tuple[TrackerName, ...] = ()
    """The trackers that show the metrics of trainings."""

    @property
    def ledger_path(self) -> Path:
        """The database of leases."""
        return Path(self.store) / LEDGER_FILE

    @property
    def output_dir(self) -> Path:
        """The folder of the run's report and checkpoint."""
        return Path(self.store) / "runs" / f"{self.run_name}-{short_id(self.run_id)}"

    @property
    def publication_url(self) -> str:
        """The address of the run's results in an object store."""
        return f"{self.publish}/{self.run_name}"


def artifact_key(kind: str, scope: RunScope) -> str:
    """The key of a run's artifact in Prefect. Prefect shows the key as the title of a card for the newest artifact."""
    name = re.sub(r"[^a-z0-9]+", "-", scope.run_name.lower()).strip("-")
    return f"{kind}-{name}-{short_id(scope.run_id)}"


class Stage(TaskRecord):
    """A job with its fingerprint and its directory."""

    name: str
    """For example sft, select-sft, rl."""
    fingerprint: str
    """Digest that identifies the work of the stage."""
    run_dir: str
    """Absolute path of the run directory on this machine. A remote node's run directory is mirrored to this path."""
    job: dict[str, Any]  # Any: JSON
    """The content of job.json."""
    num_steps: int
    """Number of metric steps of the job, for the progress bar."""
    timeout_s: float
    """The job is stopped after this time."""
    begins_with: str = ""
    """Directory of the same stage that another run ended early. The training resumes from its checkpoints."""

    @property
    def kind(self) -> str:
        """The command of `python -m rollouts_core` that does the job."""
        return str(self.job["kind"])

    @property
    def samples(self) -> bool:
        """Whether the stage is a training that asks engines for completions."""
        return self.trains and TRAININGS[self.kind].is_graded and not self.job["rollouts"]

    @property
    def trains(self) -> bool:
        """Whether the stage trains the model."""
        return self.kind in TRAININGS


class StageRecord(TaskRecord):
    """The outcome of a finished stage."""

    stage: str
    fingerprint: str
    run_dir: str
    how: How
    """ran: started by this run. attached: already under way. reused: finished before."""
    why: str = ""
    """The reason for `how` in words, with the name of the other run if another run made the result."""
    began_at: float = 0.0
    """When this run reached the stage, in seconds since 1970; 0 if the record came from Prefect's cache."""
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
    """A running engine that answers requests."""

    kind: EngineKind = "embedded"
    version: str = ""
    """The version of the engine's package; empty for the embedded engine."""
    url: str
    run_dir: str
    node: str = ""
    """The name of the engine's node."""
    lease_url: str = ""
    """The address at which a trainer on another node renews the engine's lease."""

    @property
    def lease_file(self) -> str:
        """The file through which the RL job renews the engine's lease."""
        return f"{self.run_dir}/.job/lease"
