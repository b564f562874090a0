"""End rented machines whose hours or budget are used up, or that a failed run no longer keeps.

Not here: the choice of machines to end (infra/renting/reaper.py). The serving process checks machines every two
minutes, with the same effect as `rollouts reap --spare`. The deployment `reap` also checks machines (reap.py).

Machines that were rented with named credentials are checked by a child process with these credentials:

    python -m rollouts.flows.expired_machines STORE [--spare] ──> the report as JSON
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rollouts.infra.cloud import Pace
from rollouts.infra.clouds import cloud_names
from rollouts.infra.errors import InfraError, PermanentInfraError, TransientInfraError
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.providers.clouds import clouds_with_keys, credentials_in_use, open_usable_clouds
from rollouts.infra.renting.reaper import ReapReport, reap
from rollouts.infra.renting.rentals import Rental, given_up, open_rentals
from rollouts_core.errors import ConfigError

PACE = Pace(gone_within_s=60.0)
"""How long to wait for an ended machine to disappear at the provider. After this time, the next check handles it."""
LATE_S = 24 * 3600.0
"""Seconds for which the machine of an abandoned request is searched, because a provider may create it late."""
SPARE = "--spare"

logger = logging.getLogger(__name__)


def look_at_machines(store: Path, *, spare: bool = True, everywhere: bool = False) -> ReapReport:
    """End rented machines that no run of the store uses, and return the ended machines, the kept machines and failures.

    Args:
        spare: keep machines of killed runs for a restart of the run, until the machines expire. In any case, a machine
            that a failed run keeps is ended after node.keep_on_failure_minutes.
        everywhere: ask all providers whose keys are in the environment, even if the ledger has no machine there.

    Raises:
        PermanentInfraError: the key of a provider with a rented machine is missing.
    """
    if not (store / LEDGER_FILE).exists():
        return ReapReport()
    with Ledger(store / LEDGER_FILE) as ledger:
        named = {rental.credentials for rental in looked_for(ledger)} - {credentials_in_use()}
    report = _look_at_own(store, spare=spare, everywhere=everywhere)
    for name in sorted(named):
        report.add(_look_with(name, store, spare=spare))
    return report


def end_expired(store: Path) -> list[str]:
    """End expired machines, and return a sentence per ended machine. Failures are logged."""
    try:
        report = look_at_machines(store)
    except (PermanentInfraError, TransientInfraError) as error:
        logger.warning("rented machines could not be checked: %s", error)
        return []
    for line in report.ended:
        logger.warning("ended %s", line)
    for line in report.failures:
        logger.warning("%s", line)
    return report.ended


def looked_for(ledger: Ledger) -> list[Rental]:
    """The machines that cost money, and abandoned requests whose machine the provider may still create."""
    return [*open_rentals(ledger), *given_up(ledger, time.time() - LATE_S)]


def _look_at_own(store: Path, *, spare: bool, everywhere: bool) -> ReapReport:
    """End machines that no run uses, in the accounts whose keys this process has."""
    own = credentials_in_use()
    with Ledger(store / LEDGER_FILE) as ledger:
        providers = {rental.provider for rental in looked_for(ledger) if rental.credentials == own}
        providers |= set(clouds_with_keys(cloud_names())[0]) if everywhere else set()
        if not providers:
            return ReapReport()
        with open_usable_clouds(sorted(providers)) as (clouds, problems):
            report = reap(ledger, clouds, spare=spare, credentials=own, pace=PACE)
        report.failures += problems
        return report


def _look_with(name: str, store: Path, *, spare: bool) -> ReapReport:
    """End machines that no run uses and that were rented with the credentials `name`."""
    if not name:
        return ReapReport(failures=["machines that were rented without named credentials are not checked here"])
    from rollouts.flows.credentials import run_with_credentials  # importing prefect reads the environment

    try:
        said = run_with_credentials(name, __spec__.name, [str(store), *([SPARE] if spare else [])])
    except (ConfigError, TransientInfraError) as error:
        return ReapReport(failures=[f"machines rented with the credentials {name} cannot be checked: {error}"])
    return ReapReport(**json.loads(said))


def main() -> None:
    """End machines that no run uses, in the accounts whose keys this process has, and print the report as JSON."""
    try:
        report = _look_at_own(Path(sys.argv[1]), spare=SPARE in sys.argv[2:], everywhere=False)
    except InfraError as error:
        report = ReapReport(failures=[str(error)])
    sys.stdout.write(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
