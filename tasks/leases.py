"""Renew the leases of a run's jobs as long as the run holds them.

Not here: what a lease is (infra/supervisor/), the renewals by the RL job and by a training's leader (rollouts_core).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rollouts.infra.errors import InfraError
from rollouts.infra.jobs import JobStatus, renew_lease
from rollouts.infra.node import Node
from rollouts.infra.providers import open_session
from rollouts.infra.repeating import repeating
from rollouts.infra.session import Session

LEASE_S = 60.0
"""A job ends by itself when its lease was not renewed for this long."""
ENGINE, FOLLOWER = "engine", "follower"
"""How the directories of such jobs begin."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeasedJob:
    """A job with a lease, and its node."""

    node: Node
    run_dir: str
    """On the node."""


def has_lease(run_dir: str) -> bool:
    """Whether the job in a directory ends by itself when its lease lapses."""
    return run_dir.rpartition("/")[2].startswith((f"{ENGINE}-", f"{FOLLOWER}-"))


@contextmanager
def lease_renewed(
    job: LeasedJob, on_status: Callable[[Session, JobStatus], None] = lambda session, status: None
) -> Iterator[None]:
    """Renew the lease of a job as long as the block runs, in a thread and over a session of its own.

    An unreachable node is asked again later. It takes a minute to fail, so jobs that share a thread would lapse.

    Args:
        on_status: gets the job's status after each renewal.
    """
    with open_session(job.node) as session:

        def renew() -> None:
            try:
                on_status(session, renew_lease(session, job.run_dir))
            except InfraError as error:  # the stage that needs the job reports the failure
                logger.info("the lease of %s on %s was not renewed: %s", job.run_dir, job.node.name, error)

        with repeating(renew, interval_s=LEASE_S / 4, thread_name="leases"):
            yield
