"""Find out which stages of a run are finished before the run rents a machine.

If an earlier run had the same settings and data, all stages are finished, and a rented machine would have no work.

Not here: reusing finished stages (stage_tasks.py), the list of a run's stages (flows/pipeline.py).
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
"""Runs a stage and returns its record, or only loads the record of a finished stage."""


class _UnfinishedError(Exception):
    """A stage has no result yet."""


def placeholder_if_finished(
    settings: NodeSettings, scope: RunScope, run_stages: Callable[[Node, RunStage], object]
) -> Node | None:
    """A placeholder node if the run would rent a machine although all its stages are finished. Otherwise None.

    Args:
        run_stages: calls a `RunStage` for each stage of the run, in order.
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
            except InfraError as error:  # not fatal: this run needs no machine
                progress.say(str(error))
        progress.say("every stage is finished: nothing is rented")
    return nowhere


def trainings_begun(scope: RunScope, machine: Node, run_stages: Callable[[Node, RunStage], object]) -> tuple[str, ...]:
    """The local directories of the run's trainings that may have started.

    All finished trainings may have started, and also the first unfinished stage if it is a training.

    Args:
        run_stages: calls a `RunStage` for each stage of the run, in order.
    """
    if not any(Path(scope.store).glob("stages/*")):  # no training has started; planning would only read all data
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
    """Load the record of a finished stage. An evaluation also counts as finished if earlier ones have its scores.

    Raises:
        _UnfinishedError: the stage is not finished.
    """
    take_earlier_scores(stage, scope)
    result = RunDirectory(Path(stage.run_dir)).read_result() if is_finished(stage) else None
    if result is None:
        raise _UnfinishedError
    return StageRecord.reused(stage, result)


def has_machine_to_end(settings: RentedNode, scope: RunScope) -> bool:
    """True if this run, or a killed run with the same settings, still has a rented machine.

    Provisioning uses an existing machine instead of renting another, and the end of the run gives the machine back.
    """
    with Ledger(scope.ledger_path) as ledger:
        return any(
            rental.run_id == scope.run_id or (is_left_for(rental, settings) and ledger.has_died(rental.run_id))
            for rental in open_rentals(ledger)
        )


def has_left_machines(scope: RunScope) -> bool:
    """True if a killed run still has a rented machine."""
    with Ledger(scope.ledger_path) as ledger:
        return any(ledger.has_died(rental.run_id) for rental in open_rentals(ledger))
