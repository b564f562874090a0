"""Measure what the pipeline costs above its stages: the wall time of the flow over that of its commands by hand.

    python benchmarks/orchestration_overhead.py [--repeats 3]

Each repeat runs the quickstart's flow in an empty store, then takes the job.json of every stage that it left and runs
`python -m rollouts_core KIND job.json` on it in a new directory, one after the other, with the engine beside RL. Both
sides train the same model on the same data for the same steps. The flow's time is what Prefect recorded for the run:
provisioning to release, without the start of Prefect's server.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from rollouts.flows.own_server.lend import local_server
from rollouts.flows.prefect_api import ask

STAGES = ("sft", "select-sft", "rl", "select-rl", "evaluate")
ENGINE_START_TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of measurements (default: 3)")
    repeats = parser.parse_args().repeats
    ratios, differences = [], []
    for number in range(1, repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            store, by_hand = Path(folder, "store"), Path(folder, "by-hand")
            flow_s = run_flow(store)
            hand_s = run_stages_by_hand(store, by_hand)
        ratios.append(flow_s / sum(hand_s.values()))
        differences.append(flow_s - sum(hand_s.values()))
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in hand_s.items())
        print(f"{number}: flow {flow_s:.1f} s, by hand {sum(hand_s.values()):.1f} s ({stages})", flush=True)
    for name, values, unit in (("flow / by hand", ratios, ""), ("flow - by hand", differences, " s")):
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{name}: min {low:.3f}{unit}, median {middle:.3f}{unit}, max {high:.3f}{unit}")


def run_flow(store: Path) -> float:
    """Run the quickstart in an empty store; returns the run time that Prefect recorded, in seconds."""
    command = [sys.executable, "-m", "rollouts.flows.cli", "quickstart", "--store", str(store)]
    subprocess.run(command, check=True, capture_output=True)
    with local_server(store) as address:
        (run,) = ask(address, "POST", "/flow_runs/filter", {})
    return float(run["total_run_time"])


def run_stages_by_hand(store: Path, target: Path) -> dict[str, float]:
    """Run the command of every stage in a new directory; returns the seconds of each."""
    seconds: dict[str, float] = {}
    for stage in STAGES:
        (source,) = (store / "stages").glob(f"{stage}-*")
        if stage == "rl":
            engine_began = time.perf_counter()
            engine = start_engine(store, target)
            seconds["engine"] = time.perf_counter() - engine_began
        began = time.perf_counter()
        run_stage(source, target)
        seconds[stage] = time.perf_counter() - began
        if stage == "rl":
            engine.terminate()
            engine.wait()
    return seconds


def run_stage(source: Path, target: Path) -> None:
    """Run the job of a stage directory in a new one of the same name."""
    job_file = copy_job(source, target)
    kind = json.loads(job_file.read_text())["kind"]
    subprocess.run([sys.executable, "-m", "rollouts_core", kind, str(job_file)], check=True, capture_output=True)


def start_engine(store: Path, target: Path) -> subprocess.Popen[bytes]:
    """Start the engine of the RL stage and return when it answers."""
    (source,) = (store / "stages").glob("engine-*")
    job_file = copy_job(source, target)
    (job_file.parent / ".job").mkdir()
    engine = subprocess.Popen(
        [sys.executable, "-m", "rollouts_core", "serve", str(job_file)], stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{json.loads(job_file.read_text())['port']}/health"
    deadline = time.monotonic() + ENGINE_START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            httpx.get(url, timeout=5).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.05)
            continue
        return engine
    raise TimeoutError(f"the engine did not answer within {ENGINE_START_TIMEOUT_S:g} s")


def copy_job(source: Path, target: Path) -> Path:
    """The job.json of a stage directory, in a new directory of the same name."""
    directory = target / source.name
    directory.mkdir(parents=True)
    return Path(shutil.copy(source / "job.json", directory / "job.json"))


if __name__ == "__main__":
    main()
