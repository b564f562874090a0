"""Keep jobs on other nodes alive as long as nobody is there yet that does it beside them.

Not here: what a lease is (infra/supervisor/), who renews it later (rollouts_core).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from infra.errors import InfraError
from infra.jobs import renew_lease
from infra.node import Node
from infra.providers import open_session
from infra.repeating import repeating

LEASE_S = 60.0
"""A job with a lease that nobody renews for this long ends by itself."""
ENGINE, FOLLOWER = "engine", "follower"
"""What the directories of such jobs begin with."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeasedJob:
    """A job with a lease, and where it is."""

    node: Node
    run_dir: str
    """On the node."""


def has_lease(run_dir: str) -> bool:
    """Whether the job in a directory is one that ends by itself when nobody needs it any more."""
    return run_dir.rpartition("/")[2].startswith((f"{ENGINE}-", f"{FOLLOWER}-"))


@contextmanager
def leases_renewed(jobs: Sequence[LeasedJob]) -> Iterator[None]:
    """Renew the leases of jobs as long as the block runs; a node that does not answer is asked again later."""
    with ExitStack() as stack:
        # Each in a thread: a node that is lost takes a minute to say so, in which the others' leases would end.
        for job in jobs:
            stack.enter_context(_lease_renewed(job))
        yield


@contextmanager
def _lease_renewed(job: LeasedJob) -> Iterator[None]:
    with open_session(job.node) as session:

        def renew() -> None:
            try:
                renew_lease(session, job.run_dir)
            except InfraError as error:  # who needs the job says what becomes of it
                logger.info("the lease of %s on %s was not renewed: %s", job.run_dir, job.node.name, error)

        with repeating(renew, interval_s=LEASE_S / 4, thread_name="leases"):
            yield
