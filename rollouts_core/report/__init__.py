"""The report of a pipeline run, as one HTML page and as Markdown."""

from rollouts_core.report.inputs import ReportInput, StageSummary, TrainedStage
from rollouts_core.report.page import (
    render_report,
    render_results_markdown,
    render_summary_markdown,
    with_registered_name,
)
from rollouts_core.report.results import Results, describe_results

__all__ = [
    "ReportInput",
    "Results",
    "StageSummary",
    "TrainedStage",
    "describe_results",
    "render_report",
    "render_results_markdown",
    "render_summary_markdown",
    "with_registered_name",
]
