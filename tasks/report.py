"""Write a run's report: an HTML page in the run's output folder, and a summary on the run's page in Prefect."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace

import tomli_w
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from rollouts.infra.node import NodeSettings
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.records import RunScope, StageRecord, artifact_key
from rollouts.tasks.report_input import build_report_input, judge_training
from rollouts.tasks.spending import spending_of_records, with_spending
from rollouts.tasks.store_paths import RUN_FILE
from rollouts_core.comparison import Verdict
from rollouts_core.config import Config
from rollouts_core.report import render_report, render_summary_markdown
from rollouts_core.report.markdown import as_code
from rollouts_core.roll_back import ROLLED_BACK
from rollouts_core.stages import EVALUATE, trainings_of
from rollouts_core.system.files import write_atomically, write_json


@task(name="report", cache_policy=NO_CACHE)
def write_report(
    records: Sequence[StageRecord], config: Config, node: NodeSettings, checkpoint_path: str, scope: RunScope
) -> tuple[str, Verdict | None]:
    """Write report.html, run.json and config.toml. Returns the report's path and the verdict on the last training.

    Trainings whose kind is not judged (`StageKind.is_judged`) give None instead of a verdict.
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
                **{name: record.result.get(name) for name in ("finished_early", ROLLED_BACK)},
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
        progress.say(str(path))
    return str(path), verdict


def render_settings(config: Config, node: NodeSettings, scope: RunScope) -> str:
    """The settings of the run as TOML for `rollouts run`. Settings with their default value are left out."""
    settings = json.loads(config.model_dump_json(exclude_defaults=True))
    node_settings = {"kind": node.kind, **node.model_dump(mode="json", exclude_defaults=True)}
    published = {"publish": scope.publish, "publish_checkpoints": scope.publish_checkpoints}
    reported = {"report_to": scope.report_to} if scope.report_to else {}
    run_settings = {"name": scope.run_name} | reported | (published if scope.publish else {})
    return tomli_w.dumps({**settings, "node": node_settings, "run": run_settings})
