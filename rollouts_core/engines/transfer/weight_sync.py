"""Bring new weights to every engine, and record which engines serve them.

backend.get_weights -> changed tensors, in memory, if all engines run on this machine    -> every engine in parallel
                    -> changed tensors, in files, if all engines are embedded engines
                    -> <weights_dir>/<version>/{model.safetensors, config.json}
                    -> a copy that is sent to each engine, if the settings say so
backend.get_adapters: instead, if the backend trains adapters and all engines take them (adapters.py)
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollouts_core.backends.protocol import TrainingBackend, adapters_of, base_weights_of
from rollouts_core.config import RolloutConfig, WeightTransfer
from rollouts_core.config.messages import first_line
from rollouts_core.embedded.adapters import is_adapter, largest_rank, merge_published
from rollouts_core.engines.in_flight import InFlightEngine
from rollouts_core.engines.protocol import InferenceEngine, SegmentAccess
from rollouts_core.engines.transfer.adapters import AdaptedWeights, PublishedBase, common_form, write_scaled_folder
from rollouts_core.engines.transfer.canary import Canary, backend_canary, published_canary
from rollouts_core.engines.transfer.checksums import version_of_copy
from rollouts_core.engines.transfer.rounding import RoundingWatch, common_dtype
from rollouts_core.engines.transfer.shared_memory import SegmentedWeights, SegmentStore
from rollouts_core.engines.transfer.versions import HostCopies, SentBy, SentWeights
from rollouts_core.errors import CheckpointError, ConfigError, EngineError, TrainingError, WeightSyncError
from rollouts_core.system.concurrency import gather, in_short_thread
from rollouts_core.system.files import new_directory, remove_partial_directories, write_atomically

if TYPE_CHECKING:
    from rollouts_core.engines.protocol import Weights

logger = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 900.0
PUBLISH_MARGIN_S = 60.0
"""Seconds by which a publication's time limit exceeds a pool's limit, so that the pool can first quarantine an
engine."""
VERSION_CHARS = 16
"""Number of hexadecimal digits in a default version. The digits differ for different weights and different
trainings."""
WEIGHTS_FILE = "model.safetensors"
OF_CHECKPOINT = "-of-checkpoint"
"""Suffix of the names of directories with adapters for a checkpoint."""
KEPT_VERSIONS = 2
"""Number of published directories to keep: the newest directory, and the previous, which a slow engine may still be
reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncResult:
    """The result of one engine's update."""

    engine: str
    """The engine's name."""
    version: str
    """The version that the engine was given."""
    error: str
    """The problem, or empty if the engine was verified to serve the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierVersion:
    """Weights that were published before, and are published again although the trainer has newer weights."""

    number: int
    """Number of optimizer steps after which the weights were published."""
    file: Path
    """The weights by their Hugging Face names, or the adapters alone, as safetensors."""


@dataclass(slots=True, kw_only=True)
class PublishedVersion:
    """The version that the engines of one training were given last."""

    version: str = ""
    weights: Weights | None = None
    """The published weights, or None before the first publication, and without engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTarget:
    """The place and the names of the weight versions that a run publishes."""

    weights_dir: Path
    """Directory, readable by every engine, that holds one directory per version, or segments and config.json."""
    model_config: Path
    """The config.json that goes with the weights."""
    prefix: str
    """Versions are called `<prefix>-<number of optimizer steps>`."""
    temperature: float = 1.0
    """The rollouts' temperature, with which the backend was created."""
    transfer: WeightTransfer = "auto"
    """Way of sending the weights to the engines."""
    segments: SegmentStore = field(default_factory=SegmentStore, compare=False)
    """Shared memory that holds the weights. Publications use it in place of a directory if every engine can read it."""
    copies: HostCopies = field(default_factory=HostCopies, compare=False)
    """Copies of the weights in host memory, which are sent to engines."""
    newest: PublishedVersion = field(default_factory=PublishedVersion, compare=False)
    """The version that was published last."""
    base: PublishedBase = field(default_factory=PublishedBase, compare=False)
    """The place at which the frozen weights of the published adapters were published."""
    rounding: RoundingWatch = field(default_factory=RoundingWatch, compare=False)
    """How much of an update the engines' number format preserves."""

    def version_of(self, number: int) -> str:
        """The version of the weights after `number` optimizer steps."""
        return f"{self.prefix}-{number}"


async def sync_weights_to_engines(
    engines: Sequence[InferenceEngine],
    checkpoint_path: str | Path | SegmentedWeights | SentWeights | AdaptedWeights,
    *,
    version: str = "",
    canary: Canary | None = None,
    timeout_s: float = SYNC_TIMEOUT_S,
) -> list[WeightSyncResult]:
    """Load a checkpoint's weights into all engines in parallel, and return one result per engine, in the order of the
    engines.

    Args:
        checkpoint_path: a directory, segments that all engines can map, weights to send, or adapters in a folder.
        version: the engines' name for these weights, which must be unique. The default for a directory is its name with
            the digest of its tensors. Segments and sent weights have their own versions.
        canary: verifies tensors without comparable checksums. By default, a forward pass of the checkpoint's model does
            this.
        timeout_s: time limit for each engine, to which the time to finish running requests is added. A slower engine
            counts as failed.

    Raises:
        CheckpointError: no version was given, and the directory has no weights from which to derive a version.
        TrainingError: the trainer failed to compute the canary's log-probs.
    """
    weights = Path(checkpoint_path) if isinstance(checkpoint_path, str) else checkpoint_path
    given = version or await _own_version(weights)

    async def sync_one(engine: InferenceEngine) -> WeightSyncResult:
        error = f"it did not take {given} within {timeout_s:g} s"
        wait_s = engine.finish_timeout_s if isinstance(engine, InFlightEngine) else 0.0
        if wait_s:
            error += f", after up to {wait_s:g} s for the requests that were under way"
        with anyio.move_on_after(wait_s + timeout_s):
            try:
                await engine.load_weights(weights, given, canary)
                error = ""
            except (EngineError, CheckpointError, OSError) as problem:
                error = str(problem) or type(problem).__name__
            except TrainingError:  # the trainer computes a canary's log-probs, so this error is not an engine's
                raise
            except Exception as problem:  # after one engine's error, the other engines still get their weights
                logger.exception("%s could not be given %s", engine.name, given)
                error = f"{type(problem).__name__}: {first_line(problem)}"
        return WeightSyncResult(engine=engine.name, version=given, error=error)

    return await gather([partial(sync_one, engine) for engine in engines])


async def _own_version(weights: Weights) -> str:
    return await in_short_thread(partial(content_version, weights)) if isinstance(weights, Path) else weights.version


def content_version(directory: Path) -> str:
    """The version of the weights in a directory, for example `step_000100@8c1f...`. Only equal weights have equal
    versions.

    Raises:
        CheckpointError: the directory has no weights, or its weights cannot be read.
    """
    total = hashlib.sha256()
    files = sorted(directory.glob("*.safetensors"))
    try:
        for path in files:
            with path.open("rb") as file:
                total.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read ({error}): give the folder of a model") from error
    if not files:
        raise CheckpointError(f"{directory} has no *.safetensors: give the folder of a model or a checkpoint")
    return f"{directory.resolve().name}@{total.hexdigest()[:VERSION_CHARS]}"


@asynccontextmanager
async def open_target(
    target: PublishTarget | None,
    backend: TrainingBackend,
    engines: Sequence[InferenceEngine],
    config: RolloutConfig,
    *,
    checkpoint_dir: Path | None = None,
) -> AsyncIterator[PublishTarget]:
    """Yield `target` or, without `target`, a new target with version names that are unique to this training.

    The files of a new target are in `weights` in the checkpoints' folder. Without this folder, they are in a temporary
    folder.

    Raises:
        ConfigError: no target was given, there are engines, and the backend does not know its model's config.json.
    """
    if target is not None:
        yield target
        return
    with nullcontext(checkpoint_dir) if checkpoint_dir else tempfile.TemporaryDirectory(prefix="weights-") as folder:
        weights_dir = Path(folder) / "weights"
        if engines:
            save_model_config: Callable[[Path], None] | None = getattr(backend, "save_model_config", None)
            if save_model_config is None:
                raise ConfigError(
                    f"{type(backend).__name__} has no save_model_config, so the config.json that engines need beside "
                    "the weights is not known: give target=PublishTarget(weights_dir=..., model_config=..., prefix=...)"
                )
            weights_dir.mkdir(parents=True, exist_ok=True)
            save_model_config(weights_dir / "config.json")
        yield PublishTarget(
            weights_dir=weights_dir,
            model_config=weights_dir / "config.json",
            prefix=secrets.token_hex(VERSION_CHARS // 2),
            temperature=config.sampling.temperature,
            transfer=config.engine.weight_transfer,
        )


async def publish_weights(
    backend: TrainingBackend,
    engines: Sequence[InferenceEngine],
    target: PublishTarget,
    *,
    earlier: EarlierVersion | None = None,
) -> str:
    """Publish the backend's weights as a new version and load them into all engines, and return the version.

    Without engines nothing is written.

    Args:
        earlier: version to publish instead of the backend's weights.

    Raises:
        WeightSyncError: names every engine that does not serve the version.
    """
    version = target.version_of(earlier.number if earlier else backend.weight_version)
    if not engines:
        return version
    published: Weights
    canary: Canary | None = None  # tensors of segments are always compared
    access = await common_access(engines)
    held = await in_short_thread(partial(load_file, earlier.file)) if earlier else {}
    adapters = await _adapters_to_publish(backend, engines, target, held, access=access)
    weights: dict[str, Tensor] = {}
    if not adapters:
        weights = await _weights_to_publish(backend, engines, target, held, access=access)
        target.base.place = None
    if adapters and target.base.form == "folder":
        published = adapted = await _write_adapters(backend, adapters, version, target)
        canary = _canary(backend, adapted, target, is_earlier=earlier is not None)
    elif target.transfer != "auto":
        published = sent = await _copy(backend, weights, adapters, version, target, target.transfer)
        canary = _canary(backend, sent, target, is_earlier=earlier is not None)
    elif access is SegmentAccess.NONE:
        published = directory = await _write_directory(weights, version, target)
        canary = _canary(backend, directory, target, is_earlier=earlier is not None)
    else:
        in_memory = access is SegmentAccess.MEMORY
        published = await _write_segments(backend, weights, adapters, version, target, in_memory=in_memory)
    results = await sync_weights_to_engines(
        engines, published, version=version, canary=canary, timeout_s=SYNC_TIMEOUT_S + PUBLISH_MARGIN_S
    )
    if failed := [result for result in results if result.error]:
        raise WeightSyncError("; ".join(f"{result.engine}: {result.error}" for result in failed))
    target.newest.version, target.newest.weights = version, published
    num_kept = KEPT_VERSIONS if isinstance(published, Path | AdaptedWeights) else 0
    base = published.base_version if isinstance(published, AdaptedWeights) else ""
    remove_old_versions(target.weights_dir, newest=version, num_kept=num_kept, base=base)
    return version


async def _adapters_to_publish(
    backend: TrainingBackend,
    engines: Sequence[InferenceEngine],
    target: PublishTarget,
    held: Mapping[str, Tensor],
    *,
    access: SegmentAccess,
) -> dict[str, Tensor]:
    """The adapters, or empty if the engines get merged weights.

    Args:
        held: tensors of an earlier version to publish instead of the backend's weights, or empty.
    """
    own = held or await adapters_of(backend).result()
    adapters = {name: tensor for name, tensor in own.items() if is_adapter(name)}
    if not adapters:
        return {}
    form = await common_form(engines, largest_rank(adapters))
    if form == "beside" and target.transfer == "auto" and access is SegmentAccess.NONE:
        form = ""  # a directory always has merged weights
    if form == "folder" and target.transfer != "auto":
        form = ""  # the engine is perhaps unable to read the trainer's files
    target.base.note_form(form, num_bytes=sum(tensor.nbytes for tensor in adapters.values()))
    return adapters if form else {}


async def _weights_to_publish(
    backend: TrainingBackend,
    engines: Sequence[InferenceEngine],
    target: PublishTarget,
    held: Mapping[str, Tensor],
    *,
    access: SegmentAccess,
) -> dict[str, Tensor]:
    """All weights, with merged adapters.

    Args:
        held: tensors of an earlier version to publish instead of the backend's weights, or empty.
    """
    if any(map(is_adapter, held)):
        base = await base_weights_of(backend).result()
        return await in_short_thread(partial(merge_published, {**base, **held}))
    if held:
        return dict(held)
    weights = dict(await backend.get_weights().result())
    if target.transfer != "auto" or access is SegmentAccess.NONE:
        await _round_for(engines, weights, backend, target)
    return weights


def _canary(
    backend: TrainingBackend, published: Path | SentWeights | AdaptedWeights, target: PublishTarget, *, is_earlier: bool
) -> Canary:
    """The canary of published weights. The backend computes its log-probs, unless the backend has later weights."""
    if not is_earlier:
        return backend_canary(backend, published, temperature=target.temperature)
    num_tokens = getattr(backend, "num_tokens", None)
    return published_canary(published, temperature=target.temperature, num_tokens=num_tokens)


def write_newest_version(target: PublishTarget) -> Path | None:
    """The file of the weights that the engines serve, or None without engines. If adapters are sent as adapters, the
    file has only the adapters.

    The file is in the directory of published versions and is removed with them, so the caller must link the file to
    keep it.
    """
    weights, directory = target.newest.weights, target.weights_dir / target.newest.version
    if isinstance(weights, AdaptedWeights):  # the engine reads `directory`, the folder of adapters
        directory = directory.with_name(f"{directory.name}{OF_CHECKPOINT}")
    if weights is None:
        return None
    if not isinstance(weights, Path):
        tensors = _tensors_of(weights)
        adapters = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
        _write_tensors(adapters or tensors, directory, target)
    return directory / WEIGHTS_FILE


def _tensors_of(weights: SegmentedWeights | SentWeights | AdaptedWeights) -> Mapping[str, Tensor]:
    if isinstance(weights, AdaptedWeights):
        return weights.adapters
    if isinstance(weights, SentWeights):
        return weights.tensors
    return {name: placed.segment.tensors[name] for name, placed in weights.placed.items()}


async def _round_for(
    engines: Sequence[InferenceEngine], weights: dict[str, Tensor], backend: TrainingBackend, target: PublishTarget
) -> None:
    """Round the weights to the number format of the engines, if this format is known and not float32."""
    dtype = await common_dtype(engines)
    if dtype is not None and dtype != torch.float32:
        start: Mapping[str, Tensor] = getattr(backend, "start_sample", {})  # optional in a backend
        await in_short_thread(partial(target.rounding.round_for, weights, start, dtype))


async def common_access(engines: Sequence[InferenceEngine]) -> SegmentAccess:
    """The access to segments that all given engines have, or NONE without engines."""
    return min(await gather([engine.segment_access for engine in engines]), default=SegmentAccess.NONE)


async def _write_segments(
    backend: TrainingBackend,
    weights: Mapping[str, Tensor],
    adapters: Mapping[str, Tensor],
    version: str,
    target: PublishTarget,
    *,
    in_memory: bool,
) -> SegmentedWeights:
    with_config = _folder_with_config(target)
    folder = None if in_memory else with_config
    publish = partial(target.segments.publish, version=version, model_dir=with_config, folder=folder)
    if not adapters:
        return await publish(weights)
    if target.base.place != ("segments", folder):
        await publish(await base_weights_of(backend).result())
        target.base.place = ("segments", folder)
    return await publish(adapters, keeps_others=True)


async def _write_adapters(
    backend: TrainingBackend, adapters: Mapping[str, Tensor], version: str, target: PublishTarget
) -> AdaptedWeights:
    base_version = f"{target.prefix}-base"
    model_dir = target.weights_dir / base_version
    if target.base.place != model_dir:
        base = await base_weights_of(backend).result()
        await in_short_thread(partial(_write_tensors, base, model_dir, target))
        target.base.place = model_dir
    folder = target.weights_dir / version
    await in_short_thread(partial(write_scaled_folder, folder, adapters))
    return AdaptedWeights(
        version=version, folder=folder, adapters=adapters, model_dir=model_dir, base_version=base_version
    )


async def _copy(
    backend: TrainingBackend,
    weights: Mapping[str, Tensor],
    adapters: Mapping[str, Tensor],
    version: str,
    target: PublishTarget,
    transfer: SentBy,
) -> SentWeights:
    if adapters and target.base.place != "copies":
        await in_short_thread(partial(target.copies.take, await base_weights_of(backend).result()))
        target.base.place = "copies"
    take = partial(target.copies.take, adapters or weights, keeps_others=bool(adapters))
    tensors = await in_short_thread(take)
    return SentWeights(version=version, model_dir=_folder_with_config(target), tensors=tensors, transfer=transfer)


def _folder_with_config(target: PublishTarget) -> Path:
    folder, config = target.weights_dir, target.weights_dir / "config.json"
    content = target.model_config.read_bytes()
    if not config.is_file() or config.read_bytes() != content:  # a file of an earlier attempt may be damaged
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(config, content)
    return folder


async def _write_directory(weights: Mapping[str, Tensor], version: str, target: PublishTarget) -> Path:
    await in_short_thread(partial(_write_tensors, weights, target.weights_dir / version, target))
    return target.weights_dir / version


def _write_tensors(weights: Mapping[str, Tensor], path: Path, target: PublishTarget) -> None:
    with new_directory(path) as directory:
        on_host = {name: value.contiguous().cpu() for name, value in weights.items()}
        save_file(on_host, directory / WEIGHTS_FILE)
        shutil.copyfile(target.model_config, directory / "config.json")


def remove_old_versions(weights_dir: Path, *, newest: str, num_kept: int = KEPT_VERSIONS, base: str = "") -> None:
    """Delete published directories except the newest, and temporary copies of the deleted directories.

    Args:
        newest: the served version, which is always kept, even if its directory looks older because a clock was wrong.
        num_kept: number of directories to keep, or 0 if engines do not read directories.
        base: name of the directory with the frozen weights of the adapters, which is also kept.
    """
    folders = [path for path in weights_dir.iterdir() if path.is_dir() and path.name != base]
    versions = sorted(
        (path for path in folders if not path.name.startswith(".")),
        key=lambda path: (path.name == newest, path.stat().st_mtime),
    )
    num_old = max(0, len(versions) - num_kept)
    for path in versions[:num_old]:
        shutil.rmtree(path)
    # Copies of kept versions stay, because an engine may be reading them. A copy of a deleted version consists of
    # broken links.
    kept = {base, *(path.name for path in versions[num_old:])}
    for path in folders:
        if (version := version_of_copy(path)) and version not in kept:
            shutil.rmtree(path, ignore_errors=True)  # the writer of the copy may be removing it at the same time
    remove_partial_directories(weights_dir)
