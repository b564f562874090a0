"""Raise this process's limit on open files, and limit concurrent requests to engines accordingly."""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from anyio.lowlevel import RunVar

MAX_OPEN_FILES = 65_536
"""The limit is never raised above this value, which is more than any job needs. A higher limit would slow down child
programs that loop over all file descriptors up to the limit."""
SHARE_OF_REQUESTS = 4
"""Each of the two kinds of requests may use one quarter of the free file descriptors. The other half is for connections
that stay open after their requests, and for files of rewards, sandboxes, weights and checkpoints."""
MIN_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class RequestPlaces:
    """Limits on the number of concurrent requests from one event loop to all engines."""

    completions: asyncio.Semaphore
    """Limit for requests that generate completions, which may take long."""
    questions: asyncio.Semaphore
    """Limit for short requests, separate so that they do not wait for completions."""


_places: RunVar[RequestPlaces] = RunVar("places of requests")


def raise_file_limit() -> None:
    """Raise this process's limit on open files to the permitted maximum. Child processes inherit the limit.

    Many systems start with a limit of 1024, and each request to an engine needs a file descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # the system's limit may be lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def request_places() -> RequestPlaces:
    """The limits on requests of the current event loop. The first call computes the limits from the number of free file
    descriptors."""
    try:
        return _places.get()
    except LookupError:
        number = max(MIN_REQUESTS, _count_files_left() // SHARE_OF_REQUESTS)
        places = RequestPlaces(asyncio.Semaphore(number), asyncio.Semaphore(number))
        _places.set(places)
        return places


def _count_files_left() -> int:
    """The number of files that this process may open in addition to its open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    return limit - len([*Path("/dev/fd").iterdir()])
