"""`rollouts finish`: end a run's training early, so that the run continues with its best checkpoint.

Not here: how the request reaches the training job, and how other runs treat a stage that ended early
(tasks/early_end.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollouts.flows.commands.models import open_registry
from rollouts.flows.commands.terminal import DEFAULT_STORE, AsJson, Store, tell
from rollouts.infra.ledger import Ledger
from rollouts.tasks.early_end import ask_run_to_finish
from rollouts_core.errors import InputError
from rollouts_core.stages import TRAININGS, is_training

MIN_ID_CHARS = 8
"""Minimum number of leading characters of a run's id that a user may give instead of the whole id."""


def finish(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run: its name, my-run-5793d50a, or its id in Prefect.")
    ],
    store: Store = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """End the training of RUN after the current step. RUN continues with its best checkpoint so far."""
    tell(finish_training(store, run), as_json=as_json)


def finish_training(store: Path, given: str) -> str:
    """Request that a run ends its current training early, and return a sentence about what happens next.

    Raises:
        InputError, PermanentInfraError: the store or the run does not exist, or the run is not training.
    """
    with open_registry(store) as ledger:
        run_id, name = find_run(ledger, given)
        if not ledger.is_alive(run_id):
            if (report := store / "runs" / name / "report.html").is_file():
                raise InputError(f"{name} has finished: its report is {report}")
            raise InputError(f"{name} has no process: start the run again (Retry in Prefect), then finish it")
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
            f"{training} is also the training of {' and '.join(others)}, which needs all its steps: cancel that run "
            "first, or let the training go on"
        )
    ask_run_to_finish(store.resolve() / "stages" / training, run_id)
    return f"{name}: {training} ends after the current step, and the run continues with its best checkpoint"


def find_run(ledger: Ledger, given: str) -> tuple[str, str]:
    """The id and the name of the run that the user named. If several runs have the name, exactly one must be running.

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
        raise InputError(f"{given} could mean {' or '.join(living.values())}: give one of these names")
    at_work = ", ".join(name for run_id, name in runs.items() if ledger.is_alive(run_id)) or "none"
    raise InputError(f"there is no run {given}; running runs: {at_work}")
