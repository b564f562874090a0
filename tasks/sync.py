"""Publish what the run made into the store's folder of this run: verified, all at once."""

from __future__ import annotations

import sys
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from rollouts.infra.session import LocalSession
from rollouts.infra.sync.push import publish_directory
from rollouts.tasks.candidate import keep_registered
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.records import RunScope
from rollouts_core.job import InputModel


@task(name="sync", cache_policy=NO_CACHE)
def sync_results(model: InputModel, scope: RunScope) -> str:
    """Copy the final checkpoint to `checkpoint/` of the run's output; returns its path."""
    destination = scope.output_dir / "checkpoint"
    with StageProgress("sync") as progress:
        destination.parent.mkdir(parents=True, exist_ok=True)
        keep_registered(destination, model.digest, scope)
        session = LocalSession(sys.executable)  # the store has everything that a node made
        report = publish_directory(session, Path(model.model.path), str(destination))
        progress.say(f"{model.name}, {report.num_bytes / 1e6:.1f} MB in {report.num_files} verified files")
    return str(destination)
