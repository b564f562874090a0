"""Find the model of a name, and the rows of an evaluation.

    base                              the start model of the configuration
    production, candidate             of the registry; small/production where the store has several lines
    small-3                           a registered model
    my-run-5793d50a, sft-0a1b/...     a run of the store; a stage, or one checkpoint of it
    ./folder, s3://bucket/folder      a Hugging Face checkpoint, or what a run published

Not here: registering and promoting (infra/registry.py), fetching (inputs.py). This module does not import prefect:
preflight uses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.registry import Alias, Model, current, models
from rollouts.infra.stores.object_store import is_url
from rollouts.tasks.candidate import check_whole
from rollouts.tasks.hub_models import bring_hub_model
from rollouts.tasks.inputs import bring_input
from rollouts.tasks.preparing import prepare_data
from rollouts_core.checkpoint import MANIFEST, find_checkpoint
from rollouts_core.config import Config, DataConfig, ModelConfig
from rollouts_core.config.messages import closest_name
from rollouts_core.errors import ConfigError

BASE = "base"
ALIAS = re.compile(rf"(?:(?P<line>[^/]+)/)?(?P<alias>{'|'.join(Alias)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """The model that a name stands for at this moment."""

    title: str
    """For people: as it was named, and what that is."""
    model: ModelConfig
    """How it is loaded; its path is a folder of this machine."""


def find_named_model(given: str, config: Config, store: Path, say: Callable[[str], None]) -> NamedModel:
    """The model that a name stands for; one that a URL names lies in the store then.

    Args:
        config: whose start model `base` is, and whose code of models is trusted or not.
        say: told what was fetched, a sentence each.

    Raises:
        InputError: the model does not exist, or it is not whole; one sentence.
        InfraError: an object store does not answer, or has nothing there.
    """
    path = config.model.path if given == BASE else given
    if is_url(path):
        return NamedModel(title=given, model=_load_from(bring_input(path, store, say), config))
    if given == BASE:
        return NamedModel(title=given, model=bring_hub_model(config, store, say).model)
    if (registered := _find_registered(given, store)) is not None:
        check_whole(registered, store)
        title = given if given == registered.name else f"{given} ({registered.name})"
        return NamedModel(title=title, model=_load_from(store / registered.checkpoint, config))
    places = (store / "runs" / given, store / "stages" / given, Path(given))
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        raise ConfigError(_unknown(given, store))
    checkpoint = _checkpoint_in(folder.resolve())
    own = checkpoint.is_relative_to(store) and checkpoint.relative_to(store).as_posix().removeprefix("stages/")
    return NamedModel(title=own or str(checkpoint), model=_load_from(checkpoint, config))


def with_heldout(config: Config, data: str, store: Path, say: Callable[[str], None]) -> Config:
    """The settings that an evaluation reads, with its rows here: `data`, or the configuration's own if that is "".

    Raises:
        ConfigError: a file that does not exist.
        InfraError: as `find_named_model`.
    """
    heldout = data or config.data.heldout or prepare_data(config, store, say).data.heldout
    path = str(bring_input(heldout, store, say)) if is_url(heldout) else heldout
    if Path(path).is_absolute() and not Path(path).exists():
        raise ConfigError(f"{'evaluate.data' if data else 'data.heldout'}: {path} does not exist")
    columns = {} if data else config.data.columns_of("heldout")
    rows = DataConfig(heldout=path, columns={"heldout": columns} if columns else {})
    return config.model_copy(update={"data": rows})


def _find_registered(given: str, store: Path) -> Model | None:
    """The model of the registry, or None if the registry does not have the name."""
    every, match = _registered(store), ALIAS.fullmatch(given)
    if match is None:
        return next((each for each in every if each.name == given), None)
    lines = sorted({each.line for each in every})
    if match["line"] and match["line"] not in lines:
        return None
    if not match["line"] and len(lines) > 1:
        raise ConfigError(
            f"the store has several lines of models: name one, as {lines[0]}/{match['alias']}; there are "
            f"{', '.join(lines)}"
        )
    found = None
    if lines:
        with Ledger(store / LEDGER_FILE) as ledger:
            found = current(ledger, match["line"] or lines[0], Alias(match["alias"]))
    if found is None:
        raise ConfigError(f"no model is {given}: `rollouts models` shows what there is")
    return found


def _registered(store: Path) -> list[Model]:
    if not (store / LEDGER_FILE).is_file():
        return []
    with Ledger(store / LEDGER_FILE) as ledger:
        return models(ledger)


def _checkpoint_in(folder: Path) -> Path:
    """The checkpoint of a run's folder, the folder itself if it holds a model, or the newest checkpoint in it."""
    if (folder / "checkpoint" / MANIFEST).is_file():
        return folder / "checkpoint"
    return folder if (folder / "config.json").is_file() else find_checkpoint(folder)


def _load_from(path: Path, config: Config) -> ModelConfig:
    return config.model.at(path)


def _unknown(given: str, store: Path) -> str:
    known = [BASE, *Alias, *(path.name for folder in ("runs", "stages") for path in (store / folder).glob("*"))]
    known += [model.name for model in _registered(store)]
    hint = closest_name(given, known)
    return (
        f"there is no model {given}{hint if 'did you mean' in hint else ';'} name base, production or candidate, a "
        "registered model, a run or stage of the store, a folder, or a URL"
    )
