"""The trainer's end of a process group with the ranks of one server: rank 0 sends, the server's ranks receive.

    WeightGroup     creates a store that listens at an address that the server can reach
    connect         runs during the server's own call; returns when the server's ranks have joined
    broadcast       runs during the server's own call; sends the bytes of one bucket
    close           may interrupt a broadcast: the server's end fails, and the trainer stops waiting; may interrupt a
                    connect before the first rank joins, for instance if the server refuses

Each server has its own group, so a dead or hanging server does not delay other servers, and a restarted server gets a
new group without waiting for other servers. In return, the trainer sends the weights once per server.

The groups consist of torch's backend objects without the global group of the trainer's ranks, because torch's functions
for groups would turn the global group into an NCCL group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from uuid import uuid4

import httpx
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not export this name

from rollouts_core.backends.process_group import (
    TIMEOUT_S,
    begin_broadcast,
    connect_gloo,
    connect_nccl,
    let_go,
    name_store,
    open_store,
    wait_for,
)
from rollouts_core.backends.process_group import find_address_towards as find_own_address
from rollouts_core.engines.transfer.nccl import nccl_version
from rollouts_core.errors import EngineUnavailableError

GroupBackend = Literal["gloo", "nccl"]
JOIN_POLL_S = 0.02
LEFT = "the group was closed meanwhile"
DEVICES: dict[GroupBackend, str] = {"gloo": "cpu", "nccl": "cuda"}
"""Device type of the tensors that a `GroupBackend` sends, and part of the group's key prefix in the store."""


class WeightGroup:
    """A group with the `num_ranks` ranks of the server at `url`. The caller must close the group.

    Raises:
        EngineUnavailableError: no route leads to the server, or the store cannot listen at the address on this route.
    """

    def __init__(self, url: str, backend: GroupBackend, *, num_ranks: int) -> None:
        self.url = url
        self.backend = backend
        self.num_ranks = num_ranks
        self.name = f"rollouts-{uuid4().hex}"
        """Name of the group, also on the server."""
        self.device = DEVICES[backend]
        self.address = find_address_towards(url)
        """The trainer's address on the route to the server."""
        with self._failures_named("can be offered no group"):
            self._store, self.port = open_store(self.address)
        self._group: Any = None  # Any: ProcessGroupGloo or ProcessGroupNCCL, which only builds for CUDA have
        self._is_left = False

    def connect(self) -> None:
        """Wait for the server's ranks.

        Raises:
            EngineUnavailableError: a rank did not join in time.
        """
        store = name_store(self._store, self.name, self.device)
        with self._failures_named("did not join"):
            if self.backend == "nccl":
                self._group = connect_nccl(store, rank=0, size=1 + self.num_ranks)
            else:
                self._group = self._connect_gloo(store)
            if self._is_left:
                self.close()
                raise RuntimeError(LEFT)

    def broadcast(self, flat: Tensor) -> None:
        """Send bytes to the server's ranks, and return when the trainer's end of the group has sent all bytes.

        Raises:
            EngineUnavailableError: the server's end is gone, or did not receive the bytes in time.
        """
        assert self._group is not None, "the group is not connected"
        with self._failures_named("did not take a bucket of weights"):
            work = begin_broadcast(self._group, flat.to(self.device))
            wait_for(work, is_left=lambda: self._is_left)

    def close(self) -> None:
        """Leave the group without waiting for its other ranks. A running broadcast fails."""
        self._is_left = True
        held, self._group = [self._group], None
        let_go(held)

    def _connect_gloo(self, store: PrefixStore) -> Any:  # Any: see __init__
        self._wait_for_a_rank()
        return connect_gloo(store, rank=0, size=1 + self.num_ranks, address=self.address)

    def _wait_for_a_rank(self) -> None:
        """Return when a rank of the server has joined. Unlike gloo's own wait, this wait can be cancelled before the
        timeout."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._store.num_keys() == 0:  # each joining rank adds a key
            if self._is_left:
                raise RuntimeError(LEFT)
            if time.monotonic() > deadline:
                raise RuntimeError(f"no rank joined within {TIMEOUT_S:g} s")
            time.sleep(JOIN_POLL_S)

    @contextmanager
    def _failures_named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:  # all of torch's errors of networks and groups are RuntimeErrors
            first_line = str(error).partition("\n")[0]
            own = f" (NCCL {nccl_version()} here; NCCL_DEBUG=WARN says more)" if self.backend == "nccl" else ""
            raise EngineUnavailableError(f"{self.url} {what} by {self.backend}: {first_line}{own}") from error


def is_nccl_usable() -> bool:
    """Whether this process has a GPU, and a torch with NCCL."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def find_address_towards(url: str) -> str:
    """The address of this machine on the route to a server.

    Raises:
        EngineUnavailableError: no route leads to the server.
    """
    where = httpx.URL(url)
    try:
        return find_own_address(where.host, where.port or 80)
    except OSError as error:
        raise EngineUnavailableError(f"{url}: this machine has no route to it ({error})") from error
