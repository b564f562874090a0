"""A fake provider with an account and a ledger, from which tests rent machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollouts.infra.cloud import Pace
from rollouts.infra.ledger import Ledger
from rollouts.infra.offers import GPUQuery, Instance
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.renting.provision import rent_machines
from rollouts.infra.renting.release import release_machine
from rollouts.infra.renting.rentals import (
    Rental,
    all_rentals,
)
from rollouts.infra.renting.request import Check, Renting, RentRequest
from tests.infra.fake_runpod import FakeRunPod

PACE = Pace(poll_s=0.02, looks_s=(0.0, 0.2, 0.4, 0.6), gone_within_s=20.0)
REQUEST = RentRequest(
    run_id="7f3c0c7e-run",
    query=GPUQuery(gpu_types=("H100",), regions=("EU", "US"), security="any"),
    public_key="ssh-ed25519 AAAA me",
    purpose="p",
    max_usd=10.0,
    max_hours=2.0,
    usable_within_s=20.0,
)


def usable(rental: Rental, instance: Instance) -> str:
    return "SHA256:key"


@dataclass
class World:
    """A provider, our account there, and our ledger."""

    fake: FakeRunPod
    cloud: RunPod
    path: Path
    url: str = ""
    """Where the provider answers other processes."""

    def rent(self, request: RentRequest = REQUEST, check: Check = usable) -> Rental:
        with Ledger(self.path) as ledger:
            [rental] = rent_machines(Renting(request, ledger, {"runpod": self.cloud}, check=check, pace=PACE))
        return rental

    def release(self, rental: Rental, pace: Pace = PACE) -> Rental:
        with Ledger(self.path) as ledger:
            return release_machine(rental, ledger, self.cloud, pace=pace)

    def rows(self) -> list[Rental]:
        with Ledger(self.path) as ledger:
            return all_rentals(ledger)
