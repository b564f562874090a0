"""`rollouts finish`: end a run's training early, so that the run goes on with its best checkpoint.

Not here: how the request reaches the job, and how other runs treat a stage that ended early (tasks/early_end.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollouts.flows.commands.models import open_registry
from rollouts.flows.commands.terminal import DEFAULT_STORE, Store
from rollouts.infra.ledger import Ledger
from rollouts.tasks.early_end import ask_run_to_finish
from rollouts_core.errors import InputError
from rollouts_core.stages import TRAININGS, is_training

MIN_ID_CHARS = 8
"""Fewest characters of a run's id that name the run."""


def finish(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run: its name, my-run-5793d50a, or its id in Prefect.")
    ],
    store: Store = DEFAULT_STORE,
) -> None:
    """End the training of RUN after the step under way. RUN goes on with its best checkpoint so far."""
    typer.echo(finish_training(store, run))


def finish_training(store: Path, given: str) -> str:
    """Ask a run to end its present training early, and return a sentence about what happens next.

    Raises:
        InputError, PermanentInfraError: the store or the run does not exist, or the run is not training.
    """
    with open_registry(store) as ledger:
        run_id, name = find_run(ledger, given)
        if not ledger.is_alive(run_id):
            if (report := store / "runs" / name / "report.html").is_file():
                raise InputError(f"{name} trains no more: its report is {report}")
            raise InputError(f"{name} has no process: Retry or start the run, then finish it")
        claimed = [Path(lease.run_dir).name for lease in ledger.leases_of(run_id)]
        training = next((each for each in reversed(claimed) if is_training(each.rpartition("-")[0])), "")
        if not training:
            labels = " and ".join(kind.label for kind in TRAININGS.values())
            raise InputError(f"{name} is not training at the moment: only {labels} can be finished early")
        runs = {use.run_id: use.run for use in ledger.stage_uses()}
        others = [
            runs.get(lease.run_id, lease.run_id)
            for lease in ledger.leases()
            if Path(lease.run_dir).name == training and lease.run_id != run_id and not ledger.has_died(lease.run_id)
        ]
    if others:
        raise InputError(
            f"{training} is trained for {' and '.join(others)} too, which needs all steps: cancel that run first, "
            "or let the training go on"
        )
    ask_run_to_finish(store.resolve() / "stages" / training, run_id)
    return f"{name}: {training} ends after the step under way, and the run goes on with its best checkpoint"


def find_run(ledger: Ledger, given: str) -> tuple[str, str]:
    """The id and the name of the run that the user named. If several runs have the name, exactly one must be alive.

    Raises:
        InputError: no run, or several runs, have this name.
    """
    runs = {use.run_id: use.run for use in ledger.stage_uses()}
    meant = {
        run_id: name
        for run_id, name in runs.items()
        if given in (run_id, name, name.rpartition("-")[0]) or (len(given) >= MIN_ID_CHARS and run_id.startswith(given))
    }
    living = {run_id: name for run_id, name in meant.items() if ledger.is_alive(run_id)} or meant
    if len(living) == 1:
        return next(iter(living.items()))
    if living:
        raise InputError(f"{given} may be {' or '.join(living.values())}: name one of them")
    at_work = ", ".join(name for run_id, name in runs.items() if ledger.is_alive(run_id)) or "none"
    raise InputError(f"there is no run {given}: the running ones are {at_work}")
