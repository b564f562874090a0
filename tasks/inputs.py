"""Download models and data with URLs into the store, and return their paths.

    model.path, data.*, training.*.resume_from,    s3://bucket/...  ──>  <store>/inputs/<digest>/<name>
    rollout.rewards.*.model                                              <store>/inputs/<digest>/.<name>.origin

The digest is computed from the entity tags of the objects, or from the file list of a manifest. Changed objects have
another digest and are downloaded again. The fingerprint of a stage depends on the content of the files, not on the URL.

Not here: the download itself (infra/stores/download.py). This module must not import prefect, because preflight runs
before Prefect's environment is set.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from rollouts.infra.errors import InfraError, StoreUnavailableError
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.stores.download import WantedFile, digest_of, download, find_wanted
from rollouts.infra.stores.object_store import ObjectStore, is_url
from rollouts.tasks.hub_models import bring_hub_model, needs_download
from rollouts.tasks.preparing import prepare_data
from rollouts.tasks.store_paths import INPUTS
from rollouts_core.config import Config
from rollouts_core.mistakes import Mistakes
from rollouts_core.system.files import write_json

_DIGEST_CHARS = 16
_MAX_NAME_CHARS = 60
_DATA = ("sft_eval", "prompts", "rollouts", "selection", "heldout")


def named_urls(config: Config) -> dict[str, str]:
    """The URLs in the settings that name models and data, by the names of these settings."""
    data, training = config.data, config.training
    given = {"model.path": config.model.path}
    if isinstance(data.sft, str):
        given["data.sft"] = data.sft
    else:
        given |= {f"data.sft.{index}": each.path for index, each in enumerate(data.sft)}
    given |= {f"data.{name}": getattr(data, name) for name in _DATA}
    given |= {f"training.{name}.resume_from": settings.resume_from for name, settings in training}
    given |= {f"rollout.rewards.{index}": each.model_folder for index, each in enumerate(config.rollout.rewards)}
    return {setting: url for setting, url in given.items() if is_url(url)}


def has_inputs_to_bring(config: Config) -> bool:
    """True if an input of the configuration has to be downloaded or prepared."""
    return bool(named_urls(config)) or bool(config.data.prepare.name) or needs_download(config)


def bring_inputs(config: Config, store: Path, say: Callable[[str], None], mistakes: Mistakes | None = None) -> Config:
    """Download all inputs with URLs. Returns the configuration with paths in the store instead of the URLs.

    Data files that `data.prepare` makes, and a hub model that inference engines serve, get paths in the store, too.

    Args:
        say: receives one sentence per download.
        mistakes: collects the errors of all settings. A failed setting keeps its URL. Without `mistakes`, the first
            error is raised.

    Raises:
        InfraError: a URL cannot be downloaded.
        InputError: the data cannot be prepared, or the hub does not deliver the model.
    """
    with nullcontext() if mistakes is None else mistakes.at("data.prepare"):
        config = prepare_data(config, store, say)
    with nullcontext() if mistakes is None else mistakes.at("model.path"):
        config = bring_hub_model(config, store, say)
    places = _bring_each(named_urls(config), store, say, mistakes)

    def placed(given: str) -> str:
        return places.get(given, given)

    data, training = config.data, config.training
    demonstrations = (
        placed(data.sft)
        if isinstance(data.sft, str)
        else tuple(each.model_copy(update={"path": placed(each.path)}) for each in data.sft)
    )
    resumed = {
        name: settings.model_copy(update={"resume_from": placed(settings.resume_from)}) for name, settings in training
    }
    graders = tuple(
        each.model_copy(update={"model": placed(each.model)}) if each.model_folder else each
        for each in config.rollout.rewards
    )
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": placed(config.model.path)}),
            "data": data.model_copy(
                update={"sft": demonstrations, **{name: placed(getattr(data, name)) for name in _DATA}}
            ),
            "training": training.model_copy(update=resumed),
            "rollout": config.rollout.model_copy(update={"rewards": graders}),
        }
    )


def _bring_each(
    named: Mapping[str, str], store: Path, say: Callable[[str], None], mistakes: Mistakes | None
) -> dict[str, str]:
    """Download the content of each URL. Returns the local paths by URL.

    Each URL is tried only once, even if several settings name it. If a bucket does not answer, its other URLs fail
    without a request, because each request would take minutes.
    """
    places: dict[str, str] = {}
    failures: dict[str, InfraError] = {}  # the keys are failed URLs and unreachable buckets
    for setting, url in named.items():
        if url in places:
            continue
        with nullcontext() if mistakes is None else mistakes.at(setting):
            if failure := failures.get(url) or failures.get(_bucket_of(url)):
                raise failure
            try:
                places[url] = str(bring_input(url, store, say))
            except InfraError as error:
                failures[_bucket_of(url) if isinstance(error, StoreUnavailableError) else url] = error
                raise
    return places


def _bucket_of(url: str) -> str:
    """The part of a URL that names the bucket. The URL of a local folder is returned unchanged."""
    bucket = re.match(r"[^:]+://[^/]+", url)
    return bucket[0] if bucket else url


def bring_input(url: str, store: Path, say: Callable[[str], None]) -> Path:
    """Download the content of a URL into the store, unless the store has it already. Returns the local path."""
    source = ObjectStore(url)
    wanted = find_wanted(source)
    path = _place_of(source, wanted, store)
    with Ledger(store / LEDGER_FILE) as ledger, ledger.transaction():  # under this lock, prune cannot remove the folder
        path.parent.mkdir(parents=True, exist_ok=True)
        os.utime(path.parent)
        write_json(_origin_file(path), {"url": source.url})
        is_there = path.exists()
    if not is_there:
        download(source, wanted, path)
        say(f"{url}: fetched {sum(each.size for each in wanted) / 1e6:.1f} MB to {path}")
    return path


def find_origin(path: Path, store: Path) -> str:
    """The URL from which the input at a path was downloaded. Empty if the URL is unknown."""
    root = _input_of(path, store)
    if root is None:
        return ""
    try:
        return str(json.loads(_origin_file(root).read_text())["url"])
    except FileNotFoundError:  # an older version downloaded the input without saving the URL
        return ""


def keys_at_origin(origin: ObjectStore, path: Path, store: Path) -> dict[Path, str]:
    """The object store keys of a downloaded input's files, by local path.

    Raises:
        StoreUnavailableError: the objects have changed since the download.
    """
    wanted = find_wanted(origin)
    root = _place_of(origin, wanted, store)
    if root != _input_of(path, store):
        raise StoreUnavailableError(f"{origin.url} has changed since it was fetched")
    return {root / each.name if each.key else root: each.key for each in wanted}


def _place_of(source: ObjectStore, wanted: Sequence[WantedFile], store: Path) -> Path:
    return store.resolve() / INPUTS / digest_of(wanted)[:_DIGEST_CHARS] / source.name


def _input_of(path: Path, store: Path) -> Path | None:
    """The folder or file <store>/inputs/<digest>/<name> that contains a path. None for a path outside of inputs/."""
    inputs, resolved = store.resolve() / INPUTS, path.resolve()
    parts = resolved.relative_to(inputs).parts if resolved.is_relative_to(inputs) else ()
    return inputs.joinpath(*parts[:2]) if len(parts) >= 2 else None


def _origin_file(path: Path) -> Path:
    """The file that stores an input's URL. The file lies beside the input, so that prune removes both together."""
    return path.with_name(f".{path.name[:_MAX_NAME_CHARS]}.origin")
