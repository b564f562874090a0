"""Provision the machine that a run's stages run on, and release the machine at the end of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from rollouts.infra.cloud import Pace
from rollouts.infra.errors import InfraError
from rollouts.infra.ledger import Lease, Ledger
from rollouts.infra.node import Node, NodeSettings
from rollouts.infra.providers import provision_node, release_node
from rollouts.infra.providers.rented import keep_rented, release_rentals
from rollouts.infra.renting.rentals import usd_spent
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.records import RunScope
from rollouts.tasks.salvage import salvage
from rollouts.tasks.spending import note_spending
from rollouts.tasks.stage import GivenUp, drop_leases, leases_on, stop_leased_jobs

LOOKED_ALREADY = Pace(looks_s=(0.0,))
"""Look up a requested machine only once, because the interrupted rental attempt looked it up several times."""


@task(name="provision", cache_policy=NO_CACHE)
def provision(settings: NodeSettings, scope: RunScope) -> Node:
    """Connect to the machines in the settings, or rent them. Returns the leading node with its further nodes."""
    with StageProgress("provision") as progress:
        node = provision_node(settings, Path(scope.store), run_id=scope.run_id, say=progress.say)
        for each in (node, *node.further_nodes):
            key = f" (its key: {each.believed_by})" if each.believed_by else ""
            noun = "engines' node" if each in node.engine_nodes else "node"
            progress.say(f"{each.kind} {noun} {each.name}{key}, with directories of stages in {each.root}/stages")
    return node


def give_back(
    node: Node,
    scope: RunScope,
    *,
    keep_minutes: float = 0.0,
    say: Callable[[str], None] = lambda sentence: None,
    is_impatient: Callable[[], bool] = lambda: False,
) -> list[str]:
    """End this run's jobs on its machines, except jobs that another run uses, then release the machines.

    Results of stopped jobs are downloaded before the release. A rented machine is released even if it is unreachable or
    the ledger cannot be written, and the jobs on an unreachable machine end with the machine. Jobs on unreachable
    further nodes end when their leases lapse.

    Args:
        keep_minutes: if positive, a reachable rented machine is kept for this many minutes instead of released.
        say: receives a sentence about each job that is still saving.
        is_impatient: returns True to stop waiting for a job, which then saves and ends by itself.

    Returns:
        One sentence per action.
    """
    leases: dict[str, list[Lease]] = {}
    is_saving = False
    is_left = True  # assumed until the jobs are known: runs of other stores may need the jobs on further nodes
    kept: list[str] = []
    try:
        leases = leases_on(scope, node)
        given_up = stop_leased_jobs(scope, node, leases[node.name], say=say, is_impatient=is_impatient)
        is_left = bool(given_up.left_to_stores)
        is_saving = bool(given_up.still_saving)
        done = describe_given_up(given_up)
        done += salvage(scope, node) if node.is_remote and not is_saving else []
        if node.is_rented and keep_minutes > 0:
            kept = keep_rented(node, keep_minutes)
    except InfraError as error:
        if not node.is_rented:
            raise
        drop_leases(scope)
        done = [f"the jobs on {node.name} end with the machine ({error})"]
    finally:
        try:
            further_done = [
                done
                for each in node.further_nodes
                for done in give_back_further(each, leases.get(each.name, []), scope, is_left=is_left or is_saving)
            ]
        finally:
            if not kept and not (is_saving and node.is_rented):
                release_node(node)
    if is_saving and node.is_rented:
        return [*done, *further_done, f"{node.name} is given back after the result of the job is fetched"]
    done += [*further_done, *(kept or [describe_release(node)])]
    if node.is_rented:
        with Ledger(scope.ledger_path) as ledger:
            usd = usd_spent(ledger, scope.run_id, time.time())
        done.append(f"the machines of the run cost {usd:.2f} USD{' so far' if kept else ''}")
        note_spending(scope)
    return done


def describe_given_up(given_up: GivenUp) -> list[str]:
    """Describe what happened to each job of a run that gave up its machine. Returns one sentence per job."""
    return [
        *(f"ended the job in {run_dir}{saved}" for run_dir, saved in given_up.ended.items()),
        *(f"the job in {run_dir} saves its last step and ends by itself" for run_dir in given_up.still_saving),
        *(f"left the job in {run_dir} running for another run of this store" for run_dir in given_up.left_to_runs),
        *(
            f"left the job in {run_dir} running: a run of another store follows it"
            for run_dir in given_up.left_to_stores
        ),
        *(f"left the job in {run_dir} running; it ends when no run needs it" for run_dir in given_up.left_to_those),
    ]


def give_back_further(node: Node, leases: Sequence[Lease], scope: RunScope, *, is_left: bool = False) -> list[str]:
    """End this run's jobs on a further node, and release the node. A rented node is released with the leading node.

    If the node is unreachable, its jobs end by themselves when their leases lapse.

    Args:
        is_left: whether the job on the leading node keeps running, for example for a run of another store. If it does,
            the jobs of the further node keep running, too.

    Returns:
        One sentence per action.
    """
    try:
        if is_left:
            drop_leases(scope, leases)
            done = describe_given_up(GivenUp(left_to_those=[lease.run_dir for lease in leases]))
        else:
            done = describe_given_up(stop_leased_jobs(scope, node, leases)) if leases else []
    except InfraError as error:
        drop_leases(scope, leases)
        done = [f"the jobs on {node.name} end by themselves within a minute ({error})"]
    if node.is_rented:
        return done
    release_node(node)
    return [*done, describe_release(node)]


def describe_release(node: Node) -> str:
    """One sentence about the release of a node. A machine that the user rented without rollouts keeps running."""
    names = [node.name, *(each.name for each in node.further_nodes if each.is_rented)]
    nodes = "node" if len(names) == 1 else "nodes"
    return (
        f"{node.name} was rented by you, and keeps running"
        if node.is_of_user
        else f"gave back {node.kind} {nodes} {', '.join(names)}"
    )


def release_now(
    node: Node, scope: RunScope, *, keep_minutes: float = 0.0, is_impatient: Callable[[], bool] = lambda: False
) -> None:
    """Release a run's machines (`give_back`). If the leading node is rented and not kept, also release machines that
    the run does not know (`give_back_unknown`). Show one line per action."""
    with StageProgress("release") as progress:
        done = give_back(node, scope, keep_minutes=keep_minutes, say=progress.say, is_impatient=is_impatient)
        if node.is_rented and keep_minutes == 0:
            done += give_back_unknown(scope, known=node)
        for sentence in done:
            progress.say(sentence)


def release_unknown(scope: RunScope, *, since: float = 0.0) -> None:
    """Release rented machines that the run does not know (`give_back_unknown`). Show one line per action."""
    with StageProgress("release") as progress:
        for sentence in give_back_unknown(scope, since=since):
            progress.say(sentence)


def give_back_unknown(scope: RunScope, *, since: float = 0.0, known: Node | None = None) -> list[str]:
    """Release machines that were rented for this run but that the run does not know, because renting was interrupted.

    Returns one sentence per action, and per machine that could not be released.

    Args:
        since: machines that were requested before this time (seconds since 1970) are not released.
        known: the node that the run knows. `give_back` has released or kept the machines of this node.
    """
    spared = [each.name for each in (known, *known.further_nodes)] if known else []
    try:
        return release_rentals(Path(scope.store), scope.run_id, since=since, spared=spared, pace=LOOKED_ALREADY)
    except InfraError as error:
        return [f"machines that the run may have rented could not be given back ({error}): run `rollouts reap`"]


@task(name="release", cache_policy=NO_CACHE)
def release(node: Node, scope: RunScope, *, keep_minutes: float = 0.0) -> None:
    release_now(node, scope, keep_minutes=keep_minutes)
