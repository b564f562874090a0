"""Ask Prefect's server again, inside its process, when its database was busy.

Not here: the server (keeper.py). SQLite refuses a transaction that wants to write while another one does; the server
answers 503 then, having changed nothing. Prefect's clients ask again, its UI does not: a form was lost.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BUSY = 503
PATIENCE_S = 15.0
PAUSE_S = 0.1


def patient(app: ASGIApp, *, patience_s: float = PATIENCE_S) -> ASGIApp:
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
