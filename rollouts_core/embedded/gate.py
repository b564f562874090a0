"""Check the API key of every request to an engine. An engine without a key answers only programs on its own machine,
and refuses requests from web pages of other sites.

Not here: listening (server.py). This file also runs inside vLLM (engines/in_vllm/rollouts_gate.py), so it imports only
the standard library.

    with a key:     a request needs `Authorization: Bearer KEY` or `x-api-key: KEY`, else 401
    without a key:  Host, Origin and Referer must be this machine, and Sec-Fetch-Site not cross-site, else 403
                    a browser's GET to a path of CHANGING_GETS gets 403, because any link could cause it
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
"""ASGI's description of a request."""
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CHANGING_GETS = ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation", "/weights_checker")
"""Paths that change the server's state or take long. These paths accept GET, because SGLang accepts it and trainers use
it."""
UNAUTHORIZED = "Unauthorized"
NOT_FROM_HERE = "a server without an API key answers only programs on its own machine, at 127.0.0.1 or localhost"
NOT_BY_BROWSERS = "a browser must not request this path by GET: send a POST"


class Gate:
    """An ASGI app that checks every request before it passes the request to another app.

    Args:
        app: the app that answers permitted requests.
        api_key: key that every request must have. If empty, the server must listen only on a loopback address.
        open_paths: paths whose GET requests need no key.
    """

    def __init__(self, app: App, api_key: str = "", open_paths: Collection[str] = ()) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode() if api_key else b""
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a permitted request to the app; refuse other requests."""
        refusal = None if scope["type"] == "lifespan" else self._find_refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            status = refusal[0]
            headers = [
                (b"content-type", b"application/json"),
                (b"connection", b"close"),
            ]  # closes the connection of a refused client
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps(_refusal_body(scope, refusal)).encode()})

    def _find_refusal(self, scope: Scope) -> tuple[int, str] | None:
        is_get = scope.get("method") in ("GET", "HEAD")
        if self._expected:
            is_open = is_get and scope["path"] in self._open_paths
            given = _values_of(scope, b"authorization")
            given += [
                b"Bearer " + key for key in _values_of(scope, b"x-api-key")
            ]  # Anthropic's clients send this header
            given = given or [b""]
            is_known = all(hmac.compare_digest(value, self._expected) for value in given)
            return None if is_known or is_open else (401, UNAUTHORIZED)
        hosts = [b"//" + host for host in _values_of(scope, b"host")]
        pages = _values_of(scope, b"origin") + _values_of(scope, b"referer")
        sites = _values_of(scope, b"sec-fetch-site")
        if not all(map(_is_of_this_machine, hosts + pages)) or b"cross-site" in sites:
            return 403, NOT_FROM_HERE
        # For typed addresses and links from other programs, browsers send `Sec-Fetch-Site: none`.
        return (403, NOT_BY_BROWSERS) if sites and is_get and scope["path"] in CHANGING_GETS else None


def _refusal_body(scope: Scope, refusal: tuple[int, str]) -> dict[str, Any]:  # Any: JSON
    """The JSON of a refusal. For paths under /v1 it has a form that clients of OpenAI and Anthropic can parse."""
    status, problem = refusal
    if not scope["path"].startswith("/v1/"):
        return {"error": problem}
    kind = "authentication_error" if status == 401 else "permission_error"
    code = "invalid_api_key" if status == 401 else None
    return {"type": "error", "error": {"message": problem, "type": kind, "param": None, "code": code}}


def is_loopback(host: str) -> bool:
    """True if a server that listens on this host is reachable only from this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _values_of(scope: Scope, name: bytes) -> list[bytes]:
    """All values of a header. A request may contain a header several times."""
    return [value for found, value in scope["headers"] if found.lower() == name]


def _is_of_this_machine(url: bytes) -> bool:
    try:
        return is_loopback(urlsplit(url.decode("latin-1")).hostname or "")
    except ValueError:
        return False
