"""Pins that events which are sent once more never change how a run ends.

Without it a run that completed would fail because the team's server is of another version.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import uuid4

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from rollouts.flows.earlier_states import recall_states


class OtherVersion(BaseHTTPRequestHandler):
    """Answers with states as our version of Prefect does not know them."""

    server: OtherServer

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([{"kind": "COMPLETED"}]).encode())
        self.server.asked.append(self.path.partition("?")[0])

    def log_message(self, *_: object) -> None:
        """Not on the tests' terminal."""


class OtherServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), OtherVersion)
        self.asked: list[str] = []


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherServer]:
    with OtherServer() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{running.server_port}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        settings: dict[Any, Any] = {PREFECT_API_URL: url}  # Any: as Prefect has them
        with temporary_settings(settings):
            yield running
        running.shutdown()


def test_the_states_of_a_server_of_another_version_are_no_error(server: OtherServer) -> None:
    recall_states(str(uuid4()))
    assert server.asked
