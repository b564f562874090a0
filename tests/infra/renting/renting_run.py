"""A run that rents, uses and gives back machines, as a process that a test can kill.

    LEDGER PROVIDER URL RUN_ID KEY NUM_MACHINES [STEP]

With a step it kills itself there: when the provider has made the machine ("asked"), and nobody has written that down
yet, or when the ledger has a row in the state of that name.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollouts.infra.cloud import Cloud, Pace
from rollouts.infra.clouds import CloudName
from rollouts.infra.ledger import Ledger
from rollouts.infra.offers import GPUQuery, Instance
from rollouts.infra.providers.http import Account
from rollouts.infra.providers.lambda_cloud import Lambda
from rollouts.infra.providers.prime import Prime
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.providers.shadeform import Shadeform
from rollouts.infra.providers.vast import Vast
from rollouts.infra.renting.provision import rent_machines
from rollouts.infra.renting.release import release_machines
from rollouts.infra.renting.rentals import Rental, RentalState
from rollouts.infra.renting.request import Renting, RentRequest

PACE = Pace(poll_s=0.02, looks_s=(0.0, 0.3, 0.6, 0.9), gone_within_s=60.0)
USED_S = 0.2
ACCOUNTS: dict[str, type[RunPod | Lambda | Prime | Shadeform | Vast]] = {
    "runpod": RunPod,
    "lambda": Lambda,
    "prime": Prime,
    "shadeform": Shadeform,
    "vast": Vast,
}


def check(rental: Rental, instance: Instance) -> str:
    return "SHA256:key"


def die_at(step: str, account: type[Account]) -> None:
    """Have this process killed at the step."""

    def end_of(module: object, name: str, is_it: Callable[[dict[str, Any]], bool]) -> None:  # Any: values of columns
        act = getattr(module, name)

        def act_and_die(*arguments: Any, **changes: Any) -> Any:  # Any: whatever it takes and returns
            answer = act(*arguments, **changes)
            if is_it(changes):
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        setattr(module, name, act_and_die)

    provision = sys.modules[rent_machines.__module__]
    end_of(provision, "add_rental", lambda _: step == RentalState.INTENDED)
    end_of(account, "create", lambda _: step == "asked")
    for module in (provision, sys.modules[release_machines.__module__]):
        end_of(module, "change_rental", lambda changes: step == changes.get("state"))


def main() -> None:
    ledger_file, provider, url, run_id, key, num_machines, *step = sys.argv[1:]
    account = ACCOUNTS[provider]
    if step:
        die_at(step[0], account)
    request = RentRequest(
        run_id=run_id,
        query=GPUQuery(gpu_types=("H100",)),
        num_machines=int(num_machines),
        public_key="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKHEMZ7ibIPHlAUA0YUTIGe8rRkl5uVMl0Y1rpqCMhXi me",
        purpose=run_id,
        max_usd=10.0,
        max_hours=1.0,
        usable_within_s=60.0,
    )
    with (
        Ledger(Path(ledger_file)) as ledger,
        ledger.living_run(run_id),
        account(key, url, min_interval_s=0) as cloud,
    ):
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        clouds: dict[CloudName, Cloud] = {account.name: cloud}
        rentals = rent_machines(Renting(request, ledger, clouds, check=check, pace=PACE))
        time.sleep(USED_S)
        release_machines(rentals, ledger, clouds, pace=PACE)


if __name__ == "__main__":
    main()
