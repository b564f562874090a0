"""Stop what a run does on a rented machine before its hours, or the run's money, are used up.

Not here: ending the machine at that moment, whatever happens (infra/providers/rented.py), giving it back
(provision.py).

    ready ─────────────── work ───────────────┬── margin ──┐
                                              │            └ the provider's machine is ended
                                              └ jobs are cancelled, and write a last checkpoint, which is fetched
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
"""The margin as a share of the time, if `MARGIN_S` would leave little of it."""
LOOK_S = 5.0

logger = logging.getLogger(__name__)


@contextmanager
def stopped_in_time(node: Node, scope: RunScope) -> Iterator[None]:
    """While the block runs, the run's jobs on a rented machine are ended so early that what they have can be fetched.

    Raises:
        BudgetUsedUpError: they were, in place of what the block says about it.
    """
    if not node.is_rented:
        yield
        return
    is_stopped = threading.Event()
    began_at = time.time()

    def look() -> None:
        if not is_stopped.is_set() and time.time() < end_of_work(node, scope, began_at):
            return
        is_stopped.set()  # for good: a stage that begins now is ended too
        try:
            cancel_jobs(node, scope)
        except InfraError as error:
            logger.warning("the jobs on %s could not be ended, and are tried again: %s", node.name, error)

    try:
        with repeating(look, interval_s=LOOK_S, thread_name=f"budget of {node.name}"):
            yield
    except InfraError as error:
        if is_stopped.is_set():
            raise BudgetUsedUpError(node.name) from error
        raise


def end_of_work(node: Node, scope: RunScope, began_at: float) -> float:
    """When the jobs on a rented machine, and on the others of its unit, have to end, in seconds since 1970.

    Args:
        began_at: when the run began with them; others may have had them before.
    """
    with Ledger(scope.ledger_path) as ledger:
        rental = min(rentals_of_unit(ledger, node), key=lambda rental: rental.expires_at)
    return rental.expires_at - min(MARGIN_S, MARGIN_SHARE * (rental.expires_at - began_at))


def cancel_jobs(node: Node, scope: RunScope) -> None:
    """End the run's jobs, engines last: a training that still has its engine writes its checkpoint in peace.

    Jobs on further machines of its unit end with the training, or when their leases lapse.
    """
    leases = leases_on(scope, node)[node.name]
    with open_session(node) as session:
        for lease in sorted(leases, key=lambda lease: has_lease(lease.run_dir)):
            cancel_job(session, lease.run_dir, GRACE_S, max_grace_s=longest_grace_s(node, scope))
