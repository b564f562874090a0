"""What it costs a training that logs every step to be followed by a flow, with its progress and ledger.

    python benchmarks/metric_lines.py [--rounds 5] [--steps 3000]

A model so small that a minute has 10,000 steps and more is trained alternately by a flow that follows it, and by the
command of the same job alone. Compared is the time between the first and the last line of metrics.jsonl, without the
start of either.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from side_by_side import describe_machine, range_of, render_machine, render_table

from rollouts_core.metrics import read_json_lines
from rollouts_core.quickstart import SMALL_SIZE, write_quickstart_files

SIZE = replace(SMALL_SIZE, hidden_size=16, num_layers=1)
CONFIG = """
mode = "sft"

[model]
path = "./base_model"

[data]
sft = "sft.jsonl"
selection = "selection.jsonl"
heldout = "heldout.jsonl"

[training.sft]
num_steps = {num_steps}
checkpoint_every = {num_steps}
log_every = 1
batch_size = 1
max_length = 32

[rollout.sampling]
max_new_tokens = 8

[deployment]
trainer_threads = 1

[node]
min_free_gb = 0.1

[run]
name = "lines"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements (default: 5)")
    parser.add_argument("--steps", type=int, default=3000, help="lines of each (default: 3000)")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"followed": [], "alone": []}
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "files")
        write_quickstart_files(files, size=SIZE)
        (files / "lines.toml").write_text(CONFIG.format(num_steps=options.steps))
        for number in range(options.rounds):
            store, by_hand = Path(folder, f"store-{number}"), Path(folder, f"by-hand-{number}")
            stage = run_followed(files / "lines.toml", store)
            seconds["followed"].append(logged_s(stage))
            by_hand.mkdir()
            shutil.copy(stage / "job.json", by_hand)
            command = [sys.executable, "-m", "rollouts_core", "sft", str(by_hand / "job.json")]
            subprocess.run(command, check=True, capture_output=True)
            seconds["alone"].append(logged_s(by_hand))
    per_minute = [60 * (options.steps - 1) / taken for taken in seconds["followed"]]
    ratios = [followed / alone for followed, alone in zip(seconds["followed"], seconds["alone"], strict=True)]
    rows = [
        *([f"{name}, s", range_of(values).render(2)] for name, values in seconds.items()),
        ["lines per minute", range_of(per_minute).render(0)],
        ["followed / alone", range_of(ratios).render(4)],
    ]
    print(render_machine(describe_machine(1)) + "\n")
    print(render_table(["", "median (min to max)"], rows))


def run_followed(config: Path, store: Path) -> Path:
    """Run the pipeline in an empty store; returns the directory of its SFT."""
    command = [sys.executable, "-m", "rollouts.flows.cli", "run", str(config), "--store", str(store)]
    subprocess.run(command, check=True, capture_output=True)
    (stage,) = store.glob("stages/sft-*")
    return stage


def logged_s(stage: Path) -> float:
    """Seconds between the first and the last line of a stage's metrics."""
    assert (stage / "result.json").is_file(), f"{stage} did not finish"
    times = [line["time"] for line in read_json_lines(stage / "metrics.jsonl")]
    return float(times[-1] - times[0])


if __name__ == "__main__":
    main()
