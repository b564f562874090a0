"""Have a team's Prefect server send the messages of a run at once, also after the server was started again.

The event of a state names the event of the state before. Prefect's automations wait up to 15 minutes for that event, if
this process of the server has not seen it. So a run's earlier events are sent once more, by their ids alone: under
another name, of another resource, so that no automation takes them for states.

    Crashed ── server is started again ──> AwaitingRetry (waits for Crashed) -> ... -> Completed (waits)
                                            the id of Crashed comes again ──> all of them are handled

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
    """Let a team's server know the events of the last states of a run; the server drops known events.

    Nothing happens if the server cannot be asked or is of another version of Prefect: its messages come later then.
    """
    if not named_url():
        return
    try:
        with get_client(sync_client=True) as client:
            states = client.read_flow_run_states(UUID(run_id))
    except (httpx.HTTPError, PrefectException, ValueError):  # pydantic raises these for states of another version
        return
    for state in sorted(states, key=lambda each: each.timestamp)[-MAX_STATES:]:
        emit_event(EVENT, {"prefect.resource.id": f"rollouts.flow-run.{run_id}"}, id=state.id)
