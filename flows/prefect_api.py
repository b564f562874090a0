"""HTTP requests to a Prefect server.

A store's own server is asked without importing prefect, which takes seconds. A server of PREFECT_API_URL is asked by
Prefect's own client, which knows the user's settings for it: the password or key, also in a profile; a private
certificate authority (PREFECT_API_SSL_CERT_FILE); headers that a proxy wants (PREFECT_CLIENT_CUSTOM_HEADERS); tokens
against forged requests (CSRF); and proxies.
"""

from __future__ import annotations

import time
from typing import Any

import httpx

from rollouts.flows.own_server.https import client_context
from rollouts.flows.own_server.lend import ServerAddress, ServerError
from rollouts.flows.own_server.password import basic_authorization

TIMEOUT = httpx.Timeout(120.0, connect=30.0)
"""A server that is gone refuses the connection at once. A living server is slow on a busy machine, most of all during
its start."""
BUSY_TIMEOUT_S = 30.0
"""How long a request is repeated that the server answers with 503 because another program writes to SQLite."""
OF_PROXIES = (
    httpx.codes.UNAUTHORIZED,
    httpx.codes.FORBIDDEN,
    httpx.codes.PROXY_AUTHENTICATION_REQUIRED,
)
REFUSED = (httpx.codes.CONFLICT, httpx.codes.UNPROCESSABLE_ENTITY, httpx.codes.NOT_FOUND)


class RefusedError(ServerError):
    """The server refused a request for the reason in the message."""


def ask(address: ServerAddress, method: str, path: str, question: Any = None) -> Any:  # Any: JSON, both ways
    """Send a request to a server, and return the answer's JSON.

    Raises:
        RefusedError: the server refuses the request: 404, 409 or 422.
        ServerError: the server does not answer, or answers with another error.
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
            f"{_reason(answer)}: PREFECT_API_AUTH_STRING holds the password, PREFECT_CLIENT_CUSTOM_HEADERS what a "
            "proxy wants"
        )
    return answer


def _ask_own(address: ServerAddress, method: str, path: str, question: Any) -> httpx.Response:  # Any: JSON
    """Send a request to a store's own server, after its certificate proved its identity.

    A server whose services stand still begins anew, and drops the requests that it has. Such a request is sent once
    more: it waits at the server's socket, which stays.
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
                        f"another program answers at {address.api_url}, where the Prefect server of this store was: "
                        "nothing was sent to it; rollouts down and rollouts up start the server elsewhere"
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
"""Retries of a request, 30 s in all, because a user waits at a terminal."""
FAILURES = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError)
"""Errors of an unreachable server, and of settings that Prefect's client refuses."""


def request_named(
    api_url: str, method: str, path: str, question: Any = None, *, password: str = ""
) -> httpx.Response:  # Any: JSON
    """Send a request to the server of PREFECT_API_URL, and return the answer, whatever its status.

    This imports Prefect, which then reads its logging settings: set the environment before.

    Raises:
        One of FAILURES: the server cannot be asked.
    """
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.context import root_settings_context
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with (
        root_settings_context() as context,  # with the present environment, not that at the import
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
    """The error's message and, for an untrusted certificate, the setting to change."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"its certificate is not trusted ({error}): set PREFECT_API_SSL_CERT_FILE to the certificate of the "
            "authority that signed it"
        )
    return str(error)
