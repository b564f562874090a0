"""Automations of this project on a Prefect server: found again, replaced, and the one that marks silent runs Crashed.

Not here: messages (commands/notify.py), and runs whose process is gone while their machine is there (lost_runs.py).
An automation on the server marks the runs of a machine that is gone itself:

    a run's process ── heartbeat every three minutes ──> server: none for SILENT_MINUTES, and no other event ──> Crashed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollouts.flows.deployments import EVALUATE_FLOW, FLOW, RETRAIN_FLOW
from rollouts.flows.own_server.lend import ServerAddress
from rollouts.flows.prefect_api import ask

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

Automation = Mapping[str, Any]  # Any: JSON, as the server takes and gives it

EACH_RUN_OF_OURS: Automation = {
    "type": "event",
    "match": {"prefect.resource.id": "prefect.flow-run.*"},
    "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": [FLOW, RETRAIN_FLOW, EVALUATE_FLOW]},
    "for_each": ["prefect.resource.id"],
    "threshold": 1,
}
"""The common part of the triggers: each run of this project's flows by itself."""


def find_automations(address: ServerAddress, tag: str, *, name: str = "") -> list[Automation]:
    """The automations with the tag, of one name or of all.

    Raises:
        ServerError: the server cannot be asked.
    """
    found = ask(address, "POST", "/automations/filter", {"automations": {"tags": {"all_": [tag]}}})
    return [each for each in found if not name or each["name"] == name]


def put_automation(address: ServerAddress, automation: Automation) -> None:
    """Make it; any of the same name and first tag that was there before is deleted afterwards.

    Raises:
        ServerError: the server cannot be asked.
    """
    previous = find_automations(address, automation["tags"][0], name=automation["name"])
    ask(address, "POST", "/automations/", automation)
    for each in previous:
        delete_automation(address, each)


def delete_automation(address: ServerAddress, automation: Automation) -> None:
    """Delete one that was found.

    Raises:
        ServerError: the server cannot be asked.
    """
    ask(address, "DELETE", f"/automations/{automation['id']}")


NAME = "rollouts: silent runs"
TAG = "rollouts-silent-runs"
SILENT = "nothing was heard of its process for"
"""How the message of a run that was marked begins."""
SILENT_MINUTES = 10
LEAST_MINUTES = 5
"""Prefect's processes send a heartbeat every three (PREFECT_FLOWS_HEARTBEAT_FREQUENCY): so long are living runs
silent, and a heartbeat may come late."""


def mark_silent_runs(address: ServerAddress, *, after_minutes: int = SILENT_MINUTES) -> None:
    """Have the server mark runs of this project Crashed that it has not heard of; what it was told before is replaced.

    Raises:
        ServerError: it cannot be asked.
    """
    put_automation(address, render_automation(after_minutes))


def was_silent(state: State) -> bool:
    """Whether the server marked a run Crashed because it had not heard of the run's process."""
    return bool(state.is_crashed() and (state.message or "").startswith(SILENT))


def render_automation(after_minutes: int) -> Automation:
    """The automation as the server takes it."""
    return {
        "name": NAME,
        "description": f"Made by `rollouts watch`: marks runs Crashed without a heartbeat for {after_minutes} minutes.",
        "tags": [TAG],
        "trigger": {
            **EACH_RUN_OF_OURS,
            "posture": "Proactive",
            "after": ["prefect.flow-run.heartbeat"],
            "expect": ["prefect.flow-run.*"],  # the next heartbeat, or a change of the run's state
            "within": 60 * after_minutes,
        },
        "actions": [
            {
                "type": "change-flow-run-state",
                "state": "CRASHED",
                "name": "Crashed",
                "message": f"{SILENT} {after_minutes} minutes; its jobs, if any, go on, and Retry attaches to them",
            }
        ],
    }
