"""A look at what is rented, as a process beside others: LEDGER URL KEY. Says when it could begin, begins when told."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rollouts.infra.ledger import Ledger
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.renting.reaper import reap
from tests.infra.renting.renting_run import PACE


def main() -> None:
    ledger_file, url, key = sys.argv[1:]
    with Ledger(Path(ledger_file)) as ledger, RunPod(key, url) as cloud:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        report = reap(ledger, {"runpod": cloud}, pace=PACE)
    sys.stdout.write(f"{json.dumps(asdict(report))}\n")


if __name__ == "__main__":
    main()
