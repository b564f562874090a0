"""Run the user's data preparation (`data.prepare`), once for each combination of source, code and settings.

    data.prepare ──> <store>/inputs/<digest>/prepared/sft.jsonl, prompts.jsonl, ...

The digest is computed from source, code and settings. A stage's fingerprint depends only on the prepared files.
Not here: the preparation itself (rollouts_core/data/preparing.py). This module must not import prefect, because
preflight runs before Prefect's environment is set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.locks import locked
from rollouts.tasks.store_paths import INPUTS
from rollouts_core.config import Config, HubConfig, name_of_function
from rollouts_core.data.preparing import FILES, digest_preparation, find_source
from rollouts_core.data.rows import COMMIT
from rollouts_core.errors import ConfigError, DataError
from rollouts_core.keys import HUB_TOKEN, read_key
from rollouts_core.system.files import new_directory

DIGEST_CHARS = 16
PREPARED = "prepared"
RECORD = "preparation.json"


def prepare_data(config: Config, store: Path, say: Callable[[str], None]) -> Config:
    """Run `data.prepare`, unless its files exist. Returns the configuration with the paths of the prepared files.

    If the configuration also names a data file itself, that file is used instead of the prepared file.

    Raises:
        InputError: the preparation failed, or does not make a file that the run's mode needs.
    """
    prepare = config.data.prepare
    if not prepare.name:
        return config
    name = name_of_function(prepare.name)
    source, asked_revision = find_source(prepare)
    revision = _commit_of(source, asked_revision, config.hub)
    digest = digest_preparation(prepare, source, revision)[:DIGEST_CHARS]
    folder = store.resolve() / INPUTS / digest / PREPARED
    _claim(folder.parent, store)
    with locked(folder.with_name(".lock")):
        if not folder.exists():
            say(f"data.prepare: {name} reads {source}{f' at {revision}' if revision else ''}")
            asked = {"prepare": prepare.model_dump(mode="json"), "source": source, "revision": revision}
            numbers = _run(json.dumps(asked), folder, hub_environment(config.hub))
            counts = ", ".join(f"{number} rows of {file}" for file, number in numbers.items())
            say(f"data.prepare: {name} made {counts} in {folder}")
    made = {file: str(path) for file in FILES if (path := folder / f"{file}.jsonl").is_file()}
    given = {file: path for file, path in made.items() if not getattr(config.data, file)}
    prepared = config.model_copy(update={"data": config.data.model_copy(update=given)})
    for setting in prepared.missing_data:
        raise ConfigError(
            f'data.prepare: {name} makes {", ".join(made)}, and mode "{config.mode}" needs data.{setting}: set '
            "this setting, or choose another preparation"
        )
    return prepared


def _commit_of(source: str, revision: str, hub: HubConfig) -> str:
    """The commit of a hub dataset at a revision. Returns `revision` unchanged if `source` is empty or a folder."""
    if not source or Path(source).exists() or COMMIT.fullmatch(revision):
        return revision
    return str(json.loads(ask_hub(["dataset", source, revision], hub_environment(hub)))["commit"])


def ask_hub(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run rollouts_core/data/hub_download.py in a process with this environment. Returns the standard output.

    Raises:
        ConfigError: the hub refused the request, or did not find the model or dataset.
    """
    command = [sys.executable, "-P", "-m", "rollouts_core.data.hub_download", *arguments]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(done.stderr.strip().rpartition("\n")[2])
    return done.stdout


def hub_environment(hub: HubConfig) -> dict[str, str]:
    """The environment variables of a process that downloads from the Hugging Face hub.

    Raises:
        ConfigError: the environment variable that must contain the hub token (`hub.token_variable`) is not set.
    """
    mirror = {"HF_ENDPOINT": hub.url.rstrip("/")} if hub.url else {}
    token = {HUB_TOKEN: read_key(hub.token_variable, "hub", name="token_variable")} if hub.token_variable else {}
    return {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **mirror, **token}


def _claim(folder: Path, store: Path) -> None:
    """Create the folder and mark the folder as used now, so that prune keeps it. Prune waits for the ledger's lock."""
    with Ledger(store / LEDGER_FILE) as ledger, ledger.transaction():
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)


def _run(asked: str, folder: Path, environment: Mapping[str, str]) -> dict[str, int]:
    with new_directory(folder) as made:
        command = [sys.executable, "-P", "-m", "rollouts_core.data.preparing", str(made)]
        done = subprocess.run(command, input=asked, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 2:
            raise DataError(done.stderr.strip().rpartition("\n")[2])
        if done.returncode != 0:
            raise DataError(f"data.prepare: its process ended with exit code {done.returncode}: {done.stderr[-2000:]}")
        numbers: dict[str, int] = json.loads(done.stdout.strip().rpartition("\n")[2])
        (made / RECORD).write_text(json.dumps({**json.loads(asked), "rows": numbers}, indent=1) + "\n")
    return numbers
