"""A server that speaks the API of Google Cloud Storage (gcp-storage-emulator's), in a thread of the test.

Not here: what is stored there (test_google_storage.py). It knows no credentials, so nobody is refused there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from gcp_storage_emulator.server import create_server


@dataclass(frozen=True, slots=True)
class GCSServer:
    """A running server."""

    port: int

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which the driver finds it."""
        return {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self.port}"}

    def make_bucket(self, name: str) -> None:
        """A new bucket."""
        self._call("POST", "b", json={"name": name})

    def contents(self, bucket: str) -> dict[str, bytes]:
        """What is in a bucket, by the API itself, for an independent opinion."""
        names = [each["name"] for each in self._call("GET", f"b/{bucket}/o").json().get("items", [])]
        return {
            name: self._call("GET", f"b/{bucket}/o/{name.replace('/', '%2F')}", params={"alt": "media"}).content
            for name in names
        }

    def write(self, bucket: str, name: str, content: bytes) -> None:
        """Replace an object."""
        url = f"http://127.0.0.1:{self.port}/upload/storage/v1/b/{bucket}/o"
        httpx.post(url, params={"uploadType": "media", "name": name}, content=content).raise_for_status()

    def _call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}/storage/v1/{path}"
        return httpx.request(method, url, **arguments).raise_for_status()


def use(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Set the variables for this test, and no other of Google's."""
    for name in [each for each in os.environ if each.startswith(("GOOGLE_", "GCSFS_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@contextmanager
def running_gcs_server() -> Iterator[GCSServer]:
    """A server that ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True)
    server.start()
    try:
        yield GCSServer(port)
    finally:
        server.stop()
