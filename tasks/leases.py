"""Renew the leases of a run's engines, and of its training jobs on machines other than the leader.

A job with a lease ends by itself if nothing renews the lease. Not here: ending such jobs (infra/supervisor/), renewals
by the RL job and by a training's leader (rollouts_core).
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
"""A job's lease lapses after this many seconds without a renewal. A job with a lapsed lease ends by itself."""
ENGINE, FOLLOWER = "engine", "follower"
"""Directory names of jobs with a lease start with "engine" or "follower". A follower is a training's job on a further
machine."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeasedJob:
    """A job that ends by itself if its lease is not renewed."""

    node: Node
    run_dir: str
    """The job's directory on its node."""


def has_lease(run_dir: str) -> bool:
    """True if the job in this directory has a lease, so that it ends by itself if nothing renews the lease."""
    return run_dir.rpartition("/")[2].startswith((f"{ENGINE}-", f"{FOLLOWER}-"))


@contextmanager
def lease_renewed(
    job: LeasedJob, on_status: Callable[[Session, JobStatus], None] = lambda session, status: None
) -> Iterator[None]:
    """Renew the lease of a job while the `with` block runs.

    A failed renewal is only logged, because the next renewal follows soon. A renewal on an unreachable node blocks for
    a minute. In a shared thread, the leases of other jobs would then lapse, so each job has its own thread and session.

    Args:
        on_status: receives the job's status after each renewal.
    """
    with open_session(job.node) as session:

        def renew() -> None:
            try:
                on_status(session, renew_lease(session, job.run_dir))
            except InfraError as error:  # the stage that needs the job reports the failure
                logger.info("the lease of %s on %s was not renewed: %s", job.run_dir, job.node.name, error)

        with repeating(renew, interval_s=LEASE_S / 4, thread_name="leases"):
            yield
