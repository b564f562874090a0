"""What a run wants to rent, and what its renting goes by: where it is written down, who is asked, when one can be used.

Not here: renting (provision.py), what the ledger has of each machine (rentals.py).
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
"""Log in on a machine and return the fingerprint of its host key, which is the expected one, where one is; an
InfraError says why it cannot be used (yet)."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RentRequest:
    """What a run wants."""

    run_id: str
    query: GPUQuery
    num_machines: int = 1
    """So many in one region of one provider, or none."""
    public_key: str
    image: str = ""
    purpose: str
    """Hash of everything that makes one machine as good as another."""
    credentials: str = ""
    """Name of those whose accounts are used."""
    max_usd: float
    """What all machines of the run may cost together."""
    max_hours: float
    """No machine is kept longer."""
    usable_within_s: float = 900.0
    expects_host_key: bool = True
    """The first connection is held against a key that is known before, where the provider allows that."""


@dataclass(frozen=True, slots=True)
class Renting:
    """The renting of one run."""

    request: RentRequest
    ledger: Ledger
    clouds: Mapping[CloudName, Cloud]
    """The accounts that may be asked."""
    check: Check
    say: Say = logger.info
    """Told what happens, a sentence each."""
    pace: Pace = PATIENT

    def cloud_of(self, rental: Rental) -> Cloud:
        """The account that a machine is in."""
        return self.clouds[rental.provider]

    def release(self, rental: Rental, *, note: str = "", is_unfit: bool = False) -> None:
        """`release_machine`."""
        release_machine(rental, self.ledger, self.cloud_of(rental), note=note, is_unfit=is_unfit, pace=self.pace)

    def own_rows(self) -> list[Rental]:
        """The run's machines that are not over, oldest first; none in other accounts: nothing can be said of those."""
        own = self.request.credentials
        rows = rentals_of(self.ledger, self.request.run_id)
        return [rental for rental in rows if rental.credentials == own and not rental.state.is_over]


def is_in_use(rental: Rental) -> bool:
    """Whether it is there, and nobody has tried to end it so far."""
    return rental.state in (RentalState.RENTED, RentalState.READY)
