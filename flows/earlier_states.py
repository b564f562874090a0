"""Avoid delayed notifications after a restart of a shared Prefect server.

Each state change of a run is an event, which refers to the event of the previous state. A restarted server no longer
knows the previous event, so its automations wait up to 15 minutes for that event. Therefore this module sends events
with the ids of the run's earlier events. These events have another name and resource, so that automations ignore them.

    Crashed ── the server restarts ──> AwaitingRetry (waits for Crashed) -> ... -> Completed (waits)
                                            the id of Crashed is sent again ──> the waiting events are handled

Not here: a store's own server, which is configured to wait only seconds (own_server/server_process.py).
"""

from __future__ import annotations

from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.exceptions import PrefectException

from rollouts.flows.own_server.lend import named_url

EVENT = "rollouts.flow-run.earlier-state"
MAX_STATES = 20
"""Prefect limits the length of a chain of waiting events to this number."""


def recall_states(run_id: str) -> None:
    """Send the ids of a run's last states to a shared server. The server ignores ids that it knows.

    If the server does not answer, or has an incompatible version of Prefect, nothing is sent, and notifications may be
    late.
    """
    if not named_url():
        return
    try:
        with get_client(sync_client=True) as client:
            states = client.read_flow_run_states(UUID(run_id))
    except (httpx.HTTPError, PrefectException, ValueError):  # pydantic raises ValueError for states of another version
        return
    for state in sorted(states, key=lambda each: each.timestamp)[-MAX_STATES:]:
        emit_event(EVENT, {"prefect.resource.id": f"rollouts.flow-run.{run_id}"}, id=state.id)
