"""A store with finished runs, as the pipeline leaves them: for tests of commands that read runs later."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts_core.config import Config
from rollouts_core.job import EvalJob
from rollouts_core.metrics import EventLog
from rollouts_core.run_directory import RunDirectory
from tests.kit.small_pipeline import small_settings
from tests.rollouts_core.report.made_run import rollout, write_tokenizer
from tests.rollouts_core.report.test_report import write_evaluation, write_job, write_rl, write_sft

PROMPTS = tuple(f"held {i}" for i in range(40))
SCORES: Mapping[str, Sequence[float]] = {
    "base": [0.0] * 36 + [1.0] * 4,
    "sft": [0.0] * 20 + [1.0] * 20,
    "rl": [0.0] * 2 + [1.0] * 38,
}


def write_stored_run(
    store: Path,
    run: str,
    *,
    scores: Mapping[str, Sequence[float]] = SCORES,
    prompts: Sequence[str] = PROMPTS,
    digest: str = "cd" * 32,
    host: str = "node-1",
    **overrides: Any,  # Any: settings of every type
) -> Path:
    """Write a finished run of SFT and RL; returns its folder.

    Args:
        run: the name of its folder: small-11111111.
        prompts: the held-out prompts, one per score.
        digest: of the held-out rows.
        overrides: settings of the small pipeline, as in small_settings.
    """
    settings = small_settings(**overrides)
    own = {name: settings.pop(name) for name in ("node", "run")}
    settings["model"]["path"] = str(store / settings["model"]["path"])  # a run keeps absolute paths
    settings["data"] = {name: str(store / path) for name, path in settings["data"].items()}
    config = Config.model_validate(settings)
    name, _, run_id = run.rpartition("-")
    steps = {"step_000002": [0.0, 1.0], "step_000004": [1.0, 1.0]}
    stages = {stage: store / "stages" / f"{stage}-{run_id * 2}" for stage in (
        "sft", "select-sft", "rl", "select-rl", "evaluate")}  # fmt: skip
    write_sft(stages["sft"])
    write_rl(stages["rl"])
    for stage in ("select-sft", "select-rl"):
        write_evaluation(stages[stage], steps)
    _write_heldout(stages["evaluate"], scores, prompts, digest)
    for stage in ("sft", "rl"):
        with EventLog(RunDirectory(stages[stage]).events, attempt=1) as events:
            events.write("started", host=host, system="Linux", processors=2, versions={"torch": "2.13"})
    folder = store / "runs" / run
    write_tokenizer(folder / "checkpoint")
    with Ledger(store / LEDGER_FILE) as ledger:
        for path in stages.values():
            ledger.note_use(path.name, run_id * 4, run=run, num_steps=4)
    tables = json.loads(config.model_dump_json(exclude_defaults=True))
    (folder / "config.toml").write_text(tomli_w.dumps({**tables, "node": own["node"], "run": {"name": name}}))
    described = {
        "run_id": run_id * 4,
        "run_name": name,
        "config": tables,
        "stages": [
            {
                "stage": stage, "fingerprint": path.name[-16:], "run_dir": str(path), "how": "ran", "why": "",
                "began_at": 1.8e9 + 10 * place, "seconds": 9.0, "finished_early": None, "usd": 0.5,
            }
            for place, (stage, path) in enumerate(stages.items())
        ],
        "selected": {"sft": "step_000004", "rl": "step_000004"},
        "verdict": f"the verdict of {run}",
        "spent": {"total_usd": 3.0, "outside_stages_usd": 0.5, "until": 1.8e9, "is_final": True},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(described))
    (folder / "report.html").write_text("<html>the first report</html>")
    return folder


def _write_heldout(directory: Path, scores: Mapping[str, Sequence[float]], prompts: Sequence[str], digest: str) -> None:
    write_evaluation(directory, scores)
    files = RunDirectory(directory)
    job = EvalJob.model_validate_json(files.job.read_text())
    write_job(directory, job.model_copy(update={"data": job.data.model_copy(update={"digest": digest})}))
    for model, rewards in scores.items():
        answers = [
            replace(rollout(1, i, 0, prompt=prompt), reward=reward)
            for i, (prompt, reward) in enumerate(zip(prompts, rewards, strict=True))
        ]
        files.write_samples(model, answers, temperature=1.0)
