"""One end of a process group that stands beside all others of its process: what trainer and servers have in common.

Not here: what is sent, and to whom (engines/group.py), what becomes of it (embedded/receiving.py,
engines/in_vllm/rollouts_receiver.py).

Made of torch's backends alone, in the form in which torch.distributed, and so SGLang, makes its own: both ends find
each other whichever of them is ours. Nothing but torch is imported, because vLLM's workers load this file by its path.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch does not list them

TIMEOUT_S = 120.0
"""For the others to join, and for one bucket to be sent or to come."""
POLL_S = 0.001


def find_address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to another; OSError where no way leads there."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # nothing is sent
        return str(probe.getsockname()[0])


def open_store(address: str, *, multi_tenant: bool = False) -> tuple[TCPStore, int]:
    """A store, and the port at which it listens.

    It listens at this address alone, since everybody that reaches a store can take part. A TCPStore that opens its
    port itself listens on all interfaces.

    Args:
        multi_tenant: let this process open further stores at the port, which are this one.

    Raises:
        OSError, RuntimeError: nothing can listen at the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=multi_tenant,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=TIMEOUT_S),
        )
    return store, port


def join_store(address: str, port: int, *, size: int) -> TCPStore:
    """The store that the trainer opened, over which the members find each other; RuntimeError if it is not there.

    This member is counted in, as `torch.distributed.rendezvous` does: a trainer that opened the store so waits until
    `size` members were counted. Only the one that opened it waits.
    """
    return TCPStore(address, port, world_size=size, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))


def name_store(store: TCPStore, name: str, device: str) -> PrefixStore:
    """The place in a store where torch.distributed would look for the group."""
    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))


def connect_gloo(store: PrefixStore, *, rank: int, size: int, address: str) -> Any:
    """One end of a group; returns when all others are there, RuntimeError where they do not come.

    The type, ProcessGroupGloo, is one that only some builds of torch have.

    Args:
        address: of this machine, where the others reach it.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # as torch's own tests do
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return dist.ProcessGroupGloo(store, rank, size, options)


def connect_nccl(store: PrefixStore, *, rank: int, size: int) -> Any:
    """One end of a group of GPUs, ProcessGroupNCCL, which only builds for CUDA have."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    # Groups that are made from now on raise where a rank is gone; others end the process, with its work. It stays set:
    # engines are joined by several threads.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    return dist.ProcessGroupNCCL(store, rank, size, options)


def begin_broadcast(group: Any, flat: Tensor) -> Any:
    """Begin to send these bytes as rank 0, or to have rank 0's written into them as another one.

    Returns the work, for `wait_for`: whoever waits must hold no reference to the group, see `let_go`.
    """
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([flat], options)


def wait_for(work: Any, *, is_left: Callable[[], bool]) -> None:  # Any: torch's Work
    """Return when the work of a group is done.

    Raises:
        RuntimeError: what it ended with, or that it was given up, or took too long.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not work.is_completed():
        if is_left():
            raise RuntimeError("it was given up")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {TIMEOUT_S:g} s")
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
