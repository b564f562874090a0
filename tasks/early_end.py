"""End a training before its last step at a user's request, and decide which runs use the shortened stage.

    rollouts finish ──> <stage>/finish-asked ──> the run that follows the job ──> finish-<attempt> beside the job
        after its current step, the job writes a checkpoint and result.json with `finished_early`; the run continues

A stage that ended early counts as finished only for the run whose user requested the end. Another run with the same
settings uses a second directory, whose name is derived from the first directory's name. The second training starts from
copies of the first training's checkpoints, trains the remaining steps, and does not change the first run's files.

Not here: how a training ends early (rollouts_core/run_checkpoints.py), the command (flows/commands/finish.py).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel

from rollouts.infra.errors import InfraError
from rollouts.infra.jobs import JobState, ask_to_finish
from rollouts.infra.locks import locked
from rollouts.infra.repeating import repeating
from rollouts.infra.session import Session
from rollouts.tasks.records import RunScope, Stage
from rollouts_core.checkpoint import adopt_checkpoint, list_checkpoints, verify_checkpoint
from rollouts_core.errors import CheckpointError, RolloutsError
from rollouts_core.run_directory import RunDirectory
from rollouts_core.system.files import write_atomically

REQUEST = "finish-asked"
"""File in the stage's local directory that requests an early end. The file contains the id of the run that forwards the
request to the job."""
LOOK_S = 1.0

logger = logging.getLogger(__name__)


class EndedForAnotherRunError(RolloutsError):
    """The user of another run ended the job early, while this run also waited for the job's result."""


class EarlyEnd(BaseModel):
    """The early end of a training stage, as `finished_early` in result.json stores it."""

    step: int
    num_steps: int
    asked_by: str
    """Id of the run whose user requested the early end."""

    @property
    def sentence(self) -> str:
        """Text for messages and reports: "finished early at step 3 of 10"."""
        return f"finished early at step {self.step} of {self.num_steps}"


def read_early_end(directory: Path) -> EarlyEnd | None:
    """The early end of the stage in this directory, or None if the stage did not end early."""
    try:
        result = RunDirectory(directory).read_result()
    except (OSError, ValueError):
        return None  # the run of the stage itself reports a damaged or missing result.json
    early = result.get("finished_early") if isinstance(result, dict) else None
    return EarlyEnd.model_validate(early) if early else None


def is_left_behind(directory: Path, following: Path, run_id: str) -> bool:
    """True if another run ended the stage in `directory` early, so that run `run_id` must use directory `following`."""
    if (early := read_early_end(directory)) is not None:
        return early.asked_by != run_id
    return following.is_dir() and not RunDirectory(directory).result.is_file()


def check_own_end(stage: Stage, scope: RunScope) -> None:
    """Raise EndedForAnotherRunError if the stage ended early at another run's request."""
    early = read_early_end(Path(stage.run_dir))
    if early is not None and early.asked_by != scope.run_id:
        raise EndedForAnotherRunError(
            f"{stage.name} {early.sentence} at the request of run {early.asked_by}, which trained the same stage: "
            "start this run again to train the remaining steps"
        )


def begin_with_earlier(stage: Stage) -> str:
    """Copy the checkpoints of the early-ended stage `stage.begins_with` into a stage that has no checkpoints yet.

    Returns a sentence about the last copied checkpoint, or "" if nothing was copied.
    """
    own = RunDirectory(Path(stage.run_dir))
    if not stage.begins_with:
        return ""
    earlier = RunDirectory(Path(stage.begins_with))
    own.root.mkdir(parents=True, exist_ok=True)
    with locked(own.root / ".begin.lock"):
        if own.result.is_file() or list_checkpoints(own.checkpoints):
            return ""
        # Metrics are copied before checkpoints, so that an interruption cannot leave a checkpoint without metrics.
        with suppress(FileNotFoundError):
            shutil.copyfile(earlier.metrics, own.metrics)
        for path in list_checkpoints(earlier.checkpoints):
            try:
                verify_checkpoint(path)
            except CheckpointError as error:
                logger.warning("training resumes from the checkpoint before %s: %s", path.name, error)
                break
            adopt_checkpoint(path, own.checkpoints)
    found = list_checkpoints(own.checkpoints)
    return f"starts from {found[-1].name} in {earlier.root}, a stage that ended early" if found else ""


def ask_run_to_finish(directory: Path, run_id: str) -> None:
    """Write a request for an early end into a stage's directory. Run `run_id` forwards the request to the job."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / REQUEST, run_id)


@contextmanager
def requests_passed_on(
    session: Session, stage: Stage, run_dir: str, scope: RunScope, say: Callable[[str], None]
) -> Iterator[None]:
    """Forward requests for an early end (`ask_run_to_finish`) to the stage's job, while the `with` block runs.

    A thread looks for the request file once per second.

    Args:
        run_dir: the job's directory on its node.
    """
    request = Path(stage.run_dir) / REQUEST

    def look() -> None:
        try:
            if request.read_text() == scope.run_id:
                status = ask_to_finish(session, run_dir, scope.run_id)
                if status.state is JobState.RUNNING:
                    say("asked the job to finish after its current step")
            request.unlink()
        except FileNotFoundError:
            return
        except InfraError as error:
            logger.warning("the job in %s could not be asked to finish: %s", run_dir, error)

    with repeating(look, interval_s=LOOK_S, thread_name=f"requests to {run_dir}"):
        yield
