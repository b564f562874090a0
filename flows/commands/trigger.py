"""Start a run of a deployment at a store's Prefect server, as the deployment's form in the UI does.

Not here: the list of deployments (deployments.py), the process that starts their runs (serving.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from uuid import uuid4

from rollouts.flows.commands.up import require_serving
from rollouts.flows.deployments import EVALUATE_FLOW, FLOW, form_name, load_deployments, offered_name, overridden
from rollouts.flows.own_server.lend import local_server, run_url
from rollouts.flows.prefect_api import RefusedError, ask
from rollouts.flows.tools import TOOLS, overridden_tool
from rollouts_core.config.messages import closest_name
from rollouts_core.errors import ConfigError


def trigger_run(store: Path, name: str, assignments: Iterable[str]) -> str:
    """Start a run of a deployment, with settings replaced by `key=value`, and return the URL of the run's page.

    Raises:
        ServerError: the store has no serving process, or the server refuses the run.
        ConfigError: the deployment does not exist, or a setting does not fit.
    """
    require_serving(store)
    known = load_deployments(store.resolve() / "prefect")
    flow = known[name].flow if name in known else FLOW
    if name in known and known[name].is_short:
        full = name.removesuffix(form_name(""))
        raise ConfigError(
            f"{name} is only for the form in Prefect's UI: rollouts run --deployment {full} accepts every setting"
        )
    with local_server(store) as address:
        try:
            deployment = ask(address, "GET", f"/deployments/name/{flow}/{offered_name(store.resolve(), name)}")
        except RefusedError as error:
            if name in known:
                raise ConfigError(
                    f"the deployment {name} was deleted in Prefect: call rollouts up with its configuration again; for "
                    "a preset, call rollouts down and rollouts up"
                ) from error
            raise ConfigError(f"there is no deployment {name}{closest_name(name, list(known))}") from error
        change = partial(overridden_tool if flow in TOOLS else overridden, flow)
        parameters = change(deployment["parameters"], assignments)
        if flow == EVALUATE_FLOW and "evaluate" not in parameters:
            raise ConfigError(
                f"{name} needs a model: evaluate.model=production, or candidate, base, a run, a folder, a URL"
            )
        question = {"name": parameters.get("run", {}).get("name", name), "parameters": parameters}
        question["idempotency_key"] = str(uuid4())  # a repeated request must not create a second run
        run = ask(address, "POST", f"/deployments/{deployment['id']}/create_flow_run", question)
    return run_url(address, run["id"])
