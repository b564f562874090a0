"""Run other systems' own advantage, loss and correction functions on one fixed batch and write what they return.

    python -m tests.rollouts_core.algorithms.peers.record CHECKOUTS [SYSTEM ...]

CHECKOUTS holds one folder per system (`slime`, `verl`, ...), each a git checkout; see README.md. Each system runs in
a process of its own, because their stand-ins for absent packages would meet otherwise.
Not here: any code of those systems; how each is called (`systems/`).
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.rollouts_core.algorithms.peers.recording import Case, plain

FOLDER = Path(__file__).parent
RELEASE = "_release"
"""A folder `verl_release` holds an unpacked release of verl, next to the checkout `verl`; both are recorded alike."""
REPOSITORIES = {
    "slime": "THUDM/slime",
    "verl": "volcengine/verl",
    "trl": "huggingface/trl",
    "openrlhf": "OpenRLHF/OpenRLHF",
    "skyrl": "NovaSky-AI/SkyRL",
    "nemo_rl": "NVIDIA-NeMo/RL",
    "open_instruct": "allenai/open-instruct",
    "prime_rl": "PrimeIntellect-ai/prime-rl",
    "areal": "inclusionAI/AReaL",
    "torchtitan": "pytorch/torchtitan",
    "nanochat": "karpathy/nanochat",
    "tinker_cookbook": "thinking-machines-lab/tinker-cookbook",
}


def commit_and_date(checkout: Path) -> tuple[str, str]:
    """Hash and date of the checkout's commit; of an unpacked release (no git), its version and an empty date."""
    if not (checkout / ".git").exists():
        (facts,) = checkout.glob("*.dist-info/METADATA")
        version = next(line for line in facts.read_text().splitlines() if line.startswith("Version:"))
        return f"release {version.split()[1]}", ""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%H %cI"]
    commit, date = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return commit, date


def as_json(cases: list[Case], *, repository: str, commit: str, date: str) -> str:
    """The file's text: one number list a line, so that a change shows in a diff."""
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"{repository}: case names must be unique, found {sorted(names)}.")
    records: list[dict[str, Any]] = [plain(asdict(case)) for case in cases]
    whole = {"repository": repository, "commit": commit, "date": date, "cases": records}
    text = json.dumps(whole, indent=1, allow_nan=False)
    return re.sub(r"\[[^][{}]*\]", lambda found: "[" + " ".join(found.group()[1:-1].split()) + "]", text) + "\n"


def record(system: str, checkout: Path) -> None:
    """Run one system's recorder and write its file, `<folder>.json`."""
    commit, date = commit_and_date(checkout)
    torch.set_num_threads(1)
    recorder = importlib.import_module(f"tests.rollouts_core.algorithms.peers.systems.{system}")
    cases = recorder.record(checkout.resolve())
    output = FOLDER / f"{checkout.name}.json"
    output.write_text(as_json(cases, repository=REPOSITORIES[system], commit=commit, date=date))
    sys.stdout.write(f"{checkout.name}: {len(cases)} cases at {commit}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, help="folder with one checkout per system")
    parser.add_argument("systems", nargs="*", help="only these, by the names of their folders; all by default")
    options = parser.parse_args()
    known = [name + suffix for name in REPOSITORIES for suffix in ("", RELEASE)]
    names = options.systems or [name for name in known if (options.checkouts / name).is_dir()]
    if len(names) == 1:
        record(names[0].removesuffix(RELEASE), options.checkouts / names[0])
        return
    for name in names:
        command = [sys.executable, "-m", "tests.rollouts_core.algorithms.peers.record", str(options.checkouts), name]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
