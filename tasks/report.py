"""Write the run's report: an HTML page in its output folder, and a summary on the run's page in Prefect."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from rollouts.infra.foreign_text import shown_line
from rollouts.infra.node import NodeSettings
from rollouts.tasks.early_end import EarlyEnd
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.records import RunScope, StageRecord, artifact_key
from rollouts.tasks.spending import Spending, spending_of_records, with_spending
from rollouts.tasks.store_paths import RUN_FILE
from rollouts_core.comparison import Verdict, judge_improvement
from rollouts_core.config import Config
from rollouts_core.report import ReportInput, StageSummary, TrainedStage, render_report, render_summary_markdown
from rollouts_core.report.markdown import as_code
from rollouts_core.stages import BASE, EVALUATE, is_training, label_of, selection_of, trainings_of
from rollouts_core.system.files import write_atomically, write_json


@task(name="report", cache_policy=NO_CACHE)
def write_report(
    records: Sequence[StageRecord], config: Config, node: NodeSettings, checkpoint_path: str, scope: RunScope
) -> tuple[str, Verdict | None]:
    """Write report.html, run.json and config.toml; returns the report's path and the verdict.

    The verdict is None if the last training is not judged.
    """
    by_stage = {record.stage: record for record in records}
    last = trainings_of(config.mode)[-1]
    verdict = judge_training(by_stage[EVALUATE.name], by_stage[last.name], config) if last.kind.is_judged else None
    settings_toml = render_settings(config, node, scope)
    spending = spending_of_records(records, scope)
    report = replace(
        build_report_input(by_stage, config, settings_toml, checkpoint_path, scope, verdict, spending),
        written_at=time.time(),
    )
    path = scope.output_dir / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(scope.output_dir / "config.toml", settings_toml)
    write_atomically(path, render_report(report))
    run = {
        "run_id": scope.run_id,
        "run_name": scope.run_name,
        "config": config.model_dump(mode="json", exclude_defaults=True),
        "stages": [
            {
                **record.model_dump(mode="json", exclude={"result"}),
                "finished_early": record.result.get("finished_early"),
            }
            for record in records
        ],
        "selected": dict(report.selected),
        "verdict": report.verdict,
    }
    write_json(scope.output_dir / RUN_FILE, with_spending(run, spending))
    create_markdown_artifact(
        render_summary_markdown(report), key=artifact_key("report", scope), description=f"Report: {as_code(str(path))}"
    )
    with StageProgress("report") as progress:
        progress.say(f"{path}{': ' + verdict.sentence if verdict else ''}")
    return str(path), verdict


def describe_how(record: StageRecord) -> str:
    """How a stage came to its result, and whether a user ended it early."""
    early = record.result.get("finished_early")
    return f"{record.how}, {EarlyEnd.model_validate(early).sentence}" if early else record.how


def judge_training(evaluation: StageRecord, training: StageRecord, config: Config) -> Verdict:
    """Whether a training beat the model that it started from on the held-out rows, and what its record warns of."""
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


def render_settings(config: Config, node: NodeSettings, scope: RunScope) -> str:
    """The settings of the run as a file for `rollouts run`, without those at their defaults."""
    settings = json.loads(config.model_dump_json(exclude_defaults=True))
    node_settings = {"kind": node.kind, **node.model_dump(mode="json", exclude_defaults=True)}
    published = {"publish": scope.publish, "publish_checkpoints": scope.publish_checkpoints}
    reported = {"report_to": scope.report_to} if scope.report_to else {}
    run_settings = {"name": scope.run_name} | reported | (published if scope.publish else {})
    return tomli_w.dumps({**settings, "node": node_settings, "run": run_settings})


def build_report_input(
    by_stage: dict[str, StageRecord],
    config: Config,
    settings_toml: str,
    checkpoint_path: str,
    scope: RunScope,
    verdict: Verdict | None,
    spending: Spending | None,
) -> ReportInput:
    """The input of the report's renderer, from the records of the stages."""
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
        contents=config.report,
        run_id=scope.run_id,
        began_at=min((record.began_at for record in by_stage.values() if record.began_at), default=0.0),
        config=config,
    )
