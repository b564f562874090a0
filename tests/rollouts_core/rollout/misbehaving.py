"""A real HTTP server that speaks SGLang's or vLLM's API, until a test tells it what to do wrong.

Not here: a server that behaves (served_engine.py), services that grade (scripted_service.py).
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

Api = Literal["sglang", "vllm"]
Json = Any  # JSON of every shape
GENERATE_PATH = {"sglang": "/generate", "vllm": "/v1/completions"}


class Connection(BaseHTTPRequestHandler):
    """One connection to the server; what a fault may do with it."""

    server: MisbehavingServer
    body: Json

    def do_GET(self) -> None:
        """What the server says about itself."""
        self.send_json(200, self.server.describe())

    def do_POST(self) -> None:
        """A request for completions."""
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.num_asked += 1
        fault = self.server.faults.pop(0) if len(self.server.faults) > 1 else self.server.faults[0]
        fault(self)

    def send_json(self, status: int, content: Json) -> None:
        """A whole answer."""
        self.send_bytes(status, json.dumps(content).encode())

    def send_bytes(self, status: int, content: bytes, *, missing: int = 0) -> None:
        """An answer that says that it has `missing` bytes more than it has."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) + missing))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def complete(self, **changes: Json) -> Json:
        """A good answer: two tokens for every prompt, but for these changes of a completion's fields."""
        if self.server.api == "vllm":
            logprobs = {"token_logprobs": changes.pop("logprobs", [-1.0, -2.0])}
            return {"choices": [{"token_ids": [5, 6], "logprobs": logprobs, "finish_reason": "length", **changes}]}
        logprobs = changes.pop("logprobs", [-1.0, -2.0])
        meta: dict[str, Json] = {"finish_reason": {"type": "length"}, "weight_version": "default"}
        if logprobs is not None:
            meta["output_token_logprobs"] = [[logprob, 0, None] for logprob in logprobs]
        renamed = {"output_ids": changes.pop("token_ids", [5, 6]), **changes}
        return [{**renamed, "meta_info": meta} for _ in self.body["input_ids"]]

    def reset(self) -> None:
        """Break off the connection without a word, as a machine does that loses power."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def finish(self) -> None:
        """Nothing is left to send on a connection that was reset."""
        if self.connection.fileno() >= 0:
            super().finish()


Fault = Callable[[Connection], None]


def behave(connection: Connection) -> None:
    """No fault: a good answer."""
    connection.send_json(200, connection.complete())


class MisbehavingServer(ThreadingHTTPServer):
    """A server on a free port.

    Args:
        faults: what happens to the first, the second ... request for completions, and to all behind the last.
        model: the folder that it says it serves.
    """

    daemon_threads = True

    def __init__(self, api: Api, faults: list[Fault], model: Path | str = "") -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.api = api
        self.faults = faults
        self.model = str(model)
        self.num_asked = 0
        self.is_over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def describe(self) -> Json:
        """What all questions about itself are answered with."""
        model_config = {"model": self.model, "logprobs_mode": "processed_logprobs"}
        return {
            "weight_version": "default",
            "model_path": self.model,
            "vllm_config": {"model_config": model_config},
        }

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves, or a connection that was reset, is what the test is about."""


@contextmanager
def misbehaving(api: Api, *faults: Fault, model: Path | str = "") -> Iterator[MisbehavingServer]:
    """The running server."""
    server = MisbehavingServer(api, list(faults), model)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
