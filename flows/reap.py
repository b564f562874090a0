"""The `reap` flow: end rented machines that no run uses, and show the ended and the remaining machines in Prefect's UI.

Not here: the choice of machines to end (infra/renting/reaper.py), the regular checks of the serving process
(expired_machines.py).
"""

# No `from __future__ import annotations`: Prefect pickles the flow by value, without the names to resolve annotations.

from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed

from rollouts.flows.checked_flow import checked_flow
from rollouts.flows.expired_machines import look_at_machines
from rollouts.flows.run_ends import known_tool, with_noted_end
from rollouts.flows.tools import REAP_FLOW, ReapConfig
from rollouts.infra.errors import TransientInfraError
from rollouts.infra.renting.reaper import ReapReport
from rollouts_core.report.markdown import escaped


@checked_flow(name=REAP_FLOW, flow_run_name=REAP_FLOW)
@with_noted_end
def reap_machines(reap: ReapConfig) -> State[Any]:
    """End rented machines that no run uses. A table artifact in Prefect lists all machines.

    Raises:
        TransientInfraError: a machine or provider could not be checked, or a machine could not be ended. The table
            artifact has the details.
    """
    store = Path(reap.store).resolve()
    with known_tool(store):
        report = look_at_machines(store, spare=reap.spare, everywhere=True)
        rows = table_of(report)
        for row in rows:
            get_run_logger().info("%(outcome)s: %(machine)s", row)
        said = f"{len(report.ended)} ended, {len(report.kept)} kept"
        create_table_artifact(rows or [NOTHING], key=f"machines-{flow_run.id}", description=f"Rented machines: {said}")
    if report.failures:
        raise TransientInfraError(f"{said}, {len(report.failures)} not checked or not ended: {report.failures[0]}")
    return Completed(message=said)


NOTHING = {"outcome": "nothing is rented", "machine": ""}


def table_of(report: ReapReport) -> list[dict[str, str]]:
    """A table row for every machine that was checked."""
    outcomes = {
        "ended": report.ended,
        "kept": report.kept,
        "another store's": report.foreign,
        "failed": report.failures,
    }
    return [{"outcome": outcome, "machine": escaped(line)} for outcome, lines in outcomes.items() for line in lines]
