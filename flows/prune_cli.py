"""`rollouts prune`: make room in a store by removing stages that nothing refers to.

Not here: what is kept and why (tasks/prune.py), the other commands (cli.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flows.machines_cli import at, render_table
from flows.models_cli import open_registry
from flows.terminal import Store
from tasks.prune import FoundStage, plan_prune, remove_stages

GB = 1e9


def prune(
    store: Store = Path(".rollouts"),
    days: Annotated[float, typer.Option(min=0, help="Stages that no run used for so many days are removed.")] = 30.0,
    max_gb: Annotated[
        float | None,
        typer.Option(min=0, help="Remove more, longest unused first, until all stages take at most so many GB."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it they are only shown.")] = False,
) -> None:
    """Remove stages that were not used for long and that nothing refers to.

    Never those that a registered model came from, that a run which goes on uses, or that a deployment names.
    """
    root = store.resolve()
    with open_registry(store) as ledger:
        plan = plan_prune(
            root, ledger, unused_days=days, max_bytes=None if max_gb is None else int(max_gb * GB), now=time.time()
        )
        if plan.removed:
            typer.echo(render_stages(plan.removed))
        removed = remove_stages(root, ledger, plan) if yes else []
    kept = f"{len(plan.kept)} stages of {total_gb(plan.kept):.3f} GB stay"
    num_spared = len(plan.removed) - len(removed)
    if not plan.removed:
        typer.echo(f"nothing to remove; {kept}")
    elif not yes:
        typer.echo(f"would remove {len(plan.removed)} stages of {total_gb(plan.removed):.3f} GB with --yes; {kept}")
    else:
        spared = f", {num_spared} that are used by now" if num_spared else ""
        typer.echo(f"removed {len(removed)} stages of {total_gb(removed):.3f} GB; {kept}{spared}")


def render_stages(stages: Sequence[FoundStage]) -> str:
    """A line for each stage."""
    rows = [(stage.name, f"{stage.num_bytes / GB:.3f}", at(stage.used_at)) for stage in stages]
    return render_table(("STAGE", "GB", "LAST USED (UTC)"), rows)


def total_gb(stages: Sequence[FoundStage]) -> float:
    """What stages take together."""
    return sum(stage.num_bytes for stage in stages) / GB
