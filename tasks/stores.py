"""Reach the object stores that a run names: fetch its inputs before anything else, publish its results at the end.

Not here: which inputs those are (inputs.py), how a publication is laid out (infra/publication.py).
"""

from __future__ import annotations

from pathlib import Path

from prefect import task

from infra.object_store import ObjectStore
from infra.publication import check_writable_store, publish_run
from rollouts_core.config import Config
from tasks.inputs import bring_inputs
from tasks.progress import StageProgress, stage_console
from tasks.records import RunScope
from tasks.retries import TRIED_AGAIN

RECORDS = ("report.html", "run.json", "config.toml")


@task(name="reach-stores", **TRIED_AGAIN)
def reach_stores(config: Config, scope: RunScope) -> Config:
    """The configuration with the inputs in the store; also returns only if results can be published."""
    with StageProgress("inputs", num_steps=0, console=stage_console()) as progress:
        if scope.publish:
            check_writable_store(ObjectStore(scope.publication_url))
            progress.say(f"results will be published at {scope.publication_url}")
        return bring_inputs(config, Path(scope.store), progress.say)


@task(name="publish", **TRIED_AGAIN)
def publish_results(checkpoint_path: str, scope: RunScope) -> str:
    """Publish the final checkpoint and the run's records; returns the URL that `rollouts pull` takes."""
    with StageProgress("publish", num_steps=0, console=stage_console()) as progress:
        num_sent_bytes = publish_run(
            ObjectStore(scope.publication_url),
            run_id=scope.run_id,
            checkpoint=Path(checkpoint_path),
            records={name: scope.output_dir / name for name in RECORDS},
        )
        progress.say(f"{scope.publication_url}, {num_sent_bytes / 1e6:.1f} MB that were not there yet")
    return scope.publication_url
