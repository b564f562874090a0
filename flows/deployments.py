"""The deployments of a store's Prefect server: the presets, and the configurations given to `rollouts up`.

Not here: the process that runs them (serving.py), what a configuration may say (form.py).

    presets/*.toml, my.toml ──> <store>/prefect/deployments/<name>.json ──> a deployment, and the defaults of its form

This module does not import prefect: it runs before Prefect's environment is set.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollouts.flows.assignments import ALGORITHM, assign, forget_algorithm, key_of
from rollouts.flows.flow_names import EVALUATE_FLOW as EVALUATE_FLOW
from rollouts.flows.flow_names import FLOW as FLOW
from rollouts.flows.flow_names import RETRAIN_FLOW as RETRAIN_FLOW
from rollouts.flows.form import Pipeline, RunOptions, load_pipeline, name_of, parse_pipeline, with_present_kind
from rollouts.flows.own_server.lend import named_url
from rollouts.flows.store import STORE_VARIABLE
from rollouts.flows.tools import TOOLS
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.tasks.watch import check_sources, watched_sources
from rollouts_core.config import read_settings
from rollouts_core.errors import ConfigError
from rollouts_core.system.files import write_json

PRESETS = Path(__file__).resolve().parent / "presets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A way to run the pipeline, by name."""

    name: str
    description: str
    """What its page says; Markdown."""
    parameters: dict[str, Any]  # Any: JSON
    """Defaults of the form: config, node and run."""
    is_preset: bool = False
    flow: str = FLOW
    schedule: dict[str, Any] | None = None  # Any: JSON
    """When it runs by itself; the content of ScheduleConfig."""
    offered_at: float = 0.0
    """Time of its `rollouts up`, seconds since 1970. A later `up` registers it again, even if it was deleted in
    Prefect."""
    code_folders: tuple[str, ...] = ()
    """Folders that modules named in the configuration are imported from: its own, and the caller's."""

    @property
    def digest(self) -> str:
        """A digest that changes with any part of it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def preset_deployments(folder: Path, quickstart: Path) -> list[Deployment]:
    """The presets, with data files in `folder`; those of the quickstart are in a folder of its own."""
    made = []
    for path in sorted(PRESETS.glob("*.toml")):
        place = quickstart if path.stem == "quickstart" else folder
        pipeline = parse_pipeline(read_settings(path), place / path.name)
        once = _deployment(path.stem, pipeline, _leading_comment(path), is_preset=True)
        made += [once, _evaluation(once, pipeline)]
    return made


def tool_deployments() -> list[Deployment]:
    """Those that train nothing."""
    return [
        Deployment(
            name=tool.name,
            description=tool.description,
            parameters={tool.name: tool.defaults},
            is_preset=True,
            flow=tool.name,
            schedule=tool.schedule.model_dump(mode="json") if tool.schedule else None,
        )
        for tool in TOOLS.values()
    ]


def deployments_of(path: Path) -> list[Deployment]:
    """The deployments of the configuration in a file: its run, named after the file, its retraining, its evaluation.

    Raises:
        ConfigError: one sentence with the file, the key and what to do.
    """
    if name_of(path) in TOOLS:
        raise ConfigError(f"{path}: {name_of(path)} is the name of a deployment that there is already: rename the file")
    pipeline = load_pipeline(path)
    description = _leading_comment(path) or f"From {path.resolve()}."
    folders = tuple(str(folder.resolve()) for folder in (path.parent, Path.cwd()))
    once = replace(_deployment(name_of(path), pipeline, description, is_preset=False), code_folders=folders)
    evaluation = _evaluation(once, pipeline)
    if pipeline.retrain is None:
        return [once, evaluation]
    check_sources(watched_sources(pipeline.config, pipeline.retrain.sources))
    again = replace(
        once,
        name=retraining_name(once.name),
        flow=RETRAIN_FLOW,
        parameters=parameters_of(replace(pipeline, evaluate=None)),
        schedule=pipeline.schedule.model_dump(mode="json") if pipeline.schedule else None,
    )
    return [once, again, evaluation]


def check_names(deployments: Iterable[Deployment]) -> None:
    """Raise ConfigError where two have one name, of which only the last would be offered."""
    names = [each.name for each in deployments]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two configurations are named {doubled[0]}: a deployment is named after its file, so rename one"
        )


def retraining_name(name: str) -> str:
    """The name of the deployment that retrains the one of this name."""
    return f"{name}-retrain"


def offered_name(store: Path, name: str) -> str:
    """The name of a deployment of the store in Prefect.

    A server of PREFECT_API_URL also has deployments of other stores. With equal names, each store would do runs of the
    others.
    """
    if not named_url():
        return name
    with Ledger(store / LEDGER_FILE) as ledger:
        return f"{name}@{ledger.identity}"


def evaluation_name(name: str) -> str:
    """The name of the deployment that evaluates as the one of this name does."""
    return f"{name}-evaluate"


def save_deployments(home: Path, deployments: Iterable[Deployment]) -> None:
    """Write what is to be served; a preset does not replace a configuration of the user with its name.

    A configuration that had a retraining, and has none any more, keeps it without its schedule.

    Raises:
        ConfigError: one has the name of the retraining or evaluation of another configuration, which it would replace.
    """
    folder = home / "deployments"
    folder.mkdir(exist_ok=True)
    known = load_deployments(home)
    given = list(deployments)
    for each in given:
        if not each.is_preset and (other := known.get(each.name)) is not None and other.flow != each.flow:
            raise ConfigError(
                f"{each.name} is the name of a deployment that there is already, which does something else "
                f"({other.flow}): rename the configuration"
            )
    names = {each.name for each in given}
    dropped = [known.get(retraining_name(each.name)) for each in given if not each.is_preset and each.flow == FLOW]
    given += [
        replace(each, schedule=None)
        for each in dropped
        if each is not None and each.flow == RETRAIN_FLOW and each.name not in names
    ]
    for deployment in given:
        if deployment.is_preset and deployment.name in known and not known[deployment.name].is_preset:
            continue
        write_json(folder / f"{deployment.name}.json", asdict(deployment))


def load_deployments(home: Path) -> dict[str, Deployment]:
    """The deployments to serve, by name.

    Raises:
        ConfigError: a file is not one that `save_deployments` wrote.
    """
    found = {}
    for path in sorted((home / "deployments").glob("*.json")):
        try:
            content = json.loads(path.read_text())
            parameters = content["parameters"]
            if "node" in parameters:  # an earlier version may have written it
                parameters = {**parameters, "node": with_present_kind(parameters["node"])}
            folders = tuple(content.get("code_folders", ()))
            found[path.stem] = Deployment(**{**content, "parameters": parameters, "code_folders": folders})
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{path} is not a deployment ({error}): delete it") from error
    return found


def folders_of_deployment(offered: str | None) -> tuple[str, ...]:
    """The folders that a run of a deployment imports from, as `rollouts up` was given it; () for other runs.

    The store is the serving process's: parameters of a run may name another store.
    """
    if offered is None or not (store := os.environ.get(STORE_VARIABLE)):
        return ()
    known = load_deployments(Path(store) / "prefect").get(offered.partition("@")[0])
    return tuple(known.code_folders) if known else ()


def parameters_for(store: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    """Parameters whose run keeps everything in this store, wherever it was moved."""
    return {
        name: {**section, "store": str(store.resolve())} if name == "run" or name in TOOLS else section
        for name, section in parameters.items()
    }


TABLES_OF_FLOWS = {"retrain": RETRAIN_FLOW, "evaluate": EVALUATE_FLOW, "schedule": ""}
"""Whose parameters have these tables of a file."""
_WHERE_ELSE = {
    "retrain": "the one whose name ends with -retrain has",
    "evaluate": "the one whose name ends with -evaluate has",
    "schedule": "which belongs into the file: change it there, and say `rollouts up` again",
}


def overridden(
    flow: str,
    parameters: Mapping[str, Any],  # Any: JSON
    assignments: Iterable[str],
) -> dict[str, Any]:
    """Parameters of a deployment of this flow with settings replaced; an assignment is `key=value`, a key of a file.

    A value is read as TOML or JSON, else as text: training.rl.num_steps=10, run.name=second. A new algorithm replaces
    all settings of the former algorithm, even changed ones.

    Raises:
        ConfigError: one sentence; the key is not known, or the value does not fit.
    """
    tables = {name: section for name, section in parameters.items() if name != "config"}
    settings = json.loads(json.dumps({**parameters["config"], **tables}))
    given = list(assignments)
    if ALGORITHM in map(key_of, given):
        forget_algorithm(settings)
    for assignment in given:
        key = key_of(assignment)
        if (table := key.partition(".")[0]) in TABLES_OF_FLOWS and TABLES_OF_FLOWS[table] != flow:
            raise ConfigError(f"{key}: this deployment has no {table}, {_WHERE_ELSE[table]}")
        assign(settings, assignment)
    pipeline = parse_pipeline(settings, Path("command line"))
    return parameters_of(pipeline)


def parameters_of(pipeline: Pipeline) -> dict[str, Any]:  # Any: JSON
    """The parameters of the flow, as Prefect keeps them."""
    parts: dict[str, BaseModel] = {"config": pipeline.config, "node": pipeline.node, "run": pipeline.run}
    if pipeline.retrain is not None:
        parts["retrain"] = pipeline.retrain
    if pipeline.evaluate is not None:
        parts["evaluate"] = pipeline.evaluate
    return {name: part.model_dump(mode="json") for name, part in parts.items()}


def _deployment(name: str, pipeline: Pipeline, description: str, *, is_preset: bool) -> Deployment:
    parameters = parameters_of(replace(pipeline, retrain=None, evaluate=None))
    return Deployment(name=name, description=description, parameters=parameters, is_preset=is_preset)


def _evaluation(once: Deployment, pipeline: Pipeline) -> Deployment:
    """The deployment that scores models with the settings of a run, as the run does at its end."""
    parameters = parameters_of(replace(pipeline, retrain=None, run=evaluation_options(pipeline.run)))
    name = evaluation_name(once.name)
    said = f"Score a model, and compare it with another, as {once.name} does at its end.\n\n{once.description}"
    return replace(once, name=name, flow=EVALUATE_FLOW, parameters=parameters, description=said)


def evaluation_options(run: RunOptions) -> RunOptions:
    """The options of a run for its evaluation, which makes no checkpoint that could be published or registered."""
    cleared = {"fresh": (), "report_to": (), "publish": "", "publish_checkpoints": False, "register_as": ""}
    return run.model_copy(update={"name": evaluation_name(run.name)[-64:].lstrip("._-"), **cleared})


def _leading_comment(path: Path) -> str:
    """The comment at the top of a TOML file, as text that keeps its columns."""
    if path.suffix != ".toml":
        return ""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "```text\n" + "\n".join(lines) + "\n```" if lines else ""
