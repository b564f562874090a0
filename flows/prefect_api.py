"""HTTP requests to a Prefect server.

Requests to a store's own server do not import prefect, because the import takes seconds. Requests to a server of
PREFECT_API_URL use Prefect's client, which reads the user's settings for password, key, profile, certificate authority
(PREFECT_API_SSL_CERT_FILE), proxies and headers (PREFECT_CLIENT_CUSTOM_HEADERS). Prefect's client also sends CSRF
tokens.
"""

from __future__ import annotations

import time
from typing import Any

import httpx

from rollouts.flows.own_server.https import client_context
from rollouts.flows.own_server.lend import ServerAddress, ServerError
from rollouts.flows.own_server.password import basic_authorization

TIMEOUT = httpx.Timeout(120.0, connect=30.0)
"""Long timeouts, because a running server may be slow on a busy machine, especially during its start. If the server is
gone, the connection is refused at once."""
BUSY_TIMEOUT_S = 30.0
"""Seconds for which a request is retried after status 503. The server answers 503 while another program writes to
SQLite."""
OF_PROXIES = (
    httpx.codes.UNAUTHORIZED,
    httpx.codes.FORBIDDEN,
    httpx.codes.PROXY_AUTHENTICATION_REQUIRED,
)
REFUSED = (httpx.codes.CONFLICT, httpx.codes.UNPROCESSABLE_ENTITY, httpx.codes.NOT_FOUND)


class RefusedError(ServerError):
    """The server refused a request for the reason in the message."""


def ask(address: ServerAddress, method: str, path: str, question: Any = None) -> Any:  # Any: JSON, both ways
    """Send a request to a server, and return the JSON of its response.

    Raises:
        RefusedError: the server responded with status 404, 409 or 422.
        ServerError: the server does not respond, or responds with another error.
    """
    answer = (
        _ask_own(address, method, path, question) if address.is_local else _ask_named(address, method, path, question)
    )
    if answer.status_code in REFUSED:
        raise RefusedError(_reason(answer))
    if answer.is_error:
        raise ServerError(f"the Prefect server at {address.api_url} answers {answer.status_code}: {_reason(answer)}")
    return answer.json() if answer.content else None


def _ask_named(address: ServerAddress, method: str, path: str, question: Any) -> httpx.Response:  # Any: JSON
    from rollouts.flows.prefect_api import FAILURES, describe_failure, request_named

    try:
        answer = request_named(address.api_url, method, path, question, password=address.password)
    except FAILURES as error:
        raise ServerError(
            f"the Prefect server at {address.api_url} does not answer: {describe_failure(error)}"
        ) from error
    if answer.status_code in OF_PROXIES:
        raise ServerError(
            f"the Prefect server at {address.api_url}, or a proxy before it, answers {answer.status_code}: "
            f"{_reason(answer)}: set the password in PREFECT_API_AUTH_STRING, and headers for a proxy in "
            "PREFECT_CLIENT_CUSTOM_HEADERS"
        )
    return answer


def _ask_own(address: ServerAddress, method: str, path: str, question: Any) -> httpx.Response:  # Any: JSON
    """Send a request to a store's own server, after its certificate was verified.

    A server whose background services hang restarts itself, and drops its open requests. A dropped request is retried
    once. The server's socket stays open during the restart, so that the retried request waits.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    may_repeat = True
    verify = client_context(address.certificate) if address.certificate else True
    headers = {"Authorization": basic_authorization(address.password)} if address.password else {}
    with httpx.Client(verify=verify, trust_env=False, timeout=TIMEOUT, headers=headers) as client:
        while True:
            try:
                answer = client.request(method, f"{address.api_url}{path}", json=question)
            except httpx.HTTPError as error:
                is_dropped = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) or "EOF" in str(error)
                if is_dropped and may_repeat:
                    may_repeat = False
                    continue
                if address.certificate and "SSL" in str(error) and not is_dropped:
                    raise ServerError(
                        f"another program answers at {address.api_url}, the address of this store's Prefect server: "
                        "nothing was sent to it; rollouts down and rollouts up start the server at another port"
                    ) from error
                raise ServerError(f"the Prefect server at {address.api_url} does not answer: {error}") from error
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                return answer
            time.sleep(0.2)


def _reason(answer: httpx.Response) -> str:
    try:
        content = answer.json()
    except ValueError:
        return answer.text[:300]
    if not isinstance(content, dict):
        return str(content)[:300]
    return str(content.get("detail") or content.get("exception_message") or content)[:600]


RETRIES = 4
"""Number of retries of a request, about 30 s in total. Prefect's default is higher, but here a user waits."""
FAILURES = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError)
"""Exceptions if the server is unreachable, or if Prefect's client rejects the user's settings."""


def request_named(
    api_url: str, method: str, path: str, question: Any = None, *, password: str = ""
) -> httpx.Response:  # Any: JSON
    """Send a request to the server of PREFECT_API_URL, and return the response, also with an error status.

    The first call imports Prefect, which reads its logging settings. Set environment variables before the call.

    Raises:
        One of FAILURES: the server is unreachable, or Prefect's settings are invalid.
    """
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.context import root_settings_context
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with (
        root_settings_context() as context,  # reads the environment again, which may have changed since the import
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: RETRIES}),
    ):
        api = context.settings.api
        own_password = api.auth_string.get_secret_value() if api.auth_string else ""
        key = api.key.get_secret_value() if api.key else None
        with SyncPrefectClient(api_url, auth_string=password or own_password or None, api_key=key) as client:
            try:
                return client.request(method, path, json=question)  # type: ignore[arg-type]  # any route
            except PrefectHTTPStatusError as error:
                return error.response


def describe_failure(error: Exception) -> str:
    """The error's message. For an untrusted certificate, the message names the setting to change."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"its certificate is not trusted ({error}): set PREFECT_API_SSL_CERT_FILE to the certificate of the "
            "authority that signed it"
        )
    return str(error)
