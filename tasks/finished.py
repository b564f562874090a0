"""Find out, before a machine is rented, whether a run has anything left to do on one, and how far it has come.

A run with the settings and data of an earlier one, an evaluation of models that were scored before: their stages are
finished, and a machine would cost money for nothing.

Not here: taking what is finished (stage_tasks.py), which stages there are (flows/pipeline.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rollouts.infra.errors import InfraError
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import Node, NodeSettings, RentedNode, no_machine
from rollouts.infra.providers.rented import end_left_machines, is_left_for
from rollouts.infra.renting.rentals import open_rentals
from rollouts.tasks.artifacts import is_finished
from rollouts.tasks.earlier_scores import take_earlier_scores
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.records import RunScope, Stage, StageRecord
from rollouts_core.run_directory import RunDirectory

RunStage = Callable[[Stage], StageRecord]
"""Does a stage, or takes it from somewhere."""


class _UnfinishedError(Exception):
    """A stage is left to do."""


def placeholder_if_finished(
    settings: NodeSettings, scope: RunScope, run_stages: Callable[[Node, RunStage], object]
) -> Node | None:
    """A stand-in for a rented machine if every stage is finished; None if a machine is needed.

    Args:
        run_stages: goes through the stages of the run, each by the function that it is given.
    """
    if not isinstance(settings, RentedNode) or has_machine_to_end(settings, scope):
        return None
    nowhere = no_machine(scope.store)
    try:
        run_stages(nowhere, lambda stage: take_finished(stage, scope))
    except _UnfinishedError:
        return None
    with StageProgress("provision") as progress:
        if has_left_machines(scope):
            try:
                end_left_machines(settings, Path(scope.store), progress.say)
            except InfraError as error:  # nothing of this run depends on it
                progress.say(str(error))
        progress.say("every stage is finished: nothing is rented")
    return nowhere


def trainings_begun(scope: RunScope, machine: Node, run_stages: Callable[[Node, RunStage], object]) -> tuple[str, ...]:
    """The directories on this machine of the run's trainings, up to and including the first unfinished stage.

    Args:
        run_stages: goes through the stages of the run, each by the function that it is given.
    """
    if not any(Path(scope.store).glob("stages/*")):  # to say which they would be takes a look at all of the data
        return ()
    found: list[str] = []

    def note(stage: Stage) -> StageRecord:
        if stage.trains:
            found.append(stage.run_dir)
        return take_finished(stage, scope)

    with suppress(_UnfinishedError):
        run_stages(machine, note)
    return tuple(found)


def take_finished(stage: Stage, scope: RunScope) -> StageRecord:
    """The record of a finished stage, also of an evaluation that finished ones add up to."""
    take_earlier_scores(stage, scope)
    result = RunDirectory(Path(stage.run_dir)).read_result() if is_finished(stage) else None
    if result is None:
        raise _UnfinishedError
    return StageRecord(
        stage=stage.name,
        fingerprint=stage.fingerprint,
        run_dir=stage.run_dir,
        how="reused",
        seconds=0.0,
        result=result,
    )


def has_machine_to_end(settings: RentedNode, scope: RunScope) -> bool:
    """Whether the run, or one with the same settings that died, has a machine.

    Provisioning takes it over, and the end of the run ends it. Otherwise it would rent another machine.
    """
    with Ledger(scope.ledger_path) as ledger:
        return any(
            rental.run_id == scope.run_id or (is_left_for(rental, settings) and ledger.has_died(rental.run_id))
            for rental in open_rentals(ledger)
        )


def has_left_machines(scope: RunScope) -> bool:
    """Whether a run that died has a machine."""
    with Ledger(scope.ledger_path) as ledger:
        return any(ledger.has_died(rental.run_id) for rental in open_rentals(ledger))
