"""Pins that a job asks for as many completions as it is told to, whatever limit of open files it was started under.

Without it the usual limit of a login, 1024, ends a run of 128 prompts with 8 completions each: an engine that no
further connection can be made to counts as one that is away.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest

from rollouts_core.system.open_files import MAX_OPEN_FILES

pytestmark = pytest.mark.slow

NUM_COMPLETIONS = 300
ASK = f"""
import asyncio, resource, sys
from rollouts_core.config import SamplingConfig
from rollouts_core.engines import {{engine}}
from rollouts_core.engines.completion import GenerationRequest

request = GenerationRequest(prompt_tokens=[4], sampling=SamplingConfig(max_new_tokens=1), stop_token_ids=(), seed=0)

async def ask():
    async with {{engine}}(sys.argv[1], restart_timeout_s=5.0) as engine:
        asked = [asyncio.create_task(engine.generate([request])) for _ in range({NUM_COMPLETIONS})]
        await asyncio.sleep(1.0)  # as many as can be are under way
        await engine.abort_running()
        print(sum(len(completions) for completions in await asyncio.gather(*asked)))

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
asyncio.run(ask())
"""


class Holding(BaseHTTPRequestHandler):
    """Answers no completion before it is told to end what is under way."""

    protocol_version = "HTTP/1.1"
    may_answer: Event

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path in ("/abort_request", "/pause?mode=abort"):
            self.may_answer.set()
        if self.path in ("/generate", "/v1/completions"):
            self.may_answer.wait(60.0)
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        """What both servers say, to whatever it is."""
        finish = {"type": "length"}
        meta = {"output_token_logprobs": [[-1.0, 5, None]], "weight_version": "v", "finish_reason": finish}
        choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
        of_vllm = {"weight_version": "v", "choices": [choice]}
        body = json.dumps([{"output_ids": [5], "meta_info": meta}] if self.path == "/generate" else of_vllm).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = NUM_COMPLETIONS
    daemon_threads = True


@contextmanager
def holding_server() -> Iterator[str]:
    handler = type("OneHolding", (Holding,), {"may_answer": Event()})
    with Server(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def output_of(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("engine", ["SGLangEngine", "VLLMEngine"])
def test_more_completions_than_files_may_be_open_wait_and_keep_nothing_else_from_the_engine(engine: str) -> None:
    """They end at all because the engine can be told to end them while all places are taken."""
    with holding_server() as url:
        assert output_of(ASK.format(engine=engine), url) == f"{NUM_COMPLETIONS}\n"


RAISE = """
import resource, sys
import rollouts_core.embedded.server
from rollouts.flows import cli
from rollouts_core.__main__ import main

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
rollouts_core.embedded.server.serve = lambda *_, **__: None  # its limit is looked at, not its answers
{start}
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    "start",
    ["assert main(['rl', '/nowhere/job.json']) == 2", "cli.app(['serve', '.'], standalone_mode=False)"],
    ids=["job", "rollouts serve"],
)
def test_a_job_and_a_server_may_have_as_many_files_open_as_the_system_lets_them(start: str) -> None:
    soft, hard = map(int, output_of(RAISE.format(start=start)).split())
    assert soft == (MAX_OPEN_FILES if hard == -1 else min(hard, MAX_OPEN_FILES)) > 128
