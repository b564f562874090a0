"""The deployments of a store's Prefect server: the presets, and the configurations given to `rollouts up`.

Not here: the process that starts their runs (serving.py), the settings of a configuration (form.py).

    presets/*.toml, my.toml ──> <store>/prefect/deployments/<name>.json ──> a deployment, and the defaults of its form

This module must not import prefect, because it runs before Prefect's environment variables are set.
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
from rollouts.flows.flow_names import SHORT_FORM as SHORT_FORM
from rollouts.flows.form import Pipeline, RunOptions, load_pipeline, name_of, parse_pipeline, with_present_kind
from rollouts.flows.own_server.lend import named_url
from rollouts.flows.short_form import form_values, is_short, with_named_store
from rollouts.flows.store import STORE_VARIABLE
from rollouts.flows.tools import TOOLS
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.tasks.watch import check_sources, watched_sources
from rollouts_core.config import read_settings
from rollouts_core.errors import ConfigError
from rollouts_core.system.files import write_json

PRESETS = Path(__file__).resolve().parent / "presets"
TAGS = {FLOW: "train", RETRAIN_FLOW: "retrain", EVALUATE_FLOW: "evaluate"}
"""The first tag of a deployment in Prefect, by its flow. Deployments of all other flows have the tag upkeep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The content of a Prefect deployment: a flow, its parameters and its schedule, under a name."""

    name: str
    description: str
    """Text of the deployment's page, in Markdown."""
    parameters: dict[str, Any]  # Any: JSON
    """Defaults of the form: config, node and run, or the fields of the short form."""
    is_preset: bool = False
    flow: str = FLOW
    schedule: dict[str, Any] | None = None  # Any: JSON
    """Schedule of the deployment, as the fields of ScheduleConfig."""
    offered_at: float = 0.0
    """When `rollouts up CONFIG` last wrote the deployment, in seconds since 1970. A new time changes the digest, so
    that the deployment is registered again, even if a user deleted it in Prefect."""
    code_folders: tuple[str, ...] = ()
    """Folders from which runs import the user's modules: the configuration's folder, and the current folder of
    `rollouts up`."""

    @property
    def is_short(self) -> bool:
        """Whether the deployment's form in Prefect is the short form, with fields for only the usual settings."""
        return is_short(self.parameters)

    @property
    def python_flow(self) -> str:
        """The key of the flow function. The key differs from the flow's name in Prefect only for the short form."""
        return SHORT_FORM if self.is_short else self.flow

    @property
    def tags(self) -> list[str]:
        """The tags of the deployment and of its runs in Prefect."""
        kind = TAGS.get(self.flow, "upkeep")
        return [kind, "short-form" if self.is_short else "every-setting"] if self.flow == FLOW else [kind]

    @property
    def digest(self) -> str:
        """A hash of all fields, to notice a change of the deployment."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def preset_deployments(folder: Path, quickstart: Path) -> list[Deployment]:
    """The deployments of the presets.

    Args:
        folder: relative paths of data in the presets start here.
        quickstart: relative paths of data in the preset quickstart start here.
    """
    made = []
    for path in sorted(PRESETS.glob("*.toml")):
        place = quickstart if path.stem == "quickstart" else folder
        pipeline = parse_pipeline(read_settings(path), place / path.name)
        once = _deployment(path.stem, pipeline, _leading_comment(path), is_preset=True)
        made += [*_forms(once, pipeline), _evaluation(once, pipeline)]
    return made


def tool_deployments() -> list[Deployment]:
    """The deployments of the tools, such as `finish` and `reap`, which train nothing."""
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
    """The deployments of a configuration file: a run with the full form, a run with the short form, a retraining (with
    [retrain]), and an evaluation.

    Raises:
        ConfigError: the file cannot be read, a setting is invalid, or the file has the name of a tool.
    """
    if name_of(path) in TOOLS:
        raise ConfigError(f"{path}: {name_of(path)} is the name of a built-in deployment: rename the file")
    pipeline = load_pipeline(path)
    description = _leading_comment(path) or f"From {path.resolve()}."
    folders = tuple(str(folder.resolve()) for folder in (path.parent, Path.cwd()))
    once = replace(_deployment(name_of(path), pipeline, description, is_preset=False), code_folders=folders)
    evaluation = _evaluation(once, pipeline)
    full, *short = _forms(once, pipeline)
    if pipeline.retrain is None:
        return [full, evaluation, *short]
    check_sources(watched_sources(pipeline.config, pipeline.retrain.sources))
    again = replace(
        once,
        name=retraining_name(once.name),
        flow=RETRAIN_FLOW,
        parameters=parameters_of(replace(pipeline, evaluate=None)),
        schedule=pipeline.schedule.model_dump(mode="json") if pipeline.schedule else None,
    )
    return [full, again, evaluation, *short]


def check_names(deployments: Iterable[Deployment]) -> None:
    """Raise ConfigError if two deployments have the same name, because the second would replace the first."""
    names = [each.name for each in deployments]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two configurations are named {doubled[0]}: a deployment is named after its file, so rename one"
        )


def retraining_name(name: str) -> str:
    """The name of the deployment that retrains with the configuration `name`."""
    return f"{name}-retrain"


def offered_name(store: Path, name: str) -> str:
    """The name in Prefect of the store's deployment `name`. At a server of PREFECT_API_URL, the store's id is appended.

    Without the store's id, two stores on one server could have deployments with equal names, and would execute each
    other's runs.
    """
    if not named_url():
        return name
    with Ledger(store / LEDGER_FILE) as ledger:
        return f"{name}@{ledger.identity}"


def evaluation_name(name: str) -> str:
    """The name of the deployment that evaluates with the configuration `name`."""
    return f"{name}-evaluate"


def form_name(name: str) -> str:
    """The name of the deployment that runs the configuration `name` and has the short form."""
    return f"{name}-form"


def save_deployments(home: Path, deployments: Iterable[Deployment]) -> None:
    """Write the deployments to files for the serving process. A preset never replaces a user's configuration with the
    same name.

    If [retrain] was removed from a configuration, the earlier deployment for retraining stays, without a schedule.

    Raises:
        ConfigError: a deployment has the name of another configuration's retraining or evaluation.
    """
    folder = home / "deployments"
    folder.mkdir(exist_ok=True)
    known = load_deployments(home)
    given = list(deployments)
    for each in given:
        other = known.get(each.name)
        if not each.is_preset and other is not None and other.python_flow != each.python_flow:
            raise ConfigError(
                f"{each.name} is the name of an existing deployment of another kind "
                f"({other.python_flow}): rename the configuration"
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
    """Read the saved deployments, by name.

    Raises:
        ConfigError: a file in the folder was not written by `save_deployments`.
    """
    found = {}
    for path in sorted((home / "deployments").glob("*.json")):
        try:
            content = json.loads(path.read_text())
            parameters = content["parameters"]
            if "config" in parameters and "node" in parameters:  # an earlier version named some settings differently
                parameters = {**parameters, "node": with_present_kind(parameters["node"])}
            folders = tuple(content.get("code_folders", ()))
            found[path.stem] = Deployment(**{**content, "parameters": parameters, "code_folders": folders})
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{path} is not a deployment ({error}): delete it") from error
    return found


def folders_of_deployment(offered: str | None) -> tuple[str, ...]:
    """The folders from which runs of the deployment import the user's modules (() for a run without a deployment).

    The deployment is read from the store of the serving process, because a user may request a run for another store.
    """
    if offered is None or not (store := os.environ.get(STORE_VARIABLE)):
        return ()
    known = load_deployments(Path(store) / "prefect").get(offered.partition("@")[0])
    return tuple(known.code_folders) if known else ()


def parameters_for(store: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    """The parameters with the current path of the store, because a user may have moved the store."""
    if is_short(parameters):
        return with_named_store(parameters, store.resolve())
    return {
        name: {**section, "store": str(store.resolve())} if name == "run" or name in TOOLS else section
        for name, section in parameters.items()
    }


TABLES_OF_FLOWS = {"retrain": RETRAIN_FLOW, "evaluate": EVALUATE_FLOW, "schedule": ""}
"""Tables of a configuration that only one flow reads, each with that flow. No flow reads the table `schedule`."""
_WHERE_ELSE = {
    "retrain": "but the deployment whose name ends with -retrain has",
    "evaluate": "but the deployment whose name ends with -evaluate has",
    "schedule": "which belongs into the file: change it there, and call `rollouts up` again",
}


def check_table(flow: str, key: str) -> None:
    """Raise ConfigError if this flow does not read the table of a setting."""
    if (table := key.partition(".")[0]) in TABLES_OF_FLOWS and TABLES_OF_FLOWS[table] != flow:
        raise ConfigError(f"{key}: this deployment has no {table}, {_WHERE_ELSE[table]}")


def overridden(
    flow: str,
    parameters: Mapping[str, Any],  # Any: JSON
    assignments: Iterable[str],
) -> dict[str, Any]:
    """Replace settings in the parameters of a deployment by assignments such as training.rl.num_steps=10.

    A value is read as TOML or JSON, otherwise as text. A new algorithm replaces all settings that the former algorithm
    filled in, even settings that the user changed.

    Raises:
        ConfigError: a key is unknown, or a value does not fit.
    """
    tables = {name: section for name, section in parameters.items() if name != "config"}
    settings = json.loads(json.dumps({**parameters["config"], **tables}))
    given = list(assignments)
    if ALGORITHM in map(key_of, given):
        forget_algorithm(settings)
    for assignment in given:
        check_table(flow, key_of(assignment))
        assign(settings, assignment)
    pipeline = parse_pipeline(settings, Path("command line"))
    return parameters_of(pipeline)


def parameters_of(pipeline: Pipeline) -> dict[str, Any]:  # Any: JSON
    """The parameters of a flow run with the settings of the pipeline, as JSON."""
    parts: dict[str, BaseModel] = {"config": pipeline.config, "node": pipeline.node, "run": pipeline.run}
    if pipeline.retrain is not None:
        parts["retrain"] = pipeline.retrain
    if pipeline.evaluate is not None:
        parts["evaluate"] = pipeline.evaluate
    return {name: part.model_dump(mode="json") for name, part in parts.items()}


def _deployment(name: str, pipeline: Pipeline, description: str, *, is_preset: bool) -> Deployment:
    parameters = parameters_of(replace(pipeline, retrain=None, evaluate=None))
    return Deployment(name=name, description=description, parameters=parameters, is_preset=is_preset)


def _forms(once: Deployment, pipeline: Pipeline) -> list[Deployment]:
    """Return two deployments: with a field for every setting, and with the short form.

    A pipeline with null in a setting gets no short form, because the short form contains TOML, which lacks null.
    """
    try:
        values = form_values(pipeline)
    except TypeError:
        return [once]
    short = replace(
        once,
        name=form_name(once.name),
        parameters=values,
        description=SHORT_DESCRIPTION.format(name=once.name, about=once.description),
    )
    about = f"A field for every setting. `{short.name}` has fields for the usual settings.\n\n{once.description}"
    return [replace(once, description=about), short]


SHORT_DESCRIPTION = """\
Start a run with the usual settings.

- **Quick run** starts a run with these settings at once.
- **Custom run** shows the usual settings as fields. *More settings* holds the other settings as TOML: change them, or
  add any setting of a configuration file.
- The deployment `{name}` has a field for every setting.

{about}"""
"""Description of a short form's deployment, in Markdown."""


def _evaluation(once: Deployment, pipeline: Pipeline) -> Deployment:
    """The deployment that evaluates a model with the settings of a run, as the run does at its end."""
    parameters = parameters_of(replace(pipeline, retrain=None, run=evaluation_options(pipeline.run)))
    name = evaluation_name(once.name)
    said = f"Score a model and compare it with another model, as {once.name} does at its end.\n\n{once.description}"
    return replace(once, name=name, flow=EVALUATE_FLOW, parameters=parameters, description=said)


def evaluation_options(run: RunOptions) -> RunOptions:
    """The options of the run, without publishing and registering, because an evaluation makes no checkpoint."""
    cleared = {"fresh": (), "report_to": (), "publish": "", "publish_checkpoints": False, "register_as": ""}
    return run.model_copy(update={"name": evaluation_name(run.name)[-64:].lstrip("._-"), **cleared})


def _leading_comment(path: Path) -> str:
    """The comment at the top of a TOML file, as a Markdown code block, which keeps the alignment of columns."""
    if path.suffix != ".toml":
        return ""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "```text\n" + "\n".join(lines) + "\n```" if lines else ""
