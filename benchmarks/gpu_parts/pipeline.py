"""The quickstart, as a newcomer runs it, with the trainer on the GPU.

Not here: the pipeline's own tests, which need no GPU (tests/flows).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from side_by_side import REPOSITORY, worker_environment

from gpu_parts.checking import Check, Place, hold
from gpu_parts.record import Figures
from rollouts_core.quickstart import SMALL_SIZE, QuickstartSize, write_quickstart_files

PRESET = REPOSITORY / "flows/presets/quickstart.toml"
ROLLOUTS = "from rollouts.flows.command import main; main()"
"""The command `rollouts`, which is not installed where only wheels of what it needs are."""


def run_quickstart(place: Place) -> Figures:
    """SFT, selection, RL and evaluation by `rollouts run`; on a GPU the held-out score must rise with each."""
    import tomli_w  # as the check's `needs` says

    settings = tomllib.loads(PRESET.read_text(encoding="utf-8"))
    settings["deployment"]["trainer_processes"] = place.choose(0, 1)  # 0 refuses a machine without a GPU
    settings["deployment"]["trainer_threads"] = place.choose(0, 1)
    write_quickstart_files(place.folder / "files", size=place.choose(QuickstartSize(), SMALL_SIZE))
    if place.is_rehearsal:
        make_small(settings)
    config = place.folder / "files/quickstart.toml"
    config.write_text(tomli_w.dumps(settings), encoding="utf-8")
    store = place.folder / "store"
    done = subprocess.run(
        [sys.executable, "-c", ROLLOUTS, "run", str(config), "--store", str(store)],
        cwd=REPOSITORY,
        env={**worker_environment(os.cpu_count() or 1), "ROLLOUTS_HOME": str(place.folder / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    hold(
        done.returncode == 0,
        f"rollouts run ended with code {done.returncode}: {done.stdout[-300:]}{done.stderr[-500:]}",
    )
    scores = read_scores(store)
    if not place.is_rehearsal:
        hold(scores["base"] < scores["sft"] < scores["rl"], f"the held-out scores do not rise: {scores}")
    return {f"score of {name}": score for name, score in scores.items()}


def make_small(settings: dict[str, Any]) -> None:  # Any: settings of every type
    """As few steps as show that every stage runs."""
    settings["training"]["sft"] |= {"num_steps": 2, "checkpoint_every": 2, "log_every": 1}
    settings["training"]["rl"] |= {"num_steps": 1, "checkpoint_every": 1}
    settings["rollout"] |= {"batch_size": 4, "n_samples_per_prompt": 4}
    settings["rollout"]["sampling"]["max_new_tokens"] = 16
    # So short a training earns no reward, and gets worse as often as better.
    settings["training"]["rl"]["reward_shaping"] = {"max_response_tokens": 16, "overlong_buffer_tokens": 16}
    settings["evaluation"] |= {"max_p_value": 1.0, "samples_per_prompt": 1}
    settings["node"]["min_free_gb"] = 0.1


def read_scores(store: Path) -> dict[str, float]:
    """The held-out score of each model, by its name."""
    (evaluation,) = (store / "stages").glob("evaluate-*")
    told = json.loads((evaluation / "result.json").read_text(encoding="utf-8"))
    return {each["name"]: float(each["mean"]) for each in told["checkpoints"]}


CHECKS = [
    Check(name="the quickstart with the trainer on the GPU", run=run_quickstart, needs=("prefect", "tomli_w")),
]
