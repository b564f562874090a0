"""Automations that this project makes on a Prefect server: how they are found again, and replaced.

Not here: what they are for (notify.py, silent_runs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.flows.deployments import EVALUATE_FLOW, FLOW, RETRAIN_FLOW
from rollouts.flows.prefect_api import ask
from rollouts.flows.server import ServerAddress

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
