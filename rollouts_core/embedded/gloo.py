"""One end of a gloo group that stands beside all other groups of its process: what trainer and server have in common.

Not here: what is sent, and to whom (engines/group.py), what becomes of it (receiving.py).

Made of torch's backend alone, in the form in which torch.distributed, and so SGLang, makes its own: both ends find each
other whichever of them is ours.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch does not list them

POLL_S = 0.001


def find_address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to another; OSError where no way leads there."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # nothing is sent
        return str(probe.getsockname()[0])


def name_store(store: TCPStore, name: str, device: str) -> PrefixStore:
    """The place in a store where torch.distributed would look for the group."""
    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))


def connect_gloo(store: PrefixStore, *, rank: int, size: int, address: str, timeout_s: float) -> Any:
    """One end of a group; returns when all others are there, RuntimeError where they do not come.

    The type, ProcessGroupGloo, is one that only some builds of torch have.

    Args:
        address: of this machine, where the others reach it.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # as torch's own tests do
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, rank, size, options)


def wait_for(work: Any, *, timeout_s: float, is_left: Callable[[], bool]) -> None:  # Any: torch's Work
    """Return when the work of a group is done.

    Raises:
        RuntimeError: what it ended with, or that it was given up, or took too long.
    """
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if is_left():
            raise RuntimeError("it was given up")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {timeout_s:g} s")
        time.sleep(POLL_S)
    work.wait()  # raises what it ended with


def let_go(held: list[Any]) -> None:  # Any: see connect_gloo
    """End the only reference to a group, in a thread.

    Not here, nor by who waits: gloo sends on until its timeout, and the end of the group waits for that.
    """

    def end() -> None:
        with suppress(RuntimeError, AttributeError):  # it failed already, or never began
            held[0].abort()
        held.clear()

    threading.Thread(target=end, name="group that was left", daemon=True).start()
