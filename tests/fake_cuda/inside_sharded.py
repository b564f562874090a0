"""Run by test_fake_cuda.py in a process with the fake device: FSDP2 on one of eight ranks, with a transport that does
nothing.

Without it weights could stay on the CPU when they are spread over GPUs, or a rank could hold more than its share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from rollouts_core import Sample, build_batch
from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.backends import sharding
from rollouts_core.backends.fsdp import FSDPTrainingBackend, create_fsdp_backend
from rollouts_core.backends.ranks import Ranks
from rollouts_core.config import OptimConfig, PolicyConfig
from rollouts_core.model.varlen import SDPA_BY_ROWS, VARLEN
from rollouts_core.optimizer_step import update_policy
from tests.fake_cuda.device import fake_cuda, squares
from tests.fake_cuda.models import SHAPES, models_of

NUM_RANKS = 8
NUM_MICRO_BATCHES = 2
NUM_LAYERS = SHAPES["small"]["num_hidden_layers"]
LENGTH = 48


class FirstRank:
    """The leader of eight ranks that answer nothing: what `Ranks` is to a backend."""

    rank, size, is_leader = 0, NUM_RANKS, True
    device = torch.device("cuda:0")

    def begin(self, value: object = True) -> object:
        """All ranks are there, and take the leader's value."""
        return value

    def allow(self, *_: type) -> None:
        """Any object may pass."""

    def scatter(self, objects: list[Any]) -> Any:  # Any: whatever the leader sends
        """The leader's own object."""
        return objects[0]

    def gather(self, value: object) -> list[object]:
        """As if all said the same."""
        return [value] * NUM_RANKS

    def gather_unless_failed(self, value: object, error: Exception | None) -> list[object]:
        """The same, unless this rank has an error."""
        if error is not None:
            raise error
        return self.gather(value)

    def working(self) -> mock.MagicMock:
        """A block that all run together."""
        return mock.MagicMock()


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    """Eight ranks; made before there are fake tensors, which a mesh of real ones does not take."""
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
        made = DeviceMesh("cuda", list(range(NUM_RANKS)), _init_backend=False)
        made._dim_group_names = [dist.distributed_c10d._get_default_group().group_name]
        with mock.patch.object(sharding, "init_device_mesh", lambda *_: made):
            yield made
    dist.destroy_process_group()


def create_backend(folder: Path, **policy: Any) -> FSDPTrainingBackend:  # Any: settings of the policy
    with models_of("small", folder) as model:
        return create_fsdp_backend(
            model,
            OptimConfig(),
            create_cross_entropy_loss(),
            ranks=cast(Ranks, FirstRank()),
            num_steps=10,
            policy=PolicyConfig(**policy),
        )


@pytest.mark.parametrize("policy", [{}, {"precision": "bfloat16"}, {"activation_checkpointing": True}])
def test_a_step_of_one_of_eight_ranks(tmp_path: Path, policy: dict[str, Any]) -> None:
    samples = [Sample(tokens=[5] * (LENGTH // 2 + 1), loss_mask=[0.0] + [1.0] * (LENGTH // 2))] * 2
    with _disable_current_modes():
        batch = build_batch([samples] * NUM_RANKS, pad_id=0)
    with fake_cuda(num_gpus=NUM_RANKS) as trace:
        backend = create_backend(tmp_path, **policy)
        hold_shares(backend)
        is_bfloat16 = policy.get("precision") == "bfloat16"
        assert backend.model.config._attn_implementation == (VARLEN if is_bfloat16 else SDPA_BY_ROWS)
        trace.start_peak()
        assert "grad_norm" in asyncio.run(update_policy(backend, [batch] * NUM_MICRO_BATCHES))
    assert trace.waits.total() == 1, f"one read of a step's numbers: {dict(trace.waits)}"
    assert trace.uploads == 0
    assert bool(squares(trace, LENGTH)) != is_bfloat16


@pytest.mark.parametrize("packed", [True, False])
def test_a_score_gathers_every_layer_once_and_the_rest_once(tmp_path: Path, packed: bool) -> None:
    """Layers that stayed gathered for the next score would take the memory that sharding saves."""
    samples = [Sample(tokens=[5] * (LENGTH // 2 + 1), loss_mask=[0.0] + [1.0] * (LENGTH // 2))] * (1 + packed)
    with _disable_current_modes():
        batch = build_batch([samples] * NUM_RANKS, pad_id=0)
    with fake_cuda(num_gpus=NUM_RANKS) as trace:
        backend = create_backend(tmp_path, precision="bfloat16")
        trace.start_peak()
        for number in range(1, 3):
            asyncio.run(backend.score(batch).result())
            assert trace.num_gathers == number * (NUM_LAYERS + 1)


def hold_shares(backend: FSDPTrainingBackend) -> None:
    """Each weight is on the device, and this rank holds an eighth of it."""
    for name, weight in backend.policy.named_parameters():
        assert isinstance(weight, DTensor), name
        local = weight.to_local()
        assert local.device.type == "cuda", name
        assert local.shape[0] == -(-weight.shape[0] // NUM_RANKS), name
