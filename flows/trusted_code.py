"""Refuse untrusted code, machines and secrets in settings of runs that were requested through Prefect (a form, a
schedule or HTTP).

    kind        settings, and the text that must be trusted
    function    rollout.reward_fn and similar settings: the module, or its package
    program     an interpreter, an argument, a command, packages to install, an image, OpenSSH's configuration (which
                may contain commands), a machine over SSH (which gets code, data and keys), the machines to jump through
                (which choose the machine behind them): the exact value
    secret      an environment variable and its destination: VARIABLE@URL, or VARIABLE for the run's own engines
    model       with trust_remote_code, which runs code in the model's folder: the exact path in model.path,
                evaluate.model and evaluate.against, except for models that a run of the store made

Settings that need trust are marked with their kind (`needs_trust`). Without this check, every user who may start a run
could call any function of any installed package. A value is trusted if it is in a configuration that was given to
`rollouts up` in a shell of this machine, or in the comma-separated list ROLLOUTS_TRUSTED_CODE.

Not here: `rollouts run CONFIG`, which trusts the user's configuration; resolving names of functions (rollouts_core).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from rollouts.flows.deployments import load_deployments
from rollouts.flows.evaluate_settings import EvaluateConfig
from rollouts.flows.store import STORE_VARIABLE
from rollouts.infra.node import SYSTEM_PYTHON, NodeSettings
from rollouts.infra.stores.object_store import is_url
from rollouts.tasks.model_names import BASE
from rollouts.tasks.store_paths import RUNS, STAGES
from rollouts_core.config import Config, name_of_function
from rollouts_core.errors import ConfigError

VARIABLE = "ROLLOUTS_TRUSTED_CODE"
OWN_MODULES = (
    *("rollouts_core.rewards", "rollouts_core.filters"),
    *("rollouts_core.environments.arithmetic", "rollouts_core.environments.calculator"),
    *("rollouts_core.environments.code", "rollouts_core.environments.countdown"),
    *("rollouts_core.environments.json_schema", "rollouts_core.environments.math"),
    *("rollouts_core.environments.multiple_choice", "rollouts_core.environments.text_transformation"),
)
"""This project's modules with graders and filters, which are always trusted. Other modules of this project are not
trusted, because they can start programs, delete folders or write files."""
SCORED = ("evaluate.model", "evaluate.against")


def check_trusted(
    config: Config,
    evaluate: EvaluateConfig | None = None,
    store: Path | None = None,
    node: NodeSettings | None = None,
) -> None:
    """Raise ConfigError if the settings contain values that need trust but are not trusted, with a line per value.

    Args:
        evaluate: the settings of an evaluation, whose models are checked, too.
        store: the run's store. Models that runs of this store made are trusted.
        node: the run's settings of the node.
    """
    models = models_named_by(config, evaluate)
    if store is not None and is_served(store):
        made = [setting for setting in SCORED if setting in models and is_made_in(store, models[setting])]
        models = {setting: model for setting, model in models.items() if setting not in made}
    marked = find_marked(config) + (find_marked(node, "node") if node is not None else [])
    named = [*marked, *(Named(setting=setting, kind="model", value=model) for setting, model in models.items())]
    if not named:
        return
    trusted = {*listed(), *given_to_up()}
    if untrusted := [each for each in named if not is_trusted(each, trusted)]:
        raise ConfigError("\n".join(map(_refuse, untrusted)))


def is_node_trusted(node: NodeSettings) -> bool:
    """Whether a run that was requested through Prefect may use a node with these settings."""
    trusted = {*listed(), *given_to_up()}
    return all(is_trusted(each, trusted) for each in find_marked(node, "node"))


def _refuse(named: Named) -> str:
    what = "names code of" if named.kind in ("function", "model") else "is"
    return (
        f"{named.setting} {what} {named.value}, which is not trusted in a run that was requested through Prefect: "
        f"list it in the variable {VARIABLE} where runs are served, or give a configuration that names it to "
        "rollouts up"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A value of a setting that needs trust."""

    setting: str
    kind: str
    """Kind of the value: function, program, secret or model (explained at the top of this file)."""
    value: str


def is_trusted(named: Named, trusted: Collection[str]) -> bool:
    """True if the value is trusted. If a package is trusted, all its modules are trusted."""
    if named.kind != "function":
        return named.value in trusted
    if named.value in OWN_MODULES:
        return True
    return any(named.value == each or named.value.startswith(f"{each}.") for each in trusted)


def find_marked(settings: BaseModel, place: str = "") -> list[Named]:
    """The values that need trust in a record of settings and in its nested records. Defaults need no trust.

    Args:
        place: dotted name of the setting that contains the record.
    """
    found: list[Named] = []
    for name, field in type(settings).model_fields.items():
        setting, value = f"{place}.{name}".lstrip("."), getattr(settings, name)
        mark = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        if kind := str(mark.get("needs_trust", "")):
            if value == field.default:
                continue
            target = str(getattr(settings, str(mark["sent_to"]))) if "sent_to" in mark else ""
            found += [Named(setting=at, kind=kind, value=word) for at, word in _words_of(setting, kind, value, target)]
            continue
        several = value if isinstance(value, tuple | list) else [value]
        for index, each in enumerate(several):
            if isinstance(each, BaseModel):
                found += find_marked(each, setting if each is value else f"{setting}.{index}")
    return found


def _words_of(setting: str, kind: str, value: Any, target: str) -> list[tuple[str, str]]:  # Any: of every field
    """The parts of a marked setting's value that need trust, each with the setting's name.

    Empty texts, and numbers in a list of arguments, need no trust. A switch that is on is trusted by its name.
    """
    if isinstance(value, bool):
        return [(setting, setting.rpartition(".")[2])] if value else []
    if kind == "function":
        module, colon, _ = name_of_function(value).partition(":")
        return [(setting, module)] if colon else []
    if kind == "secret":
        return [(setting, f"{value}@{target}" if target else value)] if value else []
    if isinstance(value, str):
        return [(setting, value)] if value not in ("", SYSTEM_PYTHON) else []
    return [(f"{setting}.{i}", word) for i, word in enumerate(value) if word and not _is_number(word)]


def models_named_by(config: Config, evaluate: EvaluateConfig | None) -> dict[str, str]:
    """The models whose folders may contain code that a run executes, by the names of their settings."""
    if not config.model.trust_remote_code:
        return {}
    scored = dict(zip(SCORED, (evaluate.model, evaluate.against), strict=True)) if evaluate else {}
    others = {setting: given for setting, given in scored.items() if given not in ("", BASE)}
    return {"model.trust_remote_code": config.model.path, **others}


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def is_served(store: Path) -> bool:
    """Whether this process serves runs of this store. Models of other stores are not trusted."""
    served = os.environ.get(STORE_VARIABLE)
    return not served or Path(served).resolve() == store.resolve()


def is_made_in(store: Path, given: str) -> bool:
    """Whether a model's name refers to a result of the store, and not to another folder or a URL."""
    if is_url(given):
        return False
    own = [store.resolve() / kind for kind in (RUNS, STAGES)]
    folder = next((each for each in (*(kind / given for kind in own), Path(given)) if each.is_dir()), None)
    return folder is None or any(
        folder.resolve().is_relative_to(kind) for kind in own
    )  # without a folder, `given` names a registered model


def listed() -> list[str]:
    """The values in the environment variable ROLLOUTS_TRUSTED_CODE."""
    return [name for each in os.environ.get(VARIABLE, "").split(",") if (name := each.strip())]


def given_to_up() -> set[str]:
    """The values of settings that need trust, from all configurations that were given to `rollouts up`."""
    if not (store := os.environ.get(STORE_VARIABLE)):
        return set()
    code: set[str] = set()
    for deployment in load_deployments(Path(store) / "prefect").values():
        with suppress(KeyError, ValidationError):  # no configuration (flows/tools.py), or one of another version
            config = Config.model_validate(deployment.parameters["config"])
            scored = deployment.parameters.get("evaluate")
            evaluate = EvaluateConfig.model_validate(scored) if scored else None
            code.update(each.value for each in find_marked(config))
            code.update(models_named_by(config, evaluate).values())
        with suppress(KeyError, ValidationError):  # the deployment has no node, or is of another version
            node = TypeAdapter[NodeSettings](NodeSettings).validate_python(deployment.parameters["node"])
            code.update(each.value for each in find_marked(node))
    return code
