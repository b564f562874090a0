"""Pins that the engine's process starts and ends cleanly.

Without it its supervisor, or a port, would be left in a state that only a person can repair.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.server import serve
from rollouts_core.errors import EngineError, NoMemoryError
from rollouts_core.system.listening import PortInUseError, bind_port
from tests.kit.waiting import wait_until
from tests.rollouts_core.embedded.test_server import TIMEOUT_S, TRAP, add_tokenizer
from tests.rollouts_core.embedded.tiny_models import save_model

REPOSITORY = Path(__file__).parents[3]


def test_a_taken_port_is_refused_in_one_sentence() -> None:
    with bind_port("127.0.0.1", 0) as listener, pytest.raises(PortInUseError, match="is in use by another process"):
        bind_port("127.0.0.1", listener.getsockname()[1])


SERVE = """
import sys
from pathlib import Path
from rollouts_core.embedded.server import serve
from rollouts_core.errors import InputError
try:
    serve(Path(sys.argv[1]), port=int(sys.argv[2]), on_ready=lambda url: print(url, flush=True))
except InputError as error:
    print(error, file=sys.stderr)
    raise SystemExit(2)
"""


@contextmanager
def serving(model_dir: Path, *, program: str = SERVE) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its URL; the process is gone afterwards."""
    command = [sys.executable, "-c", program, str(model_dir), "0"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.slow
def test_others_are_answered_beside_patterns_without_end(model: PreTrainedModel, tmp_path: Path) -> None:
    directory = add_tokenizer(save_model(model, tmp_path))
    with serving(directory) as (process, url), httpx.Client(base_url=url, timeout=120.0) as client:

        def complete(**params: Any) -> httpx.Response:
            body = {"text": "%", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True, **params}}
            return client.post("/generate", json=body)

        with ThreadPoolExecutor(8) as pool:
            trapped = [pool.submit(complete, **TRAP) for _ in range(4)]
            others = [pool.submit(complete) for _ in range(20)]
            assert {each.result().status_code for each in others} == {200}
            assert {each.result().status_code for each in trapped} == {400}
        assert client.get("/health").status_code == 200
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0


def connect_and_ask(url: str) -> socket.socket:
    """The connection of a request for as many tokens as the model may have."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), TIMEOUT_S)
    body = json.dumps({"input_ids": [3], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}})
    client.sendall(f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return client


def is_answered(client: socket.socket, *, within_s: float = 0.0) -> bool:
    return bool(select.select([client], [], [], within_s)[0])


def stop_amid_a_request(process: subprocess.Popen[str], url: str) -> socket.socket:
    """The connection of a request that the server was at when it was stopped."""
    for _ in range(10):
        client = connect_and_ask(url)
        while not is_answered(client):
            if httpx.get(f"{url}/server_info", timeout=TIMEOUT_S).json()["internal_states"][0]["num_running_reqs"]:
                break
        process.send_signal(signal.SIGSTOP)
        if not is_answered(client, within_s=0.5):
            return client
        client.close()
        process.send_signal(signal.SIGCONT)  # it had ended a moment before
    raise AssertionError("the request ended every time before the server was stopped")


@pytest.mark.slow
def test_sigterm_ends_running_requests_with_what_they_have_within_a_second(model_dir: Path) -> None:
    with serving(model_dir) as (process, url), stop_amid_a_request(process, url) as client:
        sent_at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert process.wait(TIMEOUT_S) == 0
        assert time.monotonic() - sent_at < TIMEOUT_S / 2  # one second, and room for a busy machine
        assert b'"type":"abort"' in answer


@pytest.mark.slow
def test_a_second_server_on_the_port_ends_with_one_sentence_and_code_two(model_dir: Path) -> None:
    with bind_port("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-c", SERVE, str(model_dir), str(port)]
        ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"port {port} on 127.0.0.1 is in use by another process: stop that process or choose another port\n"
    )


@pytest.mark.slow
def test_the_engine_starts_without_transformers(model_dir: Path) -> None:
    check = "import sys, rollouts_core.embedded.server; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, timeout=60, check=True)


def test_a_server_whose_generation_fails_ends_with_an_error(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_step(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Decoder, "step", broken_step)

    def ask_from_outside(url: str) -> None:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        threading.Thread(target=lambda: httpx.post(f"{url}/generate", json=body, timeout=60.0), daemon=True).start()

    with pytest.raises(EngineError, match="stopped generating"):
        serve(model_dir, port=0, on_ready=ask_from_outside)


def test_a_server_without_memory_ends_with_the_sentence_that_says_what_to_lower(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_without_memory(*_: object, **__: object) -> torch.Tensor:
        raise NoMemoryError("lower deployment.max_running_requests")

    monkeypatch.setattr(Decoder, "step", step_without_memory)
    answers: list[httpx.Response] = []

    def ask(url: str) -> None:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        answers.append(httpx.post(f"{url}/generate", json=body, timeout=60.0))

    def ask_from_outside(url: str) -> None:
        threading.Thread(target=ask, args=(url,), daemon=True).start()

    with pytest.raises(NoMemoryError, match=r"^lower deployment\.max_running_requests$"):
        serve(model_dir, port=0, on_ready=ask_from_outside)
    wait_until(lambda: bool(answers))
    assert (answers[0].status_code, answers[0].json()["error"]["message"]) == (
        400,
        "lower deployment.max_running_requests",
    )
