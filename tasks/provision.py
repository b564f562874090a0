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


def give_back(node: Node, scope: RunScope) -> list[str]:
    """End every job that only this run wants, then give the node back; returns what was done, a sentence each."""
    ended, left = stop_leased_jobs(scope, node)
    release_node(node)
    return [
        *(f"ended the job in {run_dir}" for run_dir in ended),
        *(f"left the job in {run_dir} to another run that wants it" for run_dir in left),
        f"gave back {node.provider} node {node.name}",
    ]


def release_now(node: Node, scope: RunScope) -> None:
    """`give_back`, and say what was done."""
    with StageProgress("release", num_steps=0, console=stage_console()) as progress:
        for sentence in give_back(node, scope):
            progress.say(sentence)


@task(name="release", cache_policy=NO_CACHE)
def release(node: Node, scope: RunScope) -> None:
    """`release_now`, as a task of the run."""
    release_now(node, scope)
