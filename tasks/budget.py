"""Stop a run's jobs on a rented machine before the machine's rental time, or the run's budget, is used up.

Not here: ending the machine at its deadline (infra/providers/rented.py), giving the machine back (provision.py).

    ready ─────────────── work ───────────────┬── margin ──┐
                                              │            └ the rented machine is ended
                                              └ jobs are cancelled; their last checkpoints are downloaded
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rollouts.infra.errors import BudgetUsedUpError, InfraError
from rollouts.infra.jobs import cancel_job
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import Node
from rollouts.infra.providers import open_session
from rollouts.infra.providers.rented import rentals_of_unit
from rollouts.infra.repeating import repeating
from rollouts.tasks.leases import has_lease
from rollouts.tasks.node_job import GRACE_S, longest_grace_s
from rollouts.tasks.records import RunScope
from rollouts.tasks.salvage import SALVAGE_S
from rollouts.tasks.stage import leases_on

MARGIN_S = GRACE_S + SALVAGE_S
MARGIN_SHARE = 0.2
"""Cancelling and downloading take at most this share of the rental time, so that a short rental has time for work."""
LOOK_S = 5.0

logger = logging.getLogger(__name__)


@contextmanager
def stopped_in_time(node: Node, scope: RunScope) -> Iterator[None]:
    """Cancel the run's jobs on a rented machine in time to download their last checkpoints before the rental ends.

    A thread watches the time while the `with` block runs.

    Raises:
        BudgetUsedUpError: the `with` block failed because the jobs were cancelled.
    """
    if not node.is_rented:
        yield
        return
    is_stopped = threading.Event()
    began_at = time.time()

    def look() -> None:
        if not is_stopped.is_set() and time.time() < end_of_work(node, scope, began_at):
            return
        is_stopped.set()  # the event is never cleared, so that a stage that starts later is cancelled, too
        try:
            cancel_jobs(node, scope)
        except InfraError as error:
            logger.warning("the jobs on %s could not be cancelled, and this is retried: %s", node.name, error)

    try:
        with repeating(look, interval_s=LOOK_S, thread_name=f"budget of {node.name}"):
            yield
    except InfraError as error:
        if is_stopped.is_set():
            raise BudgetUsedUpError(node.name) from error
        raise


def end_of_work(node: Node, scope: RunScope, began_at: float) -> float:
    """The time at which the jobs on rented machines must end, in seconds since 1970. If the rentals end at different
    times, the earliest end counts.

    Args:
        began_at: when this run began to use the machines, which an earlier run may have rented.
    """
    with Ledger(scope.ledger_path) as ledger:
        rental = min(rentals_of_unit(ledger, node), key=lambda rental: rental.expires_at)
    return rental.expires_at - min(MARGIN_S, MARGIN_SHARE * (rental.expires_at - began_at))


def cancel_jobs(node: Node, scope: RunScope) -> None:
    """Cancel the run's jobs on `node`. Engines are cancelled last, so that an RL training can still write a checkpoint.

    Jobs on further machines are not cancelled, because they end with the training or when nothing renews their leases.
    """
    leases = leases_on(scope, node)[node.name]
    with open_session(node) as session:
        for lease in sorted(leases, key=lambda lease: has_lease(lease.run_dir)):
            cancel_job(session, lease.run_dir, GRACE_S, max_grace_s=longest_grace_s(node, scope))
