"""Collect the warnings of stages from their events, for the live page and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollouts_core.less_memory import LESS_MEMORY
from rollouts_core.metrics import read_json_lines
from rollouts_core.report.inputs import ReportInput
from rollouts_core.roll_back import ROLLED_BACK
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import label_of


def list_warnings(events: Sequence[Mapping[str, Any]]) -> list[str]:  # Any: JSON
    """The warnings and the rollback of the latest attempt, and the warnings of all attempts about lowered settings, in
    order."""
    latest = max((int(each.get("attempt", 0)) for each in events), default=0)
    return [
        str(each.get("message", ""))
        for each in events
        if each["event"] == LESS_MEMORY
        or (each["event"] in ("warning", ROLLED_BACK) and int(each.get("attempt", latest)) == latest)
    ]


def load_warnings(report: ReportInput) -> list[tuple[str, list[str]]]:
    """The label and the warnings of each training that has warnings."""
    found = [(label_of(each.name), RunDirectory(each.run_dir).events) for each in report.trainings]
    listed = [(label, list_warnings(read_json_lines(path))) for label, path in found]
    return [(label, warnings) for label, warnings in listed if warnings]
