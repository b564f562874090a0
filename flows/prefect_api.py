"""Questions to a Prefect server over HTTP, for commands that must not wait for prefect to be imported.

Not here: what the answers mean (status.py, trigger.py), the server (server.py).
"""

from __future__ import annotations

import time
from typing import Any

import httpx

from flows.certificate import client_context
from flows.server import ServerAddress, ServerError, authorization

TIMEOUT_S = 30.0
BUSY_TIMEOUT_S = 30.0
"""SQLite answers 503 while somebody else writes: so long the question is asked again."""
REFUSED = (httpx.codes.CONFLICT, httpx.codes.UNPROCESSABLE_ENTITY, httpx.codes.NOT_FOUND)


class RefusedError(ServerError):
    """The server understood the question and says no; the message is its reason."""


def ask(address: ServerAddress, method: str, path: str, question: Any = None) -> Any:  # Any: JSON, both ways
    """What the server answers.

    Raises:
        RefusedError: it refuses; the message is its reason.
        ServerError: it cannot be asked.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    verify = client_context(address.certificate) if address.certificate else True
    with httpx.Client(
        verify=verify, trust_env=not address.is_local, timeout=TIMEOUT_S, headers=authorization(address.password)
    ) as client:
        while True:
            try:
                answer = client.request(method, f"{address.api_url}{path}", json=question)
            except httpx.HTTPError as error:
                if address.certificate and "SSL" in str(error):
                    raise ServerError(
                        f"another program answers at {address.api_url}, where the Prefect server of this store was: "
                        "nothing was sent to it; rollouts down and rollouts up start the server elsewhere"
                    ) from error
                raise ServerError(f"the Prefect server at {address.api_url} does not answer: {error}") from error
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                break
            time.sleep(0.2)
    if answer.status_code in REFUSED:
        raise RefusedError(_reason(answer))
    if answer.is_error:
        raise ServerError(f"the Prefect server at {address.api_url} answers {answer.status_code}: {_reason(answer)}")
    return answer.json() if answer.content else None


def _reason(answer: httpx.Response) -> str:
    try:
        content = answer.json()
    except ValueError:
        return answer.text[:300]
    if not isinstance(content, dict):
        return str(content)[:300]
    return str(content.get("detail") or content.get("exception_message") or content)[:600]
