"""Wait until a rented machine can be used: it has an address, costs what it may, is where it may, lets us log in.

Not here: renting it (provision.py), logging in (providers/rented.py).
"""

import time

from rollouts.infra.cloud import Cloud, look_up
from rollouts.infra.errors import LoginError, NameUnknownError, TransientInfraError, UnfitMachineError
from rollouts.infra.foreign_text import shown_line
from rollouts.infra.ledger import Ledger
from rollouts.infra.renting.rentals import Rental, RentalState, change_rental
from rollouts.infra.renting.request import Renting
from rollouts.infra.ssh.host_keys import HostKeyEvidence

UNSEEN_S = 60.0
"""A provider may not list a machine yet that was created this recently."""
PRICE_TOLERANCE = 1.001
"""Providers round their prices."""


def wait_until_usable(rental: Rental, renting: Renting) -> tuple[str, str, float]:
    """Wait until a machine is usable. Returns the problem or "", its host key, and its price per hour."""
    request, cloud, pace = renting.request, renting.cloud_of(rental), renting.pace
    max_usd_per_hour = request.query.max_usd_per_gpu_hour * request.query.gpu_count * PRICE_TOLERANCE
    started = time.monotonic()
    reason, price = "its provider gave it no address", rental.usd_per_hour
    while True:
        try:
            instance = look_up(cloud, rental.instance_id, rental.name)
            is_unseen = rental.state is not RentalState.READY and time.monotonic() - started < UNSEEN_S
            if instance is None and not is_unseen:
                return f"{rental.name} is gone: its provider took it away", "", price
            if instance is not None and not instance.status.may_become_usable:
                return f"{rental.name} is {instance.status}", "", price
            if instance is not None:
                price = max(price, instance.usd_per_hour or 0.0)
            if price > max_usd_per_hour:
                return f"{rental.name} costs {price:.2f} USD/h, more than offered and allowed", "", price
            if instance is not None and instance.region and not request.query.admits_region(instance.region):
                place = f"{shown_line(instance.region)} instead of {rental.region}"
                return f"{rental.name} is in {place}, which node.query.regions does not admit", "", price
            if instance is not None and instance.has_address:
                if request.expects_host_key:
                    rental = _with_expected_key(rental, renting.ledger, cloud)
                return "", renting.check(rental, instance), price
        except UnfitMachineError as error:
            return str(error), "", price
        except (TransientInfraError, LoginError, NameUnknownError) as error:  # fresh machines are incomplete
            reason = str(error)
        if time.monotonic() - started + pace.poll_s > request.usable_within_s:
            return f"{rental.name} could not be used within {request.usable_within_s:g} s ({reason})", "", price
        if time.time() >= rental.expires_at:
            problem = f"{rental.name} could not be used before its hours or the run's money were used up ({reason})"
            return problem, "", price
        time.sleep(pace.poll_s)


def _with_expected_key(rental: Rental, ledger: Ledger, cloud: Cloud) -> Rental:
    """Store the host key that its provider reports, unless one is already known; return the row."""
    if rental.host_key or rental.expected_key:
        return rental
    told = cloud.host_key(rental.instance_id)
    if not told:
        return rental
    return change_rental(ledger, rental, expected_key=told, believed_by=HostKeyEvidence.PROVIDER.value) or rental
