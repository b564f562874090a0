"""Make HTTP calls to a server with typed errors, and check that an answer is a usable completion.

Not here: the paths of the calls (sglang.py, vllm.py, to_sglang.py, router.py), retries (recovery.py).
"""

from __future__ import annotations

import math
import socket
from collections.abc import Collection, Sequence
from typing import Any

import aiohttp
import httpx
from aiohttp import AddrInfoType
from httpx_aiohttp import AiohttpTransport

from rollouts_core.config.messages import first_line
from rollouts_core.engines.completion import Completion, GenerationRequest, status_of_finish
from rollouts_core.errors import (
    EngineAnswerError,
    EngineBusyError,
    EngineError,
    EngineUnavailableError,
    NoNumbersError,
)
from rollouts_core.keys import key_header
from rollouts_core.system.backoff import read_retry_after
from rollouts_core.system.http_answers import parse_json, shown_beginning
from rollouts_core.system.open_files import request_places
from rollouts_core.types import Status

CONNECT_TIMEOUT_S = 10.0
UPDATE_TIMEOUT = httpx.Timeout(600.0, connect=CONNECT_TIMEOUT_S)
"""Time limit of loading weights, which takes long. The limit of connecting to the server is short."""
RESUME_TIMEOUT = httpx.Timeout(30.0, connect=CONNECT_TIMEOUT_S)
"""Time limit of ending a pause, which a server answers at once."""
IDLE_CONNECTION_S = 5.0
"""Seconds after which a connection without requests is closed."""
LOST_MACHINE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""Socket options by which a machine that acknowledges nothing for 30 s counts as gone, even while a request is
running."""
DONE_OR_QUEUED = (200, 202)
"""Status codes of a successful answer, or of a router that queued the request."""
NO_NUMBERS = (b"Out of range float values are not JSON compliant", b"log-probs of the next token are no finite numbers")
"""Texts with which vLLM and the embedded engine report NaN log-probs. SGLang returns NaN in its answer."""


class EngineConnection:
    """The connections to one server."""

    def __init__(
        self,
        url: str,
        *,
        request_timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
        api_key: str = "",
    ) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(request_timeout_s, connect=CONNECT_TIMEOUT_S),
            transport=transport or create_transport(),
            headers=key_header(api_key),
        )

    async def sample(self, path: str, body: Any) -> Any:  # Any: JSON both ways
        """Request completions, which may take long, and return the JSON answer.

        The number of connections that the process may open limits the concurrent requests for completions. Waiting for
        a free connection does not count towards the request's time limit, and does not delay other kinds of requests.

        Raises:
            EngineUnavailableError: the answer is incomplete, or says that the server is busy or broken.
            EngineError: the server refused, or its answer is not JSON.
        """
        async with request_places().completions:
            return await self.call("POST", path, json=body)

    async def call(
        self, method: str, path: str, *, is_answered: bool = True, **arguments: Any
    ) -> Any:  # Any: JSON both ways
        """Make a request and return the JSON answer, or None for an empty answer.

        Raises:
            EngineUnavailableError: the answer is incomplete, or says that the server is busy or broken.
            EngineError: the server refused, or its answer is not JSON.
        """
        try:
            response = await self._client.request(method, path, **arguments)
        except httpx.TransportError as error:
            raise EngineUnavailableError(f"{self.url}{path}: {str(error) or type(error).__name__}") from error
        except aiohttp.ClientError as error:  # errors that the transport does not translate to httpx
            raise EngineError(
                f"{self.url}{path} did not answer in HTTP: check that an engine listens there ({first_line(error)})"
            ) from error
        if response.status_code == 429 or response.status_code >= 500:
            problem = f"{self.url}{path} answered {response.status_code}: {shown_beginning(response.content, 200)}"
            if response.status_code == 429:
                raise EngineBusyError(problem, read_retry_after(response.headers))
            raise EngineUnavailableError(problem)
        if response.status_code == 401:
            raise EngineError(
                f"{self.url}{path} requires another API key: set rollout.engine.api_key_variable to the name of the "
                "environment variable with the engine's key"
            )
        if response.status_code not in DONE_OR_QUEUED:
            kind = NoNumbersError if any(sign in response.content for sign in NO_NUMBERS) else EngineError
            raise kind(f"{self.url}{path} answered {response.status_code}: {shown_beginning(response.content, 500)}")
        if not is_answered:
            return None
        try:
            return parse_json(response.content)
        except ValueError as error:
            shown = shown_beginning(response.content, 200)
            raise EngineAnswerError(f"{self.url}{path} answered no JSON: {shown!r}") from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def create_transport() -> httpx.AsyncBaseTransport:
    """Create a transport without a limit of connections, because its callers limit the number of requests.

    aiohttp is used because httpx's pool checks every connection whenever a request begins or ends. With 128 running
    requests, httpx's pool takes 20 times the processor time of aiohttp.
    """
    return AiohttpTransport(client=_open_session)


def _open_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        limit=0,  # no limit
        keepalive_timeout=IDLE_CONNECTION_S,
        ssl=httpx.create_ssl_context(),
        socket_factory=_open_socket,
    )
    return aiohttp.ClientSession(connector=connector)


def _open_socket(address: AddrInfoType) -> socket.socket:
    """A socket that detects a lost machine while it waits for an answer, because the wait may be long."""
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in LOST_MACHINE_OPTIONS.items():
        if hasattr(socket, name):  # some systems lack some of these options
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened


def read_logprob(value: float | None) -> float:
    """A log-prob as a number. Servers write null for NaN, which JSON does not have."""
    return math.nan if value is None else float(value)


def read_completion(
    name: str,
    request: GenerationRequest,
    *,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str,
    version_spans: tuple[tuple[str, int, int], ...],
    ends: Collection[int],
) -> Completion:
    """Convert a server's answer to a completion.

    Args:
        ends: tokens of the server's model that end a completion, besides the request's stop tokens.

    Raises:
        EngineError: training cannot use the answer.
    """
    status = status_of_finish(name, finish_reason)
    if len(logprobs) != len(tokens):
        raise EngineAnswerError(f"{name} answered {len(tokens)} tokens with {len(logprobs)} logprobs")
    if not all(map(math.isfinite, logprobs)):
        raise NoNumbersError(f"{name} answered log-probs that are not finite numbers: its weights may hold NaN")
    if finish_reason == "length" and len(tokens) < request.sampling.max_new_tokens:
        raise EngineError(
            f"{name} ended a completion after {len(tokens)} of {request.sampling.max_new_tokens} tokens: its "
            f"context is too short for them and the {len(request.prompt_tokens)} prompt tokens: serve a longer context"
        )
    if status is Status.ABORTED and tokens:
        # SGLang checks for an abort before it checks for an end token, so an ended completion may arrive as aborted.
        # An ended completion must not be continued.
        if tokens[-1] in request.stop_token_ids or tokens[-1] in ends:
            status = Status.COMPLETED
        elif len(tokens) >= request.sampling.max_new_tokens:
            status = Status.TRUNCATED
    return Completion(
        tokens=list(tokens),
        logprobs=list(logprobs),
        status=status,
        finish_reason=finish_reason,
        version_spans=version_spans,
    )
