"""Requests to the server of PREFECT_API_URL by Prefect's own client, with all of the user's settings for it.

These are the password or key, also in a profile; a private certificate authority (PREFECT_API_SSL_CERT_FILE), headers
that a proxy wants (PREFECT_CLIENT_CUSTOM_HEADERS), tokens against forged requests (CSRF), and proxies.

Not here: a store's own server, which commands ask without importing prefect (prefect_api.py).
"""

from __future__ import annotations

from typing import Any

import httpx

RETRIES = 4
"""Attempts after the first one, 30 s in all. A request from a terminal has a user who waits."""
FAILURES = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError)
"""Errors of a server that cannot be asked, and of settings that Prefect's client refuses."""


def request_named(
    api_url: str, method: str, path: str, question: Any = None, *, password: str = ""
) -> httpx.Response:  # Any: JSON
    """Return what the server answers, whatever its status.

    Prefect reads its logging settings when it is imported, which is here: set the environment before.

    Raises:
        One of FAILURES: the server cannot be asked.
    """
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.context import root_settings_context
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with (
        root_settings_context() as context,  # the environment of now, not that of the import
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
    """The fault, in words that lead to a setting."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"its certificate is not trusted ({error}): set PREFECT_API_SSL_CERT_FILE to that of the authority that "
            "signed it"
        )
    return str(error)
