"""Compute digests of the data that a retraining watches for changes.

Not here: deciding whether the data is new (retraining.py), reading the data (rollouts_core/data).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollouts.infra.stores.download import digest_of, find_wanted
from rollouts.infra.stores.object_store import ObjectStore, is_url
from rollouts_core.config import Config
from rollouts_core.data.preparing import find_source
from rollouts_core.data.rows import COMMIT, digest_path, resolve_revision
from rollouts_core.errors import DataError


def watched_sources(config: Config, sources: Sequence[str]) -> dict[str, str]:
    """The data that a retraining watches for changes. For each path: the revision of a hub dataset, "" for files.

    Args:
        sources: files and folders from the settings; empty means the demonstrations, prompts or rollouts that the run
            trains on.
    """
    if sources:
        return dict.fromkeys(sources, "")
    data = config.data
    prepared = dict([find_source(data.prepare)]) if data.prepare.name else {}
    reads_demonstrations = config.reads("sft") and (data.sft or not prepared)
    demonstrations = {each.path: each.revision for each in config.demonstrations} if reads_demonstrations else {}
    prompts = [data.prompts or data.rollouts] if config.is_graded else []
    watched = demonstrations | dict.fromkeys(prompts, "") | prepared
    return {path: revision for path, revision in watched.items() if path}


def can_change(watched: dict[str, str]) -> bool:
    """False if all watched sources are hub datasets at a fixed commit."""
    return any(
        is_url(path) or Path(path).is_absolute() or not COMMIT.fullmatch(revision) for path, revision in watched.items()
    )


def check_sources(watched: dict[str, str]) -> None:
    """Raise DataError if a watched file or folder does not exist, or if a watched folder has no files."""
    for path in map(Path, watched):
        if path.is_dir() and not any(each.is_file() for each in path.rglob("*")):
            raise DataError(f"{path}, which is watched for new data, is a folder without files: put data there first")
        if path.is_absolute() and not path.exists():
            raise DataError(f"{path}, which is watched for new data, does not exist: give a file or a folder of files")


def check_outside(watched: dict[str, str], store: Path) -> None:
    """Raise DataError if a watched folder contains the store.

    Every run changes the store, so that every check would find new data.
    """
    for path in map(Path, watched):
        if path.is_absolute() and store.resolve().is_relative_to(path.resolve()):
            raise DataError(
                f"{path}, which is watched for new data, contains the store {store}, which every run changes: name "
                "the files or folders of the data in retrain.sources, or choose another store"
            )


def digest_sources(watched: dict[str, str]) -> dict[str, str]:
    """Digests of the watched sources, by path. For a hub dataset without a fixed revision, the newest commit counts.

    Raises:
        DataError: a source does not exist, or the hub does not answer.
        InfraError: an object store does not answer, or has no object at the URL.
    """
    check_sources(watched)
    return {path: _digest_source(path, revision) for path, revision in watched.items()}


def _digest_source(path: str, revision: str) -> str:
    if is_url(path):  # the object store's listing is enough for a digest, without a download
        return digest_of(find_wanted(ObjectStore(path)))
    return digest_path(path, revision=resolve_revision(path, revision))
