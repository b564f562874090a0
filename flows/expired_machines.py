"""End rented machines whose hours or money are used up, also those of runs that nobody starts again.

Not here: what is ended and what is spared (infra/reaper.py). The process that serves deployments looks now and then, as
a timer with `rollouts reap --spare` would; the deployment `reap` looks when somebody, or its schedule, asks (reap.py).
"""

from __future__ import annotations

import logging
from pathlib import Path

from infra.errors import PermanentInfraError, TransientInfraError
from infra.ledger import LEDGER_FILE, Ledger
from infra.offers import CLOUD_NAMES
from infra.providers.clouds import clouds_with_keys, open_clouds
from infra.provision import Pace
from infra.reaper import ReapReport, reap
from infra.rentals import open_rentals

PACE = Pace(gone_within_s=60.0)
"""What is not gone by then is looked at again the next time."""

logger = logging.getLogger(__name__)


def look_at_machines(store: Path, *, spare: bool = True, everywhere: bool = False) -> ReapReport:
    """End what nobody wants of what the store rents, and say what was done and left.

    Args:
        spare: machines of killed runs are left to their next start until they expire.
        everywhere: ask all providers whose keys are in the environment, also where the ledger knows of no machine.

    Raises:
        PermanentInfraError: there is no key of a provider at which something is rented.
    """
    if not (store / LEDGER_FILE).exists():
        return ReapReport()
    with Ledger(store / LEDGER_FILE) as ledger:
        providers = {rental.provider for rental in open_rentals(ledger)}
        providers |= set(clouds_with_keys(CLOUD_NAMES)[0]) if everywhere else set()
        if not providers:
            return ReapReport()
        with open_clouds(sorted(providers)) as clouds:
            return reap(ledger, clouds, spare=spare, pace=PACE)


def end_expired(store: Path) -> list[str]:
    """End what has expired, and return what was ended; what could not be looked at is logged."""
    try:
        report = look_at_machines(store)
    except (PermanentInfraError, TransientInfraError) as error:
        logger.warning("rented machines could not be looked at: %s", error)
        return []
    for line in report.ended:
        logger.warning("ended %s", line)
    for line in report.failures:
        logger.warning("%s", line)
    return report.ended
