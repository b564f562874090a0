"""A run that rents, uses and gives back one machine, as a process that a test can kill: LEDGER URL RUN_ID KEY."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from infra.ledger import Ledger
from infra.offers import GPUQuery, Instance
from infra.providers.runpod import RunPod
from infra.provision import Pace, RentRequest, release_machine, rent_machine
from infra.rentals import Rental

PACE = Pace(poll_s=0.02, looks_s=(0.0, 0.3, 0.6, 0.9), gone_within_s=60.0)
USED_S = 0.2


def check(rental: Rental, instance: Instance) -> str:
    return "SHA256:key"


def main() -> None:
    ledger_file, url, run_id, key = sys.argv[1:]
    request = RentRequest(
        run_id=run_id,
        query=GPUQuery(gpu_types=("H100",)),
        public_key="ssh-ed25519 AAAA me",
        purpose=run_id,
        max_usd=10.0,
        max_hours=1.0,
        usable_within_s=60.0,
    )
    with Ledger(Path(ledger_file)) as ledger, ledger.living_run(run_id), RunPod(key, url) as cloud:
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        rental = rent_machine(request, ledger, {"runpod": cloud}, check=check, pace=PACE)
        time.sleep(USED_S)
        release_machine(rental, ledger, cloud, pace=PACE)


if __name__ == "__main__":
    main()
