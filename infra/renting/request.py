"""A run's request for machines, and what renting needs: the ledger, the accounts, and the login check.

Not here: renting (provision.py), the ledger's rows (rentals.py).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollouts.infra.cloud import PATIENT, Cloud, Pace
from rollouts.infra.clouds import CloudName
from rollouts.infra.ledger import Ledger
from rollouts.infra.offers import GPUQuery, Instance
from rollouts.infra.renting.release import release_machine
from rollouts.infra.renting.rentals import Rental, RentalState, rentals_of

logger = logging.getLogger(__name__)

Check = Callable[[Rental, Instance], str]
"""Logs in on a machine, compares its host key with the expected one, and returns the key's fingerprint. Raises an
InfraError if the machine is not usable, or not usable yet."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RentRequest:
    """The machines that a run needs, and the limits of their cost and hours."""

    run_id: str
    query: GPUQuery
    num_machines: int = 1
    """Number of machines. All machines must be in the same region of the same provider."""
    public_key: str
    image: str = ""
    purpose: str
    """Hash of the settings that must be equal for one machine to replace another."""
    credentials: str = ""
    max_usd: float
    """Largest cost of all machines of the run together, in USD."""
    max_hours: float
    usable_within_s: float = 900.0
    expects_host_key: bool = True
    """Whether the first connection must find the host key that this program installed or that the provider reported.
    Providers that can do neither are exempt."""


@dataclass(frozen=True, slots=True)
class Renting:
    request: RentRequest
    ledger: Ledger
    clouds: Mapping[CloudName, Cloud]
    check: Check
    say: Say = logger.info
    """Called with progress messages, one sentence each."""
    pace: Pace = PATIENT

    def cloud_of(self, rental: Rental) -> Cloud:
        return self.clouds[rental.provider]

    def release(self, rental: Rental, *, note: str = "", is_unfit: bool = False) -> None:
        release_machine(rental, self.ledger, self.cloud_of(rental), note=note, is_unfit=is_unfit, pace=self.pace)

    def own_rows(self) -> list[Rental]:
        """Return the run's open machines, oldest first. Machines of other credentials are skipped, because the run's
        credentials cannot query their state."""
        own = self.request.credentials
        rows = rentals_of(self.ledger, self.request.run_id)
        return [rental for rental in rows if rental.credentials == own and not rental.state.is_over]


def is_in_use(rental: Rental) -> bool:
    """Return whether the machine exists and its end has not been requested."""
    return rental.state in (RentalState.RENTED, RentalState.READY)
