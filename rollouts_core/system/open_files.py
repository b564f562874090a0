"""How many files and connections this process may have open, and how many of them may be requests to engines.

Not here: the requests (engines/http.py), the limits of what runs a model's code (environments/sandbox_child.py).
"""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from anyio.lowlevel import RunVar

MAX_OPEN_FILES = 65_536
"""More than any job needs. Some programs look at every number up to the limit that they inherit."""
SHARE_OF_REQUESTS = 4
"""A quarter of what is left for each kind of request: a connection stays open for a while after it, and rewards,
sandboxes, weights and checkpoints need files, too."""
MIN_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class RequestPlaces:
    """As many places as requests may be under way at the same time in an event loop, whichever engines they go to."""

    completions: asyncio.Semaphore
    """Of those that may take long."""
    questions: asyncio.Semaphore
    """Of those that are asked for each completion, and are answered at once: they wait behind none that takes long."""


_places: RunVar[RequestPlaces] = RunVar("places of requests")


def raise_file_limit() -> None:
    """Let this process, and what it starts, have as many files open as it may allow itself.

    The usual limit of a login is 1024, which is for programs that know no other; a request to an engine is a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a system may have a limit of its own below that
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def request_places() -> RequestPlaces:
    """The places of this event loop; how many there are is decided when they are first asked for."""
    try:
        return _places.get()
    except LookupError:
        number = max(MIN_REQUESTS, _count_files_left() // SHARE_OF_REQUESTS)
        places = RequestPlaces(asyncio.Semaphore(number), asyncio.Semaphore(number))
        _places.set(places)
        return places


def _count_files_left() -> int:
    """How many files this process could open more than it has."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    return limit - len([*Path("/dev/fd").iterdir()])
