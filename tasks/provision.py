"""Get the node that the stages run on, and give it back."""

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
"""When renting breaks off, the requested machine has already been looked for again and again."""


@task(name="provision", cache_policy=NO_CACHE)
def provision(settings: NodeSettings, scope: RunScope) -> Node:
    """The node that the settings ask for, with the others of its unit."""
    with StageProgress("provision") as progress:
        node = provision_node(settings, Path(scope.store), run_id=scope.run_id, say=progress.say)
        for each in (node, *node.further_nodes):
            key = f" (its key: {each.believed_by})" if each.believed_by else ""
            noun = "engines' node" if each in node.engine_nodes else "node"
            progress.say(f"{each.kind} {noun} {each.name}{key}, run directories below {each.root}/stages")
    return node


def give_back(
    node: Node,
    scope: RunScope,
    *,
    keep_minutes: float = 0.0,
    say: Callable[[str], None] = lambda sentence: None,
    is_impatient: Callable[[], bool] = lambda: False,
) -> list[str]:
    """End every job that only this run wants, then give the node back; returns what was done, a sentence each.

    Results of stopped jobs are fetched from other machines before. A rented machine is given back also where its jobs
    cannot be reached, or the ledger cannot be written: they end with it. Jobs on further nodes that cannot be reached
    end by themselves.

    Args:
        keep_minutes: so long a rented machine that can be reached stays, in place of being given back.
        say: told which job is still saving.
        is_impatient: True stops that waiting; the job saves and ends by itself.
    """
    leases: dict[str, list[Lease]] = {}
    is_saving = False
    is_left = True  # where the jobs cannot be seen to, others may need what is beside them, which ends by itself
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
        done = [f"its jobs end with the machine ({error})"]
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
        return [*done, *further_done, f"{node.name} is given back when that is fetched"]
    done += [*further_done, *(kept or [describe_release(node)])]
    if node.is_rented:
        with Ledger(scope.ledger_path) as ledger:
            usd = usd_spent(ledger, scope.run_id, time.time())
        done.append(f"the machines of the run cost {usd:.2f} USD{' so far' if kept else ''}")
        note_spending(scope)
    return done


def describe_given_up(given_up: GivenUp) -> list[str]:
    """The fate of a run's jobs, a sentence each."""
    return [
        *(f"ended the job in {run_dir}{saved}" for run_dir, saved in given_up.ended.items()),
        *(f"the job in {run_dir} saves its last step and ends by itself" for run_dir in given_up.still_saving),
        *(f"left the job in {run_dir} to another run that wants it" for run_dir in given_up.left_to_runs),
        *(f"left the job in {run_dir}: a run of another store follows it" for run_dir in given_up.left_to_stores),
        *(f"left the job in {run_dir}, which ends when no run needs it" for run_dir in given_up.left_to_those),
    ]


def give_back_further(node: Node, leases: Sequence[Lease], scope: RunScope, *, is_left: bool = False) -> list[str]:
    """End the jobs on a further node, and give it back. A rented node is given back, or kept, with its whole unit.

    If the node does not answer, its jobs end by themselves: their leases lapse.

    Args:
        is_left: what they are for goes on for a run of another store.
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
    """The fate of a node; a machine that the user rented goes on costing money."""
    names = [node.name, *(each.name for each in node.further_nodes if each.is_rented)]
    nodes = "node" if len(names) == 1 else "nodes"
    return (
        f"{node.name} is yours, and runs on" if node.is_of_user else f"gave back {node.kind} {nodes} {', '.join(names)}"
    )


def release_now(
    node: Node, scope: RunScope, *, keep_minutes: float = 0.0, is_impatient: Callable[[], bool] = lambda: False
) -> None:
    """`give_back`, with what was asked for besides and has appeared since, and say what was done."""
    with StageProgress("release") as progress:
        done = give_back(node, scope, keep_minutes=keep_minutes, say=progress.say, is_impatient=is_impatient)
        if node.is_rented and keep_minutes == 0:
            done += give_back_unknown(scope, known=node)
        for sentence in done:
            progress.say(sentence)


def release_unknown(scope: RunScope, *, since: float = 0.0) -> None:
    """`give_back_unknown`, and say what was done and is left."""
    with StageProgress("release") as progress:
        for sentence in give_back_unknown(scope, since=since):
            progress.say(sentence)


def give_back_unknown(scope: RunScope, *, since: float = 0.0, known: Node | None = None) -> list[str]:
    """Give back what was rented for a run that was not told of it; returns what was done and is left, a sentence each.

    Args:
        since: what the run has had for longer stays.
        known: the machine that the run was told of, which is given back, or still saves its last step.
    """
    spared = [each.name for each in (known, *known.further_nodes)] if known else []
    try:
        return release_rentals(Path(scope.store), scope.run_id, since=since, spared=spared, pace=LOOKED_ALREADY)
    except InfraError as error:
        return [f"what the run has rented, if anything, could not be given back ({error}): `rollouts reap` ends it"]


@task(name="release", cache_policy=NO_CACHE)
def release(node: Node, scope: RunScope, *, keep_minutes: float = 0.0) -> None:
    """`release_now`, as a task of the run."""
    release_now(node, scope, keep_minutes=keep_minutes)
