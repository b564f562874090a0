"""The quickstart through the whole pipeline with each engine: the held-out score at its end, and where its time went.

    python benchmarks/quickstart_engines.py [--engines embedded,sglang,vllm] [--seeds 0,1,2] [--out engines.json]

One store for all: SFT is trained and selected once, RL starts from it once per engine and seed, the engines take turns.
The model has 128 hidden units, because vLLM on a CPU has no heads of 16. A seed is `rollout.seed`: the order of the
prompts, and with the embedded engine what is sampled. Real servers are those of `make engines`; others with
`--sglang-python` and `--vllm-python`. About ten minutes per run with vLLM on two cores, a minute with the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
from side_by_side import REPOSITORY, describe_machine, range_of, render_machine, render_table, write_results

from rollouts_core.metrics import read_metrics
from rollouts_core.quickstart import QuickstartSize, write_quickstart_files

SFT_STEPS = 600
"""Half of the quickstart's: this model is larger."""
HIDDEN_SIZE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run came to."""

    seed: int
    sft_score: float
    """Mean held-out reward of the selected SFT checkpoint; the same for all."""
    rl_score: float
    """That of the selected RL checkpoint."""
    generate_s: float
    """Median over the steps."""
    publish_s: float
    """Median over the steps."""
    mismatch_kl: float
    """Mean over the steps: between the engine's probabilities of the tokens it sampled and the trainer's."""


def main() -> None:
    options = read_options()
    machine = describe_machine(options.threads)
    engines = options.engines.split(",")
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in engines}
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "quickstart"
        write_quickstart_files(files, size=QuickstartSize(hidden_size=HIDDEN_SIZE))
        for number, seed in enumerate(int(word) for word in options.seeds.split(",")):
            for kind in engines if number % 2 == 0 else reversed(engines):
                settings = settings_of(kind, seed, options)
                outcome = run_pipeline(files, f"{kind}-{seed}", settings, Path(folder) / "store")
                outcomes[kind].append(outcome)
                print(f"{kind}, seed {seed}: {outcome.rl_score:.3f}", file=sys.stderr, flush=True)
    results = {
        "script": "quickstart_engines",
        "machine": machine,
        "outcomes": {kind: [asdict(each) for each in found] for kind, found in outcomes.items()},
    }
    print(f"{render_machine(machine)}\n\n{render(outcomes)}")
    write_results(options.out, results)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="embedded,sglang,vllm", help="kinds, with commas (default: all three)")
    parser.add_argument("--seeds", default="0,1,2", help="rollout seeds, with commas (default: 0,1,2)")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of every engine, and of the trainer (default: 1)"
    )
    for kind in ("sglang", "vllm"):
        parser.add_argument(
            f"--{kind}-python",
            default=str(REPOSITORY / f".engines/{kind}/bin/python"),
            help="interpreter of the environment that it is installed in (default: that of `make engines`)",
        )
    parser.add_argument("--out", type=Path, help="JSON file that gets every outcome")
    return parser.parse_args()


def settings_of(kind: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:  # Any: settings of every type
    """The quickstart's own settings with another engine and seed."""
    settings = tomllib.loads((REPOSITORY / "flows/presets/quickstart.toml").read_text())
    settings["run"] = {"name": f"{kind}-{seed}"}
    settings["training"]["sft"]["num_steps"] = SFT_STEPS
    settings["rollout"] |= {"seed": seed, "engine": {"kind": kind}}
    if kind != "embedded":
        settings["rollout"]["engine"]["python"] = getattr(options, f"{kind}_python")
    settings["deployment"] |= {"trainer_threads": options.threads, "engine_threads": options.threads}
    settings["evaluation"]["engine"] = "embedded"  # the same judge for all
    return settings


def run_pipeline(files: Path, name: str, settings: Mapping[str, Any], store: Path) -> Outcome:  # Any: settings
    """Run what a user would run, and read what it left."""
    config = files / f"{name}.toml"
    config.write_text(tomli_w.dumps(dict(settings)))
    command = [str(Path(sys.executable).with_name("rollouts")), "run", str(config), "--store", str(store)]
    environment = {**os.environ, "PREFECT_HOME": str(store.with_name("prefect"))}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with code {run.returncode}:\n{run.stdout[-4000:]}")
    (report,) = store.glob(f"runs/{name}-*/run.json")
    stages = {stage["stage"]: Path(stage["run_dir"]) for stage in json.loads(report.read_text())["stages"]}
    evaluated = json.loads((stages["evaluate"] / "result.json").read_text())["checkpoints"]
    scored = {entry["name"]: entry for entry in evaluated}
    steps = read_metrics(stages["rl"] / "metrics.jsonl")
    return Outcome(
        seed=settings["rollout"]["seed"],
        sft_score=scored["sft"]["mean"],
        rl_score=scored["rl"]["mean"],
        generate_s=statistics.median(step["generate_s"] for step in steps),
        publish_s=statistics.median(step["publish_s"] for step in steps),
        mismatch_kl=statistics.fmean(step["mismatch_kl"] for step in steps),
    )


def render(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """A row per engine."""
    (sft_score,) = {each.sft_score for found in outcomes.values() for each in found}
    header = (
        "engine",
        "score after RL",
        "by seed",
        "generating, s per step",
        "publishing, s per step",
        "mean KL to the trainer",
    )
    rows = [
        (
            kind,
            range_of([each.rl_score for each in found]).render(3),
            ", ".join(f"{each.rl_score:.3f}" for each in found),
            f"{statistics.median(each.generate_s for each in found):.2f}",
            f"{statistics.median(each.publish_s for each in found):.2f}",
            f"{statistics.fmean(each.mismatch_kl for each in found):.1e}",
        )
        for kind, found in outcomes.items()
    ]
    return f"{sft_score:.3f} after SFT.\n\n{render_table(header, rows)}"


if __name__ == "__main__":
    main()
