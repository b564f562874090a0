"""Copy a run's results to the run's folder in the store and to an object store, and download inputs.

    remote machine ── files of the checkpoint ──> object store <── missing files, and the run's records ── this machine

The remote machine uploads only if it can reach the object store. Not here: which inputs are downloaded (inputs.py), the
layout of published results (infra/stores/publication.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from rollouts.infra.errors import InfraError
from rollouts.infra.node import Node
from rollouts.infra.providers import open_session
from rollouts.infra.session import LocalSession
from rollouts.infra.stores.direct import can_presign, send_checkpoint_from_node
from rollouts.infra.stores.object_store import ObjectStore
from rollouts.infra.stores.publication import check_writable_store, publish_run
from rollouts.infra.sync.push import publish_directory
from rollouts.tasks.candidate import keep_registered
from rollouts.tasks.inputs import bring_inputs
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.records import RunScope
from rollouts.tasks.retries import TRIED_AGAIN
from rollouts.tasks.upload_inputs import exists_on_node
from rollouts_core.config import Config
from rollouts_core.job import InputModel


@task(name="sync", cache_policy=NO_CACHE)
def sync_results(model: InputModel, scope: RunScope) -> str:
    """Copy the final checkpoint to `checkpoint/` in the run's output folder. Returns the new path."""
    destination = scope.output_dir / "checkpoint"
    with StageProgress("sync") as progress:
        destination.parent.mkdir(parents=True, exist_ok=True)
        keep_registered(destination, model.digest, scope)
        session = LocalSession(sys.executable)  # local, because the checkpoint is in the store already
        report = publish_directory(session, Path(model.model.path), str(destination))
        progress.say(f"copied {model.name}, {report.num_bytes / 1e6:.1f} MB in {report.num_files} verified files")
    return str(destination)


RECORDS = ("report.html", "run.json", "config.toml")


@task(name="reach-stores", **TRIED_AGAIN)
def reach_stores(config: Config, scope: RunScope) -> Config:
    """Check that the object store accepts results, and download the inputs. Returns the settings with local paths."""
    with StageProgress("inputs") as progress:
        if scope.publish:
            check_writable_store(ObjectStore(scope.publication_url))
            progress.say(f"results will be published at {scope.publication_url}")
        return bring_inputs(config, Path(scope.store), progress.say)


@task(name="send", cache_policy=NO_CACHE)
def send_from_machine(final: InputModel, checkpoint_path: str, machine: Node, scope: RunScope) -> None:
    """Let the remote machine that made the final checkpoint upload it to the object store.

    An upload from the remote machine is often faster than from this machine. A failure is only reported, because
    `publish_results` uploads all missing files.

    Args:
        checkpoint_path: the copy of the checkpoint on this machine.
    """
    store, source = ObjectStore(scope.publication_url), machine.path_on_node(final.model.path)
    if not can_presign(store):
        return
    with StageProgress("send") as progress:
        try:
            with open_session(machine) as session:
                if not exists_on_node(session, source):  # another machine made the checkpoint
                    return
                num_bytes = send_checkpoint_from_node(session, store, Path(checkpoint_path), source)
        except (InfraError, OSError) as error:
            progress.say(
                f"the checkpoint is uploaded from here, because the node cannot upload it to {store.url} ({error})"
            )
            return
        if num_bytes:
            progress.say(f"the node itself uploaded {num_bytes / 1e6:.1f} MB to {store.url}")


@task(name="publish", **TRIED_AGAIN)
def publish_results(checkpoint_path: str, scope: RunScope) -> str:
    """Upload the final checkpoint and the run's records to the object store. Returns the URL for `rollouts pull`."""
    with StageProgress("publish") as progress:
        num_sent_bytes = publish_run(
            ObjectStore(scope.publication_url),
            run_id=scope.run_id,
            checkpoint=Path(checkpoint_path),
            records={name: scope.output_dir / name for name in RECORDS},
        )
        progress.say(f"{scope.publication_url}, uploaded {num_sent_bytes / 1e6:.1f} MB")
    return scope.publication_url
