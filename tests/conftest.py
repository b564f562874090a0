"""What every test shares: no hub is asked, whole pipelines begin, and continuous integration skips nothing for what is
missing there.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.excuses import ExcusedSkip
from tests.kit.reports import pytest_report_to_serializable as pytest_report_to_serializable

if TYPE_CHECKING:
    from tests.infra.stores.s3_server import CuttablePort, S3Server

# Before any test imports them: a failed assertion of a helper shows its values.
pytest.register_assert_rewrite("tests.kit.commands", "tests.kit.runs", "tests.kit.serving")

# Before any test imports a library that reads them: no test asks a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

# A shell starts what is to run in the background with SIGINT ignored, and commands that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# As with Ctrl-C, fixtures end what they started: servers, engines and routers would outlive a killed session.
signal.signal(signal.SIGTERM, signal.default_int_handler)


# Tests make folders for temporary files that stay when they are killed. So a session has a place of its own for these,
# which a process removes when the session has ended, however it did.
REMOVE_AT_END = """
import os, shutil, sys, time
sys.stdin.read()
for _ in range(300):  # those who write there may end a moment later
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""
_remover = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist, whose controller has been here
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's own folders stay where they are
    folder = tempfile.mkdtemp(prefix="rt-")  # short: names of sockets end after 107 bytes
    Path(folder).chmod(0o1777)  # as /tmp: some tests have other users
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    command = [sys.executable, "-I", "-c", REMOVE_AT_END, folder]
    config.stash[_remover] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _remover in config.stash:
        config.stash[_remover].communicate()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server."""
    from tests.infra.stores.s3_server import running_s3_server  # heavy, and only for those who ask

    with running_s3_server() as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of the test's own, with the variables set that lead to it."""
    from tests.infra.stores.s3_server import use

    name = f"bucket-{secrets.token_hex(8)}"
    s3_server.make_bucket(name)
    use(monkeypatch, s3_server.environment)
    return name


@pytest.fixture
def cuttable(bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuttablePort]:
    """A way to the bucket on which everybody is seen who takes it, and that breaks when a test says so."""
    from tests.infra.stores.s3_server import CuttablePort, environment_of, use

    way = CuttablePort(s3_server.port)
    use(monkeypatch, environment_of(way.port))
    yield way
    way.close()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: tests wait for servers, leases and each other for half of their time."""
    return min(4, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(trylast=True)  # when the tests that `-m` leaves out are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the files with most runs of pipelines begin: short ones fill up the end, where all would wait for one."""
    slow = [item.path for item in items if item.get_closest_marker("slow")]
    num_runs, num_slow = Counter(path for path in slow if "flows" in path.parts), Counter(slow)
    items.sort(key=lambda item: (-num_runs[item.path], -num_slow[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _is_missing_in_ci(report) and not (call.excinfo and isinstance(call.excinfo.value, ExcusedSkip)):
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
    return report.skipped and os.environ.get("CI") == "true"
