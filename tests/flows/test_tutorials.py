"""Pins that every command and every piece of code of the tutorials works as it stands there, in the order of the page.

Without it a newcomer's first hour would end at a command that the page misspells.

A piece of code with a title is a file of the reader's. Other Python is a cell of one notebook, and `sh` is the
terminal; the server that a page starts runs until its end. Only sizes are smaller here, by `SIZES`: the quickstart in
its real size has a test of its own (`test_quickstart.py`).
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts_core.checkpoint import latest_intact_checkpoint, load_manifest
from tests.kit.commands import clean_environment, join_home, processes_of
from tests.kit.processes import dies_with_us
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"\n]+)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
MAX_WORDS = 900
SMALL_QUICKSTART = ".rollouts/quickstart/seed-0/quickstart.toml"
SIZES: dict[str, dict[str, str]] = {
    "first_run.md": {
        "make quickstart\nsource .venv/bin/activate": f"rollouts run {SMALL_QUICKSTART}",
        "rollouts quickstart\n": f"rollouts run {SMALL_QUICKSTART}\n",
        "num_steps = 40$/num_steps = 60": "num_steps = 4$/num_steps = 5",
    },
    "your_model.md": {
        "numbers[3000:3200]": "numbers[3000:3020]",
        "numbers[3200:3600]": "numbers[3200:3220]",
        "num_steps = 40\ncheckpoint_every = 20\noptim": "num_steps = 2\ncheckpoint_every = 2\noptim",
        "batch_size = 16": "batch_size = 2",
        "samples_per_prompt = 2": "samples_per_prompt = 1\nmax_p_value = 1.0",
    },
    "use_the_model.md": {"30000": "{port}"},
    "team_server.md": {"4200": "{port}"},
    "notebook.md": {"num_steps=60": "num_steps=6", "num_steps=40": "num_steps=2"},
}


SERVERS = {"rollouts serve": "serving ", "prefect server start": "/docs", "prefect worker start": "started!"}
"""How commands begin that run until Ctrl-C, and what they say when they are ready."""


class Reader:
    """A reader of one page, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        """The outputs of the commands and cells so far."""
        self.defined: dict[str, Any] = {"__name__": "notebook"}
        """The names of the notebook."""
        self.environment = clean_environment() | {
            "PATH": f"{write_programs(folder)}:{os.environ['PATH']}",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
        """Those of the terminal, which also has what the page exports."""

    async def follow(self, page: str) -> None:
        """Do everything that a page asks for."""
        with ExitStack() as servers:
            for language, title, code in blocks_of(page):
                if title:
                    (self.folder / title).write_text(code)
                elif language == "sh" and code.startswith(tuple(SERVERS)):
                    servers.callback(end, self.start(code))
                elif language == "sh":
                    self.said.append(self.run(code))
                elif language == "python":
                    self.said.append(await self.run_cell(page, code))

    def run(self, code: str) -> str:
        """The output of commands of the terminal."""
        kept = self.folder / "environment"
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{code}env -0 > '{kept}'"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert ended.returncode == 0, f"{code}{ended.stdout}{ended.stderr}"
        self.environment = dict(each.split("=", 1) for each in kept.read_text().split("\0") if each)
        return ended.stdout + ended.stderr

    def start(self, code: str) -> subprocess.Popen[bytes]:
        """A server, or a worker of one, that is ready."""
        [ready] = [said for begin, said in SERVERS.items() if code.startswith(begin)]
        output = self.folder / "server.txt"
        with output.open("wb") as file:
            server = subprocess.Popen(
                [*dies_with_us("INT"), "bash", "-c", f"exec {code}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        port = re.search(r"--port (\d+)", code)

        def is_ready() -> bool:
            return ready in output.read_text() and (port is None or is_open(int(port[1])))

        wait_until(lambda: server.poll() is not None or is_ready(), what=f"{ready!r} of {code}")
        assert server.poll() is None, output.read_text()
        return server

    async def run_cell(self, page: str, code: str) -> str:
        """The output of a cell of a notebook, which may await."""
        compiled = compile(code, f"docs/tutorials/{page}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with redirect_stdout(StringIO()) as output:
            outcome = eval(compiled, self.defined)
            if inspect.isawaitable(outcome):
                await outcome
        return output.getvalue()


def blocks_of(page: str) -> list[tuple[str, str, str]]:
    """Language, title and text of each piece of code of a page, in the sizes of this test."""
    text = (TUTORIALS / page).read_text()
    for size, smaller in SIZES[page].items():
        assert size in text, f"{page} lacks {size!r}"
        text = text.replace(size, smaller.replace("{port}", str(free_port())))
    return [(found[1], found[2], found[3]) for found in BLOCK.finditer(text)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGINT)
    server.wait(60)


def write_programs(folder: Path) -> Path:
    """A folder for PATH with the programs of an activated environment."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, arguments in {"rollouts": "-m rollouts.flows.cli", "python": "", "prefect": "-m prefect"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    return programs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, served_home: Path) -> Iterator[Path]:
    """The folder of a reader, with a store; pages that continue each other share it."""
    folder = tmp_path_factory.mktemp("reader")
    join_home(served_home, folder / ".rollouts")
    yield folder
    wait_until(lambda: not processes_of(folder), what=f"the end of {processes_of(folder)}", timeout_s=60.0)


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def follow(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """The reader of a page, at its end."""
    monkeypatch.chdir(folder)
    reader = Reader(folder)
    asyncio.run(reader.follow(page))
    return reader


def test_every_tutorial_is_followed_and_short() -> None:
    pages = {path.name: path.read_text() for path in TUTORIALS.glob("*.md")}
    assert pages.keys() == SIZES.keys()
    assert {name: len(text.split()) for name, text in pages.items() if len(text.split()) > MAX_WORDS} == {}


@pytest.mark.matrix
def test_the_first_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small_pipeline((folder / SMALL_QUICKSTART).parent, run__name="quickstart").rename(folder / SMALL_QUICKSTART)
    first, shown, answer, again, changed = follow("first_run.md", folder, monkeypatch).said
    assert "Report:" in first and "report.html" in shown and answer.strip()
    assert "rl             started" in first and " started" not in again and "reused" in again
    assert "training.rl.num_steps was 4 and is 5" in changed and "sft            reused" in changed
    assert len(re.findall(r"^quickstart-\w+ +done", changed, re.MULTILINE)) == 3


@pytest.fixture(scope="module")
def trained(folder: Path) -> Reader:
    """A reader at the end of "Your model, data and reward", which other pages continue."""
    with pytest.MonkeyPatch.context() as patch:
        return follow("your_model.md", folder, patch)


@pytest.mark.matrix
def test_your_model_data_and_reward(trained: Reader) -> None:
    rows, checked, run, shown = trained.said
    assert '"completion": ' in rows and '"answer": ' in rows
    assert "graded by my_rewards:sorted_digits: reward 0.0 for an empty completion" in checked
    assert re.search(r"\(\d{4}\)=\?<\|end\|><\|assistant\|>\[\[\d{4}<\|end\|>\]\]", checked)
    assert "rl             step 2 of 2" in run and re.search(r"^digits-\w+ +done", shown, re.MULTILINE)


@pytest.mark.matrix
def test_the_use_of_the_model(trained: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    chats, asked, answered, streamed, scored, generated = follow("use_the_model.md", trained.folder, monkeypatch).said
    assert "small/base_model" in chats and streamed
    assert '"object":"list"' in asked.replace(" ", "")
    content = re.search(r'"content": ?"([^"]*)"', asked)
    assert content is not None and content[1] == answered.strip() == generated.strip()
    assert re.search(r"^\| base \|.+\n\| runs/digits-\w+/checkpoint \|", scored, re.MULTILINE)
    assert "reused from run digits-" in scored


@pytest.mark.matrix
def test_a_teams_server(trained: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, deployed, _, approved, models, unchanged = follow("team_server.md", trained.folder, monkeypatch).said
    assert "Deployment 'retrain/team-retrain' successfully created" in deployed
    assert approved == "ACCEPT\n"
    assert re.search(r"^digits-1 +1 +production", models, re.MULTILINE) and re.search(
        r"production +digits-1 +Ada", models
    )
    assert "finished successfully in 'Skipped'" in unchanged


@pytest.mark.matrix
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, fine_tuned, _, improved = follow("notebook.md", tmp_path, monkeypatch).said
    assert "6/6" in fine_tuned and "loss=" in fine_tuned
    assert "2/2" in improved and "mean reward of ten steps 0." in improved
    for stage, num_steps in {"sft": 6, "rl": 2}.items():
        checkpoint = latest_intact_checkpoint(tmp_path / stage)
        assert checkpoint is not None and load_manifest(checkpoint).step == num_steps
