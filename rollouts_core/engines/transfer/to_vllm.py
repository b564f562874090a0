"""Send weights to one vLLM server through a process group, without files.

The receiving end in vLLM's workers is in_vllm/rollouts_receiver.py. vLLM loads and repacks layer by layer, and a layer
is loaded as a whole, so all tensors are sent each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import httpx
from torch import Tensor

from rollouts_core.engines.http import UPDATE_TIMEOUT
from rollouts_core.engines.transfer.group import GroupBackend, WeightGroup, is_nccl_usable
from rollouts_core.engines.transfer.group_sender import CLEAN_UP_TIMEOUT, GroupSender, broadcast_bucket
from rollouts_core.engines.transfer.versions import BUCKET_BYTES, split_buckets
from rollouts_core.errors import WeightSyncError
from rollouts_core.system.concurrency import gather


class VLLMWeightSender(GroupSender):
    """Sends weights to one server."""

    async def send(self, tensors: Mapping[str, Tensor], backend: GroupBackend, *, num_ranks: int) -> None:
        """Make the server load these tensors. Call this only while no request is running on the server.

        Raises:
            EngineUnavailableError: the server, or its end of the group, vanished.
            EngineError: the server refused the tensors, or was started without the receiver.
        """
        if backend == "nccl" and not is_nccl_usable():
            raise WeightSyncError(
                f"{self._connection.url} cannot be sent weights by NCCL, which needs a GPU on both sides: the trainer "
                'has no GPU, so set rollout.engine.weight_transfer = "gloo"'
            )
        buckets = list(split_buckets(tensors, BUCKET_BYTES))
        described = [[describe_tensor(name, tensor) for name, tensor in bucket.items()] for bucket in buckets]
        async with self._joined(backend, num_ranks) as group:

            async def broadcast() -> None:
                for bucket in buckets:
                    await broadcast_bucket(group, bucket)

            await gather([partial(self._call, "reload_sent_weights", {"buckets": described}), partial(broadcast)])

    async def _ask_to_join(self, group: WeightGroup) -> None:
        place = {"address": group.address, "port": group.port, "name": group.name}
        await self._call("join_weight_group", {**place, "backend": group.backend, "size": 1 + group.num_ranks})

    async def _tell_left(self, group: WeightGroup) -> None:
        await self._call("leave_weight_group", {}, CLEAN_UP_TIMEOUT)

    async def _call(
        self, method: str, arguments: Mapping[str, Any], timeout: httpx.Timeout = UPDATE_TIMEOUT
    ) -> None:  # Any: JSON
        body = {"method": method, "kwargs": arguments}
        await self._connection.call("POST", "/collective_rpc", json=body, timeout=timeout)


def count_ranks(parallel: Mapping[str, Any]) -> int:  # Any: JSON
    """Number of workers with weights, from a server's `parallel_config`. `world_size` counts the workers of one
    replica."""
    return int(parallel.get("world_size") or 1) * int(parallel.get("data_parallel_size") or 1)


def describe_tensor(name: str, tensor: Tensor) -> tuple[str, str, list[int]]:
    """A tensor's description for the receiver in vLLM: name, number format and shape."""
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
