"""Does training work on this machine's GPU, and how fast? One GPU, no network, at most 8 minutes.

    python benchmarks/gpu_check.py [--out .gpu-check] [--only correctness,speed] [--again]
    python benchmarks/gpu_check.py --rehearse         the same on the CPU with tiny models, about a minute
    python benchmarks/gpu_check.py --only engines     SGLang and vLLM, which take a minute or two to start

    part          at most    checks
    correctness   120 s      SFT and GRPO steps against the CPU, packed rows, attention kernels, kill and resume
    memory         60 s      adapters, recomputation, a large vocabulary, the preflight's estimate, out of memory
    backends       60 s      one process and FSDP, weights through CUDA IPC, the embedded engine beside the trainer
    pipeline       90 s      the quickstart: SFT, RL and evaluation, with the trainer on the GPU
    speed         150 s      SFT and the training part of a GRPO step against a bare loop and TRL; waits of the GPU
    engines       300 s      not in the default: SGLang and vLLM, if they are installed, take the trainer's weights

Each part is a process of its own, which is ended at its limit with its descendants. A rehearsal runs all parts in one
process, which imports everything once. The folder gets gpu_check.json, with a row after each check, and gpu_check.md. A
repeated run keeps the rows that held, were measured or skipped, and runs the others.

Exit codes: 0 every check of correctness held, 1 one did not or was not reached, 2 the check cannot run here: the last
line says why. A measurement that breaks off is listed at the end and changes no exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from gpu_parts.device import Facts, find_problem, from_json
from gpu_parts.record import NAME, TABLE_NAME, Record, describe
from side_by_side import REPOSITORY, describe_machine, worker_environment

from rollouts.infra.supervisor.files import POLL_S
from rollouts.infra.supervisor.processes import UNKILLABLE_AFTER_S, become_subreaper, find_processes, send_signal

BUDGETS_S = {"correctness": 120.0, "memory": 60.0, "backends": 60.0, "pipeline": 90.0, "speed": 150.0}
"""Wall-clock limit of each default part, imports included, in the order in which they run."""
TOTAL_S = 480.0
"""Limit of the default parts together, the probe included."""
EXTRA_BUDGETS_S = {"engines": 300.0}
"""Limits of the parts that run only if a user names them, after the others and beside TOTAL_S."""
LIMITS_S = BUDGETS_S | EXTRA_BUDGETS_S
PROBE_S = 60.0
GRACE_S = 5.0
"""For an interrupted part to end what it started, before it is killed."""
REHEARSAL_FACTOR = 5
"""Factor on the time limits of a rehearsal, which may run on a busy machine."""
CPU_THREADS = 1
USER_ERROR_CODE = 2


def main() -> int:
    options = read_options()
    if options.part:
        run_parts(options.part, options.out, device="cpu" if options.rehearse else "cuda")
        return 0
    began = time.monotonic()
    facts = probe()
    problem = "" if options.rehearse else find_problem(facts)
    if problem:
        sys.stderr.write(f"gpu_check: {problem}\n")
        return USER_ERROR_CODE
    options.out.mkdir(parents=True, exist_ok=True)
    record = open_record(options.out, facts, is_rehearsal=options.rehearse, again=options.again)
    print(describe(record.about), flush=True)
    factor = REHEARSAL_FACTOR if options.rehearse else 1
    total_s = factor * (TOTAL_S + sum(EXTRA_BUDGETS_S.get(part, 0.0) for part in options.only))
    for parts in [options.only] if options.rehearse else [[part] for part in options.only]:
        limit_s = factor * sum(LIMITS_S[part] for part in parts)
        end_after(parts, options, seconds=min(limit_s, total_s - (time.monotonic() - began)))
    return conclude(options.out, options.only, seconds=time.monotonic() - began)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path(".gpu-check"), help="folder of the record (default: %(default)s)"
    )
    parser.add_argument(
        "--only", type=read_parts, default=list(BUDGETS_S), help="parts, comma-separated (default: all but engines)"
    )
    parser.add_argument("--again", action="store_true", help="run every check again, also those that held")
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU, with tiny models, and nothing that needs CUDA"
    )
    parser.add_argument("--part", type=read_parts, help=argparse.SUPPRESS)
    return parser.parse_args()


def read_parts(text: str) -> list[str]:
    """The parts that a user names, in the order in which they run."""
    named = text.split(",")
    unknown = [name for name in named if name not in LIMITS_S]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown part {', '.join(unknown)}: choose from {', '.join(LIMITS_S)}")
    return [part for part in LIMITS_S if part in named]


def probe() -> Facts:
    """What torch says of this machine, from a process of its own."""
    command = [sys.executable, "-m", "gpu_parts.device"]
    answer = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=PROBE_S, check=False
    )
    if answer.returncode != 0:
        last_line = answer.stderr.strip().rpartition("\n")[2]
        sys.stderr.write(f"gpu_check: torch cannot be loaded ({last_line}): install it for this Python\n")
        raise SystemExit(USER_ERROR_CODE)
    return from_json(answer.stdout.strip().rpartition("\n")[2])


def open_record(folder: Path, facts: Facts, *, is_rehearsal: bool, again: bool) -> Record:
    """Open the record of this device, these versions and this commit, or begin a new one."""
    machine = describe_machine(CPU_THREADS)
    about = {
        "is_rehearsal": is_rehearsal,
        "device": machine["cpu"] if is_rehearsal else facts.device,
        "packages": facts.packages,
        "python": facts.python,
        "commit": machine["commit"],
        "date": date.today().isoformat(),
    }
    saved = None if again else Record.load(folder)
    if saved and {**saved.about, "date": ""} == {**about, "date": ""}:
        return saved
    record = Record(folder, about)
    record.write()
    return record


def end_after(parts: list[str], options: argparse.Namespace, *, seconds: float) -> None:
    """Run parts as one process, and end what is left of it and its descendants at its end or its limit."""
    become_subreaper()
    shown = ", ".join(parts)
    print(f"{shown}, at most {max(0.0, seconds):.0f} s", flush=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--part", ",".join(parts)]
    command += ["--out", str(options.out.resolve())]
    log = log_of(parts[0], options.out, is_rehearsal=options.rehearse).open("w", encoding="utf-8")
    process = subprocess.Popen(
        [*command, *(["--rehearse"] if options.rehearse else [])],
        stderr=log,
        env=worker_environment(os.cpu_count() or 1 if not options.rehearse else CPU_THREADS),
        start_new_session=True,
    )
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        print(f"  {shown} reached its limit of {seconds:.0f} s", flush=True)
    finally:
        end_with_descendants(process, options.out)
        log.close()


def log_of(part: str, folder: Path, *, is_rehearsal: bool) -> Path:
    """The file that gets what the process of a part writes to standard error."""
    return folder / ("rehearsal.log" if is_rehearsal else f"{part}.log")


def end_with_descendants(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Interrupt a part, so that it can end its children, then kill all its other descendants.

    The jobs of the quickstart have sessions of their own, so a process group does not have them. They are found as
    descendants of this process, which orphans become by `become_subreaper`.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    deadline = time.monotonic() + UNKILLABLE_AFTER_S
    while left := find_processes(str(folder), supervisor=os.getpid(), group=process.pid):
        if time.monotonic() >= deadline:
            print(f"  processes {left} cannot be killed", flush=True)
            return
        send_signal(left, signal.SIGKILL)
        time.sleep(POLL_S)
    process.wait()


def conclude(folder: Path, parts: list[str], *, seconds: float) -> int:
    """Say what was found; returns the exit code."""
    record = Record.load(folder)
    assert record is not None, "it was written before the parts ran"
    print(f"\n{record.render()}\n\n{seconds:.0f} s in all; {folder / NAME} and {folder / TABLE_NAME} have all of it")
    never_began = [part for part in parts if not any(row.part == part for row in record.rows)]
    for part in never_began:
        log = log_of(part, folder, is_rehearsal=record.about["is_rehearsal"])
        print(f"failed: {part} did not begin, {log} says why")
    for row in record.failures() + record.unmeasured():
        print(f"{row.outcome}: {row.part}: {row.check}: {row.detail}")
    return 1 if record.failures() or never_began else 0


def run_parts(parts: list[str], folder: Path, *, device: str) -> None:
    """Run the checks of some parts in this process."""
    from gpu_parts.checking import run_checks  # torch loads with the part, in its process alone

    record = Record.load(folder)
    assert record is not None, "the parent writes it first"
    os.chdir(REPOSITORY)
    for part in parts:
        run_checks(part, importlib.import_module(f"gpu_parts.{part}").CHECKS, record, device)


if __name__ == "__main__":
    sys.exit(main())
