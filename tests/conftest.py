"""What every test shares: no hub is asked, and continuous integration skips nothing for what is missing there."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest

# Before any test imports a library that reads them: no test asks a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

# A shell starts what is to run in the background with SIGINT ignored, and commands that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _is_missing_in_ci(report) and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in continuous integration: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a file that is skipped as a whole."""
    report = yield
    if _is_missing_in_ci(report):
        report.outcome = "failed"
        report.longrepr = f"skipped in continuous integration: {report.longrepr}"
    return report


def _is_missing_in_ci(report: pytest.TestReport | pytest.CollectReport) -> bool:
    return report.skipped and os.environ.get("CI") == "true" and "specs" not in report.keywords
