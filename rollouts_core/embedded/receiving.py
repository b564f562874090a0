"""Receive weights from a trainer through process groups, and collect the tensors of a weight update.

Not here: the trainer's side (engines/transfer/group.py), loading the tensors (scheduler.py), parsing requests
(protocol.py).

    begin -> receive a bucket, the next bucket, ... -> end: returns all received tensors, which are then loaded together
    join, leave: a process group, which is used for many weight updates

SGLang loads each bucket when it arrives. This engine collects all buckets until `end`, so that an interrupted update
leaves the old weights unchanged.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
"""Highest number of calls that wait for a trainer at the same time. Each call needs a thread and a connection."""
ANSWER_GRACE_S = 5.0
"""Seconds to wait for a thread after the timeout of its network operation."""
MAX_GROUPS = 64
"""Highest number of process groups. At the limit a new group replaces the oldest group, whose trainer was perhaps
killed."""


class OrderError(RequestError):
    """The calls of a weight update have the wrong order. The answer has SGLang's form and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCall:
    """A request to join a process group with a trainer."""

    name: str
    """The trainer's name for the group."""
    address: str
    """Address of the trainer's store, where the members of the group meet."""
    port: int
    rank: int
    """Rank of this server in the group. The trainer has rank 0."""
    size: int
    """Number of members of the group, including the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCall:
    """An announcement of tensors that the trainer will broadcast."""

    group: str
    """Name of the process group of the broadcast."""
    dtypes: Mapping[str, torch.dtype]
    """Dtype by tensor name, in the order in which the tensors are sent."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape by tensor name."""
    is_flat: bool
    """True if one broadcast has the bytes of all tensors, False if each tensor has a broadcast of its own."""


class WeightReceiver:
    """Process groups with trainers, and the tensors of the open update. Use it only in the thread of one event loop.

    Args:
        max_bytes: limit of the size of all tensors of an update.
    """

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        self._max_bytes = max_bytes
        self._groups: dict[str, Any] = {}  # Any: ProcessGroupGloo, which some builds of torch lack
        self._arrived: dict[str, Tensor] | None = None
        """The tensors received so far by name; None if no weight update is open."""
        self._kept: frozenset[str] = frozenset()
        self._num_waiting = 0
        self._num_expected_bytes = 0
        """Total size of the buckets that are being received."""

    def begin(self, kept: Collection[str] = ()) -> None:
        """Open a weight update.

        Args:
            kept: names of the tensors that stay unchanged and will not be sent.

        Raises:
            OrderError: an update is already open, perhaps from a killed trainer.
        """
        if self._arrived is not None:
            raise OrderError(OPEN_SESSION)
        self._arrived, self._kept = {}, frozenset(kept)

    def end(self) -> tuple[dict[str, Tensor], frozenset[str]]:
        """Close the weight update; returns the received tensors, and the names of the tensors that stay unchanged.

        Raises:
            OrderError: no update is open.
        """
        if self._arrived is None:
            raise OrderError(NO_SESSION)
        arrived, self._arrived = self._arrived, None
        return arrived, self._kept

    async def join(self, call: GroupCall) -> None:
        """Join a process group. If this server is in a group of the same name, it leaves that group.

        Raises:
            EngineUnavailableError: the trainer is unreachable, or too many calls are waiting.
        """
        with _failures_named(f"cannot join the trainer at {call.address}:{call.port}"):
            joined = [await self._beside(partial(_connect, call))]
        if call.name in self._groups:
            self.leave(call.name)
        while len(self._groups) >= MAX_GROUPS:
            self.leave(next(iter(self._groups)))
        self._groups[call.name] = joined.pop()

    async def receive(self, call: BucketCall) -> None:
        """Receive a bucket of tensors and store it until the end of the weight update.

        Raises:
            OrderError: no update is open.
            RequestError: the group does not exist.
            EngineUnavailableError: the bucket did not arrive, or too many calls are waiting.
        """
        if (arrived := self._arrived) is None:
            raise OrderError(NO_SESSION)
        if call.group not in self._groups:
            raise RequestError(f"Process group {call.group} does not exist: call init_weights_update_group first.")
        sizes = [math.prod(shape) * call.dtypes[name].itemsize for name, shape in call.shapes.items()]
        held = sum(tensor.nbytes for tensor in arrived.values()) + self._num_expected_bytes
        if held + sum(sizes) > self._max_bytes:
            raise RequestError(
                f"The update has {held + sum(sizes)} bytes, but at most {self._max_bytes} are permitted."
            )
        broadcasts = [torch.empty(size, dtype=torch.uint8) for size in ([sum(sizes)] if call.is_flat else sizes)]
        pieces = torch.split(broadcasts[0], sizes) if call.is_flat else broadcasts
        with _failures_named("the weights did not arrive"):
            await self._beside(partial(self._receive_bytes, call.group, broadcasts), num_bytes=sum(sizes))
        for (name, shape), piece in zip(call.shapes.items(), pieces, strict=True):
            arrived[name] = piece.view(call.dtypes[name]).view(shape)

    def leave(self, name: str) -> None:
        """Leave a process group, even while a bucket is being received.

        Raises:
            OrderError: the group does not exist.
        """
        if name not in self._groups:
            raise OrderError("The group to be destroyed does not exist.")
        let_go([self._groups.pop(name)])  # without a variable, so that `let_go` has the last reference

    def close(self) -> None:
        for name in list(self._groups):
            self.leave(name)

    async def _beside(self, work: Callable[[], ResultT], *, num_bytes: int = 0) -> ResultT:
        """Run `work` in a thread and return its result. The thread counts as a waiting call until it ends.

        A thread is needed because torch waits forever, without a way to interrupt it, for a store that accepts the
        connection but sends nothing.

        Raises:
            EngineUnavailableError: too many calls are waiting.
            RuntimeError: `work` took too long.
        """
        if self._num_waiting >= MAX_WAITING_CALLS:
            raise EngineUnavailableError(f"{MAX_WAITING_CALLS} calls already wait for trainers: try again later")
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
        thread.result()  # raises the error of `work`
        return results.pop()

    def _receive_bytes(self, name: str, broadcasts: Sequence[Tensor]) -> None:
        joined = id(self._groups.get(name))  # a number, because `let_go` needs the last reference to the group

        def is_left() -> bool:
            return name not in self._groups or id(self._groups[name]) != joined

        for tensor in broadcasts:
            if is_left():
                raise RuntimeError("the group was closed meanwhile")
            wait_for(begin_broadcast(self._groups[name], tensor), is_left=is_left)


def _connect(call: GroupCall) -> Any:  # Any: see WeightReceiver
    store = join_store(call.address, call.port, size=call.size)
    address = find_address_towards(call.address, call.port)
    place = name_store(store, call.name, "cpu")
    return connect_gloo(place, rank=call.rank, size=call.size, address=address)


@contextmanager
def _failures_named(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch raises RuntimeError for all errors of networks and process groups
        first_line = str(error).partition("\n")[0]
        raise EngineUnavailableError(f"{what}: {first_line}") from error
