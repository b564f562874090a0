"""Pins `rollouts serve --engine`: SGLang and vLLM answer people's requests, and leave no process behind.

Without it somebody who pastes the printed lines gets an error, or an engine keeps a GPU after Ctrl-C.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import AuthenticationError, OpenAI

from rollouts_core.config import EngineKind
from rollouts_core.engines import cleanup_process
from rollouts_core.quickstart import build_character_tokenizer
from tests.engines.models import SavedModel
from tests.engines.servers import engine_python
from tests.kit.commands import clean_environment
from tests.kit.waiting import wait_until
from tests.rollouts_core.embedded.tiny_models import expected_logits

KEY = "sesame"
MARK = "ROLLOUTS_SERVE_TEST"
"""Environment variable of the command's processes, which they inherit."""
PROMPT = "1+1="
START_TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Command:
    """A `rollouts serve` that runs."""

    process: subprocess.Popen[bytes]
    folder: Path
    output: Path

    def url(self) -> str:
        """The URL, after the command has printed it."""
        wait_until(self._is_told, what="an answering engine", timeout_s=START_TIMEOUT_S)
        found = re.search(r"serving .* at (http://\S+) ", self.output.read_text())
        assert found, self.output.read_text()
        return found[1]

    def _is_told(self) -> bool:
        return "serving " in self.output.read_text() or self.process.poll() is not None

    def processes(self) -> list[int]:
        """The processes of the command and of its engine."""
        marker = f"{MARK}={self.folder}".encode()
        listed = cleanup_process.list_processes()
        return [int(each.name) for each in listed if marker in cleanup_process.read(each / "environ").split(b"\0")]

    def end(self, number: int) -> str:
        """What the command has printed when it has ended by a signal; no process is left then."""
        self.process.send_signal(number)
        assert self.process.wait(60) == 0
        wait_until(lambda: not self.processes(), what="the end of all processes", timeout_s=20.0)
        return self.output.read_text()


@contextmanager
def serving(model: Path, folder: Path, *arguments: str, hangup: signal.Handlers = signal.SIG_DFL) -> Iterator[Command]:
    """Start the command. It inherits `hangup`, whether the tests themselves run under nohup or not."""
    output = folder / "output.txt"
    before = signal.signal(signal.SIGHUP, hangup)
    try:
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollouts.flows.cli", "serve", str(model), "--port", "0", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**clean_environment(), MARK: str(folder), "ROLLOUTS_STORE": str(folder / "store")},
                start_new_session=True,
            )
    finally:
        signal.signal(signal.SIGHUP, before)
    command = Command(process, folder, output)
    try:
        yield command
    finally:
        process.kill()
        process.wait()
        for left in command.processes():
            os.kill(left, signal.SIGKILL)


@pytest.mark.engine
@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", ["sglang", pytest.param("vllm", marks=pytest.mark.matrix)])
def test_a_model_is_served_by_an_engine_as_by_ours(kind: EngineKind, start: SavedModel, tmp_path: Path) -> None:
    arguments = ("--engine", kind, "--engine-python", str(engine_python(kind)), "--api-key", KEY)
    with serving(start.directory, tmp_path, *arguments) as command:
        url = command.url()
        client = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)
        model = str(start.directory)
        completion = client.completions.create(model=model, prompt=PROMPT, max_tokens=4, temperature=0)
        assert completion.choices[0].text == greedy_text(start, PROMPT, num_tokens=4)
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=3, temperature=0
        )
        assert chat.usage is not None and chat.usage.completion_tokens > 0
        with pytest.raises(AuthenticationError):
            client.with_options(api_key="other").models.list()
        assert len(command.processes()) > 2, "the engine has processes of its own"
        said = command.end(signal.SIGINT)
    assert "Traceback" not in said
    assert KEY not in said + next((tmp_path / "store/served").glob(f"{kind}-*/log.txt")).read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def greedy_text(saved: SavedModel, prompt: str, *, num_tokens: int) -> str:
    """The most probable continuation."""
    tokenizer = build_character_tokenizer()
    tokens = tokenizer.encode(prompt)
    for _ in range(num_tokens):
        tokens.append(int(expected_logits(saved.model, tokens)[-1].argmax()))
    return str(tokenizer.decode(tokens[-num_tokens:], skip_special_tokens=True))


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_an_engine_that_ends_at_its_start_is_explained_by_the_commands_options(
    start: SavedModel, tmp_path: Path
) -> None:
    arguments = ("--engine", "vllm", "--engine-python", str(engine_python("vllm")), "--engine-args", "--no-such 3")
    with serving(start.directory, tmp_path, *arguments) as command:
        assert command.process.wait(START_TIMEOUT_S) == 1
        said = command.output.read_text()
    assert "ended by itself: it does not know one of its arguments: see --engine-args" in said
    assert "log.txt:\n" in said


STAND_IN = """
import http.server, os, signal, subprocess, sys, time

class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

time.sleep(1)
if not os.fork():  # as an engine's worker that does not hear SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ENDED"))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """The interpreter of an environment with a vLLM that computes nothing."""
    package = tmp_path / "packages/vllm/entrypoints/openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(STAND_IN)
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/packages" exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    return str(interpreter)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.matrix) for each in (signal.SIGTERM, signal.SIGHUP))],
)
@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "starting"])
def test_no_process_is_left_after_a_signal(
    number: int, is_ready: bool, stand_in: str, start: SavedModel, tmp_path: Path
) -> None:
    with serving(start.directory, tmp_path, "--engine", "vllm", "--engine-python", stand_in) as command:
        if is_ready:
            command.url()
            assert len(command.processes()) > 2, "the worker runs"
        else:
            wait_until(lambda: "starts; its log" in command.output.read_text(), what="the start", timeout_s=240.0)
        said = command.end(number)
    assert "Traceback" not in said
    assert ("Bearer" in said, "serving " in said) == (False, is_ready)


@pytest.mark.slow
def test_a_signal_before_the_engine_starts_leaves_no_process(start: SavedModel, tmp_path: Path) -> None:
    """Without it the installer of a missing engine works on after the command."""
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\ntouch $0.asked\nsleep 300\n")
    slow.chmod(0o755)
    with serving(start.directory, tmp_path, "--engine", "vllm", "--engine-python", str(slow)) as command:
        wait_until((tmp_path / "python.asked").exists, what="the check of the engine", timeout_s=240.0)
        command.end(signal.SIGTERM)


@pytest.mark.matrix
@pytest.mark.slow
def test_nohup_keeps_the_server(stand_in: str, start: SavedModel, tmp_path: Path) -> None:
    arguments = ("--engine", "vllm", "--engine-python", stand_in)
    with serving(start.directory, tmp_path, *arguments, hangup=signal.SIG_IGN) as command:
        command.url()
        command.process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            command.process.wait(3)
        command.end(signal.SIGTERM)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_second_command_at_the_port_of_a_starting_engine_is_refused_and_harms_nothing(
    stand_in: str, start: SavedModel, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    arguments = ("--engine", "vllm", "--engine-python", stand_in, "--port", port)
    with serving(start.directory, tmp_path, *arguments) as command:
        log = tmp_path / f"store/served/vllm-{port}/log.txt"
        wait_until(log.exists, what="the start", timeout_s=240.0)
        os.kill(command.process.pid, signal.SIGSTOP)  # it still holds the port when the second one comes
        for engine in [pid for pid in command.processes() if pid != command.process.pid]:
            os.kill(engine, signal.SIGKILL)  # an engine that does not listen yet
        first = log.stat().st_ino
        (tmp_path / "second").mkdir()
        (tmp_path / "second/store").symlink_to(tmp_path / "store")
        with serving(start.directory, tmp_path / "second", *arguments) as second:
            assert second.process.wait(60) == 2
            assert f"starts an engine at port {port}: stop that command or choose another" in second.output.read_text()
        assert log.stat().st_ino == first
        os.kill(command.process.pid, signal.SIGCONT)
        assert command.process.wait(60) == 1


@pytest.mark.slow
def test_an_engine_that_dies_while_it_serves_ends_the_command(stand_in: str, start: SavedModel, tmp_path: Path) -> None:
    with serving(start.directory, tmp_path, "--engine", "vllm", "--engine-python", stand_in) as command:
        command.url()
        [engine] = [pid for pid in command.processes() if is_engine(pid)]
        os.kill(engine, signal.SIGTERM)
        assert command.process.wait(60) == 1
        said = command.output.read_text()
        wait_until(lambda: not command.processes(), what="the end of all processes", timeout_s=20.0)
    assert re.search(r"the vllm engine for .* ended by itself: exit code 1\nThe last lines of .*log.txt:\n", said)
    assert said.endswith("\nENDED\n")


def is_engine(pid: int) -> bool:
    """Whether a process is the first one of the engine: the child of the command."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return b"vllm.entrypoints.openai.api_server" in arguments and b"rollouts.flows.cli" in Path(
        f"/proc/{parent}/cmdline"
    ).read_bytes().split(b"\0")
