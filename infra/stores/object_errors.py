"""Convert errors of the object stores' drivers to InfraErrors with one sentence for the user.

The drivers are optional packages, and they raise errors of several other libraries. This module cannot import the
classes of these errors, so it recognizes errors by the names of their classes.

Not here: requests to stores (object_store.py).
"""

import asyncio
import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from rollouts.infra.errors import (
    DiskFullError,
    InfraError,
    ObjectMissingError,
    PermanentInfraError,
    StoreRefusedError,
    StoreUnavailableError,
)

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}
"""Environment variables with the driver's credentials, by protocol."""
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL"}
"""Environment variable with the address of an S3-compatible server, by protocol."""

_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "DefaultCredentialsError",
}
_REFUSED_CODES = {
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
}
_PASSING_CODES = {
    "BadDigest",
    "IncompleteBody",
    "InternalError",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
}
_PASSING = {
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionError",
    "HTTPClientError",
    "IncompleteRead",
    "ResponseParserError",
    "ResponseStreamingError",
    "ServerDisconnectedError",
    "TransportError",
}
_PASSING_ERRNOS = {errno.EBUSY, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH}
_FULL = re.compile("quota|storage ?full", re.IGNORECASE)
"""Pattern of the error codes that full stores send. Each kind of store has its own code."""
_RANGE_NOT_SATISFIABLE = 416
_NO_ROOM = 507
_MAX_SHOWN_CHARACTERS = 200


@contextmanager
def sorted_failures(url: str) -> Iterator[None]:
    """Convert exceptions of the block to InfraErrors about the URL."""
    try:
        yield
    except InfraError:
        raise
    except Exception as error:  # the errors of botocore and aiohttp have no common base class
        raise sort_failure(error, url) from error


def sort_failure(error: Exception, url: str) -> InfraError:
    protocol, _, place = url.partition("://")
    variables = _CREDENTIALS.get(protocol, f"the credentials of {protocol}")
    names = {cls.__name__ for cls in type(error).__mro__}
    code, status = _answer_of(error)
    reason = _reason(error)
    if code == "NoSuchBucket":
        return missing_bucket(url)
    if names & _NO_CREDENTIALS:
        return StoreRefusedError(f"{url} needs credentials, but none were found ({reason}): set {variables}")
    if code == "RequestTimeTooSkewed":
        return StoreRefusedError(f"{url} is refused because the clock of this machine is wrong ({reason}): set it")
    if code == "InvalidObjectState":  # a lifecycle rule of the bucket may have archived the object
        return StoreRefusedError(f"{url} is archived and cannot be read: restore it first")
    if _FULL.search(code) or status == _NO_ROOM:
        return StoreRefusedError(f"{url} cannot be written, because the store has no room left ({code or reason})")
    if isinstance(error, PermissionError) or code in _REFUSED_CODES or status in (401, 403):
        return StoreRefusedError(f"{url} is refused ({code or reason}): check {variables}, and their permissions there")
    if isinstance(error, FileNotFoundError | NotADirectoryError) or status == 404:
        return ObjectMissingError(f"there is nothing at {url}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(place, 0)
    if status == _RANGE_NOT_SATISFIABLE:  # the requested range was valid when the object was listed
        return StoreUnavailableError(f"{url} has become shorter: try again")
    is_passing = code in _PASSING_CODES or status == 429 or status >= 500 or bool(names & _PASSING)
    is_passing |= isinstance(error, ConnectionError | TimeoutError | asyncio.TimeoutError)
    if is_passing or (isinstance(error, OSError) and error.errno in _PASSING_ERRNOS):
        where = f"the network and {_ENDPOINTS[protocol]}" if protocol in _ENDPOINTS else "the network"
        return StoreUnavailableError(f"{url} does not answer ({reason}): check {where}, then try again")
    return PermanentInfraError(f"{url} cannot be used: {reason}")


def missing_bucket(url: str) -> StoreRefusedError:
    bucket = url.partition("://")[2].partition("/")[0]
    return StoreRefusedError(f"there is no bucket {bucket} for {url}: create it, or correct the URL")


def _answer_of(error: Exception) -> tuple[str, int]:
    """Return the store's error code and HTTP status; "" and 0 if the store did not answer."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(response.get("Error", {}).get("Code", "")), int(status)
        status = getattr(cause, "status", None) or getattr(cause, "code", None)
        if isinstance(status, int):
            return "", status
        cause = cause.__cause__
    return "", 0


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno and not error.strerror:
        return os.strerror(error.errno)
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
