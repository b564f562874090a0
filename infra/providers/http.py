"""Accounts at providers with an API over HTTP: ask it, and sort its answers by what the caller can do about them.

Not here: what is asked (runpod.py and its like).

    reading, ending    asked again while the provider is busy or away, up to `patience_s`, then ProviderUnavailableError
    creating           sent once: 429 created nothing and is asked again; no answer, 408 or 5xx is an UnclearAnswerError
    both               401, 402, 403 are a ProviderRefusedError at once, unless a provider means something else by them

Providers count the requests of an account, whoever sends them: so all connections of a process to one take turns.

Keys are sent in a header and written nowhere; what a provider says is shown without them, shortened.
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

import httpx
from pydantic import BaseModel, Field, ValidationError

from rollouts.infra.clouds import CloudName
from rollouts.infra.errors import OfferGoneError, ProviderRefusedError, ProviderUnavailableError, UnclearAnswerError
from rollouts.infra.foreign_text import shown_line

TIMEOUT_S = 30.0
CREATE_TIMEOUT_S = 90.0
MAX_ANSWER_BYTES = 10_000_000
MAX_ANSWER_S = 120.0
"""An answer that has begun is here by then, also over a slow line; timeouts alone let one drip for ever."""
MAX_SHOWN_CHARACTERS = 300
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
_REFUSED = {401: "the key is not valid", 402: "there is no money on the account", 403: "the key may not do that"}
_LATE = 408
"""Said by what stands in front of an API, too, which may have the request by then."""
_REPEATED = 16

RecordT = TypeVar("RecordT", bound=BaseModel)
Json = dict[str, Any]  # Any: JSON
InstanceId = Annotated[str, Field(pattern=r"^[!-~]{1,200}$")]
"""A provider's name for a machine; nothing that a terminal would obey."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an API is, and how it wants to be asked."""

    title: str
    """The provider's name for messages."""
    url: str
    key_variable: str
    """The environment variable with the key of the account."""
    key_is: str = "key"
    """What the variable holds, for messages."""
    key_header: str = "Authorization"
    key_prefix: str = "Bearer "
    min_interval_s: float = 0.0
    """Requests are at least this far apart."""
    create_interval_s: float = 0.0
    """Requests for machines are."""
    patience_s: float = 60.0
    """Reading and ending are tried for this long."""
    account_refusal: str = ""
    """Regular expression of what is said about the account with other codes than 401, 402 and 403."""
    offer_refusal: str = ""
    """Regular expression of what is said about one offer with 403, when a machine is asked for; empty where that is
    always about the account."""

    @property
    def url_variable(self) -> str:
        """The environment variable with another address of the API, for example of a proxy of the company."""
        return self.key_variable.replace("_API_KEY", "_API_URL")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    content: bytes
    retry_after: str


class _Turns:
    """When something may be asked for next, for all connections of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_at: dict[tuple[str, ...], float] = {}

    def wait(self, kind: tuple[str, ...], interval_s: float) -> None:
        """Sleep until it is this caller's turn; the next one's is `interval_s` later."""
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
    """An open connection to an API; may be used by several threads."""

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
        """From now on show nothing of what the provider says if it repeats a part of the secret, of 16 characters."""
        starts = [(line, start) for line in secret.splitlines() for start in range(len(line) - _REPEATED + 1)]
        self._concealed |= {line[start : start + _REPEATED] for line, start in starts}

    def read(self, path: str, shape: type[RecordT], params: Mapping[str, str] | None = None) -> RecordT:
        """What is there, in the given shape.

        Raises:
            ProviderUnavailableError, ProviderRefusedError.
        """
        found = self.find(path, shape, params)
        if found is None:
            raise ProviderUnavailableError(f"{self._endpoint.title} has no {path}: is its address right?")
        return found

    def find(self, path: str, shape: type[RecordT], params: Mapping[str, str] | None = None) -> RecordT | None:
        """Like `read`; None where the API answers 404.

        Raises:
            ProviderUnavailableError, ProviderRefusedError.
        """
        answer = self._ask_patiently("GET", path, params=params)
        return None if answer.status == 404 else self._parse(answer, shape, f"GET {path}")

    def named(self, records: Sequence[Json], prefix: str, shape: type[RecordT], *, key: str = "name") -> list[RecordT]:
        """Those records of a list that are called so, in the given shape; how others look does not matter.

        Args:
            key: where a record has its name.

        Raises:
            ProviderUnavailableError: one of ours cannot be read.
        """
        ours = [record for record in records if str(record.get(key) or "").startswith(prefix)]
        try:
            return [shape.model_validate(record) for record in ours]
        except ValidationError as error:
            raise ProviderUnavailableError(self._say("a list", f"an unreadable answer ({_first(error)})")) from error

    def readable(self, records: Sequence[Json], shape: type[RecordT]) -> list[RecordT]:
        """Those records of a list of offers that have the given shape: one of a new kind does not hide the others.

        Raises:
            ProviderUnavailableError: none of several has it.
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
        """Ask for something that may be asked for twice; returns the answer, or None where the API answers 404.

        Raises:
            ProviderUnavailableError, ProviderRefusedError.
        """
        answer = self._ask_patiently(method, path, body=body)
        return None if answer.status == 404 else answer.content

    def ask(self, path: str, body: Json, shape: type[RecordT]) -> RecordT:
        """The answer to a question that is sent by POST and changes nothing.

        Raises:
            ProviderUnavailableError, ProviderRefusedError.
        """
        return self._parse(self._ask_patiently("POST", path, body=body), shape, f"POST {path}")

    def follow(self, path: str, params: Mapping[str, str], *, within_s: float) -> Iterator[str]:
        """The lines of an answer that may have no end, for about so long; none where it is not to be had."""
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
        """Ask once for something to be created.

        Args:
            is_machine: it costs money; providers want requests for these to be further apart than others.

        Raises:
            OfferGoneError: the API refused this one.
            ProviderRefusedError: it refuses everything.
            ProviderUnavailableError: it had no time, and created nothing; or may have, and that does no harm.
            UnclearAnswerError: it may have created a machine.
        """
        what = f"{method} {path}"
        unclear = UnclearAnswerError if is_machine else ProviderUnavailableError
        deadline = time.monotonic() + self._endpoint.patience_s
        attempt = 0
        while True:
            attempt += 1
            try:
                answer = self._ask(method, path, body=body, timeout_s=CREATE_TIMEOUT_S, is_machine=is_machine)
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:  # nothing was sent
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
        """The first answer that is an answer: 2xx or 404."""
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
        """Like `_pause`, as long as an answer says."""
        problem = self._say(what, f"{answer.status}: {self._shown(answer.content)}")
        self._pause(attempt, deadline, problem, wanted_s=_seconds(answer.retry_after))

    def _pause(self, attempt: int, deadline: float, problem: str, *, wanted_s: float = 0.0) -> None:
        """Wait before asking again: longer each time, and as long as is wanted.

        Raises:
            ProviderUnavailableError: that would be later than the deadline.
        """
        own_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1)
        pause_s = max(own_s, wanted_s)  # 0 may be wanted, or a date that is over by our clock
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
        """The provider's own words, without control characters and without the key."""
        text = shown_line(content.decode(errors="replace"))
        shown = text.replace(self._key, "***")[:MAX_SHOWN_CHARACTERS]
        if any(part in shown for part in self._concealed):
            return "words that repeat a secret of ours"
        return shown or "no explanation"


class Account:
    """An account at a provider: what the providers' classes have in common."""

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
        """`url` takes the place of the endpoint's own, and `min_interval_s` that of both intervals."""
        endpoint = replace(self.endpoint, url=url or self.endpoint.url)
        if min_interval_s is not None:
            endpoint = replace(endpoint, min_interval_s=min_interval_s, create_interval_s=min_interval_s)
        self._api = ProviderAPI(endpoint, key, transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.__exit__()

    def host_key(self, instance_id: str) -> str:
        """Nothing: most providers tell no host keys."""
        return ""


def key_blob(public_key: str) -> str:
    """The part of a line in OpenSSH's format that is the key itself: type, blob, comment."""
    return public_key.split()[1]


def key_name(public_key: str) -> str:
    """What the account calls the key: another name for each, since a provider may not take one twice."""
    return "rollouts-" + hashlib.sha256(base64.b64decode(key_blob(public_key))).hexdigest()[:12]


def _seconds(retry_after: str) -> float:
    """How long a Retry-After header asks to wait: a number of seconds, or a date; 0 where it says nothing."""
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
    place = ".".join(str(part) for part in problem["loc"])  # keys of the answer may be in it
    return shown_line(f"{place}: {problem['msg']}")[:MAX_SHOWN_CHARACTERS]
