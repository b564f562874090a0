"""SkyPilot as far as it is used here, as a program that remembers its clusters: FOLDER WORDS...

Written after the program of SkyPilot 0.14.1: it takes the options that the real one takes, and no others. Kubernetes
is enabled where `can` says so: `gpus list` has what the nodes of the current context are labelled with, in powers of
two, without an instance type, a memory or, as long as nothing is configured, a price; a launch takes no limit of price
there, and ssh needs a proxy command. What it remembers, and its faults, of which numbers count down, are in
FOLDER/state.json: each cluster that it makes has the next of `addresses`, where `address` says nothing else.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

State = dict[str, Any]  # Any: JSON
CATALOG = [
    ("AWS", "p5.4xlarge", "H100", 1, 80.0, 6.88, 2.5, "us-east-1"),
    ("AWS", "p5.4xlarge", "H100", 1, 80.0, 6.98, None, "us-west-2"),
    ("GCP", None, "L4", 1, None, 0.71, 0.28, "us-central1"),
    ("GCP", "a3-highgpu-1g", "H100", 1, None, 6.5, 2.1, "us-central1"),
    ("Azure", "NC40ads_H100_v5", "H100", 1, None, 6.6, 2.2, "eastus"),
    ("GCP", "mystery-1g", "MYSTERY", 1, None, 0.1, 0.1, "us-central1"),
    ("Kubernetes", None, "H100-80GB", 1, None, 0.0, 0.0, "gke_mine_europe-west4_gpus"),
    ("Kubernetes", None, "H100-80GB", 2, None, 0.0, 0.0, "gke_mine_europe-west4_gpus"),
    ("Kubernetes", None, "L4", 1, None, 0.5, 0.5, "gke_mine_europe-west4_gpus"),
    ("Verda", "1H100.80S.30V", "H100", 1, 80.0, 2.2, None, "FIN-01"),
    ("Fluidstack", "H100_SXM5_80GB::1", "H100", 1, 80.0, 2.3, None, "norway_2_eu"),
    ("RunPod", "1x_H100_SECURE", "H100", 1, 80.0, 2.0, None, "CA"),
]
UNHEALTHY = "Cluster is abnormal because ray cluster is unhealthy (SSH connection to the head node timed out)."
CAN = {"default": {"AWS": ["compute", "storage"], "GCP": ["compute"], "Azure": ["storage"], "RunPod": ["compute"]}}
FIELDS = (
    *("cloud", "instance_type", "accelerator_name", "accelerator_count"),
    *("device_memory", "price", "spot_price", "region"),
)


@contextmanager
def opened(folder: Path) -> Iterator[State]:
    """What the program remembers, for one process at a time."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state: State = json.loads((folder / "state.json").read_text())
        yield state
        (folder / "state.json").write_text(json.dumps(state))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def takes(state: State, fault: str) -> bool:
    """Whether the fault is due; counts it down."""
    number = int(state["faults"].get(fault, 0))
    state["faults"][fault] = max(0, number - 1)
    return number > 0


def parse(words: list[str]) -> argparse.Namespace:
    """The words as the real program takes them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    launch = commands.add_parser("launch", allow_abbrev=False)
    for flag in ("--yes", "--detach-run", "--down"):
        launch.add_argument(flag, action="store_true")
    launch.add_argument("--cluster", required=True)
    launch.add_argument("--idle-minutes-to-autostop", type=int)
    launch.add_argument("--wait-for", choices=["jobs_and_ssh", "jobs", "none"])
    launch.add_argument("entrypoint")
    status = commands.add_parser("status", allow_abbrev=False)
    status.add_argument("--refresh", action="store_true")
    status.add_argument("clusters", nargs="*")
    down = commands.add_parser("down", allow_abbrev=False)
    down.add_argument("--yes", action="store_true")
    down.add_argument("clusters", nargs="+")
    gpus = commands.add_parser("gpus").add_subparsers(dest="what", required=True).add_parser("list")
    gpus.add_argument("accelerator")
    gpus.add_argument("--infra")
    gpus.add_argument("--all-regions", action="store_true")
    for reading in (status, gpus, commands.add_parser("check", allow_abbrev=False)):
        reading.add_argument("--output", choices=["table", "json"])
    return parser.parse_args(words)


def launch(state: State, options: argparse.Namespace) -> int:
    """Make a cluster, or say why not."""
    if takes(state, "no_capacity"):
        sys.stderr.write("\x1b[31msky.exceptions.ResourcesUnavailableError: Failed to acquire resources in all zones\n")
        return 1
    task = json.loads(Path(options.entrypoint).read_text())
    resources = task["resources"]
    if resources["infra"].startswith("kubernetes/") and (resources["use_spot"] or "instance_type" in resources):
        sys.stderr.write("ValueError: Kubernetes has no such thing\n")
        return 1
    if resources["infra"].startswith("verda/") and options.down:
        sys.stderr.write("sky.exceptions.NotSupportedError: Auto-down is not supported on Verda.\n")
        return 1
    is_broken = takes(state, "fail_setup")
    state["clusters"][options.cluster] = {
        "status": "INIT" if is_broken else "UP",
        "init_kind": "unhealthy" if is_broken else None,
        "init_status_reason": UNHEALTHY if is_broken else None,
        "cluster_ever_up": not is_broken,
        "task": task,
        "minutes": options.idle_minutes_to_autostop,
        "waits_for": options.wait_for,
        "ends": options.down,
        "address": state["addresses"][state["num_made"] % len(state["addresses"])],
    }
    state["num_made"] += 1
    if is_broken:
        sys.stderr.write("Failed to set up the cluster\n")
    return int(is_broken)


def status(state: State, options: argparse.Namespace, home: Path) -> int:
    """Print the clusters, and write how ssh reaches them."""
    if takes(state, "fail_status"):
        sys.stderr.write("Failed to connect to SkyPilot API server\n")
        return 1
    if takes(state, "talk"):
        say("Refreshing status of 1 cluster...")
    for name in options.clusters:
        if name not in state["clusters"]:
            say(f"Cluster(s) not found: \x1b[1m{name}\x1b[0m.")
    found = []
    for name, cluster in state["clusters"].items():
        if options.clusters and name not in options.clusters:
            continue
        shown = state["faults"].get("status") or cluster["status"]
        init = {key: cluster.get(key) for key in ("init_kind", "init_status_reason")}
        is_known = bool(cluster.get("cluster_ever_up"))
        found.append({"name": name, "status": shown, "nodes": 1, "cloud": "AWS", "cluster_ever_up": is_known, **init})
        address = cluster.get("address", state["addresses"][0]) | state["address"]
        lines = ["# Added by sky", f"Host {name}", *(f"  {key} {value}" for key, value in address.items()), ""]
        folder = home / ".sky/generated/ssh"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join([*lines, f"Host {name}-worker1", "  HostName 10.9.9.9"]))
    say(json.dumps(found, indent=2))
    return 0


def gpus(options: argparse.Namespace) -> int:
    """Print what there is of a GPU."""
    name, _, count = options.accelerator.partition(":")
    found: dict[str, list[State]] = {}
    for row in CATALOG:
        kind: State = dict(zip(FIELDS, row, strict=True))
        is_meant = name.lower() in kind["accelerator_name"].lower() and kind["accelerator_count"] == int(count)
        if is_meant and kind["cloud"].lower() == options.infra:
            found.setdefault(kind["accelerator_name"], []).append({**kind, "cpu_count": 8.0, "memory": 64.0})
    say(json.dumps(found, indent=2))
    return 0


def down(state: State, options: argparse.Namespace) -> int:
    """End clusters."""
    for name in options.clusters:
        if name not in state["clusters"]:
            say(f"Cluster(s) not found: \x1b[1m{name}\x1b[0m.")
            continue
        if takes(state, "fail_downs"):
            say(f"\nTerminating cluster {name}...failed. \nReason: RuntimeError: the cloud did not answer.")
            say("Terminating 1 cluster                     0% -:--:--")
            say("Cluster(s) failed. See details above. If you want to ignore the errors, use `sky down --purge`.")
            continue
        del state["clusters"][name]
    return 0


def main() -> int:
    """One call."""
    folder, home, words = Path(sys.argv[1]), Path.home(), sys.argv[2:]
    options = parse(words)
    with opened(folder) as state:
        state["calls"].append(words)
        hang_s = state["faults"].pop("hang_launch_s", 0) if options.command == "launch" else 0
        if options.command == "check":
            say(json.dumps(state.get("can") or CAN, indent=2))
            code = 0
        elif options.command == "gpus" and options.infra in state["faults"].get("away", []):
            sys.stderr.write("Timed out when trying to reach the cluster\n")
            code = 1
        elif options.command == "gpus":
            code = gpus(options)
        elif options.command == "status":
            code = status(state, options, home)
        else:
            code = {"launch": launch, "down": down}[options.command](state, options)
    sys.stdout.flush()
    time.sleep(hang_s)
    return code


if __name__ == "__main__":
    sys.exit(main())
