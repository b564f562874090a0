"""Bring models and data with URLs into the store, and return their paths.

    model.path, data.*, training.*.resume_from,    s3://bucket/...  ──>  <store>/inputs/<digest>/<name>
    rollout.rewards.*.model                                              <store>/inputs/<digest>/.<name>.origin

The digest is that of the store's entity tags, or of what a manifest lists: what changed there is fetched anew, what did
not is fetched once. Stages go by the content of what was brought, as with any other folder or file.

Not here: how it is fetched (infra/stores/download.py). This module does not import prefect: preflight uses it.
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
    """The URLs among the models and data of a configuration, by the settings that name them."""
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
    """Whether something that the configuration names has to be fetched or made."""
    return bool(named_urls(config)) or bool(config.data.prepare.name) or needs_download(config)


def bring_inputs(config: Config, store: Path, say: Callable[[str], None], mistakes: Mistakes | None = None) -> Config:
    """The configuration with paths in the store in the place of URLs; what they name lies there then.

    Data files that `data.prepare` makes, and a model of the hub that engines serve, get paths in the store, too.

    Args:
        say: told what was fetched, a sentence each.
        mistakes: takes the error of each setting, whose URL stays; without it the first one is raised.

    Raises:
        InfraError: one sentence about a URL that cannot be fetched.
        InputError: one sentence; the data cannot be prepared, or the hub does not deliver the model.
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
    """Fetch the content of each URL; returns the paths by their URLs.

    Each URL is asked for once, whether it can be fetched or not.
    A bucket that does not answer is not asked for another URL, because the drivers try for minutes each time.
    """
    places: dict[str, str] = {}
    failures: dict[str, InfraError] = {}  # by URLs, and by buckets that do not answer
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
    """The URL of the bucket that has a URL's content; of a folder of this machine its own URL."""
    bucket = re.match(r"[^:]+://[^/]+", url)
    return bucket[0] if bucket else url


def bring_input(url: str, store: Path, say: Callable[[str], None]) -> Path:
    """Fetch the content of a URL into the store, unless it is there; returns its path."""
    source = ObjectStore(url)
    wanted = find_wanted(source)
    path = _place_of(source, wanted, store)
    with Ledger(store / LEDGER_FILE) as ledger, ledger.transaction():  # under its lock, prune moves folders away
        path.parent.mkdir(parents=True, exist_ok=True)
        os.utime(path.parent)
        write_json(_origin_file(path), {"url": source.url})
        is_there = path.exists()
    if not is_there:
        download(source, wanted, path)
        say(f"{url}: fetched {sum(each.size for each in wanted) / 1e6:.1f} MB to {path}")
    return path


def find_origin(path: Path, store: Path) -> str:
    """The URL that the input came from of which something lies at a path; empty if it is not known."""
    root = _input_of(path, store)
    if root is None:
        return ""
    try:
        return str(json.loads(_origin_file(root).read_text())["url"])
    except FileNotFoundError:  # fetched by an older version
        return ""


def keys_at_origin(origin: ObjectStore, path: Path, store: Path) -> dict[Path, str]:
    """The keys of an input's files in the store that it came from, by their paths here.

    Raises:
        StoreUnavailableError: something else lies there now.
    """
    wanted = find_wanted(origin)
    root = _place_of(origin, wanted, store)
    if root != _input_of(path, store):
        raise StoreUnavailableError(f"{origin.url} has changed since it was fetched")
    return {root / each.name if each.key else root: each.key for each in wanted}


def _place_of(source: ObjectStore, wanted: Sequence[WantedFile], store: Path) -> Path:
    return store.resolve() / INPUTS / digest_of(wanted)[:_DIGEST_CHARS] / source.name


def _input_of(path: Path, store: Path) -> Path | None:
    """The input that a path is part of: <store>/inputs/<digest>/<name>."""
    inputs, resolved = store.resolve() / INPUTS, path.resolve()
    parts = resolved.relative_to(inputs).parts if resolved.is_relative_to(inputs) else ()
    return inputs.joinpath(*parts[:2]) if len(parts) >= 2 else None


def _origin_file(path: Path) -> Path:
    """Beside the input, so that what removes one removes both."""
    return path.with_name(f".{path.name[:_MAX_NAME_CHARS]}.origin")
