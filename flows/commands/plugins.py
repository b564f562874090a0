"""`rollouts plugins`: list the plugins of installed packages.

Not here: finding plugins (rollouts_core/plugins.py), the other commands (cli.py).
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rollouts.flows.commands.machines import render_table
from rollouts.infra.clouds import ALL_CLOUDS
from rollouts.tasks.trackers import ALL_TRACKERS
from rollouts_core.algorithms.objectives import ALL_OBJECTIVES
from rollouts_core.environments import ALL_ENVIRONMENTS
from rollouts_core.rewards import ALL_REWARDS


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per plugin.")] = False,
) -> None:
    """List the objectives, environments, rewards, trackers and providers that installed packages add.

    Each row has the plugin's group, name, package and version, and a state: ok, or the error of importing the plugin.
    """
    core = [*ALL_OBJECTIVES.describe_plugins(), *ALL_ENVIRONMENTS.describe_plugins(), *ALL_REWARDS.describe_plugins()]
    rows = [*core, *ALL_TRACKERS.describe_plugins(), *ALL_CLOUDS.describe_plugins()]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
    elif rows:
        columns = ("group", "name", "package", "version")
        cells = [(*(row[column] for column in columns), row["problem"] or "ok") for row in rows]
        typer.echo(render_table(("GROUP", "NAME", "PACKAGE", "VERSION", "STATE"), cells))
    else:
        typer.echo("no installed package has plugins: docs/library.md shows how to write one")
