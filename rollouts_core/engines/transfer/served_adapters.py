"""Load and unload adapters at one server, and remember the adapter that requests name.

Not here: the frozen weights and the server's version name (vllm.py, sglang.py), verification (delivery.py).
"""

from __future__ import annotations

from rollouts_core.engines.http import UPDATE_TIMEOUT, EngineConnection
from rollouts_core.engines.transfer.adapters import AdaptedWeights
from rollouts_core.errors import EngineError, EngineUnavailableError


class ServedAdapters:
    """The adapters of one server. SGLang and vLLM list, load and unload adapters in the same form.

    Args:
        prefix: prefix of the server's paths for loading and unloading adapters.
    """

    def __init__(self, connection: EngineConnection, *, prefix: str = "") -> None:
        self._connection = connection
        self._prefix = prefix
        self.current = ""
        """Name of the adapter that requests use, or empty if requests use the weights without adapters."""

    async def load(self, weights: AdaptedWeights, version: str) -> None:
        """Load an adapter under the name `version`. Requests use the earlier adapter until `current` changes."""
        if version in await self.names():
            await self._unload(version)  # servers refuse a name that is already loaded
        body = {"lora_name": version, "lora_path": str(weights.folder.resolve())}
        path = f"{self._prefix}/load_lora_adapter"
        await self._connection.call("POST", path, json=body, timeout=UPDATE_TIMEOUT, is_answered=False)

    async def drop(self, *, kept: str) -> None:
        """Unload all adapters except `kept`."""
        for name in await self.names():
            if name != kept:
                await self._unload(name)

    async def names(self) -> list[str]:
        """The names of loaded adapters."""
        models = await self._connection.call("GET", "/v1/models")
        listed = models.get("data", []) if isinstance(models, dict) else []
        return [str(each["id"]) for each in listed if each.get("parent")]

    async def explain(self, error: EngineError, adapter: str) -> EngineError:
        """The error to raise for a failed request with an adapter. EngineUnavailableError if a restarted server lost
        the adapter, because the server can load it again."""
        if not adapter or isinstance(error, EngineUnavailableError) or adapter in await self.names():
            return error
        return EngineUnavailableError(f"{self._connection.url} has no adapters {adapter}: {error}")

    async def _unload(self, name: str) -> None:
        path = f"{self._prefix}/unload_lora_adapter"
        await self._connection.call("POST", path, json={"lora_name": name}, timeout=UPDATE_TIMEOUT, is_answered=False)
