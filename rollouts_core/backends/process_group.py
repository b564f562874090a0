"""Process groups outside of torch.distributed's default group, for weights from trainer to engines.

The groups have the form that torch.distributed and therefore SGLang use, so either end may be SGLang.
Only torch is imported, because vLLM's workers load this file by its path.
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
"""Time limit for all members to join, and for one bucket to arrive, seconds."""
POLL_S = 0.001


def find_address_towards(host: str, port: int) -> str:
    """This machine's address on the route to another host; OSError without a route."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # nothing is sent
        return str(probe.getsockname()[0])


def open_store(address: str, *, multi_tenant: bool = False) -> tuple[TCPStore, int]:
    """Open a store; returns it with its port.

    The store listens only at this address, because every client of a store can take part. A TCPStore that opens its
    own port listens on all interfaces.

    Args:
        multi_tenant: further stores that this process opens at the port are the same store.

    Raises:
        OSError, RuntimeError: the address cannot be listened on.
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
    """Connect to the trainer's store, through which the members find each other; RuntimeError if it is unreachable.

    The connection counts as one member, as in `torch.distributed.rendezvous`: a trainer that opened the store in that
    way waits until `size` members were counted. Members do not wait.
    """
    return TCPStore(address, port, world_size=size, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))


def name_store(store: TCPStore, name: str, device: str) -> PrefixStore:
    """The prefix in a store under which torch.distributed would look for the group."""
    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))


def connect_gloo(store: PrefixStore, *, rank: int, size: int, address: str) -> Any:
    """Join a group; returns when all members are connected. Raises RuntimeError if a member does not connect.

    Returns ProcessGroupGloo, a type that only some builds of torch have.

    Args:
        address: this machine's address as seen by the others.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's own tests use it
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return dist.ProcessGroupGloo(store, rank, size, options)


def connect_nccl(store: PrefixStore, *, rank: int, size: int) -> Any:
    """Join a group of GPUs; returns ProcessGroupNCCL, which only CUDA builds have."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    # Makes new groups raise if a rank is gone, instead of ending the process. The variable stays set, because several
    # threads connect to engines.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    return dist.ProcessGroupNCCL(store, rank, size, options)


def begin_broadcast(group: Any, flat: Tensor) -> Any:
    """Start to send these bytes as rank 0, or to receive rank 0's bytes into them.

    Returns the work, for `wait_for`. While waiting, the caller must hold no reference to the group; see `let_go`.
    """
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([flat], options)


def wait_for(work: Any, *, is_left: Callable[[], bool]) -> None:  # Any: torch's Work
    """Wait until a group's work is done.

    Raises:
        RuntimeError: the work failed, the group was closed meanwhile, or the work took too long.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not work.is_completed():
        if is_left():
            raise RuntimeError("the group was closed meanwhile")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not finished within {TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    work.wait()  # raises the error of failed work


def let_go(held: list[Any]) -> None:  # Any: see connect_gloo
    """Drop the only reference to a group, in a thread.

    This needs a thread, because gloo keeps sending until its timeout and the group's destructor waits for gloo.
    """

    def end() -> None:
        with suppress(RuntimeError, AttributeError):  # the group has failed, or never started
            held[0].abort()
        held.clear()

    threading.Thread(target=end, name="group that was left", daemon=True).start()
