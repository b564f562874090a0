"""Get the node that the stages run on, and give it back."""

from __future__ import annotations

import time
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.errors import InfraError
from infra.ledger import Ledger
from infra.node import Node, NodeSettings
from infra.providers import provision_node, release_node
from infra.rentals import usd_spent
from tasks.progress import StageProgress, stage_console
from tasks.records import RunScope
from tasks.salvage import salvage
from tasks.stage import drop_leases, stop_leased_jobs


@task(name="provision", cache_policy=NO_CACHE)
def provision(settings: NodeSettings, scope: RunScope) -> Node:
    """The node that the settings ask for."""
    with StageProgress("provision", num_steps=0, console=stage_console()) as progress:
        node = provision_node(settings, Path(scope.store), run_id=scope.run_id, say=progress.say)
        key = f" (its key: {node.believed_by})" if node.believed_by else ""
        progress.say(f"{node.provider} node {node.name}{key}, run directories below {node.root}/stages")
    return node


def give_back(node: Node, scope: RunScope) -> list[str]:
    """End every job that only this run wants, then give the node back; returns what was done, a sentence each.

    What stopped jobs have on another machine is fetched before. A rented machine is given back also where its jobs
    cannot be reached: they end with it.
    """
    try:
        ended, left = stop_leased_jobs(scope, node)
        done = [
            *(f"ended the job in {run_dir}" for run_dir in ended),
            *(f"left the job in {run_dir} to another run that wants it" for run_dir in left),
            *(salvage(scope, node) if node.is_remote else []),
        ]
    except InfraError as error:
        if not node.is_rented:
            raise
        drop_leases(scope)
        done = [f"its jobs end with the machine ({error})"]
    finally:
        release_node(node)
    done.append(f"gave back {node.provider} node {node.name}")
    if node.is_rented:
        with Ledger(scope.ledger_path) as ledger:
            usd = usd_spent(ledger, scope.run_id, time.time())
        done.append(f"the machines of the run cost {usd:.2f} USD")
    return done


def release_now(node: Node, scope: RunScope) -> None:
    """`give_back`, and say what was done."""
    with StageProgress("release", num_steps=0, console=stage_console()) as progress:
        for sentence in give_back(node, scope):
            progress.say(sentence)


@task(name="release", cache_policy=NO_CACHE)
def release(node: Node, scope: RunScope) -> None:
    """`release_now`, as a task of the run."""
    release_now(node, scope)
