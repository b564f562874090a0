"""Which code a run may name that was asked for through Prefect: by a form, a schedule, or HTTP.

    function    rollout.reward_fn and its like, as package.module:function
    model       model.path with trust_remote_code, which runs what lies in the model's folder, and then also what
                evaluate.model and evaluate.against name, but for what runs of the store made
    program     rollout.engine.python and router_python, and every word but numbers in rollout.engine.extra_args:
                servers have arguments that name modules, or let a model's own code run; and node.ssh_config, in
                which OpenSSH finds commands to run here

Without this list, whoever may start a run, or writes deployments on a shared server, could have any function of any
installed package called. Trusted is what configurations name that were given to `rollouts up`, by somebody with a shell
on this machine, and what ROLLOUTS_TRUSTED_CODE lists: packages, and models by their paths, separated by commas.

Not here: `rollouts run CONFIG`, whose configuration is somebody's own; that names can be resolved (rollouts_core).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.deployments import load_deployments
from flows.evaluate_settings import EvaluateConfig
from flows.store import STORE_VARIABLE
from infra.node import NodeSettings
from infra.stores.object_store import is_url
from rollouts_core.config import Config
from rollouts_core.errors import ConfigError
from tasks.model_names import BASE
from tasks.places import RUNS, STAGES

VARIABLE = "ROLLOUTS_TRUSTED_CODE"
OWN_PACKAGE = "rollouts_core"
SCORED = ("evaluate.model", "evaluate.against")


def check_trusted(
    config: Config,
    evaluate: EvaluateConfig | None = None,
    store: Path | None = None,
    node: NodeSettings | None = None,
) -> None:
    """Raise ConfigError for the first code of somebody that the settings name and nobody here trusts.

    Args:
        evaluate: which models are loaded in place of the configuration's own.
        store: of the run, whose models need no trust beyond that of the configurations that made them.
        node: on which it is to run.
    """
    modules, models = modules_named_by(config), models_named_by(config, evaluate)
    if store is not None and is_served(store):
        made = [setting for setting in SCORED if setting in models and is_made_in(store, models[setting])]
        models = {setting: model for setting, model in models.items() if setting not in made}
    programs = programs_named_by(config)
    if node is not None:
        programs |= ssh_configs_of(node.model_dump(mode="json"))
    if not modules and not models and not programs:
        return
    trusted = {OWN_PACKAGE, *listed(), *given_to_up()}
    refused = {
        setting: code
        for setting, code in modules.items()
        if not any(code == each or code.startswith(f"{each}.") for each in trusted)
    }
    exact = {**models, **programs}
    refused |= {setting: code for setting, code in exact.items() if code not in trusted - {OWN_PACKAGE}}
    for setting, code in refused.items():
        what = f"is {code}" if setting in programs else f"names code of {code}"
        raise ConfigError(
            f"{setting} {what}, which runs that are asked for through Prefect may not run here: list "
            f"it in the variable {VARIABLE} where runs are served, or give a configuration that names it to "
            "rollouts up"
        )


def modules_named_by(config: Config) -> dict[str, str]:
    """The modules of functions, by the settings that name them; with a package its modules are trusted."""
    return config.rollout.modules_named


def models_named_by(config: Config, evaluate: EvaluateConfig | None) -> dict[str, str]:
    """The models whose folders bring code that is run, by the settings that name them."""
    if not config.model.trust_remote_code:
        return {}
    scored = dict(zip(SCORED, (evaluate.model, evaluate.against), strict=True)) if evaluate else {}
    others = {setting: given for setting, given in scored.items() if given not in ("", BASE)}
    return {"model.trust_remote_code": config.model.path, **others}


def programs_named_by(config: Config) -> dict[str, str]:
    """The interpreters that engines are run by, and what may name code among their arguments, by the settings."""
    engine = config.rollout.engine
    words = {f"extra_args.{number}": word for number, word in enumerate(engine.extra_args) if not _is_number(word)}
    named = {"python": engine.python, "router_python": engine.router_python, **words}
    return {f"rollout.engine.{setting}": word for setting, word in named.items() if word}


def ssh_configs_of(node: Mapping[str, Any]) -> dict[str, str]:  # Any: JSON
    """The configurations of OpenSSH that a node and the others of its unit name, by the settings."""
    nodes = {"node": node}
    for kind in ("trainer_nodes", "engine_nodes"):
        nodes |= {f"node.{kind}.{number}": each for number, each in enumerate(node.get(kind, ()))}
    return {f"{place}.ssh_config": each["ssh_config"] for place, each in nodes.items() if each.get("ssh_config")}


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def is_served(store: Path) -> bool:
    """Whether runs of this process are for this store; whoever asks for a run may name another one."""
    served = os.environ.get(STORE_VARIABLE)
    return not served or Path(served).resolve() == store.resolve()


def is_made_in(store: Path, given: str) -> bool:
    """Whether the name of a model means what a run of the store made, and no folder or URL of somebody's."""
    if is_url(given):
        return False
    own = [store.resolve() / kind for kind in (RUNS, STAGES)]
    folder = next((each for each in (*(kind / given for kind in own), Path(given)) if each.is_dir()), None)
    return folder is None or any(folder.resolve().is_relative_to(kind) for kind in own)  # None: of the registry


def listed() -> list[str]:
    """What the environment trusts."""
    return [name for each in os.environ.get(VARIABLE, "").split(",") if (name := each.strip())]


def given_to_up() -> set[str]:
    """The code of the configurations that the process which serves this run was given."""
    if not (store := os.environ.get(STORE_VARIABLE)):
        return set()
    code: set[str] = set()
    for deployment in load_deployments(Path(store) / "prefect").values():
        with suppress(KeyError, ValidationError):  # it trains nothing, or another version made it
            config = Config.model_validate(deployment.parameters["config"])
            scored = deployment.parameters.get("evaluate")
            evaluate = EvaluateConfig.model_validate(scored) if scored else None
            code.update(modules_named_by(config).values(), models_named_by(config, evaluate).values())
            code.update(programs_named_by(config).values())
            code.update(ssh_configs_of(deployment.parameters.get("node", {})).values())
    return code
