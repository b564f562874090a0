"""Download the start model from the Hugging Face hub into the store, if the run needs the model as a folder.

    model.path = "organisation/name" ──> <store>/inputs/<digest>/<name>/

Not here: the download itself (rollouts_core/data/hub_download.py), models with URLs (inputs.py). This module must not
import prefect, because preflight runs before Prefect's environment is set.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.locks import locked
from rollouts.tasks.preparing import DIGEST_CHARS, ask_hub, hub_environment
from rollouts.tasks.store_paths import INPUTS
from rollouts_core.config import Config
from rollouts_core.config.files import HUB_ID
from rollouts_core.data.rows import COMMIT
from rollouts_core.errors import ConfigError

GB = 1e9


def needs_download(config: Config) -> bool:
    """True if `model.path` is a hub name but the run needs a folder.

    Inference engines serve only folders, and jobs cannot download from a mirror (`hub.url`).
    """
    path = config.model.path
    if Path(path).exists() or not HUB_ID.fullmatch(path):
        return False
    return config.evaluation.metric == "accuracy" or bool(config.hub.url)


def bring_hub_model(config: Config, store: Path, say: Callable[[str], None]) -> Config:
    """Download a hub model at `model.revision`, or at its newest commit. Returns the settings with the model's folder.

    Raises:
        ConfigError: the hub does not deliver the model, or the disk has too little free space.
    """
    if not needs_download(config):
        return config
    name, commit = config.model.path, config.model.revision
    environment = hub_environment(config.hub)
    found: dict[str, object] = {}
    if not COMMIT.fullmatch(commit):
        found = _find(name, commit, environment)
        commit = str(found["commit"])
    digest = hashlib.sha256(f"{name}@{commit}".encode()).hexdigest()[:DIGEST_CHARS]
    folder = store.resolve() / INPUTS / digest / name.rpartition("/")[2]
    with Ledger(store / LEDGER_FILE) as ledger, ledger.transaction():  # under this lock, prune cannot remove the folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.utime(folder.parent)
    with locked(folder.with_name(".lock")):
        if not folder.exists():
            num_bytes = int(str((found or _find(name, commit, environment))["num_bytes"]))
            incoming = folder.with_name(f".{folder.name}.incoming")
            _check_room(name, incoming, num_bytes)
            say(f"model.path: downloads {name} at {commit}, {num_bytes / GB:.1f} GB")
            ask_hub(["fetch", name, commit, str(incoming)], environment)
            incoming.rename(folder)
            say(f"model.path: {name} is in {folder}")
    model = config.model.model_copy(update={"path": str(folder), "revision": ""})
    return config.model_copy(update={"model": model})


def _check_room(name: str, incoming: Path, num_bytes: int) -> None:
    has_bytes = sum(file.stat().st_size for file in incoming.rglob("*") if file.is_file())
    free = shutil.disk_usage(incoming.parent).free
    if free < num_bytes - has_bytes:
        raise ConfigError(
            f"model.path: {name} takes {num_bytes / GB:.1f} GB, and the disk of {incoming.parent} has {free / GB:.1f} "
            "GB free: free some space, or choose another store with --store"
        )


def _find(name: str, revision: str, environment: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(ask_hub(["find", name, revision], environment))
    return found
