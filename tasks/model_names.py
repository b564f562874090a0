"""Find the model that a name from the user refers to, and find the rows of an evaluation.

    base                              the start model of the configuration
    production, candidate             an alias in the registry (small/production if the store has several lines)
    small-3                           a registered model
    my-run-5793d50a, sft-0a1b/...     a run, a stage, or one checkpoint of a stage in the store
    ./folder, s3://bucket/folder      a Hugging Face checkpoint, or the published checkpoint of a run

Not here: registering and promoting models (infra/registry.py), downloading models (inputs.py). This module must not
import prefect, because preflight runs before Prefect's environment is set.
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
    """The model that a name from the user refers to, when the name is looked up."""

    title: str
    """The model's name in messages, for example "production (small-3)", or the checkpoint's path."""
    model: ModelConfig
    """The settings to load the model, with a local folder as path."""


def find_named_model(given: str, config: Config, store: Path, say: Callable[[str], None]) -> NamedModel:
    """Find the model that a name refers to. A model with a URL is downloaded into the store.

    Args:
        given: "base", an alias, a registered name, a run, a stage, a path or a URL (see the head of this module).
        config: `config.model` is the model "base". `config.model.trust_remote_code` applies to all models.
        say: receives one sentence per download.

    Raises:
        InputError: the model does not exist or is damaged.
        InfraError: an object store does not answer, or has no object at the URL.
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
    """The configuration with an evaluation's rows as its only data.

    Args:
        data: path or URL of the rows; empty uses `config.data.heldout`.

    Raises:
        ConfigError: the file with the rows does not exist.
        InfraError: an object store does not answer, or has no object at the URL.
    """
    heldout = data or config.data.heldout or prepare_data(config, store, say).data.heldout
    path = str(bring_input(heldout, store, say)) if is_url(heldout) else heldout
    if Path(path).is_absolute() and not Path(path).exists():
        raise ConfigError(f"{'evaluate.data' if data else 'data.heldout'}: {path} does not exist")
    columns = {} if data else config.data.columns_of("heldout")
    rows = DataConfig(heldout=path, columns={"heldout": columns} if columns else {})
    return config.model_copy(update={"data": rows})


def _find_registered(given: str, store: Path) -> Model | None:
    """Look up a model in the registry by its name or alias. Returns None if the registry does not have the name.

    Raises:
        ConfigError: the alias has no model, or several lines have the alias.
    """
    every, match = _registered(store), ALIAS.fullmatch(given)
    if match is None:
        return next((each for each in every if each.name == given), None)
    lines = sorted({each.line for each in every})
    if match["line"] and match["line"] not in lines:
        return None
    if not match["line"] and len(lines) > 1:
        raise ConfigError(
            f"the store has several lines of models: name one, for example {lines[0]}/{match['alias']}; the lines are "
            f"{', '.join(lines)}"
        )
    found = None
    if lines:
        with Ledger(store / LEDGER_FILE) as ledger:
            found = current(ledger, match["line"] or lines[0], Alias(match["alias"]))
    if found is None:
        raise ConfigError(f"no model has the alias {given}: `rollouts models` lists all models")
    return found


def _registered(store: Path) -> list[Model]:
    if not (store / LEDGER_FILE).is_file():
        return []
    with Ledger(store / LEDGER_FILE) as ledger:
        return models(ledger)


def _checkpoint_in(folder: Path) -> Path:
    """Find the checkpoint of a model by its folder.

    The folder may be a run's folder, a checkpoint, or a stage's folder. A stage's folder gives its newest checkpoint.
    """
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
        f"there is no model {given}{hint if 'did you mean' in hint else ';'} give base, production or candidate, a "
        "registered model, a run or stage of the store, a folder, or a URL"
    )
