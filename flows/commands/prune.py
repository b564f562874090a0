"""`rollouts prune`: free disk space of a store by removing folders that nothing refers to.

Not here: which folders are kept (tasks/prune.py), the other commands (cli.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from rollouts.flows.commands.machines import at, render_table
from rollouts.flows.commands.models import open_registry
from rollouts.flows.commands.terminal import DEFAULT_STORE, AsJson, Store, emit
from rollouts.tasks.prune import FoundFolder, plan_prune, remove_folders

GB = 1e9


def prune(
    store: Store = DEFAULT_STORE,
    days: Annotated[float, typer.Option(min=0, help="Remove folders that no run used for this many days.")] = 30.0,
    max_gb: Annotated[
        float | None,
        typer.Option(min=0, help="Remove more folders, longest unused first, until the rest takes this many GB."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove the folders; without --yes they are only listed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove stages, checkpoints of runs and downloaded inputs that are long unused and not referred to.

    Folders of registered models, of running runs and of deployments are never removed.
    """
    root = store.resolve()
    with open_registry(store) as ledger:
        max_bytes = None if max_gb is None or math.isinf(max_gb * GB) else int(max_gb * GB)
        plan = plan_prune(root, ledger, unused_days=days, max_bytes=max_bytes, now=time.time())
        if plan.removed and not as_json:
            typer.echo(render_folders(plan.removed))
        removed = remove_folders(root, ledger, plan) if yes else []
    if as_json:
        gone = {folder.place for folder in removed}
        emit(
            {"kind": "folder", "name": each.name, "bytes": each.num_bytes, "used_at": each.used_at,
             "is_removed": each.place in gone}
            for each in plan.removed
        )  # fmt: skip
        return
    kept = f"{len(plan.kept)} folders of {total_gb(plan.kept):.3f} GB stay"
    num_spared = len(plan.removed) - len(removed)
    if not plan.removed:
        typer.echo(f"nothing to remove; {kept}")
    elif not yes:
        typer.echo(f"would remove {len(plan.removed)} folders of {total_gb(plan.removed):.3f} GB with --yes; {kept}")
    else:
        spared = f", {num_spared} were kept because a run began to use them" if num_spared else ""
        typer.echo(f"removed {len(removed)} folders of {total_gb(removed):.3f} GB; {kept}{spared}")


def render_folders(folders: Sequence[FoundFolder]) -> str:
    """Format the folders as a table: name, GB and last use."""
    rows = [(folder.name, f"{folder.num_bytes / GB:.3f}", at(folder.used_at)) for folder in folders]
    return render_table(("FOLDER", "GB", "LAST USED (UTC)"), rows)


def total_gb(folders: Sequence[FoundFolder]) -> float:
    return sum(folder.num_bytes for folder in folders) / GB
