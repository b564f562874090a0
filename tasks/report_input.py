"""Collect the data for a run's report from the records of its stages, and judge the run's last training.

Not here: writing the report at the end of a run (report.py) or again later (earlier_report.py). This module must not
import prefect, because the `rollouts` command imports this module before Prefect's environment is set.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from rollouts.infra.foreign_text import shown_line
from rollouts.tasks.benchmark_records import load_tables
from rollouts.tasks.early_end import EarlyEnd
from rollouts.tasks.records import RunScope, StageRecord
from rollouts.tasks.spending import Spending
from rollouts_core.comparison import Verdict, judge_improvement
from rollouts_core.config import Config
from rollouts_core.report import ReportInput, StageSummary, TrainedStage
from rollouts_core.roll_back import read_roll_back
from rollouts_core.stages import BASE, EVALUATE, is_training, label_of, selection_of, trainings_of


def describe_how(record: StageRecord) -> str:
    """Text for the report: ran, attached or reused (`StageRecord.how`), and its rollback or early end."""
    if roll_back := read_roll_back(record.result):
        return f"{record.how}, {roll_back.sentence}"
    early = record.result.get("finished_early")
    return f"{record.how}, {EarlyEnd.model_validate(early).sentence}" if early else record.how


def judge_training(evaluation: StageRecord, training: StageRecord, config: Config) -> Verdict:
    """Judge whether a training improved the model that it started from, by the scores on the held-out rows.

    The sentence of the verdict also has the warning in the training's result.json.
    """
    scores = {entry["name"]: entry["scores"] for entry in evaluation.result["checkpoints"]}
    models = [BASE, *(place.name for place in trainings_of(config.mode))]
    start = models[models.index(training.stage) - 1]
    before = "the start model" if start == BASE else f"the selected {label_of(start)} checkpoint"
    verdict = judge_improvement(
        scores[start],
        scores[training.stage],
        names=(before, label_of(training.stage)),
        max_p_value=config.evaluation.max_p_value,
    )
    warning = shown_line(str(training.result.get("warning") or ""))
    return replace(verdict, sentence=f"{verdict.sentence}; {warning}") if warning else verdict


def build_report_input(
    by_stage: dict[str, StageRecord],
    config: Config,
    settings_toml: str,
    checkpoint_path: str,
    scope: RunScope,
    verdict: Verdict | None,
    spending: Spending | None,
) -> ReportInput:
    """Collect the data for rendering the report.

    Args:
        by_stage: the records of all stages, by stage name and in order.
    """
    return ReportInput(
        run_name=scope.run_name,
        mode=config.mode,
        stages=tuple(
            StageSummary(
                name=record.stage,
                how=describe_how(record),
                why=record.why,
                seconds=record.seconds,
                run_dir=record.run_dir,
                usd=spending.usd_by_stage[record.stage] if spending else None,
            )
            for record in by_stage.values()
        ),
        usd_outside_stages=spending.outside_stages_usd if spending else None,
        evaluation_dir=Path(by_stage[EVALUATE.name].run_dir),
        trainings=tuple(
            TrainedStage(
                name=name,
                run_dir=Path(by_stage[name].run_dir),
                selection_dir=Path(by_stage[selection_of(name)].run_dir),
                selected=by_stage[selection_of(name)].result["best"],
            )
            for name in by_stage
            if is_training(name)
        ),
        checkpoint_path=checkpoint_path,
        settings_toml=settings_toml,
        reproduce_command=shlex.join(
            ["rollouts", "run", str(scope.output_dir / "config.toml"), "--store", scope.store]
        ),
        use_command=shlex.join(["rollouts", "serve", checkpoint_path]),
        verdict=verdict.sentence if verdict else "",
        is_improvement=verdict.is_improvement if verdict else None,
        benchmarks=load_tables(scope.output_dir),
        contents=config.report,
        run_id=scope.run_id,
        began_at=min((record.began_at for record in by_stage.values() if record.began_at), default=0.0),
        config=config,
    )
