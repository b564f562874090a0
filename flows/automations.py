"""Manage automations on a Prefect server: create, find and delete them, and mark runs without heartbeats Crashed.

Not here: notifications (commands/notify.py), and runs whose process died on a machine that still works (lost_runs.py).
If a whole machine dies, only the Prefect server can notice that heartbeats are missing:

    a run's process ── heartbeat every three minutes ──> server: no heartbeat for SILENT_MINUTES ──> Crashed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollouts.flows.deployments import EVALUATE_FLOW, FLOW, RETRAIN_FLOW
from rollouts.flows.own_server.lend import ServerAddress
from rollouts.flows.prefect_api import ask

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

Automation = Mapping[str, Any]  # Any: JSON of Prefect's API

EACH_RUN_OF_OURS: Automation = {
    "type": "event",
    "match": {"prefect.resource.id": "prefect.flow-run.*"},
    "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": [FLOW, RETRAIN_FLOW, EVALUATE_FLOW]},
    "for_each": ["prefect.resource.id"],
    "threshold": 1,
}
"""Common part of all triggers: match the events of this project's flow runs, and count the events of each run
separately."""


def find_automations(address: ServerAddress, tag: str, *, name: str = "") -> list[Automation]:
    """The automations with this tag and, if `name` is given, with this name.

    Raises:
        ServerError: the server does not answer.
    """
    found = ask(address, "POST", "/automations/filter", {"automations": {"tags": {"all_": [tag]}}})
    return [each for each in found if not name or each["name"] == name]


def put_automation(address: ServerAddress, automation: Automation) -> None:
    """Create an automation, then delete the earlier automations with the same name and first tag.

    Raises:
        ServerError: the server does not answer.
    """
    previous = find_automations(address, automation["tags"][0], name=automation["name"])
    ask(address, "POST", "/automations/", automation)
    for each in previous:
        delete_automation(address, each)


def delete_automation(address: ServerAddress, automation: Automation) -> None:
    """Delete an automation that `find_automations` returned.

    Raises:
        ServerError: the server does not answer.
    """
    ask(address, "DELETE", f"/automations/{automation['id']}")


NAME = "rollouts: silent runs"
TAG = "rollouts-silent-runs"
SILENT = "nothing was heard of its process for"
"""Beginning of the state message of a flow run that the automation marked Crashed."""
SILENT_MINUTES = 10
LEAST_MINUTES = 5
"""Lowest accepted value of `after_minutes`. A run sends a heartbeat every three minutes
(PREFECT_FLOWS_HEARTBEAT_FREQUENCY), and a heartbeat may be late."""


def mark_silent_runs(address: ServerAddress, *, after_minutes: int = SILENT_MINUTES) -> None:
    """Create or replace the automation that marks flow runs Crashed after `after_minutes` without a heartbeat.

    Raises:
        ServerError: the server does not answer.
    """
    put_automation(address, render_automation(after_minutes))


def was_silent(state: State) -> bool:
    """Whether the state is Crashed because the automation for missing heartbeats set it."""
    return bool(state.is_crashed() and (state.message or "").startswith(SILENT))


def render_automation(after_minutes: int) -> Automation:
    """The automation for missing heartbeats, as JSON for Prefect's API."""
    return {
        "name": NAME,
        "description": f"Made by `rollouts watch`: marks runs Crashed that are silent for {after_minutes} minutes.",
        "tags": [TAG],
        "trigger": {
            **EACH_RUN_OF_OURS,
            "posture": "Proactive",
            "after": ["prefect.flow-run.heartbeat"],
            "expect": ["prefect.flow-run.*"],  # expects the next heartbeat, or a change of the run's state
            "within": 60 * after_minutes,
        },
        "actions": [
            {
                "type": "change-flow-run-state",
                "state": "CRASHED",
                "name": "Crashed",
                "message": f"{SILENT} {after_minutes} minutes; the run's jobs, if any, go on; Retry attaches to them",
            }
        ],
    }
