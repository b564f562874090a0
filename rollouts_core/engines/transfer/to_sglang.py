"""Send weights to one SGLang server without files, through a process group or as handles of GPU memory.

    version "7, loading" -> begin -> bucket, bucket, ..., flush of the cache -> end -> version "7"

Tensors that the server already has are skipped, unless the server repacks all tensors after each update.

During the update completions carry a version that clients reject, so completions from partly loaded weights are
dropped.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import httpx
from torch import Tensor

from rollouts_core.engines.http import UPDATE_TIMEOUT
from rollouts_core.engines.transfer.cuda_ipc import forget, render_handles, share
from rollouts_core.engines.transfer.group import GroupBackend, WeightGroup, is_nccl_usable
from rollouts_core.engines.transfer.group_sender import CLEAN_UP_TIMEOUT, GroupSender, broadcast_bucket
from rollouts_core.engines.transfer.shared_memory import count_bytes
from rollouts_core.engines.transfer.versions import BUCKET_BYTES, SentWeights, split_buckets
from rollouts_core.errors import EngineError, EngineUnavailableError, WeightSyncError
from rollouts_core.system.concurrency import gather, in_short_thread

logger = logging.getLogger(__name__)

SESSION_IS_OPEN = "already open"
"""Part of SGLang's error if an earlier update is still open, for example because its trainer was killed."""
MEMORY_SCOPE = "memory_scope"
"""A field of the server's answer that only the embedded engine has, not SGLang."""
EXPERTS = ".experts."
"""Part of the names of weights that SGLang stores in an order that its kernel chooses."""


class WeightSender(GroupSender):
    """Sends weights to one server."""

    async def send(self, weights: SentWeights, version: str, kept: Collection[str], *, is_paused: bool) -> None:
        """Make the server load weights once, and set the version. Running requests end before the load.

        Args:
            kept: tensors that the server already has.
            is_paused: True if the server samples nothing now, so that no completion can come from partly loaded
                weights.

        Raises:
            EngineUnavailableError: the server, or its end of the group, vanished.
            EngineError: the server refused the weights.
        """
        if not is_paused:
            await self._set_version(f"{version}, loading")
        server = await self._connection.call("GET", "/server_info")
        missing = find_missing(weights.tensors, kept, server)
        if missing:
            async with self._session(weights.tensors.keys() - missing.keys(), server):
                if weights.transfer == "tensors":
                    await self._share(missing, server)
                else:
                    await self._broadcast(missing, weights.transfer, server)
        await self._set_version(version)
        logger.info(
            "sent %d of %d tensors of %s to %s, %.1f MB of %.1f",
            len(missing),
            len(weights.tensors),
            version,
            self._connection.url,
            count_bytes(missing.values()) / 1e6,
            count_bytes(weights.tensors.values()) / 1e6,
        )

    async def _broadcast(self, tensors: Mapping[str, Tensor], backend: GroupBackend, server: Mapping[str, Any]) -> None:
        if backend == "nccl" and not (is_nccl_usable() and server.get("device") == "cuda"):
            raise WeightSyncError(
                f"{self._connection.url} cannot be sent weights by NCCL, which needs a GPU on both sides: the "
                f"{'trainer' if server.get('device') == 'cuda' else 'engine'} has no GPU, so set "
                'rollout.engine.weight_transfer = "gloo"'
            )
        async with self._joined(backend, _count_ranks(self._connection.url, server)) as group:
            buckets = list(split_buckets(tensors, BUCKET_BYTES))
            for bucket in buckets:
                body = {
                    "names": list(bucket),
                    "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
                    "shapes": [list(tensor.shape) for tensor in bucket.values()],
                    "group_name": group.name,
                    "load_format": "flattened_bucket",
                    "flush_cache": bucket is buckets[-1],
                }
                receive = partial(self._post, "/update_weights_from_distributed", body)
                await gather([receive, partial(broadcast_bucket, group, bucket)])

    async def _ask_to_join(self, group: WeightGroup) -> None:
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": 1 + group.num_ranks,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("/init_weights_update_group", body)

    async def _tell_left(self, group: WeightGroup) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": group.name}, CLEAN_UP_TIMEOUT)

    async def _share(self, tensors: Mapping[str, Tensor], server: Mapping[str, Any]) -> None:
        device = "cuda" if server.get("device") == "cuda" else "cpu"
        if device == "cuda" and not is_nccl_usable():
            raise WeightSyncError(
                f"{self._connection.url} can map only memory of a GPU, but the trainer has no GPU: set "
                'rollout.engine.weight_transfer = "gloo"'
            )
        num_ranks = _count_ranks(self._connection.url, server)
        buckets = list(split_buckets(tensors, BUCKET_BYTES))
        for bucket in buckets:
            shared = await in_short_thread(partial(share, bucket, device))
            try:
                await self._post_handles(shared, num_ranks, is_last=bucket is buckets[-1])
            except BaseException:
                forget(shared)
                raise

    async def _post_handles(self, shared: Mapping[str, Tensor], num_ranks: int, *, is_last: bool) -> None:
        handles = [base64.b64encode(render_handles(shared)).decode() for _ in range(num_ranks)]
        body = {"serialized_named_tensors": handles, "flush_cache": is_last}
        await self._post("/update_weights_from_tensor", body)

    @asynccontextmanager
    async def _session(self, kept: Collection[str], server: Mapping[str, Any]) -> AsyncIterator[None]:
        """Open an update on the server for the block: the block sends all weights except the kept tensors."""
        # SGLang loads each tensor that arrives. The embedded engine loads at the end, if the update is complete, so it
        # must know which tensors will not arrive.
        begin = {"kept": sorted(kept)} if kept and MEMORY_SCOPE in server else {}
        try:
            await self._post("/begin_weight_update", begin)
        except EngineUnavailableError:
            raise
        except EngineError as error:
            if SESSION_IS_OPEN not in str(error):
                raise
            try:
                await self._post("/end_weight_update", {})
            except EngineUnavailableError:
                raise
            except EngineError as end:  # the embedded engine refuses a partial update, but closes the session
                logger.info("%s", end)
            await self._post("/begin_weight_update", begin)
        try:
            yield
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(EngineError):
                await self._post("/end_weight_update", {}, CLEAN_UP_TIMEOUT)
            raise
        await self._post("/end_weight_update", {})

    async def _set_version(self, version: str) -> None:
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def _post(self, path: str, body: Mapping[str, Any], timeout: httpx.Timeout = UPDATE_TIMEOUT) -> None:
        await self._connection.call("POST", path, json=body, timeout=timeout)


def find_missing(tensors: Mapping[str, Tensor], kept: Collection[str], server: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors to send: all but `kept`, or all tensors if the server repacks even tensors that were not sent."""
    is_repacked = server.get("quantization") is not None or any(EXPERTS in name for name in tensors)
    return {name: tensor for name, tensor in tensors.items() if is_repacked or name not in kept}


def _count_ranks(url: str, server: Mapping[str, Any]) -> int:
    """Number of processes that hold parts of the server's model.

    Raises:
        WeightSyncError: the model is split by more than tensor parallelism, so SGLang's numbers of the processes are
            unknown.
    """
    for name in ("dp_size", "pp_size"):
        if int(server.get(name) or 1) != 1:
            raise WeightSyncError(
                f"{url} was started with {name} {server[name]}, but SGLang takes sent weights only with 1: start it "
                'with 1, or set rollout.engine.weight_transfer = "auto"'
            )
    return int(server.get("tp_size") or 1)
