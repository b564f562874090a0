"""Renew the leases of a run's jobs while the run uses the jobs.

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
"""Seconds without a renewal after which the lease of a job lapses and the job ends by itself."""
ENGINE, FOLLOWER = "engine", "follower"
"""Prefixes of the directory names of jobs with a lease."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeasedJob:
    """A job with a lease, and its node."""

    node: Node
    run_dir: str
    """The job's directory on its node."""


def has_lease(run_dir: str) -> bool:
    """True if the job in this directory ends by itself when its lease lapses."""
    return run_dir.rpartition("/")[2].startswith((f"{ENGINE}-", f"{FOLLOWER}-"))


@contextmanager
def lease_renewed(
    job: LeasedJob, on_status: Callable[[Session, JobStatus], None] = lambda session, status: None
) -> Iterator[None]:
    """Renew the lease of a job while the block runs, in its own thread and over its own session.

    A failed renewal is not fatal, because the next renewal tries again. A renewal on an unreachable node takes a minute
    to fail, so in a shared thread the leases of other jobs would lapse.

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
