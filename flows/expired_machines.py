"""End rented machines whose hours or money are used up, also those of runs that nobody starts again.

Not here: what is ended and what is spared (infra/reaper.py). The process that serves deployments looks now and then, as
a timer with `rollouts reap --spare` would.
"""

from __future__ import annotations

import logging
from pathlib import Path

from infra.errors import PermanentInfraError, TransientInfraError
from infra.ledger import LEDGER_FILE, Ledger
from infra.providers.clouds import open_clouds
from infra.provision import Pace
from infra.reaper import reap
from infra.rentals import open_rentals

PACE = Pace(gone_within_s=60.0)
"""What is not gone by then is looked at again the next time."""

logger = logging.getLogger(__name__)


def end_expired(store: Path) -> list[str]:
    """End what has expired, and return what was ended; what could not be looked at is logged."""
    if not (store / LEDGER_FILE).exists():
        return []
    try:
        with Ledger(store / LEDGER_FILE) as ledger:
            providers = sorted({rental.provider for rental in open_rentals(ledger)})
            if not providers:
                return []
            with open_clouds(providers) as clouds:
                report = reap(ledger, clouds, spare=True, pace=PACE)
    except (PermanentInfraError, TransientInfraError) as error:
        logger.warning("rented machines could not be looked at: %s", error)
        return []
    for line in report.ended:
        logger.warning("ended %s", line)
    for line in report.failures:
        logger.warning("%s", line)
    return report.ended
