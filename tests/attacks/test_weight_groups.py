"""Pins that calls for weights that never come cannot fill the embedded engine with threads, connections and memory.

Each call to join a group waits for a trainer for two minutes. Without these tests a loop of such calls, or one call for
a group of two billion ranks, would end the engine.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rollouts_core.backends import process_group
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.protocol import MAX_GROUP_SIZE
from rollouts_core.embedded.receiving import MAX_GROUPS, MAX_WAITING_CALLS, BucketCall, GroupCall, WeightReceiver
from rollouts_core.embedded.running import GenerationRequest
from rollouts_core.embedded.sampling import SamplingParams
from rollouts_core.embedded.scheduler import MAX_WAITING_UPDATES, RequestError, Scheduler
from rollouts_core.engines.transfer.group import WeightGroup
from rollouts_core.errors import EngineUnavailableError
from tests.kit.waiting import wait_until
from tests.rollouts_core.served_engine import engine_url

NUM_CALLS = 40
SERVE = """
import sys
from pathlib import Path
from rollouts_core.embedded.server import serve
serve(Path(sys.argv[1]), port=0, on_ready=lambda url: print(url, flush=True))
"""


@pytest.fixture
def url(model_dir: Path) -> Iterator[str]:
    with engine_url(model_dir) as url:
        yield url


@contextmanager
def silent_trainer() -> Iterator[tuple[int, list[socket.socket]]]:
    """The port of a program that accepts connections and says nothing, and its connections."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=NUM_CALLS)
    connections: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connections.append(listener.accept()[0])
            except OSError:
                return  # the listener was closed

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], connections
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for each in connections:
            each.close()


def join_call(port: int, name: str, **changes: Any) -> dict[str, Any]:
    call = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    return {**call, "group_name": name, "backend": "gloo", **changes}


def joined(url: str, name: str = "") -> WeightGroup:
    """A group with the engine at `url`."""
    group = WeightGroup(url, "gloo", num_ranks=1)
    group.name = name or group.name
    connecting = threading.Thread(target=group.connect)
    connecting.start()
    answer = httpx.post(f"{url}/init_weights_update_group", json=join_call(group.port, group.name), timeout=60)
    connecting.join()
    assert answer.json()["success"], answer.text
    return group


pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
def test_a_loop_of_calls_to_join_groups_holds_few_threads_and_connections(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "TIMEOUT_S", 5.0)
    num_threads = threading.active_count()

    async def ask(port: int, connections: list[socket.socket]) -> Counter[int]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            calls = [
                asyncio.create_task(client.post("/init_weights_update_group", json=join_call(port, f"group {number}")))
                for number in range(NUM_CALLS)
            ]
            while sum(call.done() for call in calls) < NUM_CALLS - MAX_WAITING_CALLS:
                await asyncio.sleep(0.05)
            assert (await client.get("/health")).status_code == 200
            assert len(connections) <= MAX_WAITING_CALLS
            assert threading.active_count() - num_threads <= MAX_WAITING_CALLS + 4
            return Counter(answer.status_code for answer in await asyncio.gather(*calls))

    with silent_trainer() as (port, connections):
        assert asyncio.run(ask(port, connections)) == {503: NUM_CALLS}
    joined(url).close()  # a trainer finds a place again


def test_a_group_of_more_ranks_than_any_is_refused_before_it_is_made(url: str) -> None:
    for size in (MAX_GROUP_SIZE + 1, 2**31 - 1, 2**64):
        answer = httpx.post(f"{url}/init_weights_update_group", json=join_call(1, "large", world_size=size))
        assert (answer.status_code, f"a `world_size` of at most {MAX_GROUP_SIZE}" in answer.text) == (400, True)


@pytest.mark.slow
def test_groups_that_were_left_make_room(url: str) -> None:
    groups = []
    num_files = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(MAX_GROUPS + 6):
        groups.append(joined(url, "the same" if number % 2 else ""))
        groups[-1].close()
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) - num_files < 14 * MAX_GROUPS, timeout_s=30)
    joined(url).close()


def test_buckets_that_are_waited_for_count_as_memory() -> None:
    group = WeightGroup("http://127.0.0.1:80", "gloo", num_ranks=1)

    async def receive_all() -> list[BaseException | None]:
        receiver = WeightReceiver(max_bytes=1000)
        connecting = asyncio.create_task(asyncio.to_thread(group.connect))
        await receiver.join(GroupCall(name=group.name, address="127.0.0.1", port=group.port, rank=1, size=2))
        await connecting
        receiver.begin()
        large = BucketCall(group=group.name, dtypes={"a": torch.float32}, shapes={"a": (100,)}, is_flat=True)
        small = BucketCall(group=group.name, dtypes={"b": torch.float32}, shapes={"b": (1,)}, is_flat=True)
        calls = [asyncio.create_task(receiver.receive(each)) for each in [large] * 4 + [small] * MAX_WAITING_CALLS]
        await asyncio.wait(calls, timeout=1)
        assert sum(not call.done() for call in calls) == MAX_WAITING_CALLS
        receiver.leave(group.name)
        return await asyncio.gather(*calls, return_exceptions=True)

    raised = asyncio.run(receive_all())
    group.close()
    assert [type(each) for each in raised[:4]] == [EngineUnavailableError] * 2 + [RequestError] * 2
    assert sum("already wait for trainers" in str(each) for each in raised[4:]) == 2


def test_updates_that_wait_for_running_requests_are_few(model_dir: Path) -> None:
    params = SamplingParams(max_new_tokens=500, ignore_eos=True)
    with Scheduler(Decoder(model_dir, num_slots=1), model_dir=model_dir) as scheduler:
        running = scheduler.submit(GenerationRequest(request_id="long", input_ids=(3,), params=params))
        wait_until(lambda: scheduler.num_running == 1, timeout_s=20)
        updates = [scheduler.update_weights(model_dir, weight_version=None) for _ in range(MAX_WAITING_UPDATES + 5)]
        for each in updates[MAX_WAITING_UPDATES:]:
            with pytest.raises(EngineUnavailableError, match="weight updates are already waiting"):
                each.result(20)
        assert not running.done()
        assert not any(each.done() for each in updates[:MAX_WAITING_UPDATES])


@pytest.mark.slow
def test_a_trainer_that_is_silent_does_not_keep_the_engine_from_ending(model_dir: Path) -> None:
    command = [sys.executable, "-c", SERVE, str(model_dir)]
    with silent_trainer() as (port, connections), subprocess.Popen(command, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        url = engine.stdout.readline().decode().strip()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/init_weights_update_group", json=join_call(port, "silent"), timeout=2)
        assert len(connections) == 1
        engine.terminate()
        assert engine.wait(120) == 0
