"""Accounts at providers with an HTTP API: send requests, and convert answers to values or errors.

    reading, ending    retried for `patience_s` while the provider is busy or away, then ProviderUnavailableError
    creating           sent once. 429 created nothing and is retried. No answer, 408 or 5xx is an UnclearAnswerError
    both               401, 402, 403 are a ProviderRefusedError at once, unless they mean something else at a provider

Providers limit the rate of an account's requests, so all connections of a process to one account take turns.

API keys are sent in a header and are never written to disk or shown. A provider's texts are shown shortened, with ***
in place of API keys. The functions at the end of the file check addresses and ids in answers.

Not here: the requests of each provider (runpod.py and others).
"""

import base64
import email.utils
import hashlib
import logging
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, Field, ValidationError

from rollouts.infra.clouds import CloudName
from rollouts.infra.errors import OfferGoneError, ProviderRefusedError, ProviderUnavailableError, UnclearAnswerError
from rollouts.infra.foreign_text import shown_line
from rollouts.infra.node import SSH_PORT

TIMEOUT_S = 30.0
CREATE_TIMEOUT_S = 90.0
MAX_ANSWER_BYTES = 10_000_000
MAX_ANSWER_S = 120.0
"""Time limit of a whole answer in seconds. Read timeouts alone would allow an endless answer."""
MAX_SHOWN_CHARACTERS = 300
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
_REFUSED = {401: "the key is not valid", 402: "there is no money on the account", 403: "the key may not do that"}
_LATE = 408
"""HTTP status of a request timeout. A proxy may send this status after forwarding the request."""
_REPEATED = 16

RecordT = TypeVar("RecordT", bound=BaseModel)
Json = dict[str, Any]  # Any: JSON
InstanceId = Annotated[str, Field(pattern=r"^[!-~]{1,200}$")]
"""A provider's id of a machine. Only printable ASCII characters are accepted."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of a provider's API, and the rules for requests to the API."""

    title: str
    """The provider's name in messages."""
    url: str
    key_variable: str
    """Name of the environment variable with the account's API key."""
    key_is: str = "key"
    """Noun for the value of `key_variable` in messages."""
    key_header: str = "Authorization"
    key_prefix: str = "Bearer "
    min_interval_s: float = 0.0
    """Minimum seconds between two requests."""
    create_interval_s: float = 0.0
    """Minimum seconds between two requests that create machines."""
    patience_s: float = 60.0
    """Time limit in seconds for retries of requests that read or end machines."""
    account_refusal: str = ""
    """Regular expression for answers that refuse the whole account with a status other than 401, 402 and 403."""
    offer_refusal: str = ""
    """Regular expression for answers with status 403 that refuse only the requested offer. Without `offer_refusal`, 403
    always refuses the account.
    """

    @property
    def url_variable(self) -> str:
        """Environment variable that replaces the API's address, for example by the address of a company's proxy."""
        return self.key_variable.replace("_API_KEY", "_API_URL")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    content: bytes
    retry_after: str


class _Turns:
    """Times of the next allowed requests, shared by all connections of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_at: dict[tuple[str, ...], float] = {}

    def wait(self, kind: tuple[str, ...], interval_s: float) -> None:
        """Sleep until this caller's turn. The next caller's turn is `interval_s` seconds later."""
        if interval_s <= 0:
            return
        with self._lock:
            now = time.monotonic()
            turn_at = max(now, self._next_at.get(kind, now))
            self._next_at[kind] = turn_at + interval_s
        if turn_at > now:
            time.sleep(turn_at - now)


_TURNS = _Turns()


class ProviderAPI:
    """An open connection to a provider's API. Several threads may use one connection."""

    def __init__(self, endpoint: Endpoint, key: str, transport: httpx.BaseTransport | None = None) -> None:
        self._endpoint = endpoint
        self._key = key
        self._client = httpx.Client(
            base_url=endpoint.url,
            headers={endpoint.key_header: f"{endpoint.key_prefix}{key}", "Accept": "application/json"},
            timeout=TIMEOUT_S,
            transport=transport,
            follow_redirects=False,
        )
        self._account = (endpoint.url, hashlib.sha256(key.encode()).hexdigest())
        self._concealed: set[str] = set()

    def conceal(self, secret: str) -> None:
        """After this call, never show a text of the provider that repeats 16 characters in a row of the secret."""
        starts = [(line, start) for line in secret.splitlines() for start in range(len(line) - _REPEATED + 1)]
        self._concealed |= {line[start : start + _REPEATED] for line, start in starts}

    def read(self, path: str, shape: type[RecordT], params: Mapping[str, str] | None = None) -> RecordT:
        """Request and parse a record.

        Raises:
            ProviderUnavailableError, ProviderRefusedError.
        """
        found = self.find(path, shape, params)
        if found is None:
            raise ProviderUnavailableError(f"{self._endpoint.title} has no {path}: is its address right?")
        return found

    def find(self, path: str, shape: type[RecordT], params: Mapping[str, str] | None = None) -> RecordT | None:
        """Request and parse a record. Returns None if the API answers with status 404.

        Raises:
            ProviderUnavailableError, ProviderRefusedError.
        """
        answer = self._ask_patiently("GET", path, params=params)
        return None if answer.status == 404 else self._parse(answer, shape, f"GET {path}")

    def named(self, records: Sequence[Json], prefix: str, shape: type[RecordT], *, key: str = "name") -> list[RecordT]:
        """Parse the records of a list whose names begin with the prefix. Records with other names may have any shape.

        Args:
            key: the JSON key of a record's name.

        Raises:
            ProviderUnavailableError: a record with the prefix does not have the given shape.
        """
        ours = [record for record in records if str(record.get(key) or "").startswith(prefix)]
        try:
            return [shape.model_validate(record) for record in ours]
        except ValidationError as error:
            raise ProviderUnavailableError(self._say("a list", f"an unreadable answer ({_first(error)})")) from error

    def readable(self, records: Sequence[Json], shape: type[RecordT]) -> list[RecordT]:
        """Parse the offers of a list. Offers that do not have the given shape are skipped with a warning.

        Raises:
            ProviderUnavailableError: no offer has the given shape.
        """
        found, problems = list[RecordT](), list[str]()
        for record in records:
            try:
                found.append(shape.model_validate(record))
            except ValidationError as error:
                problems.append(_first(error))
        if problems:
            several = f"{len(problems)} of {len(records)} offers in an unreadable answer ({problems[0]})"
            if not found:
                raise ProviderUnavailableError(self._say("a search", several))
            logger.warning("%s: they are left out", self._say("a search", several))
        return found

    def change(self, method: str, path: str, body: Json | None = None) -> bytes | None:
        """Send an idempotent request. Returns the answer, or None if the API answers with status 404.

        Raises:
            ProviderUnavailableError, ProviderRefusedError.
        """
        answer = self._ask_patiently(method, path, body=body)
        return None if answer.status == 404 else answer.content

    def ask(self, path: str, body: Json, shape: type[RecordT]) -> RecordT:
        """Send a query by POST and return the answer. The query changes nothing.

        Raises:
            ProviderUnavailableError, ProviderRefusedError.
        """
        return self._parse(self._ask_patiently("POST", path, body=body), shape, f"POST {path}")

    def follow(self, path: str, params: Mapping[str, str], *, within_s: float) -> Iterator[str]:
        """Yield the lines of an answer that may never end, for about `within_s` seconds. An error of the connection
        ends the iterator without an exception."""
        _TURNS.wait((*self._account, "any"), self._endpoint.min_interval_s)
        deadline = time.monotonic() + within_s
        num_bytes, rest = 0, b""
        try:
            with self._client.stream("GET", path, params=params, timeout=within_s) as response:
                if response.status_code != 200:
                    logger.info("%s", self._say(f"GET {path}", str(response.status_code)))
                    return
                for chunk in response.iter_bytes():
                    *lines, rest = (rest + chunk).split(b"\n")
                    yield from (line.decode(errors="replace").rstrip("\r") for line in lines)
                    num_bytes += len(chunk)
                    if num_bytes > MAX_ANSWER_BYTES or time.monotonic() > deadline:
                        return
        except httpx.HTTPError as error:
            logger.info("%s", self._say_silent(f"GET {path}", error))

    def create(
        self, path: str, body: Json, shape: type[RecordT], *, method: str = "POST", is_machine: bool = False
    ) -> RecordT:
        """Send one request to create something.

        Args:
            is_machine: whether the request creates a machine, which costs money. Providers limit the rate of requests
                that create machines.

        Raises:
            OfferGoneError: the API refused this request.
            ProviderRefusedError: the API refuses all requests of the account.
            ProviderUnavailableError: nothing was created. If `is_machine` is false, the object may also have been
                created.
            UnclearAnswerError: a machine may have been created.
        """
        what = f"{method} {path}"
        unclear = UnclearAnswerError if is_machine else ProviderUnavailableError
        deadline = time.monotonic() + self._endpoint.patience_s
        attempt = 0
        while True:
            attempt += 1
            try:
                answer = self._ask(method, path, body=body, timeout_s=CREATE_TIMEOUT_S, is_machine=is_machine)
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:  # the request was not sent
                raise ProviderUnavailableError(self._say_silent(what, error)) from error
            except (httpx.HTTPError, OverflowError) as error:
                raise unclear(self._say_silent(what, error)) from error
            if answer.status != 429:
                break
            self._pause_after(answer, attempt, deadline, what)
        self._check_refused(answer, what, is_offer=is_machine)
        said = f"{answer.status}: {self._shown(answer.content)}"
        if answer.status == 403:
            hint = f"it may not be for this account, or the key in {self._endpoint.key_variable} may not rent"
            raise OfferGoneError(self._say(what, f"{said} ({hint})"))
        if 400 <= answer.status < 500 and answer.status != _LATE:
            raise OfferGoneError(self._say(what, said))
        if answer.status not in (200, 201):
            raise unclear(self._say(what, said))
        return self._parse(answer, shape, what, unclear)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _parse(
        self, answer: _Answer, shape: type[RecordT], what: str, unreadable: type[Exception] = ProviderUnavailableError
    ) -> RecordT:
        try:
            return shape.model_validate_json(answer.content)
        except ValidationError as error:
            raise unreadable(self._say(what, f"an unreadable answer ({_first(error)})")) from error

    def _ask_patiently(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Json | None = None
    ) -> _Answer:
        """Retry a request until the API answers with status 2xx or 404, and return this answer."""
        what = f"{method} {path}"
        deadline = time.monotonic() + self._endpoint.patience_s
        attempt = 0
        while True:
            attempt += 1
            try:
                answer = self._ask(method, path, params=params, body=body)
            except (httpx.HTTPError, OverflowError) as error:
                self._pause(attempt, deadline, self._say_silent(what, error))
                continue
            self._check_refused(answer, what)
            if answer.status in (200, 201, 202, 204, 404):
                return answer
            if answer.status not in (429, _LATE) and answer.status < 500:
                raise ProviderRefusedError(self._say(what, f"{answer.status}: {self._shown(answer.content)}"))
            self._pause_after(answer, attempt, deadline, what)

    def _ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Json | None = None,
        timeout_s: float = TIMEOUT_S,
        is_machine: bool = False,
    ) -> _Answer:
        _TURNS.wait((*self._account, "any"), self._endpoint.min_interval_s)
        if is_machine:
            _TURNS.wait((*self._account, "machine"), self._endpoint.create_interval_s)
        with self._client.stream(method, path, params=params, json=body, timeout=timeout_s) as response:
            content, began = b"", time.monotonic()
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    raise OverflowError
                if time.monotonic() - began > MAX_ANSWER_S:
                    raise httpx.ReadTimeout("the answer does not end")
            return _Answer(response.status_code, content, response.headers.get("retry-after", ""))

    def _pause_after(self, answer: _Answer, attempt: int, deadline: float, what: str) -> None:
        """Pause like `_pause`, and at least as long as the answer's Retry-After header says."""
        problem = self._say(what, f"{answer.status}: {self._shown(answer.content)}")
        self._pause(attempt, deadline, problem, wanted_s=_seconds(answer.retry_after))

    def _pause(self, attempt: int, deadline: float, problem: str, *, wanted_s: float = 0.0) -> None:
        """Wait before the next attempt, longer after each attempt and at least `wanted_s` seconds.

        Raises:
            ProviderUnavailableError: the pause would end after the deadline.
        """
        own_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1)
        pause_s = max(own_s, wanted_s)  # the header may say 0 s or a past time
        if time.monotonic() + pause_s > deadline:
            raise ProviderUnavailableError(problem)
        logger.info("%s; asking again in %.1f s", problem, pause_s)
        time.sleep(pause_s)

    def _check_refused(self, answer: _Answer, what: str, *, is_offer: bool = False) -> None:
        if not 400 <= answer.status < 500:
            return
        said, reason = self._shown(answer.content), _REFUSED.get(answer.status)
        about_offer = self._endpoint.offer_refusal if is_offer and answer.status == 403 else ""
        if about_offer and re.search(about_offer, said):
            reason = None
        elif self._endpoint.account_refusal and re.search(self._endpoint.account_refusal, said):
            reason = reason or "the account may not do that"
        if reason is not None:
            raise ProviderRefusedError(
                f"{self._endpoint.title} refused {what} with {answer.status}, {reason} ({said}): "
                f"check the key in {self._endpoint.key_variable} and the account"
            )

    def _say(self, what: str, problem: str) -> str:
        return f"{self._endpoint.title} answered {what} with {problem}"

    def _say_silent(self, what: str, error: Exception) -> str:
        return f"{self._endpoint.title} does not answer ({type(error).__name__}) to {what}"

    def _shown(self, content: bytes) -> str:
        text = shown_line(content.decode(errors="replace"))
        shown = text.replace(self._key, "***")[:MAX_SHOWN_CHARACTERS]
        if any(part in shown for part in self._concealed):
            return "a text that repeats one of our secrets"
        return shown or "no explanation"


class Account:
    """Base class for an account at a provider with an HTTP API."""

    name: ClassVar[CloudName]
    endpoint: ClassVar[Endpoint]
    gives_host_key: ClassVar[bool] = False
    is_networked: ClassVar[bool] = False
    reaches: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        key: str,
        url: str = "",
        transport: httpx.BaseTransport | None = None,
        min_interval_s: float | None = None,
    ) -> None:
        """Open the account. `url` replaces the endpoint's address; `min_interval_s` replaces both of its intervals."""
        endpoint = replace(self.endpoint, url=url or self.endpoint.url)
        if min_interval_s is not None:
            endpoint = replace(endpoint, min_interval_s=min_interval_s, create_interval_s=min_interval_s)
        self._api = ProviderAPI(endpoint, key, transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.__exit__()

    def host_key(self, instance_id: str) -> str:
        """Return "", because most providers do not report host keys."""
        return ""


def key_blob(public_key: str) -> str:
    """Return the second field of a public key in OpenSSH's format (type, key, comment)."""
    return public_key.split()[1]


def key_name(public_key: str) -> str:
    """Return a name for registering an SSH key in an account. The name contains a digest of the key, because some
    providers refuse two keys of the same name."""
    return "rollouts-" + hashlib.sha256(base64.b64decode(key_blob(public_key))).hexdigest()[:12]


def _seconds(retry_after: str) -> float:
    """Return the seconds that a Retry-After header (a number or a date) asks for, or 0 if the header is invalid."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"])  # the path may contain names from the answer
    return shown_line(f"{place}: {problem['msg']}")[:MAX_SHOWN_CHARACTERS]


# ── addresses ──


_HOST = re.compile(r"[A-Za-z0-9][\w.-]*|[0-9a-fA-F:.]+", re.ASCII)
_PORT = re.compile(r"\d{1,5}", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


def usable_host(host: str | None) -> str:
    return host if host and _HOST.fullmatch(host) else ""


def usable_port(port: int | str | None) -> int:
    """Return the port, or SSH's default port if the value is not a valid port."""
    if not _PORT.fullmatch(str(port)):
        return SSH_PORT
    return int(str(port)) if int(str(port)) in range(1, 65536) else SSH_PORT


def usable_user(user: str | None, default: str) -> str:
    return user if user and _USER.fullmatch(user) else default


def quoted(instance_id: str) -> str:
    """Return the id escaped as one part of a URL's path. Dots are escaped too, so that the id cannot be `..`."""
    return quote(instance_id, safe="").replace(".", "%2E")
