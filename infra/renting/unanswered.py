"""Machines that were asked for, and of which nobody knows whether they were made: they are looked for by their names.

Not here: asking (provision.py), giving back (release.py), when one that does not appear is given up (reaper.py).
"""

import time
from dataclasses import replace

from rollouts.infra.cloud import Cloud, Pace
from rollouts.infra.offers import InstanceStatus
from rollouts.infra.renting.rentals import Rental

FOUND_NOTE = "found by its name"


def find_machine(rental: Rental, cloud: Cloud, pace: Pace) -> Rental | None:
    """Look up a machine whose creation is unconfirmed by its name; return its row with its id, not yet written.

    Returns:
        None if it does not appear.

    Raises:
        ProviderUnavailableError: the provider does not answer.
    """
    for pause_s in pace.looks_s:
        time.sleep(pause_s)
        for instance in cloud.list_named(rental.name):
            if instance.name == rental.name and instance.status is not InstanceStatus.GONE:
                return replace(rental, instance_id=instance.id)
    return None
