"""`rollouts prefect-yaml`: print the file from which `prefect deploy` creates deployments on a shared Prefect server.

Not here: the content of a deployment (deployments.py), a server and deployments for one user (up.py).

    my.toml ──> prefect.yaml ──prefect deploy --all──> the shared server ──work pool──> prefect worker ──> a run

The workers import the flows from their own installation of this package, and download no code. The workers import the
user's modules from the configuration's folder and from the current folder, if these folders exist on their machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from rollouts.flows.assignments import assigned_value
from rollouts.flows.commands.terminal import AsJson, print_text
from rollouts.flows.deployments import (
    EVALUATE_FLOW,
    FLOW,
    RETRAIN_FLOW,
    SHORT_FORM,
    Deployment,
    check_names,
    deployments_of,
)
from rollouts.flows.short_form import with_named_store
from rollouts_core.errors import ConfigError
from rollouts_core.user_code.code_folders import VARIABLE as CODE_PATH

ENTRYPOINTS = {
    FLOW: "rollouts.flows.pipeline.sft_rl",
    SHORT_FORM: "rollouts.flows.short_form_flow.sft_rl_short",
    RETRAIN_FLOW: "rollouts.flows.retrain.retrain_model",
    EVALUATE_FLOW: "rollouts.flows.evaluate.evaluate_model",
}


def prefect_yaml(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG", help="Configurations to deploy.")],
    pool: Annotated[str, typer.Option(help="Work pool whose workers execute the runs.")],
    store: Annotated[Path, typer.Option(help="Store: a folder on the workers' machine.")],
    queue: Annotated[str, typer.Option(help="Queue of the pool; default: the pool's default queue.")] = "",
    job_variable: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A variable of the pool's jobs, such as image=...; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a prefect.yaml that deploys these configurations to a shared Prefect server.

    rollouts prefect-yaml my.toml --pool gpu --store /data/rollouts > prefect.yaml; prefect deploy --all
    """
    variables = dict(_parse_variable(each) for each in job_variable or [])
    deployments = [deployment for path in configs for deployment in deployments_of(path)]
    text = render_prefect_yaml(deployments, store, pool=pool, queue=queue, job_variables=variables)
    print_text(text, as_json=as_json)


def render_prefect_yaml(
    deployments: Sequence[Deployment],
    store: Path,
    *,
    pool: str,
    queue: str = "",
    job_variables: Mapping[str, Any] | None = None,  # Any: what the pool's type takes
) -> str:
    """The text of a prefect.yaml.

    Raises:
        ConfigError: the store's path is relative, two deployments have the same name, or a setting contains a
            placeholder of prefect.yaml.
    """
    if not store.is_absolute():
        raise ConfigError(f"--store {store} is relative: give an absolute path on the workers' machine, as /data/runs")
    check_names(deployments)
    work_pool: dict[str, Any] = {"name": pool}  # Any: names, and what the pool's type takes
    if queue:
        work_pool["work_queue_name"] = queue
    if job_variables:
        work_pool["job_variables"] = dict(job_variables)
    # Without an empty `pull`, workers would need the folder in which `prefect deploy` was called.
    content = {"pull": [], "deployments": [_describe(each, store, work_pool) for each in deployments]}
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return _HEADER + text


_HEADER = "# Written by `rollouts prefect-yaml`; `prefect deploy --all` makes these deployments.\n"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Writes text with line breaks as blocks, and repeated values without YAML aliases, which are hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def _describe(deployment: Deployment, store: Path, work_pool: dict[str, Any]) -> dict[str, Any]:  # Any: YAML
    variables = dict(work_pool.get("job_variables", {}))
    if deployment.code_folders:  # workers do not know the configuration's folder
        variables["env"] = {CODE_PATH: ":".join(deployment.code_folders), **variables.get("env", {})}
    parameters = deployment.parameters
    placed = {**parameters, "run": {**parameters["run"], "store": str(store)}} if "run" in parameters else None
    described: dict[str, Any] = {  # Any: YAML
        "name": deployment.name,
        "description": deployment.description,
        "tags": deployment.tags,
        "entrypoint": ENTRYPOINTS[deployment.python_flow],
        "parameters": placed or with_named_store(parameters, store),
        "work_pool": {**work_pool, "job_variables": variables} if variables else work_pool,
    }
    if deployment.flow == RETRAIN_FLOW:
        from rollouts.flows.schedules import yaml_schedule_options  # importing prefect takes a second

        described |= yaml_schedule_options(deployment)
    if "{{" in json.dumps(described):
        raise ConfigError(
            f"{deployment.name}: a setting contains {{{{, which begins a placeholder in prefect.yaml: change it"
        )
    return described


def _parse_variable(text: str) -> tuple[str, Any]:  # Any: JSON
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"--job-variable {text!r} is not of the form key=value, like image=registry/rollouts:1")
    return key, assigned_value(value)
