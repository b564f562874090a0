"""A month of a schedule with real jobs and kill -9: production only ever gets better, and nothing is left behind.

Without it a fault between two writes could promote the wrong model, or leave jobs, claims and stages that nobody owns.

Each look is a process of its own, as a run of Prefect is; its training is a job under a supervisor, and outlives it.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollouts.infra.errors import JobFailedError
from rollouts.infra.jobs import follow_job, require_finished, start_or_attach
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.registry import Alias, Model, current, find_model, history, models, register_model
from rollouts.infra.retrainings import Retraining, RetrainingState, retrainings
from rollouts.infra.session import LocalSession
from rollouts.infra.supervisor.status import is_supervised
from rollouts.tasks.prune import plan_prune, remove_folders
from rollouts.tasks.retraining import Answer, Compared, Rules, retrain_once
from rollouts_core.checkpoint import load_manifest, new_checkpoint, verify_checkpoint
from tests.infra.shell_jobs import shell_spec
from tests.kit.commands import processes_of
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow

NUM_LOOKS = 60
LINE = "small"
START_QUALITY = 0.1
FORK = multiprocessing.get_context("fork")
SCRIPT = """
if rm "$STORE/fail" 2>/dev/null; then exit 1; fi
sleep 0.2
printf '{"quality": %s}' "$QUALITY" > result.partial && mv result.partial result.json
"""
"""A training: it makes a model as good as its data."""


@dataclass(frozen=True)
class JobWork:
    """What a retraining has done, by a job on this machine."""

    store: Path
    run_id: str

    def watch(self) -> dict[str, str]:
        return {"data": (self.store / "data").read_text()}

    def train(self, data: Mapping[str, str], production: Model | None) -> Compared:
        quality = data["data"]
        stage = f"sft-{hashlib.sha256(quality.encode()).hexdigest()[:16]}"
        with Ledger(self.store / LEDGER_FILE) as ledger, ledger.living_run(self.run_id):
            ledger.note_use(stage, self.run_id)
            made = self.run_job(ledger, self.store / "stages" / stage, quality)
            folder = self.store / f"runs/{self.run_id}-{quality}/checkpoint"
            with new_checkpoint(folder, step=1) as partial:
                (partial / "model.safetensors").write_text(f"{made}")
            model = register_model(
                ledger,
                LINE,
                checkpoint=str(folder.relative_to(self.store)),
                digest=load_manifest(folder).digest,
                run_id=self.run_id,
                stages=[stage],
                data=data,
                by="month",
            )
        return self.compare(model, production)

    def compare(self, candidate: Model, production: Model | None) -> Compared:
        made = quality_of(self.store, candidate)
        baseline = quality_of(self.store, production) if production else START_QUALITY
        return Compared(model=candidate, is_better=made > baseline, sentence=f"{made} to {baseline}", evaluation={})

    def run_job(self, ledger: Ledger, run_dir: Path, quality: str) -> float:
        """The quality that the job says it reached."""
        spec = shell_spec(run_dir, SCRIPT, env={"STORE": str(self.store), "QUALITY": quality})
        with LocalSession(sys.executable) as session:
            ledger.add_lease(str(run_dir), self.run_id, "local")
            status = start_or_attach(session, spec)
            ended = follow_job(session, status.run_dir, on_metrics=lambda _: None, on_event=lambda _: None)
            require_finished(session, ended)
            ledger.drop_lease(str(run_dir), self.run_id)
        return float(json.loads((run_dir / "result.json").read_text())["quality"])

    def ask(self, row: Retraining, candidate: Model) -> Answer:
        raise AssertionError("nobody is asked")


def quality_of(store: Path, model: Model) -> float:
    return float((store / model.checkpoint / "model.safetensors").read_text())


def look(store: Path, run_id: str, now: float) -> None:
    """One look of the schedule, to its end."""
    try:
        with Ledger(store / LEDGER_FILE) as ledger:
            rules = Rules(max_failures=NUM_LOOKS)
            retrain_once(ledger, JobWork(store, run_id), run_id=run_id, line=LINE, rules=rules, clock=lambda: now)
    except JobFailedError:
        os._exit(1)
    os._exit(0)


def start_look(store: Path, number: int, *, kill_after_s: float | None = None) -> int:
    """The exit code of the process of a look; negative where it was killed."""
    process = FORK.Process(target=look, args=(store, f"run-{number}", 43_200.0 * number))
    process.start()
    if kill_after_s is not None:
        process.join(kill_after_s)
        assert process.pid is not None
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def test_a_month_ends_with_the_best_model_in_production_and_nothing_left_behind(tmp_path: Path) -> None:
    chance, store = random.Random(0), tmp_path / "store"
    store.mkdir()
    ends: list[int] = []
    for number in range(NUM_LOOKS):
        if number == 0 or chance.random() < 0.4:
            (store / "data").write_text(f"{chance.uniform(0, 1):.6f}")
        fault = chance.choices(["none", "failure", "kill"], weights=(4, 1, 2))[0]
        (store / "fail").unlink(missing_ok=True)  # of a look that trained nothing
        if fault == "failure":
            (store / "fail").touch()
        ends.append(start_look(store, number, kill_after_s=chance.uniform(0.02, 0.5) if fault == "kill" else None))
        if ends[-1] and chance.random() < 0.5:
            (store / "fail").unlink(missing_ok=True)
            assert start_look(store, number) == 0, "a retry goes on"
    (store / "fail").unlink(missing_ok=True)
    assert start_look(store, NUM_LOOKS) == 0
    assert {0, 1, -signal.SIGKILL} <= set(ends), "every fault happened"

    with Ledger(store / LEDGER_FILE) as ledger:
        promoted = [change.model_id for change in history(ledger, LINE) if change.alias is Alias.PRODUCTION]
        qualities = [quality_of(store, find_model(ledger, str(each))) for each in promoted]
        assert qualities == sorted(set(qualities)), "production only ever got better"
        over = [RetrainingState.PROMOTED, RetrainingState.REJECTED]
        considered = [float(row.data["data"]) for row in retrainings(ledger, LINE) if row.state in over]
        assert float((store / "data").read_text()) in considered
        production = current(ledger, LINE, Alias.PRODUCTION)
        assert production is not None
        assert quality_of(store, production) == max([START_QUALITY, *considered, *qualities])
        verify_checkpoint(store / production.checkpoint)
        assert current(ledger, LINE, Alias.CANDIDATE) is None

        wait_until(lambda: not processes_of(store), what="the end of all jobs", timeout_s=60)
        assert [path for path in (store / "stages").iterdir() if is_supervised(str(path))] == []
        assert [lease for lease in ledger.leases() if not ledger.has_died(lease.run_id)] == []
        remove_folders(store, ledger, plan_prune(store, ledger, unused_days=0, max_bytes=0, now=time.time() + 1))
        lineage = {stage for model in models(ledger) for stage in model.stages}
        assert {path.name for path in (store / "stages").iterdir()} == lineage
