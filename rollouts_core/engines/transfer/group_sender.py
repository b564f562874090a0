"""Own a process group with one server. The group is created at the first update and abandoned after a failed update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
import httpx
from torch import Tensor

from rollouts_core.engines.http import CONNECT_TIMEOUT_S, EngineConnection
from rollouts_core.engines.transfer.group import GroupBackend, WeightGroup
from rollouts_core.engines.transfer.versions import flatten
from rollouts_core.errors import EngineError, EngineUnavailableError
from rollouts_core.system.concurrency import gather, in_daemon_thread, in_short_thread

CLEAN_UP_TIMEOUT = httpx.Timeout(10.0, connect=CONNECT_TIMEOUT_S)


class GroupSender(ABC):
    """Owns the process group with one server.

    Args:
        connection: the connection of the server's client.
    """

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        self._group: WeightGroup | None = None

    async def aclose(self) -> None:
        """Leave the group, and tell the server to leave the group too."""
        if self._group is not None:
            group, self._group = self._group, None
            group.close()  # a server that waits for a bucket then fails its call and answers again
            with anyio.CancelScope(shield=True), suppress(EngineError):
                await self._tell_left(group)

    @abstractmethod
    async def _ask_to_join(self, group: WeightGroup) -> None:
        """Ask the server to join the group. The server answers when all members have joined."""

    @abstractmethod
    async def _tell_left(self, group: WeightGroup) -> None:
        """Tell the server to leave the group, within `CLEAN_UP_TIMEOUT`."""

    @asynccontextmanager
    async def _joined(self, backend: GroupBackend, num_ranks: int) -> AsyncIterator[WeightGroup]:
        """The group with the server's ranks for one update. The group is abandoned if the update fails.

        Raises:
            EngineUnavailableError: the server, or its end of the group, vanished.
            EngineError: the server refused the update.
        """
        is_reused = self._group is not None
        try:
            self._group = self._group or await self._join(backend, num_ranks)
            yield self._group
        except BaseException as error:
            await self.aclose()
            if is_reused and isinstance(error, EngineError):  # the server may have restarted without the group
                raise EngineUnavailableError(str(error)) from error
            raise

    async def _join(self, backend: GroupBackend, num_ranks: int) -> WeightGroup:
        group = WeightGroup(self._connection.url, backend, num_ranks=num_ranks)
        try:
            await gather([partial(self._ask_to_join, group), partial(in_short_thread, group.connect)])
        except BaseException:
            group.close()
            raise
        return group


async def broadcast_bucket(group: WeightGroup, bucket: Mapping[str, Tensor]) -> None:
    """Send the bytes of some tensors to the server's ranks, which must already be waiting for the bucket."""
    flat = await in_short_thread(partial(flatten, bucket, group.device))
    # NCCL's first broadcast creates the connections and returns when all ranks joined. If a rank is gone, the broadcast
    # never returns.
    await in_daemon_thread(partial(group.broadcast, flat))
