"""Pins that SFT trains during the installation of an engine, in a real run with a package index that holds back.

Without it SFT would wait for the engine, or a failed installation would lose the finished SFT.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.kit.commands import Rollouts
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1200)]

PLANNED = "rollout.engine: the run installs vLLM 9.9 by pip, 1 packages, 3.5 GB, about 3 minutes, while sft runs"
WAITS = "select-sft waits for the installation of the engine"
FAILED = "pip could not install the packages on local"


@contextmanager
def empty_index(may_answer: Callable[[], object]) -> Iterator[str]:
    """A package index without packages, which answers when it may."""

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wait_until(may_answer, what="the permission to answer", timeout_s=300)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def write_config(folder: Path) -> Path:
    (folder / "lock.txt").write_text("vllm==9.9\n")
    engine = {"kind": "vllm", "requirements": str(folder / "lock.txt")}
    return write_small_pipeline(folder / "small", mode="sft", rollout__engine=engine)


def has_finished_sft(store: Path) -> bool:
    return any(store.glob("stages/sft-*/result.json"))


@pytest.fixture(autouse=True)
def without_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder without .engines, and a g++, which vLLM calls."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/g++").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


def test_sft_finishes_during_an_installation_whose_failure_ends_the_run(
    rollouts: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path)
    with empty_index(lambda: has_finished_sft(rollouts.store)) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index)
        code, output = rollouts.run("run", str(config))
        assert code != 0 and has_finished_sft(rollouts.store), output
        assert PLANNED in output and FAILED in output and "Traceback" not in output, output
        assert not list(rollouts.store.glob("stages/select-sft-*/result.json"))

        code, output = rollouts.run("run", str(config))  # as a retry
        assert code != 0 and FAILED in output, output
        assert "reused from" in output, output


def test_ctrl_c_ends_a_run_that_waits_for_the_installation_which_the_next_run_attaches_to(
    rollouts: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, is_released = write_config(tmp_path), threading.Event()
    with empty_index(is_released.is_set) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index)
        process = rollouts.start("run", str(config))
        wait_until(lambda: WAITS in rollouts.said(), what=f"{WAITS!r} in {rollouts.output}", timeout_s=300)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, rollouts.said()
        process = rollouts.start("run", str(config))
        wait_until(lambda: WAITS in rollouts.said(), what=f"{WAITS!r} in {rollouts.output}", timeout_s=300)
        is_released.set()
        assert process.wait(300) != 0 and FAILED in rollouts.said(), rollouts.said()
    [installation] = rollouts.store.glob("engines/vllm-9.9-*")
    assert len(list(installation.glob(".job/meta-*.json"))) == 1, "one attempt"
