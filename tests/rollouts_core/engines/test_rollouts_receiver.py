"""Pins which rank of a group each worker of vLLM becomes.

Without it two workers would be the same rank, and the first update would wait for the one that nobody is until its
deadline.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollouts_core.engines.in_vllm import rollouts_receiver
from rollouts_core.engines.in_vllm.rollouts_receiver import WeightReceiver
from rollouts_core.engines.transfer.to_vllm import count_ranks


class Worker(WeightReceiver):
    """What the receiver reads of a worker of vLLM's."""

    def __init__(self, *, rank: int, replica: int, world_size: int) -> None:
        self.rank = rank
        self.parallel_config = SimpleNamespace(data_parallel_index=replica, world_size=world_size)


@pytest.mark.parametrize(("world_size", "num_replicas"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_every_worker_is_another_rank_behind_the_trainer(
    backend: str, world_size: int, num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[int] = []

    def connect(store: object, *, rank: int, size: int, **_: Any) -> object:
        joined.append(rank)
        return object()

    groups = SimpleNamespace(
        connect_gloo=connect,
        connect_nccl=connect,
        join_store=lambda address, port, size: None,
        name_store=lambda store, name, device: None,
        find_address_towards=lambda address, port: "127.0.0.1",
    )
    monkeypatch.setattr(rollouts_receiver, "_groups", lambda: groups)
    num_ranks = count_ranks({"world_size": world_size, "data_parallel_size": num_replicas})
    for replica in range(num_replicas):
        for rank in range(world_size):
            worker = Worker(rank=rank, replica=replica, world_size=world_size)
            worker.join_weight_group("127.0.0.1", 1, "a group", backend, 1 + num_ranks)
    assert joined == list(range(1, 1 + num_ranks))
