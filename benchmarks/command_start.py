"""How long short commands take, and how much of this time goes into imports.

    python benchmarks/command_start.py [--rounds 9]

Each command runs in a new process with a store without work. "seconds" is the wall time. "processor" is the processor
time, which depends less on the load of the machine. "imports" is the sum over all modules of `python -X importtime`,
which itself makes the imports slower.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import describe_machine, range_of, render_machine, render_table, worker_environment, write_results

COMMANDS = {"--help": ["--help"], "--version": ["--version"], "status": ["status"], "runs": ["runs"]}
START = "import sys; sys.argv[0] = 'rollouts'; from rollouts.flows.command import main; main()"
IMPORT = re.compile(r"^import time: +(\d+) \|", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each command (default: 9)")
    parser.add_argument("--threads", type=int, default=2, help="noted with the machine; commands use one")
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args()
    machine = describe_machine(options.threads)
    with tempfile.TemporaryDirectory() as store:
        figures = {name: measure(command, store, options.rounds) for name, command in COMMANDS.items()}
    write_results(options.out, {"script": "command_start", "machine": machine, "figures": figures})
    print(f"{render_machine(machine)}\n\n{render(figures)}")


def measure(command: list[str], store: str, rounds: int) -> dict[str, list[float]]:
    """Wall time, processor time and import time of a command, and the number of imported modules, per round."""
    run([], command, store)  # the first run writes bytecode and reads the files from the disk
    figures: dict[str, list[float]] = {"seconds": [], "processor": [], "imports": [], "modules": []}
    for _ in range(rounds):
        before, began = os.times(), time.perf_counter()
        run([], command, store)
        figures["seconds"].append(time.perf_counter() - began)
        after = os.times()
        figures["processor"].append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
        imports = [int(each) / 1e6 for each in IMPORT.findall(run(["-X", "importtime"], command, store))]
        figures["imports"].append(sum(imports))
        figures["modules"].append(len(imports))
    return figures


def run(options: list[str], command: list[str], store: str) -> str:
    """Run a command to its end; returns its standard error."""
    environment = {**worker_environment(1), "ROLLOUTS_STORE": store}
    words = [sys.executable, *options, "-c", START, *command]
    ended = subprocess.run(words, env=environment, cwd=store, capture_output=True, text=True, check=True)
    return ended.stderr


def render(figures: dict[str, dict[str, list[float]]]) -> str:
    """A table with a line per command."""
    rows = []
    for name, each in figures.items():
        times = [range_of(each[what]).render(digits=2) for what in ("seconds", "processor", "imports")]
        rows.append([f"rollouts {name}", *times, f"{range_of(each['modules']).middle:.0f}"])
    return render_table(["", "seconds", "processor", "imports", "modules"], rows)


if __name__ == "__main__":
    main()
