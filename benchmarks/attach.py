"""How long until somebody who comes back sees what a job on a far machine has written meanwhile.

    python benchmarks/attach.py [--round-trip-ms 50] [--lines 2000] [--rounds 5]

An OpenSSH server of its own on loopback, behind a proxy that holds everything back, and a job that writes a line of
metrics ten times a second and has written many. Each turn connects anew.

    ours       connect, find the job under way (start_or_attach), follow it until all lines of before are delivered
    ssh cat    the OpenSSH client fetches the file; it knows nothing of the job

and on an open connection: what the job does (job_status), in seconds and in round trips; the first time, and then the
mean of ten. `true` there is the shortest thing that can be asked: a round trip and a process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from side_by_side import (
    REPOSITORY,
    describe_machine,
    need_programs,
    range_of,
    render_machine,
    render_table,
    write_results,
)

sys.path.insert(0, str(REPOSITORY))
from rollouts.infra.jobs import cancel_job, follow_job, job_status, start_or_attach
from rollouts.infra.node import SSHAccess
from rollouts.infra.ssh.ssh_session import SSHSession
from tests.infra.delay_proxy import delayed_port
from tests.infra.shell_jobs import shell_spec
from tests.infra.ssh_server import running_server

WRITER = """
step={lines}
while :; do
  step=$((step + 1))
  echo "{{\\"step\\": $step, \\"attempt\\": 1, \\"time\\": 0, \\"loss\\": 1.0}}" >> {run_dir}/metrics.jsonl
  sleep 0.1
done
"""
NUM_CALLS = 10
LINE = '{{"step": {step}, "attempt": 1, "time": 0, "loss": 1.0}}\n'


class CaughtUp(Exception):
    """Everything of before has been delivered."""


def main() -> None:
    options = read_options()
    need_programs("sshd", "ssh")
    machine = describe_machine(options.threads)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder) / "sshd") as server,
        delayed_port(server.port, one_way_ms=options.round_trip_ms / 2) as port,
    ):
        seconds = measure(Path(folder), server.access, replace(server.access, port=port), options)
    results = {"script": "attach", "machine": machine, "seconds": seconds, **vars(options)}
    write_results(options.out, {name: value for name, value in results.items() if name != "out"})
    print(render_machine(machine) + "\n\n" + render(seconds, options.round_trip_ms))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round-trip-ms", type=float, default=50.0, help="distance of the machine (default: 50)")
    parser.add_argument("--lines", type=int, default=2000, help="lines that the job has written (default: 2000)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contender (default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="noted with the machine; nothing here uses them")
    parser.add_argument("--out", type=Path, help="file for the figures")
    return parser.parse_args()


def measure(folder: Path, near: SSHAccess, far: SSHAccess, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds over the rounds, by what was done."""
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("".join(LINE.format(step=step + 1) for step in range(options.lines)))
    spec = shell_spec(run_dir, WRITER.format(lines=options.lines, run_dir=run_dir))
    seconds: dict[str, list[float]] = {
        name: [] for name in ("connect", "ours", "ssh cat", "first status", "status", "true")
    }

    def session(access: SSHAccess) -> SSHSession:
        return SSHSession(access, python=sys.executable, programs_dir=str(folder / "programs"))

    def on_metrics(line: dict[str, object]) -> None:
        if line["step"] == options.lines:
            raise CaughtUp

    with session(near) as starter:
        start_or_attach(starter, spec)
    try:
        for _ in range(options.rounds):
            began = time.perf_counter()
            with session(far) as back:
                back.run(["true"], timeout_s=30.0)
                seconds["connect"].append(time.perf_counter() - began)
                assert start_or_attach(back, spec).attached
                try:
                    follow_job(
                        back, str(run_dir), on_metrics=on_metrics, on_event=lambda event: None, on_log=lambda log: None
                    )
                except CaughtUp:
                    seconds["ours"].append(time.perf_counter() - began)
                for name, taken in ask_again_and_again(back, str(run_dir)).items():
                    seconds[name].append(taken)
            began = time.perf_counter()
            ssh_cat(far, run_dir / "metrics.jsonl")
            seconds["ssh cat"].append(time.perf_counter() - began)
    finally:
        with session(near) as ender:
            cancel_job(ender, str(run_dir), grace_s=5.0)
    return seconds


def ask_again_and_again(session: SSHSession, run_dir: str) -> dict[str, float]:
    """Seconds of a call, by what is asked."""
    moments = [time.perf_counter()]
    for _ in range(1 + NUM_CALLS):
        job_status(session, run_dir)
        moments.append(time.perf_counter())
    for _ in range(NUM_CALLS):
        session.run(["true"], timeout_s=30.0)
    shortest_s = (time.perf_counter() - moments[-1]) / NUM_CALLS
    status_s = (moments[-1] - moments[1]) / NUM_CALLS
    return {"first status": moments[1] - moments[0], "status": status_s, "true": shortest_s}


def ssh_cat(access: SSHAccess, path: Path) -> None:
    """Fetch a file by the program that OpenSSH comes with."""
    settings = {"StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null", "LogLevel": "ERROR"}
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    command = ["ssh", "-p", str(access.port), "-i", access.key_file, *options, f"{access.user}@{access.host}"]
    subprocess.run([*command, f"cat {path}"], stdout=subprocess.DEVNULL, check=True)


def render(seconds: dict[str, list[float]], round_trip_ms: float) -> str:
    """A line for each thing that was done."""
    rows = []
    for name, taken in seconds.items():
        trips = range_of([1000 * each / round_trip_ms for each in taken]).render(1) if round_trip_ms else ""
        rows.append([name, range_of(taken).render(2), trips])
    return render_table(["", "seconds", "round trips"], rows)


if __name__ == "__main__":
    main()
