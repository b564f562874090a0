"""Make a shared Prefect server that was restarted send a run's notifications without delay.

The event of a state names the event of the previous state. A server that was restarted in between does not know the
previous event, and its automations wait up to 15 minutes. Therefore this module sends the ids of a run's earlier events
again. The repeated events have another name and resource, so that automations do not take them for states.

    Crashed ── the server restarts ──> AwaitingRetry (waits for Crashed) -> ... -> Completed (waits)
                                            the id of Crashed is sent again ──> the waiting events are handled

Not here: a store's own server, which waits for seconds (own_server/server_process.py).
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
"""Prefect's own limit of events that wait for each other."""


def recall_states(run_id: str) -> None:
    """Send the ids of a run's last states to a shared server, which ignores the ids that it knows.

    If the server does not answer, or has another version of Prefect, the notifications come later.
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
