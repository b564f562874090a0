"""Two layers around Prefect's application in a store's server: patience with SQLite, and a policy for browsers.

SQLite refuses a transaction that wants to write while another one writes. Prefect's server then answers 503 and has
changed nothing. Prefect's clients ask again, its UI does not and loses a form. So the application is asked again here.
The lock error comes from SQLite: https://www.sqlite.org/rescode.html#busy

The UI's login page asks a service for usage statistics how to collect them, although analytics are off: the UI can read
that setting only after the login. A Content-Security-Policy on each answer makes the browser refuse such requests.
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
    """Return an application that answers as `app` does, but 503 only after asking it for `patience_s`."""

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
    """Ask once; returns False, with nothing sent, when the answer is 503 and this is not the last time."""
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
    except DBAPIError:  # starlette raises, after it answered
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
"""A page that was opened as localhost asks the API at 127.0.0.1, and a forwarded port may be another one."""
POLICY = f"default-src {OWN} data: blob: 'unsafe-inline' 'unsafe-eval'; object-src 'none'; base-uri 'self'"
"""Prefect's UI has inline styles, draws its graph by code that it compiles, and edits JSON in workers."""


def with_browser_policy(app: ASGIApp) -> ASGIApp:
    """The application, with the policy on each of its answers."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"content-security-policy", POLICY.encode())]
            await send(message)

        await app(scope, receive, send_with_policy if scope["type"] == "http" else send)

    return answer
