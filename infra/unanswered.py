"""Machines that were asked for, and of which nobody knows whether they were made: they are looked for by their names.

Not here: asking (provision.py), giving back (release.py), when one that does not appear is given up (reaper.py).
"""

import time

from infra.cloud import Cloud, Pace
from infra.errors import TransientInfraError
from infra.ledger import Ledger
from infra.offers import InstanceStatus
from infra.rentals import Rental, RentalState, change_rental

FOUND_NOTE = "found by its name"


def adopt_machine(rental: Rental, instance_id: str, ledger: Ledger, *, note: str = "") -> Rental:
    """Write down which machine the row is about."""
    adopted = change_rental(
        ledger,
        rental,
        state=RentalState.RENTED,
        instance_id=instance_id,
        rented_at=rental.rented_at or rental.intended_at,
        note=note,
    )
    if adopted is None:
        raise TransientInfraError(f"somebody else changed {rental.name} at the same moment: try again")
    return adopted


def find_and_adopt(rental: Rental, ledger: Ledger, cloud: Cloud, pace: Pace) -> Rental | None:
    """The row of a machine whose creation was not answered, with its id; None when it does not appear.

    Raises:
        ProviderUnavailableError: the provider cannot be asked.
        TransientInfraError: somebody else changed the row at the same moment.
    """
    for pause_s in pace.looks_s:
        time.sleep(pause_s)
        for instance in cloud.list_named(rental.name):
            if instance.name == rental.name and instance.status is not InstanceStatus.GONE:
                return adopt_machine(rental, instance.id, ledger, note=FOUND_NOTE)
    return None
