"""Keep jobs on other nodes alive as long as nobody is there yet that does it beside them.

Not here: what a lease is (infra/supervisor.py), who renews it later (rollouts_core).
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
from infra.session import Session

LEASE_S = 60.0
"""A job with a lease that nobody renews for this long ends by itself."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeasedJob:
    """A job with a lease, and where it is."""

    node: Node
    run_dir: str
    """On the node."""


@contextmanager
def leases_renewed(jobs: Sequence[LeasedJob]) -> Iterator[None]:
    """Renew the leases of jobs as long as the block runs; a node that does not answer is asked again later."""
    if not jobs:
        yield
        return
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}

        def renew() -> None:
            for job in jobs:
                try:
                    if job.node.name not in sessions:
                        sessions[job.node.name] = stack.enter_context(open_session(job.node))
                    renew_lease(sessions[job.node.name], job.run_dir)
                except InfraError as error:  # who needs the job says what becomes of it
                    logger.info("the lease of %s on %s was not renewed: %s", job.run_dir, job.node.name, error)

        with repeating(renew, interval_s=LEASE_S / 4, thread_name="leases"):
            yield
