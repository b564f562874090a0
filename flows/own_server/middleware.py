"""Two ASGI middlewares of a store's Prefect server: retries for a busy SQLite, and a policy for browsers.

SQLite refuses a transaction that wants to write while another transaction writes. Prefect's server then answers 503
without changing anything. Prefect's clients retry, but the UI does not, and the user loses the input of a form.
Therefore the first middleware retries requests that were answered with 503. The error: https://www.sqlite.org/rescode.html#busy

The UI's login page contacts a service for usage statistics even if analytics are off, because the UI reads this setting
only after the login. The second middleware adds a Content-Security-Policy, with which browsers refuse such requests.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    pass

BUSY = 503
PATIENCE_S = 15.0
PAUSE_S = 0.1


def asked_again_when_busy(app: ASGIApp, *, patience_s: float = PATIENCE_S) -> ASGIApp:
    """Wrap `app`: for up to `patience_s`, retry a request that `app` answers with 503."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await app(scope, receive, send)
            return
        body = await _read_body(receive)
        deadline = time.monotonic() + patience_s
        while not await _is_answered(app, scope, receive, send, body=body, is_last=time.monotonic() > deadline):
            await asyncio.sleep(PAUSE_S)

    return answer


async def _is_answered(app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, body: bytes, is_last: bool) -> bool:
    """Pass the request to `app` once, and send its response, except a 503 before the last attempt.

    Returns False if nothing was sent.
    """
    is_busy = False
    has_body = True

    async def receive_again() -> Message:
        nonlocal has_body
        if not has_body:
            return await receive()
        has_body = False
        return {"type": "http.request", "body": body, "more_body": False}

    async def send_unless_busy(message: Message) -> None:
        nonlocal is_busy
        if message["type"] == "http.response.start" and message["status"] == BUSY and not is_last:
            is_busy = True
        if not is_busy:
            await send(message)

    try:
        await app({**scope}, receive_again, send_unless_busy)
    except DBAPIError:  # starlette sends the response, then raises the error again
        if not is_busy:
            raise
    return not is_busy


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return b"".join(parts)


OWN = "'self' http://127.0.0.1:* http://localhost:* ws://127.0.0.1:* ws://localhost:*"
"""Sources that the UI's pages may load. Every port of this machine is allowed, because a page at localhost uses the API
at 127.0.0.1, and a forwarded port may have another number."""
POLICY = f"default-src {OWN} data: blob: 'unsafe-inline' 'unsafe-eval'; object-src 'none'; base-uri 'self'"
"""Content-Security-Policy for Prefect's UI. The UI needs inline styles, compiles code for its graph, and edits JSON in
web workers."""


def with_browser_policy(app: ASGIApp) -> ASGIApp:
    """Wrap `app`: add the Content-Security-Policy to each response."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"content-security-policy", POLICY.encode())]
            await send(message)

        await app(scope, receive, send_with_policy if scope["type"] == "http" else send)

    return answer
