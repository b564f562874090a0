"""Pins the trainer's end of a process group against an end that is made as SGLang makes its own.

Without it a server that dies, or stands still, could hang the trainer for ever, and a change in how torch's groups find
each other would show on a machine with SGLang alone.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread

import anyio
import pytest
import torch

from rollouts_core.backends.process_group import TIMEOUT_S
from rollouts_core.engines.transfer import group as group_module
from rollouts_core.engines.transfer.group import WeightGroup, find_address_towards
from rollouts_core.engines.transfer.group_sender import broadcast_bucket
from rollouts_core.engines.transfer.to_sglang import _count_ranks
from rollouts_core.engines.transfer.versions import flatten, split_buckets
from rollouts_core.errors import EngineUnavailableError, WeightSyncError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

URL = "http://127.0.0.1:9"
SERVER_END = """
import hashlib, sys
import torch
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, broadcast
from torch.distributed.rendezvous import rendezvous
from datetime import timedelta

address, name, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store, rank, size = next(rendezvous(address, rank, size, timeout=timedelta(seconds=120)))
group, _ = _new_process_group_helper(
    size, rank, [], Backend("gloo"), PrefixStore(name, store), group_name=name, timeout=timedelta(seconds=120)
)
_world.pg_group_ranks[group] = {i: i for i in range(size)}
print("joined", flush=True)
for line in sys.stdin:
    received = torch.empty(int(line), dtype=torch.uint8)
    print("receiving", flush=True)
    broadcast(received, src=0, group=group)
    print(hashlib.sha256(received.numpy()).hexdigest(), flush=True)
"""


class ServerEnd:
    """A rank of a server, as a process."""

    def __init__(self, group: WeightGroup, rank: int) -> None:
        place = [f"tcp://{group.address}:{group.port}", group.name, str(rank), str(1 + group.num_ranks)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER_END, *place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def receive(self, num_bytes: int) -> None:
        """Have it wait for so many bytes."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{num_bytes}\n")
        self.process.stdin.flush()
        assert self.says() == "receiving"


@contextmanager
def connected(num_ranks: int = 1) -> Iterator[tuple[WeightGroup, list[ServerEnd]]]:
    """A group and the server's ranks in it."""
    group = WeightGroup(URL, "gloo", num_ranks=num_ranks)
    ends = [ServerEnd(group, rank) for rank in range(1, 1 + num_ranks)]
    with ExitStack() as stack:
        for end in ends:
            stack.enter_context(end.process)
            stack.callback(end.process.kill)
        group.connect()
        stack.callback(group.close)
        assert [end.says() for end in ends] == ["joined"] * num_ranks
        yield group, ends


def test_every_rank_of_the_server_gets_the_bytes_of_each_bucket() -> None:
    tensors = {
        "half": torch.arange(7, dtype=torch.bfloat16),
        "full": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "long": torch.arange(5),
    }
    buckets = [flatten(bucket) for bucket in split_buckets(tensors, 40)]
    assert [len(bucket) for bucket in buckets] == [40, 38], "wide number formats first, at most 40 bytes"
    with connected(num_ranks=2) as (group, ends):
        for bucket in buckets:
            for end in ends:
                end.receive(len(bucket))
            group.broadcast(bucket)
            assert [end.says() for end in ends] == [hashlib.sha256(bucket.numpy().tobytes()).hexdigest()] * 2


def test_a_server_that_is_killed_amid_an_update_is_an_engine_that_vanished() -> None:
    flat = torch.zeros(64 * 2**20, dtype=torch.uint8)
    with connected() as (group, [end]):
        end.receive(len(flat))
        end.process.kill()
        with pytest.raises(EngineUnavailableError, match=f"{URL} did not take a bucket of weights by gloo"):
            for _ in range(4):  # the first bytes may lie in buffers of the kernel before it is noticed
                group.broadcast(flat)


def test_a_group_is_left_amid_a_broadcast_to_a_server_that_stands_still() -> None:
    flat = torch.zeros(64 * 2**20, dtype=torch.uint8)
    errors: list[EngineUnavailableError] = []

    def broadcast() -> None:
        try:
            group.broadcast(flat)
        except EngineUnavailableError as error:
            errors.append(error)

    with connected() as (group, [end]):
        end.receive(len(flat))
        end.process.send_signal(signal.SIGSTOP)
        sending = Thread(target=broadcast)
        sending.start()
        sending.join(0.5)
        group.close()
        sending.join(60)
        assert not sending.is_alive() and errors


def test_no_process_waits_at_its_end_for_ranks_that_never_come_to_the_first_broadcast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting_in: list[threading.Thread] = []

    def connect_for_ever(group: object, flat: torch.Tensor) -> None:  # as NCCL does, whose threads nothing can end
        waiting_in.append(threading.current_thread())
        threading.Event().wait()

    async def give_up() -> None:
        with anyio.move_on_after(0.5):
            await broadcast_bucket(group, {"w": torch.zeros(4)})

    monkeypatch.setattr(group_module, "begin_broadcast", connect_for_ever)
    group = WeightGroup(URL, "gloo", num_ranks=1)
    monkeypatch.setattr(group, "_group", object())
    anyio.run(give_up)
    assert [thread.daemon for thread in waiting_in] == [True]


def test_ranks_that_do_not_come_are_waited_for_until_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "TIMEOUT_S", 1.0)
    with pytest.raises(EngineUnavailableError, match=f"{URL} did not join by gloo"):
        WeightGroup(URL, "gloo", num_ranks=1).connect()


def test_a_group_that_the_server_refused_to_join_is_waited_for_by_nobody() -> None:
    errors: list[EngineUnavailableError] = []

    def connect() -> None:
        try:
            group.connect()
        except EngineUnavailableError as error:
            errors.append(error)

    group = WeightGroup(URL, "gloo", num_ranks=1)
    joining = Thread(target=connect)
    joining.start()
    group.close()
    joining.join(TIMEOUT_S / 2)
    assert not joining.is_alive()
    assert [str(error) for error in errors] == [f"{URL} did not join by gloo: the group was closed meanwhile"]


def test_ranks_that_come_late_are_joined() -> None:
    group = WeightGroup(URL, "gloo", num_ranks=1)
    joining = Thread(target=group.connect)
    joining.start()
    joining.join(0.5)
    assert joining.is_alive()
    with ServerEnd(group, 1).process as process:
        assert process.stdout is not None and process.stdout.readline() == "joined\n"
        joining.join(60)
        assert not joining.is_alive()
        group.close()
        process.kill()


def test_the_store_listens_on_the_way_to_the_server_alone() -> None:
    group = WeightGroup(URL, "gloo", num_ranks=1)
    listening = subprocess.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True, check=True)
    places = {line.split()[1] for line in listening.stdout.splitlines()}
    assert {place for place in places if place.endswith(f":{group.port:04X}")} == {f"0100007F:{group.port:04X}"}


def test_a_server_towards_which_nothing_can_listen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when this machine has lost the address meanwhile, or has no descriptors left."""
    monkeypatch.setattr(group_module, "find_address_towards", lambda url: "192.0.2.1")
    with pytest.raises(EngineUnavailableError, match=f"{URL} can be offered no group by gloo: .*assign"):
        WeightGroup(URL, "gloo", num_ranks=1)


def test_a_server_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(EngineUnavailableError, match=r"http://nowhere\.invalid:1: this machine has no route to it"):
        find_address_towards("http://nowhere.invalid:1")


@pytest.mark.parametrize("name", ["dp_size", "pp_size"])
def test_a_server_whose_ranks_are_numbered_otherwise_is_refused(name: str) -> None:
    assert _count_ranks(URL, {"tp_size": 2, "dp_size": 1, "pp_size": 1}) == 2
    with pytest.raises(WeightSyncError, match=f"was started with {name} 2"):
        _count_ranks(URL, {"tp_size": 2, name: 2})
