"""Bring new weights to every engine, and know of each whether it serves them.

Not here: how one engine takes and proves its weights (sglang.py, vllm.py, http.py).

    backend.get_weights -> memory, where all engines share it                        -> every engine in parallel
                        -> <weights_dir>/<version>/{model.safetensors, config.json}  ->
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from safetensors.torch import save_file
from torch import Tensor

from rollouts_core.backends.protocol import TrainingBackend
from rollouts_core.concurrency import gather, in_short_thread
from rollouts_core.engines.canary import Canary, backend_canary
from rollouts_core.engines.protocol import InferenceEngine
from rollouts_core.engines.shared_memory import SharedMemory, SharedWeights
from rollouts_core.errors import CheckpointError, EngineError, WeightSyncError
from rollouts_core.files import new_directory, write_atomically

SYNC_TIMEOUT_S = 900.0
KEPT_VERSIONS = 2
"""Published directories that stay: the newest, and the one that a slow engine may still be reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncResult:
    """What became of one engine's update."""

    engine: str
    """The engine's name."""
    version: str
    """The version it was given."""
    error: str
    """Empty when the engine proved that it serves the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTarget:
    """Where and under which name the versions of one run are published."""

    weights_dir: Path
    """Directory that holds one directory per version, or config.json alone; every engine can read it."""
    model_config: Path
    """The config.json that goes with the weights."""
    prefix: str
    """Versions are called `<prefix>-<number of optimizer steps>`."""
    temperature: float = 1.0
    """Of the rollouts, with which the backend was created."""
    memory: SharedMemory = field(default_factory=SharedMemory, compare=False)
    """Where versions are published instead, as long as every engine can read it."""


async def sync_weights_to_engines(
    engines: Sequence[InferenceEngine],
    checkpoint_path: str | Path | SharedWeights,
    *,
    version: str,
    canary: Canary | None = None,
    timeout_s: float = SYNC_TIMEOUT_S,
) -> list[WeightSyncResult]:
    """Load a checkpoint's weights into all engines in parallel; one verified result per engine, in their order.

    Args:
        checkpoint_path: its directory, or weights in memory that all engines share.
        canary: proves tensors that cannot be compared; by default a forward pass of the checkpoint's model.
        timeout_s: an engine that takes longer has not taken the version; the others do not wait for it for longer.
    """
    weights = checkpoint_path if isinstance(checkpoint_path, SharedWeights) else Path(checkpoint_path)
    results: dict[int, WeightSyncResult] = {}

    async def sync_one(place: int, engine: InferenceEngine) -> None:
        error = f"it did not take {version} within {timeout_s:g} s"
        with anyio.move_on_after(timeout_s):
            try:
                await engine.load_weights(weights, version, canary)
                error = ""
            except (EngineError, CheckpointError, OSError) as problem:
                error = str(problem) or type(problem).__name__
        results[place] = WeightSyncResult(engine=engine.name, version=version, error=error)

    async with anyio.create_task_group() as tasks:
        for place, engine in enumerate(engines):
            tasks.start_soon(sync_one, place, engine)
    return [results[place] for place in range(len(engines))]


async def publish_weights(backend: TrainingBackend, engines: Sequence[InferenceEngine], target: PublishTarget) -> str:
    """Publish the backend's weights as a new version and load them into all engines; returns the version.

    Without engines nothing is written.

    Raises:
        WeightSyncError: names every engine that does not serve the version.
    """
    version = f"{target.prefix}-{backend.weight_version}"
    if not engines:
        return version
    weights = await backend.get_weights().result()
    shares_memory = bool(engines) and all(await gather([engine.shares_memory for engine in engines]))
    write = _write_to_memory if shares_memory else _write_files
    published = await write(weights, version, target)
    canary = backend_canary(backend, temperature=target.temperature)
    results = await sync_weights_to_engines(engines, published, version=version, canary=canary)
    if failed := [result for result in results if result.error]:
        raise WeightSyncError("; ".join(f"{result.engine}: {result.error}" for result in failed))
    _remove_old_versions(target.weights_dir)
    return version


async def _write_to_memory(weights: Mapping[str, Tensor], version: str, target: PublishTarget) -> SharedWeights:
    model_config = target.weights_dir / "config.json"
    if not model_config.exists():
        target.weights_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(model_config, target.model_config.read_bytes())
    return await target.memory.publish(weights, version=version, model_dir=target.weights_dir)


async def _write_files(weights: Mapping[str, Tensor], version: str, target: PublishTarget) -> Path:
    def write() -> None:
        with new_directory(target.weights_dir / version) as directory:
            on_host = {name: value.contiguous().cpu() for name, value in weights.items()}
            save_file(on_host, directory / "model.safetensors")
            shutil.copyfile(target.model_config, directory / "config.json")

    await in_short_thread(write)
    return target.weights_dir / version


def _remove_old_versions(weights_dir: Path) -> None:
    by_age = sorted((path for path in weights_dir.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in by_age[:-KEPT_VERSIONS]:
        shutil.rmtree(path)
