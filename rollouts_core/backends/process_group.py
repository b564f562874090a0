"""Create process groups, besides torch.distributed's default group, that send weights from a trainer to engines.

Members that use torch.distributed or SGLang can join the same groups. This file imports nothing of this package,
because vLLM's workers load the file by its path.
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
"""Time limit for all members to join a group, and time limit for sending one bucket of tensors, seconds."""
POLL_S = 0.001


def find_address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to another host. Raises OSError if there is no route."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # `connect` on a UDP socket sends nothing, but chooses the route
        return str(probe.getsockname()[0])


def open_store(address: str, *, multi_tenant: bool = False) -> tuple[TCPStore, int]:
    """Open a torch store that listens only at `address`, and return the store and its port.

    A TCPStore that opens its own port would listen on all network interfaces, and every client of a store can read and
    change its content.

    Args:
        multi_tenant: make all stores that this process opens at the same port one store.

    Raises:
        OSError, RuntimeError: this machine cannot listen at the address.
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
    """Connect to the trainer's store, through which the members of a group find each other.

    The connection raises the store's count of members by one, as `torch.distributed.rendezvous` does. A trainer that
    opened its store with rendezvous waits for `size` members, but `join_store` does not wait.

    Raises:
        RuntimeError: the store is unreachable.
    """
    return TCPStore(address, port, world_size=size, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))


def name_store(store: TCPStore, name: str, device: str) -> PrefixStore:
    """Return a view of a store with the key prefix that torch.distributed uses for a group of this name."""
    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))


def connect_gloo(store: PrefixStore, *, rank: int, size: int, address: str) -> Any:
    """Join a gloo group, and wait until all members are connected. Raises RuntimeError if a member does not connect.

    Returns a ProcessGroupGloo. Some builds of torch lack this type, so it is not annotated.

    Args:
        address: address at which the other members reach this machine.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's own tests use it
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return dist.ProcessGroupGloo(store, rank, size, options)


def connect_nccl(store: PrefixStore, *, rank: int, size: int) -> Any:
    """Join an NCCL group of GPUs, and return a ProcessGroupNCCL, a type that only CUDA builds of torch have."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    # With this variable, a new group raises an error if a rank is lost. Otherwise NCCL would end the process. The
    # variable stays set, because another thread may be creating a group.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    return dist.ProcessGroupNCCL(store, rank, size, options)


def begin_broadcast(group: Any, flat: Tensor) -> Any:
    """Begin a broadcast: rank 0 sends the bytes of `flat`, other ranks receive rank 0's bytes into `flat`.

    Returns a handle for `wait_for`. While the caller waits, it must hold no reference to the group (see `let_go`).
    """
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([flat], options)


def wait_for(work: Any, *, is_left: Callable[[], bool]) -> None:  # Any: torch's Work
    """Wait until a broadcast from `begin_broadcast` is done.

    Raises:
        RuntimeError: the broadcast failed or timed out, or the group was closed meanwhile.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not work.is_completed():
        if is_left():
            raise RuntimeError("the group was closed meanwhile")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not finished within {TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    work.wait()  # raises the error if the work failed


def let_go(held: list[Any]) -> None:  # Any: see connect_gloo
    """Abort and delete a process group in a thread. `held` must contain the only reference to the group.

    A thread, because the group's destructor waits for gloo, which may continue to send until its timeout.
    """

    def end() -> None:
        with suppress(RuntimeError, AttributeError):  # the group failed or never started
            held[0].abort()
        held.clear()

    threading.Thread(target=end, name="group that was left", daemon=True).start()
