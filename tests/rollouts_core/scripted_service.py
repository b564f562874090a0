"""A real HTTP server on a free port that answers as a test tells it, and remembers who asked.

Not here: servers of completions (served_engine.py, misbehaving.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status, content (bytes as they are, anything else as JSON) and headers."""


class Service:
    """A server that answers every POST by a function of its body, and keeps connections open.

    Args:
        answer: that function.
        pages: what GET answers, by path.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Answer], pages: Mapping[str, Any] | None = None) -> None:
        self.paths: list[str] = []
        """Of all requests."""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.clients: set[tuple[str, int]] = set()
        """The connections, by the client's address."""
        self.num_under_way = self.max_under_way = 0
        self._lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.paths.append(self.path)
                service._begin(body, self.headers.get("Authorization"), self.client_address)
                status, content, headers = (*answer(body), {})[:3]
                service._end()
                self._send(status, content, headers)

            def do_GET(self) -> None:
                service.paths.append(self.path)
                is_there = self.path in (pages or {})
                self._send(200 if is_there else 404, (pages or {}).get(self.path, "no such page"), {})

            def _send(self, status: int, content: Any, headers: dict[str, str]) -> None:
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(raw)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def _begin(self, body: dict[str, Any], key: str | None, client: tuple[str, int]) -> None:
        with self._lock:
            self.bodies.append(body)
            self.keys.append(key)
            self.clients.add(client)
            self.num_under_way += 1
            self.max_under_way = max(self.max_under_way, self.num_under_way)

    def _end(self) -> None:
        with self._lock:
            self.num_under_way -= 1
