"""Runs that a server for several people has not heard of: an automation on the server marks them Crashed.

Not here: runs whose process is gone from a machine that is there (lost_runs.py), which is known within half a minute.
This is for a machine that is gone itself, with everybody who could look.

    a run's process ── heartbeat every three minutes ──> server: none for SILENT_MINUTES, and no other event ──> Crashed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.flows.automations import EACH_RUN_OF_OURS, Automation, put_automation
from rollouts.flows.server import ServerAddress

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

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
            "expect": ["prefect.flow-run.*"],  # the next one, or that it ended, was paused, waits for a retry
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
