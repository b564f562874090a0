"""Receive weights from a trainer: the server's end of process groups, and the tensors of an update so far.

Not here: the trainer's end (engines/group.py), loading the tensors (scheduler.py), the form of requests (protocol.py).

    begin -> receive a bucket, another, ... -> end: the received tensors, to be loaded together; others stay unchanged
    join, leave: a group, which is used for many updates

SGLang loads each bucket when it arrives. This engine collects the buckets until the end, so an interrupted update
leaves the old weights unchanged.
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
"""Highest number of calls that wait for groups or buckets, each in its own thread with its own connection."""
ANSWER_GRACE_S = 5.0
"""Seconds that a thread may take beyond its own time limit."""
MAX_GROUPS = 64
"""Highest number of groups. A killed trainer leaves its groups here, so a new group replaces the oldest one."""


class OrderError(RequestError):
    """A call in the wrong order within an update. The answer has SGLang's form and words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCall:
    """A request to join a group."""

    name: str
    """The trainer's name for the group."""
    address: str
    """Address of the trainer's store."""
    port: int
    """Its port."""
    rank: int
    """This server's number in the group; 0 is the trainer."""
    size: int
    """Number of members of the group, including the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCall:
    """An announcement of tensors, whose bytes arrive one after the other."""

    group: str
    """Name of the group that carries the bytes."""
    dtypes: Mapping[str, torch.dtype]
    """Number format by tensor name, in the order of the bytes."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape by tensor name."""


class WeightReceiver:
    """Groups with trainers, and the open update. Used and closed by the thread of one event loop.

    Args:
        max_bytes: limit of the bytes of all tensors of an update.
    """

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        self._max_bytes = max_bytes
        self._groups: dict[str, Any] = {}  # Any: ProcessGroupGloo, which not every build of torch has
        self._arrived: dict[str, Tensor] | None = None
        """The received tensors; None while no update is open."""
        self._kept: frozenset[str] = frozenset()
        self._num_waiting = 0
        self._num_expected_bytes = 0
        """Bytes of the buckets that are being awaited."""

    def begin(self, kept: Collection[str] = ()) -> None:
        """Open an update.

        Args:
            kept: tensors that will not be sent, because they stay unchanged.

        Raises:
            OrderError: an update is already open, perhaps from a killed trainer.
        """
        if self._arrived is not None:
            raise OrderError(OPEN_SESSION)
        self._arrived, self._kept = {}, frozenset(kept)

    def end(self) -> tuple[dict[str, Tensor], frozenset[str]]:
        """Close the update; returns the received tensors and the names of the unchanged tensors.

        Raises:
            OrderError: no update is open.
        """
        if self._arrived is None:
            raise OrderError(NO_SESSION)
        arrived, self._arrived = self._arrived, None
        return arrived, self._kept

    async def join(self, call: GroupCall) -> None:
        """Join a group, replacing an earlier group of the same name.

        Raises:
            EngineUnavailableError: the trainer is unreachable, or too many calls are waiting.
        """
        with _failures_named(f"{call.address}:{call.port} is not there as a trainer"):
            joined = [await self._beside(partial(_connect, call))]
        if call.name in self._groups:
            self.leave(call.name)
        while len(self._groups) >= MAX_GROUPS:
            self.leave(next(iter(self._groups)))
        self._groups[call.name] = joined.pop()

    async def receive(self, call: BucketCall) -> None:
        """Receive a bucket and store it until the end of the update.

        Raises:
            OrderError: no update is open.
            RequestError: the group does not exist.
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
        """Leave a group, even while a bucket is being received.

        Raises:
            OrderError: the group does not exist.
        """
        if name not in self._groups:
            raise OrderError("The group to be destroyed does not exist.")
        let_go([self._groups.pop(name)])  # in no variable: dropping the last reference waits for the group's end

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.leave(name)

    async def _beside(self, work: Callable[[], ResultT], *, num_bytes: int = 0) -> ResultT:
        """The result of `work` in a thread, which counts as a waiting call until it ends.

        A thread is needed, because torch waits forever for a store that accepts a connection and is silent, and this
        wait cannot be interrupted.

        Raises:
            EngineUnavailableError: too many calls are waiting.
            RuntimeError: the work took too long.
        """
        if self._num_waiting >= MAX_WAITING_CALLS:
            raise EngineUnavailableError(f"{MAX_WAITING_CALLS} groups and buckets are already awaited: try again later")
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
            raise RuntimeError(f"not finished within {process_group.TIMEOUT_S:g} s")
        thread.result()  # raises the error of the work
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
