"""The gate of an engine. Callers need its key. An engine without a key answers programs of its machine, and no page of
another site.

Not here: listening (server.py). It also runs in vLLM (engines/in_vllm/rollouts_gate.py), so it needs Python alone.

    a key:      `Authorization: Bearer KEY` or `x-api-key: KEY`, or 401
    no key:     Host is this machine, so are Origin and Referer, Sec-Fetch-Site is not cross-site, or 403
                browsers change nothing by GET: a link would do
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
"""The description of a request in ASGI."""
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CHANGING_GETS = ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation", "/weights_checker")
"""Endpoints that SGLang answers by GET, too, as trainers ask, though they change something or take long."""
UNAUTHORIZED = "Unauthorized"
NOT_FROM_HERE = "a server without a key answers programs of its machine, by 127.0.0.1 or localhost, alone"
NOT_BY_BROWSERS = "a browser must not ask for this by GET: send a POST"


class Gate:
    """An app, behind a check of every request.

    Args:
        app: answers what passes.
        api_key: what requests must carry; without it the server must listen on this machine alone.
        open_paths: paths that need no key by GET.
    """

    def __init__(self, app: App, api_key: str = "", open_paths: Collection[str] = ()) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode() if api_key else b""
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        refusal = None if scope["type"] == "lifespan" else self._find_refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            status = refusal[0]
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]  # strangers keep no place
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps(_refusal_body(scope, refusal)).encode()})

    def _find_refusal(self, scope: Scope) -> tuple[int, str] | None:
        is_get = scope.get("method") in ("GET", "HEAD")
        if self._expected:
            is_open = is_get and scope["path"] in self._open_paths
            given = _values_of(scope, b"authorization")
            given += [b"Bearer " + key for key in _values_of(scope, b"x-api-key")]  # of Anthropic's clients
            given = given or [b""]
            is_known = all(hmac.compare_digest(value, self._expected) for value in given)
            return None if is_known or is_open else (401, UNAUTHORIZED)
        hosts = [b"//" + host for host in _values_of(scope, b"host")]
        pages = _values_of(scope, b"origin") + _values_of(scope, b"referer")
        sites = _values_of(scope, b"sec-fetch-site")
        if not all(map(_is_of_this_machine, hosts + pages)) or b"cross-site" in sites:
            return 403, NOT_FROM_HERE
        # A link in another program opens with the site "none", as an address that is typed does.
        return (403, NOT_BY_BROWSERS) if sites and is_get and scope["path"] in CHANGING_GETS else None


def _refusal_body(scope: Scope, refusal: tuple[int, str]) -> dict[str, Any]:  # Any: JSON
    """The body of a refusal: below /v1 in a form that clients of OpenAI and of Anthropic read."""
    status, problem = refusal
    if not scope["path"].startswith("/v1/"):
        return {"error": problem}
    kind = "authentication_error" if status == 401 else "permission_error"
    code = "invalid_api_key" if status == 401 else None
    return {"type": "error", "error": {"message": problem, "type": kind, "param": None, "code": code}}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on this address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _values_of(scope: Scope, name: bytes) -> list[bytes]:
    """Every value of a header, of which a request may have several."""
    return [value for found, value in scope["headers"] if found.lower() == name]


def _is_of_this_machine(url: bytes) -> bool:
    try:
        return is_loopback(urlsplit(url.decode("latin-1")).hostname or "")
    except ValueError:
        return False
