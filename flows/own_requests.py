"""Have browsers ask nothing but this machine for what Prefect's UI wants.

Its login page asks a service for usage statistics how to collect them, although analytics are off: the UI can read that
setting only after the login. A Content-Security-Policy on each answer makes the browser refuse such requests.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OWN = "'self' http://127.0.0.1:* http://localhost:* ws://127.0.0.1:* ws://localhost:*"
"""A page that was opened as localhost asks the API at 127.0.0.1, and a forwarded port may be another one."""
POLICY = f"default-src {OWN} data: blob: 'unsafe-inline' 'unsafe-eval'; object-src 'none'; base-uri 'self'"
"""Prefect's UI has inline styles, draws its graph by code that it compiles, and edits JSON in workers."""


def asking_here_alone(app: ASGIApp) -> ASGIApp:
    """The application, with the policy on each of its answers."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"content-security-policy", POLICY.encode())]
            await send(message)

        await app(scope, receive, send_with_policy if scope["type"] == "http" else send)

    return answer
