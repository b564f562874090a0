"""Limits on open files and connections of this process, and on concurrent requests to engines."""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from anyio.lowlevel import RunVar

MAX_OPEN_FILES = 65_536
"""Highest limit to set, more than any job needs. Some programs loop over all numbers up to the inherited limit."""
SHARE_OF_REQUESTS = 4
"""Each kind of request gets this fraction, a quarter, of the free file descriptors: a connection stays open for a while
after its request, and rewards, sandboxes, weights and checkpoints also need files."""
MIN_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class RequestPlaces:
    """Limits on the concurrent requests of an event loop, over all engines."""

    completions: asyncio.Semaphore
    """For requests that may take long."""
    questions: asyncio.Semaphore
    """For short requests that accompany completions, so that they need not wait for long ones."""


_places: RunVar[RequestPlaces] = RunVar("places of requests")


def raise_file_limit() -> None:
    """Raise this process's limit on open files to the permitted maximum. Child processes inherit the limit.

    The usual limit of a login is 1024. Each request to an engine needs a file descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # the system's limit may be lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def request_places() -> RequestPlaces:
    """The limits of this event loop, computed at the first call."""
    try:
        return _places.get()
    except LookupError:
        number = max(MIN_REQUESTS, _count_files_left() // SHARE_OF_REQUESTS)
        places = RequestPlaces(asyncio.Semaphore(number), asyncio.Semaphore(number))
        _places.set(places)
        return places


def _count_files_left() -> int:
    """How many more files this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    return limit - len([*Path("/dev/fd").iterdir()])
