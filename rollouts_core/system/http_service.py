"""HTTP client for a service that grades completions: limited concurrency, shared connections, and retries.

    ask -> slot -> POST -- response --> read --> result
                    ^                    |
                    +------ pause <------+   connection lost, overload, timeout, or an unreadable response

A request keeps its slot while it pauses before a retry, so that an overloaded service gets fewer requests. Not here:
the content of requests and responses (reward_services.py, reward_models.py), clients of inference engines (engines/).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import httpx

from rollouts_core.config import RewardConfig
from rollouts_core.config.messages import first_line
from rollouts_core.engines.http import create_transport
from rollouts_core.errors import EnvironmentUnavailableError, RewardError
from rollouts_core.keys import key_header, read_key
from rollouts_core.system.backoff import draw_backoff, read_retry_after
from rollouts_core.system.http_answers import parse_json, shown_beginning

OVERLOADED = (408, 425, 429)
NEVER = (501, 505)
"""Status codes from 500 on for which a retry is useless. Requests with other codes from 500 on are retried, including
codes of proxies such as 520 to 524 and 529."""
MAX_ANSWER_BYTES = 64 << 20
"""Largest accepted response, far above the size of scores or of a judge's text. The limit protects the memory of the
training process."""
MAX_SHOWN_CHARACTERS = 200


class _NoAnswerError(Exception):
    """A request failed in a way that a retry may fix.

    Args:
        problem: description of the failure.
        retry_after_s: pause that the service requested, in seconds; 0 if it requested none.
    """

    def __init__(self, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class RefusedError(RewardError):
    """A service rejected a request.

    Args:
        parameter: the rejected field, if the response names it in the format of OpenAI's API; else empty.
    """

    def __init__(self, problem: str, parameter: str = "") -> None:
        super().__init__(problem)
        self.parameter = parameter


class HTTPService:
    """Client of a service at one URL, which receives and returns JSON.

    Connections are closed as soon as no request is running, so the client needs no `close`.
    """

    def __init__(self, url: str, config: RewardConfig) -> None:
        self.url = url
        self.config = config
        self._slots = anyio.CapacityLimiter(config.max_concurrent)
        self._client: httpx.AsyncClient | None = None
        self._num_users = 0

    async def ask(self, body: dict[str, Any] | None, read: Callable[[Any], Any]) -> Any:  # Any: JSON
        """Send a request, with retries. Returns the result of `read` for the parsed response.

        Args:
            body: the content of a POST request; None sends a GET request.
            read: converts the parsed JSON. `read` raises ValueError, KeyError, TypeError or IndexError for an
                unexpected response; the request is then retried.

        Raises:
            EnvironmentUnavailableError: all attempts failed or had unexpected responses.
            RefusedError: the service rejected the request.
        """
        num_attempts = self.config.max_retries + 1
        async with self._connected() as client, self._slots:
            for attempt in range(1, num_attempts + 1):
                try:
                    return await self._ask_once(client, body, read)
                except _NoAnswerError as error:
                    if attempt == num_attempts:
                        raise EnvironmentUnavailableError(
                            f"{self.url} gave no reward in {num_attempts} attempts: {error}"
                        ) from error
                    await anyio.sleep(max(error.retry_after_s, draw_backoff(attempt)))
        raise AssertionError("the loop only ends by returning or raising")

    async def _ask_once(
        self, client: httpx.AsyncClient, body: dict[str, Any] | None, read: Callable[[Any], Any]
    ) -> Any:  # Any: JSON
        try:
            with anyio.fail_after(self.config.timeout_s):
                async with client.stream("GET" if body is None else "POST", self.url, json=body) as response:
                    content = await _read_content(response)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _NoAnswerError(f"it did not answer within {self.config.timeout_s:g} s") from error
        except (httpx.TransportError, aiohttp.ClientError) as error:
            raise _NoAnswerError(first_line(error) or type(error).__name__) from error
        code, said = response.status_code, shown_beginning(content, MAX_SHOWN_CHARACTERS)
        if code in OVERLOADED or (code >= 500 and code not in NEVER):
            problem = f"it answered {code}: {said}"
            raise _NoAnswerError(problem, read_retry_after(response.headers))
        if code != 200:
            raise RefusedError(f"{self.url} answered {code}: {said}", _find_parameter(content))
        try:
            return read(parse_json(content))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise _NoAnswerError(f"its answer cannot be read ({reason}): {said}") from error

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[httpx.AsyncClient]:
        client = self._client
        if client is None or self._num_users == 0:
            headers = key_header(read_key(self.config.api_key_variable, "rollout.rewards"))
            client = self._client = httpx.AsyncClient(timeout=None, headers=headers, transport=create_transport())
        self._num_users += 1
        try:
            yield client
        finally:
            self._num_users -= 1
            if self._num_users == 0:
                with anyio.CancelScope(shield=True):
                    await client.aclose()


async def _read_content(response: httpx.Response) -> bytes:
    content = bytearray()
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > MAX_ANSWER_BYTES:
            raise _NoAnswerError(f"its answer has more than {MAX_ANSWER_BYTES:,} bytes")
    return bytes(content)


def _find_parameter(content: bytes) -> str:
    """The NAME in a response `{"error": {"param": NAME}}`; empty for other responses."""
    try:
        return str(parse_json(content)["error"]["param"] or "")
    except (ValueError, KeyError, TypeError, IndexError):
        return ""
