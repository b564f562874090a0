"""End a training before its last step at a user's request; and what that means later.

    rollouts finish ──> <stage>/finish-asked ──> the run that follows the job ──> finish-<attempt> beside the job
        the job ends after the step under way: a checkpoint, result.json with `finished_early`, and the run goes on

A stage that ended early is whole only for the run that asked. Another run with the same settings has
the stage in another directory, whose name follows from that of the first. It begins with the checkpoints of the first:
only the rest is trained, and nothing that the first run still uses is touched.

Not here: the training's side (rollouts_core/saving.py), the command (flows/commands/finish.py).
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
"""In the stage's directory here: the id of the run that is to pass the request on to the job."""
LOOK_S = 1.0

logger = logging.getLogger(__name__)


class EndedForAnotherRunError(RolloutsError):
    """The job that this run attached to was ended early for another run."""


class EarlyEnd(BaseModel):
    """The early end of a stage, as its record has it."""

    step: int
    num_steps: int
    asked_by: str
    """Id of the run."""

    @property
    def sentence(self) -> str:
        """For people."""
        return f"finished early at step {self.step} of {self.num_steps}"


def read_early_end(directory: Path) -> EarlyEnd | None:
    """How a stage ended early, or None."""
    try:
        result = RunDirectory(directory).read_result()
    except (OSError, ValueError):
        return None  # damaged, or set aside this moment: the stage that needs the record says so
    early = result.get("finished_early") if isinstance(result, dict) else None
    return EarlyEnd.model_validate(early) if early else None


def is_left_behind(directory: Path, following: Path, run_id: str) -> bool:
    """True if another run ended the stage of this directory early. This run then uses the following directory."""
    if (early := read_early_end(directory)) is not None:
        return early.asked_by != run_id
    return following.is_dir() and not RunDirectory(directory).result.is_file()


def check_own_end(stage: Stage, scope: RunScope) -> None:
    """Raise EndedForAnotherRunError where the stage ended early because another run asked for that."""
    early = read_early_end(Path(stage.run_dir))
    if early is not None and early.asked_by != scope.run_id:
        raise EndedForAnotherRunError(
            f"{stage.name} {early.sentence} for run {early.asked_by}, which trained it too: start this run again, and "
            "it trains the rest"
        )


def begin_with_earlier(stage: Stage) -> str:
    """Give a stage without checkpoints those of its predecessor. Returns a sentence about it, or "" if nothing was
    due."""
    own = RunDirectory(Path(stage.run_dir))
    if not stage.begins_with:
        return ""
    earlier = RunDirectory(Path(stage.begins_with))
    own.root.mkdir(parents=True, exist_ok=True)
    with locked(own.root / ".begin.lock"):
        if own.result.is_file() or list_checkpoints(own.checkpoints):
            return ""
        # Before the first checkpoint: if this is broken off, the file says that the earlier steps are done and logged.
        with suppress(FileNotFoundError):
            shutil.copyfile(earlier.metrics, own.metrics)
        for path in list_checkpoints(earlier.checkpoints):
            try:
                verify_checkpoint(path)
            except CheckpointError as error:
                logger.warning("training goes on from before %s: %s", path.name, error)
                break
            adopt_checkpoint(path, own.checkpoints)
    found = list_checkpoints(own.checkpoints)
    return f"has the checkpoints up to {found[-1].name} of {earlier.root}, which ended early" if found else ""


def ask_run_to_finish(directory: Path, run_id: str) -> None:
    """Have the run that follows the stage's job pass the request on."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / REQUEST, run_id)


@contextmanager
def requests_passed_on(
    session: Session, stage: Stage, run_dir: str, scope: RunScope, say: Callable[[str], None]
) -> Iterator[None]:
    """Pass requests of this run on to its job as long as the block runs, beside whatever it does.

    Args:
        run_dir: of the job, on its node.
    """
    request = Path(stage.run_dir) / REQUEST

    def look() -> None:
        try:
            if request.read_text() == scope.run_id:
                status = ask_to_finish(session, run_dir, scope.run_id)
                if status.state is JobState.RUNNING:
                    say("asked to finish after the step under way")
            request.unlink()
        except FileNotFoundError:
            return
        except InfraError as error:
            logger.warning("%s was not asked to finish: %s", run_dir, error)

    with repeating(look, interval_s=LOOK_S, thread_name=f"requests to {run_dir}"):
        yield
