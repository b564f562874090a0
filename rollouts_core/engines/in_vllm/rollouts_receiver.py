"""Receive the trainer's weights in a vLLM worker through a process group, without a file.

Not here: the trainer's end (engines/transfer/to_vllm.py). vLLM adds `WeightReceiver` to its workers
(`--worker-extension-cls`) and calls its methods for `/collective_rpc`. This project is not installed in vLLM's
environment, so its file about process groups is loaded by its path.

    join_weight_group -> reload_sent_weights, again and again -> leave_weight_group
                          bucket, bucket, ... -> tensors -> vLLM's own reload, layer by layer
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

DEVICES = {"gloo": "cpu", "nccl": "cuda"}


class WeightReceiver:
    """Additional methods of a vLLM worker, with the worker as `self`."""

    def join_weight_group(self, address: str, port: int, name: str, backend: str, size: int) -> None:
        """Join the trainer's process group, and return when all members have joined."""
        worker: Any = self  # Any: vLLM's types are not here
        worker.leave_weight_group()
        # Each replica of data parallelism numbers its workers from 0.
        parallel = worker.parallel_config
        groups, rank = _groups(), 1 + parallel.data_parallel_index * parallel.world_size + int(worker.rank)
        store = groups.name_store(groups.join_store(address, port, size=size), name, DEVICES[backend])
        if backend == "nccl":
            group = groups.connect_nccl(store, rank=rank, size=size)
        else:
            own = groups.find_address_towards(address, port)
            group = groups.connect_gloo(store, rank=rank, size=size, address=own)
        worker._rollouts_held, worker._rollouts_device = [group], DEVICES[backend]

    def reload_sent_weights(self, buckets: list[list[tuple[str, str, list[int]]]]) -> None:
        """Receive the tensors that the trainer sends now, and load them.

        Args:
            buckets: name, number format and shape of the tensors of each broadcast, in their order.

        Raises:
            RuntimeError: the trainer is gone, or too slow. The weights are then a mixture of two versions.
        """
        worker: Any = self
        try:
            worker.reload_weights(weights_iterator=_receive(worker, buckets))
        except BaseException:
            worker.leave_weight_group()
            from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
                finalize_layerwise_reload,
            )

            # End the reload, so that vLLM does not count tensors of this update as the beginning of the next update.
            finalize_layerwise_reload(worker.get_model(), worker.model_config)
            raise

    def leave_weight_group(self) -> None:
        """Leave the group without waiting for its other members."""
        worker: Any = self
        held, worker._rollouts_held = getattr(worker, "_rollouts_held", []), []
        if held:
            _groups().let_go(held)


def _receive(worker: Any, buckets: list[list[tuple[str, str, list[int]]]]) -> Iterator[tuple[str, torch.Tensor]]:
    if not worker._rollouts_held:
        raise RuntimeError("the worker has not joined a group with a trainer")
    for bucket in buckets:
        sizes = [_count_bytes(dtype, shape) for _, dtype, shape in bucket]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=worker._rollouts_device)
        work = _groups().begin_broadcast(worker._rollouts_held[0], flat)
        _groups().wait_for(work, is_left=lambda: False)
        for (name, dtype, shape), part in zip(bucket, torch.split(flat, sizes), strict=True):
            yield name, part.view(getattr(torch, dtype)).view(shape)


def _count_bytes(dtype: str, shape: list[int]) -> int:
    return int(torch.Size(shape).numel() * getattr(torch, dtype).itemsize)


_loaded: list[ModuleType] = []


def _groups() -> ModuleType:
    """The module process_group.py of this project, which needs only torch."""
    if not _loaded:
        spec = importlib.util.spec_from_file_location(
            "rollouts_process_group", Path(__file__).parents[2] / "backends/process_group.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _loaded.append(module)
    return _loaded[0]
