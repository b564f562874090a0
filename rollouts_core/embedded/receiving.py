"""Take weights that a trainer sends: the server's end of process groups, and what has arrived of an update.

Not here: the trainer's end (engines/group.py), loading what arrived (scheduler.py), the form of requests (protocol.py).

    begin -> receive a bucket, another, ... -> end: all that arrived, to be loaded at once beside what stays
    join, leave: a group, which outlives many updates

SGLang loads each bucket as it comes. Here they are kept apart until the end, so an update that broke off leaves the old
weights as they were.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollouts_core.backends import process_group
from rollouts_core.backends.process_group import (
    begin_broadcast,
    connect_gloo,
    find_address_towards,
    join_store,
    let_go,
    name_store,
    wait_for,
)
from rollouts_core.embedded.scheduler import RequestError
from rollouts_core.errors import EngineUnavailableError
from rollouts_core.system.concurrency import in_daemon_thread

ResultT = TypeVar("ResultT")
NO_SESSION = "no weight-update session is open; call begin_weight_update() first"
OPEN_SESSION = "a weight-update session is already open; call end_weight_update() first"
MAX_WAITING_CALLS = 8
"""Groups and buckets that are waited for at a time, each in a thread and with a connection of its own."""
ANSWER_GRACE_S = 5.0
"""How much longer than its own limit a thread may take."""
MAX_GROUPS = 64
"""Groups that are kept. A trainer that was killed leaves its groups here, so the oldest one makes room."""


class OrderError(RequestError):
    """A call that is not in its place among those of an update; answered with SGLang's body and words for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCall:
    """A group that is to be joined."""

    name: str
    """The trainer's name of it."""
    address: str
    """Where the trainer's store listens."""
    port: int
    """Its port."""
    rank: int
    """This server's number in the group; 0 is the trainer."""
    size: int
    """How many are in the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCall:
    """Tensors that are about to arrive, their bytes one after the other."""

    group: str
    """The name of the group that they come by."""
    dtypes: Mapping[str, torch.dtype]
    """By the tensor's name, in the order of the bytes."""
    shapes: Mapping[str, tuple[int, ...]]
    """By the tensor's name."""


class WeightReceiver:
    """Groups with trainers, and the update that is open; used by the thread of one event loop, and closed there.

    Args:
        max_bytes: of all tensors of an update.
    """

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        self._max_bytes = max_bytes
        self._groups: dict[str, Any] = {}  # Any: ProcessGroupGloo, which not every build of torch has
        self._arrived: dict[str, Tensor] | None = None
        """None while no update is open."""
        self._kept: frozenset[str] = frozenset()
        self._num_waiting = 0
        self._num_expected_bytes = 0
        """Limit of awaited buckets."""

    def begin(self, kept: Collection[str] = ()) -> None:
        """Open an update.

        Args:
            kept: tensors that will not be sent, since they stay as they are.

        Raises:
            OrderError: one is open, which a trainer that was killed may have left.
        """
        if self._arrived is not None:
            raise OrderError(OPEN_SESSION)
        self._arrived, self._kept = {}, frozenset(kept)

    def end(self) -> tuple[dict[str, Tensor], frozenset[str]]:
        """Close the update; returns what arrived, and the names of what stays.

        Raises:
            OrderError: none is open.
        """
        if self._arrived is None:
            raise OrderError(NO_SESSION)
        arrived, self._arrived = self._arrived, None
        return arrived, self._kept

    async def join(self, call: GroupCall) -> None:
        """Become part of a group, in place of an earlier one of the same name.

        Raises:
            EngineUnavailableError: the trainer is not there, or too many calls are waiting.
        """
        with _failures_named(f"{call.address}:{call.port} is not there as a trainer"):
            joined = [await self._beside(partial(_connect, call))]
        if call.name in self._groups:
            self.leave(call.name)
        while len(self._groups) >= MAX_GROUPS:
            self.leave(next(iter(self._groups)))
        self._groups[call.name] = joined.pop()

    async def receive(self, call: BucketCall) -> None:
        """Keep a bucket for the end of the update.

        Raises:
            OrderError: no update is open.
            RequestError: there is no such group.
            EngineUnavailableError: the bucket did not arrive, or too many calls are waiting.
        """
        if (arrived := self._arrived) is None:
            raise OrderError(NO_SESSION)
        if call.group not in self._groups:
            raise RequestError(f"There is no group {call.group}: initialize it.")
        sizes = [math.prod(shape) * call.dtypes[name].itemsize for name, shape in call.shapes.items()]
        held = sum(tensor.nbytes for tensor in arrived.values()) + self._num_expected_bytes
        if held + sum(sizes) > self._max_bytes:
            raise RequestError(f"{held + sum(sizes)} bytes are more than the weights of the model, {self._max_bytes}.")
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        with _failures_named("the weights did not arrive"):
            await self._beside(partial(self._receive_bytes, call.group, flat), num_bytes=sum(sizes))
        for (name, shape), piece in zip(call.shapes.items(), torch.split(flat, sizes), strict=True):
            arrived[name] = piece.view(call.dtypes[name]).view(shape)

    def leave(self, name: str) -> None:
        """Leave a group, also amid a bucket.

        Raises:
            OrderError: it is not known.
        """
        if name not in self._groups:
            raise OrderError("The group to be destroyed does not exist.")
        let_go([self._groups.pop(name)])  # no other name: the last reference waits for the group's end

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.leave(name)

    async def _beside(self, work: Callable[[], ResultT], *, num_bytes: int = 0) -> ResultT:
        """The result of `work` in a thread, which counts as a waiting call until it ends.

        torch waits without limit for a store that accepts a connection and is silent, and nothing can break that off.

        Raises:
            EngineUnavailableError: too many calls are waiting.
            RuntimeError: it took too long.
        """
        if self._num_waiting >= MAX_WAITING_CALLS:
            raise EngineUnavailableError(f"{MAX_WAITING_CALLS} groups and buckets are waited for: ask again later")
        results: list[ResultT] = []  # a group must have no other reference, see `let_go`
        thread = asyncio.ensure_future(in_daemon_thread(lambda: results.append(work())))
        self._num_waiting += 1
        self._num_expected_bytes += num_bytes

        def note_end(_: object) -> None:
            self._num_waiting -= 1
            self._num_expected_bytes -= num_bytes

        thread.add_done_callback(note_end)
        await asyncio.wait([thread], timeout=process_group.TIMEOUT_S + ANSWER_GRACE_S)
        if not thread.done():
            thread.add_done_callback(lambda ended: let_go(results) if ended.exception() is None else None)
            raise RuntimeError(f"not within {process_group.TIMEOUT_S:g} s")
        thread.result()  # raises what it ended with
        return results.pop()

    def _receive_bytes(self, name: str, flat: Tensor) -> None:
        work = begin_broadcast(self._groups[name], flat)
        wait_for(work, is_left=lambda: name not in self._groups)


def _connect(call: GroupCall) -> Any:  # Any: see WeightReceiver
    store = join_store(call.address, call.port, size=call.size)
    address = find_address_towards(call.address, call.port)
    place = name_store(store, call.name, "cpu")
    return connect_gloo(place, rank=call.rank, size=call.size, address=address)


@contextmanager
def _failures_named(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # all of torch's errors of networks and groups are RuntimeErrors
        first_line = str(error).partition("\n")[0]
        raise EngineUnavailableError(f"{what}: {first_line}") from error
