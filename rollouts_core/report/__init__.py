"""The report of a pipeline run, as one HTML page and as Markdown."""

from rollouts_core.report.inputs import ReportInput, StageSummary
from rollouts_core.report.page import render_report, render_summary_markdown

__all__ = ["ReportInput", "StageSummary", "render_report", "render_summary_markdown"]
