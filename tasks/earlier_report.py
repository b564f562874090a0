"""Render the report of a finished run again, with the current code, from the files in the store.

    runs/<run>/run.json, config.toml   -> records of the stages, settings, verdict, cost
    stages/<stage>/                    -> the other data, which the report reads itself

Older versions of rollouts wrote fewer files. The report omits the parts whose files are missing. Not here: the first
report of a run (report.py). This module must not import prefect, because the `rollouts` command imports this module
before Prefect's environment is set.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.tasks.model_aliases import note_in_reports
from rollouts.tasks.records import RunScope, StageRecord
from rollouts.tasks.report_input import build_report_input, judge_training
from rollouts.tasks.spending import Spending
from rollouts.tasks.store_paths import RUN_FILE, RUNS, STAGES
from rollouts_core.config import Config
from rollouts_core.config.files import read_record
from rollouts_core.errors import ConfigError, InputError
from rollouts_core.mistakes import Mistakes
from rollouts_core.report import ReportInput, render_report
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import EVALUATE, is_selection, trainings_of
from rollouts_core.system.files import write_atomically

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Exceptions while reading a run.json that is damaged or in an unknown format."""


def render_again(store: Path, run: str) -> Path:
    """Rewrite the report of a finished run. Returns the path of the report.

    Args:
        run: the name of the run's folder in the store.

    Raises:
        InputError: the run has no readable run.json, or files that the report needs were deleted. The existing report
            stays unchanged in this case, because it may still show the content of the deleted files.
    """
    report = load_report_input(store, run)
    if missing := find_missing(report):
        raise InputError(f"the report of {run} cannot be rendered again, because {', '.join(missing)} no longer exists")
    path = store / RUNS / run / "report.html"
    write_atomically(path, render_report(report))
    with Ledger(store / LEDGER_FILE) as ledger:
        note_in_reports(store, ledger)
    return path


def find_missing(report: ReportInput) -> list[str]:
    """The stage directories and the checkpoint folder that the report needs but that no longer exist."""
    stages = [Path(stage.run_dir) for stage in report.stages if stage.run_dir]
    missing = [each for each in stages if not RunDirectory(each).result.is_file()]
    checkpoint = Path(report.checkpoint_path)
    return [str(each) for each in (*missing, *([] if checkpoint.is_dir() else [checkpoint]))]


def load_report_input(store: Path, run: str) -> ReportInput:
    """Load the data for the report of a finished run.

    Raises:
        InputError: the run has no run.json, or run.json cannot be read.
    """
    folder = store / RUNS / run
    try:
        described = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        return _as_report_input(described, store, folder)
    except FileNotFoundError:
        raise InputError(f"{run} has no {RUN_FILE}: the last stage of a run writes it with the report") from None
    except UNREADABLE as error:
        raise InputError(f"{folder / RUN_FILE} cannot be read: {error!r}") from error


def _as_report_input(described: Mapping[str, Any], store: Path, folder: Path) -> ReportInput:  # Any: JSON
    scope = RunScope(run_id=described["run_id"], run_name=described["run_name"], store=str(store))
    by_stage = {each["stage"]: _as_record(each, store, described["selected"]) for each in described["stages"]}
    mistakes = Mistakes(ConfigError)
    config = read_record(Config, described["config"], mistakes, source=str(folder / RUN_FILE))
    if config is None:
        raise InputError(f"the settings in {folder / RUN_FILE} were written by another version of rollouts")
    last = trainings_of(config.mode)[-1]
    is_judged = last.kind.is_judged and "checkpoints" in by_stage[EVALUATE.name].result
    verdict = judge_training(by_stage[EVALUATE.name], by_stage[last.name], config) if is_judged else None
    settings = folder / "config.toml"
    report = build_report_input(
        by_stage,
        config,
        settings.read_text(encoding="utf-8") if settings.is_file() else "",
        str(folder / "checkpoint"),
        scope,
        verdict,
        _spending_of(described),
    )
    return replace(
        report,
        verdict=described["verdict"] or report.verdict,  # the original verdict, which this version may word differently
        written_at=time.time(),
        ended_at=max((each.began_at + each.seconds for each in by_stage.values()), default=0.0),
        config=None if mistakes else config,  # a setting of another version would be shown with a wrong default
    )


def _as_record(stage: Mapping[str, Any], store: Path, selected: Mapping[str, str]) -> StageRecord:  # Any: JSON
    """A stage's record, made of its entry in run.json and its result.json.

    The record's directory points into `store`, because the store may have been moved after the run.
    """
    known = {name: value for name, value in stage.items() if name in StageRecord.model_fields}
    run_dir = store / STAGES / Path(stage["run_dir"]).name
    result = RunDirectory(run_dir).read_result() or {}
    if is_selection(stage["stage"]):
        result = {"best": selected.get(stage["stage"].partition("-")[2], ""), **result}
    return StageRecord.model_validate({**known, "run_dir": str(run_dir), "result": result})


def _spending_of(described: Mapping[str, Any]) -> Spending | None:  # Any: JSON
    if not (spent := described.get("spent")):
        return None
    return Spending(usd_by_stage={each["stage"]: each["usd"] or 0.0 for each in described["stages"]}, **spent)
