"""Send weights to one vLLM server through a process group, without a file.

Not here: the groups (group.py), the end of vLLM's workers (in_vllm/rollouts_receiver.py), pausing the server and what
proves that it took them (vllm.py, keeper.py).

vLLM loads what comes layer by layer, and repacks it. All tensors are sent each time, since a layer is loaded whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio
import httpx
from torch import Tensor

from rollouts_core.concurrency import gather, in_short_thread
from rollouts_core.engines.group import GroupBackend, WeightGroup, is_nccl_usable
from rollouts_core.engines.http import CONNECT_TIMEOUT_S, UPDATE_TIMEOUT, EngineConnection
from rollouts_core.engines.sent import BUCKET_BYTES, flatten, split_buckets
from rollouts_core.errors import EngineError, EngineUnavailableError, WeightSyncError

RECEIVER = "rollouts_receiver.WeightReceiver"
"""What vLLM adds to its workers, from the folder in_vllm."""
CLEAN_UP_TIMEOUT = httpx.Timeout(10.0, connect=CONNECT_TIMEOUT_S)


class VLLMWeightSender:
    """Sends weights to one server; owns its group with it.

    Args:
        connection: the client's own.
    """

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        self._group: WeightGroup | None = None

    async def send(self, tensors: Mapping[str, Tensor], backend: GroupBackend, *, num_ranks: int) -> None:
        """Have the server load these tensors; nothing may be under way there.

        Raises:
            EngineUnavailableError: it vanished, or its end of the group did.
            EngineError: it refused, or was started without the receiver.
        """
        is_reused = self._group is not None
        try:
            group = self._group = self._group or await self._join(backend, num_ranks)
            buckets = list(split_buckets(tensors, BUCKET_BYTES))
            described = [[_describe(name, tensor) for name, tensor in bucket.items()] for bucket in buckets]

            async def broadcast() -> None:
                for bucket in buckets:
                    flat = await in_short_thread(partial(flatten, bucket, group.device))
                    await in_short_thread(partial(group.broadcast, flat))

            await gather([partial(self._call, "reload_sent_weights", {"buckets": described}), partial(broadcast)])
        except BaseException as error:
            await self.aclose()
            if is_reused and isinstance(error, EngineError):  # it may have been started anew, and know of no group
                raise EngineUnavailableError(str(error)) from error
            raise

    async def aclose(self) -> None:
        """Leave the group, and tell the server so."""
        if self._group is None:
            return
        group, self._group = self._group, None
        group.close()  # a worker that waits for a bucket fails by that, and answers again
        with anyio.CancelScope(shield=True):
            try:
                await self._call("leave_weight_group", {}, CLEAN_UP_TIMEOUT)
            except EngineError:
                return  # it is gone, and its end of the group with it

    async def _join(self, backend: GroupBackend, num_ranks: int) -> WeightGroup:
        if backend == "nccl" and not is_nccl_usable():
            raise WeightSyncError(
                f"{self._connection.url} cannot be sent weights by NCCL, which goes from GPU to GPU, and the trainer "
                'has none: set rollout.engine.weight_transfer = "gloo"'
            )
        group = WeightGroup(self._connection.url, backend, num_ranks=num_ranks)
        place = {"address": group.address, "port": group.port, "name": group.name}
        join = partial(self._call, "join_weight_group", {**place, "backend": backend, "size": 1 + num_ranks})
        try:
            await gather([join, partial(in_short_thread, group.connect)])
        except BaseException:
            group.close()
            raise
        return group

    async def _call(
        self, method: str, arguments: Mapping[str, Any], timeout: httpx.Timeout = UPDATE_TIMEOUT
    ) -> None:  # Any: JSON
        body = {"method": method, "kwargs": arguments}
        await self._connection.call("POST", "/collective_rpc", json=body, timeout=timeout)


def _describe(name: str, tensor: Tensor) -> tuple[str, str, list[int]]:
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
