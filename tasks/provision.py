"""Get the node that the stages run on, and give it back."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.node import Node, NodeSettings
from infra.providers import provision_node, release_node
from tasks.progress import StageProgress, stage_console
from tasks.records import RunScope
from tasks.stage import stop_leased_jobs


@task(name="provision", cache_policy=NO_CACHE)
def provision(settings: NodeSettings, scope: RunScope) -> Node:
    """The node that the settings ask for."""
    node = provision_node(settings, Path(scope.store))
    with StageProgress("provision", num_steps=0, console=stage_console()) as progress:
        key = f" (its key: {node.believed_by})" if node.believed_by else ""
        progress.say(f"{node.provider} node {node.name}{key}, run directories below {node.root}/stages")
    return node


def release_now(node: Node, scope: RunScope) -> None:
    """End every job that only this run wants, then give the node back."""
    with StageProgress("release", num_steps=0, console=stage_console()) as progress:
        for run_dir in stop_leased_jobs(scope, node):
            progress.say(f"ended the job in {run_dir}")
        release_node(node)
        progress.say(f"gave back {node.provider} node {node.name}")


@task(name="release", cache_policy=NO_CACHE)
def release(node: Node, scope: RunScope) -> None:
    """`release_now`, as a task of the run."""
    release_now(node, scope)
