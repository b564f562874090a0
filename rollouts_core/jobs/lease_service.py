"""HTTP service beside an inference engine, by which a trainer on another node renews the engine's lease.

    trainer's node ── POST, Authorization: Bearer KEY ──> set the lease file's modification time to now

The supervisor (infra/supervisor/) ends an engine whose lease is not renewed. The service ends when its standard input
is closed, which happens when the engine ends. This file runs as a program in an interpreter without packages, so it
imports only the standard library.
"""

from __future__ import annotations

import hmac
import os
import socket
import subprocess
import sys
import threading
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REQUEST_TIMEOUT_S = 10.0


def start_lease_service(listener: socket.socket, lease_file: str, key_variable: str) -> None:
    """Start the service as a child process. The service ends when this process ends, even if `exec` has replaced the
    program of this process by the engine.

    Args:
        lease_file: the file whose modification time is the time of the last renewal.
        key_variable: the environment variable with the API key that requests must have.
    """
    closed_at_the_end, held_by_the_engine = os.pipe()
    descriptor = listener.fileno()
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(descriptor), str(int(listener.family)), lease_file, key_variable],
        stdin=closed_at_the_end,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
    )
    os.close(closed_at_the_end)
    os.set_inheritable(held_by_the_engine, True)


class Renewal(BaseHTTPRequestHandler):
    """Handles one HTTP request to renew the lease."""

    timeout = REQUEST_TIMEOUT_S

    def __init__(self, *arguments: object, lease_file: str, key: str) -> None:
        self._lease_file, self._key = lease_file, key
        super().__init__(*arguments)  # type: ignore[arg-type]  # passed on by the HTTP server

    def do_POST(self) -> None:
        """Renew the lease if the request has the API key."""
        given = self.headers.get("Authorization", "").encode()
        is_known = hmac.compare_digest(given, f"Bearer {self._key}".encode())
        if is_known:
            os.utime(self._lease_file)
        self.send_response(HTTPStatus.NO_CONTENT if is_known else HTTPStatus.UNAUTHORIZED)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *values: object) -> None:
        """Log nothing, because a request arrives every few seconds."""


def serve_renewals(listener: socket.socket, lease_file: str, key: str) -> None:
    """Answer requests to renew the lease until standard input is closed."""
    server = ThreadingHTTPServer(
        listener.getsockname()[:2], partial(Renewal, lease_file=lease_file, key=key), bind_and_activate=False
    )
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    with socket.socket(int(sys.argv[2]), socket.SOCK_STREAM, fileno=int(sys.argv[1])) as inherited:
        serve_renewals(inherited, sys.argv[3], os.environ[sys.argv[4]])
