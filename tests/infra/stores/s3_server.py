"""A real S3 server (moto's) in a process of its own, and a way to it that can be cut.

    python tests/infra/stores/s3_server.py      prints the port that it listens on; ends with its standard input

Not here: what is stored there (test_object_store.py and its neighbours).
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from moto.server import ThreadedMotoServer

REGION = "us-east-1"
READ_BYTES = 64 << 10
REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) \S+ HTTP/1\.1\r\n")


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server; everybody may do everything there."""

    port: int

    @property
    def url(self) -> str:
        """The address of its API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a person would set."""
        return environment_of(self.port)

    def client(self, service: str = "s3") -> Any:  # Any: boto3 makes its clients while it runs
        """A client of somebody else's, for an independent opinion."""
        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=Config(retries={"total_max_attempts": 2}),
        )

    def make_bucket(self, name: str) -> None:
        """A bucket that keeps every version of its objects."""
        self.client().create_bucket(Bucket=name)
        self.client().put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})

    def contents(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        """The objects whose names begin so."""
        client = self.client()
        keys = [each["Key"] for each in client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])]
        return {key: client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}

    def num_writes(self, bucket: str) -> dict[str, int]:
        """How often each object was written."""
        versions = self.client().list_object_versions(Bucket=bucket).get("Versions", [])
        keys = [each["Key"] for each in versions]
        return {key: keys.count(key) for key in keys}

    def deny(self, bucket: str, *actions: str) -> None:
        """Let nobody do these things there."""
        statement = {
            "Effect": "Deny",
            "Principal": "*",
            "Action": list(actions),
            "Resource": f"arn:aws:s3:::{bucket}/*",
        }
        policy = {"Version": "2012-10-17", "Statement": [statement]}
        self.client().put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))


def environment_of(port: int) -> dict[str, str]:
    """The variables with which S3 is found at a port of this machine."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "SECRET-CANARY",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",  # the driver tries five times as it is
    }


def use(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Set the variables for this test, and no other of AWS."""
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@contextmanager
def running_s3_server() -> Iterator[S3Server]:
    """A server that ends with the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, __file__], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield S3Server(int(process.stdout.readline()))
        finally:
            process.kill()


class CuttablePort:
    """A port that leads to another one until so many bytes have passed in either direction, then to nothing."""

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._num_bytes_left: int | None = None
        self.request_heads: list[str] = []
        """How the HTTP requests began that passed."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def is_cut(self) -> bool:
        """True once as many bytes have passed as were allowed."""
        with self._lock:
            return self._num_bytes_left is not None and self._num_bytes_left <= 0

    def cut_after(self, num_bytes: int) -> None:
        """Let only so many bytes pass from now on."""
        with self._lock:
            self._num_bytes_left = num_bytes

    def mend(self) -> None:
        """Let everything pass again."""
        with self._lock:
            self._num_bytes_left = None

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()
        self._drop_all()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.is_cut:
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                with self._lock:
                    self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(READ_BYTES):
                if REQUEST.match(content):
                    self.request_heads.append(content.partition(b"\r\n\r\n")[0].decode())
                if self._may_not_pass(len(content)):
                    self._drop_all()
                    return
                sink.sendall(content)
            sink.shutdown(socket.SHUT_WR)

    def _may_not_pass(self, num_bytes: int) -> bool:
        with self._lock:
            if self._num_bytes_left is None:
                return False
            self._num_bytes_left -= num_bytes
            return self._num_bytes_left <= 0

    def _drop_all(self) -> None:
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self._sockets.clear()


def write_model(path: Path, *, num_bytes: int) -> Path:
    """A folder as a checkpoint is one: large weights, a name with blanks, an empty file."""
    (path / "trainer").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(os.urandom(num_bytes))
    (path / "trainer/state of it.json").write_bytes(b"{}")
    (path / "empty").write_bytes(b"")
    (path / "manifest.json").write_text("{}")
    return path


def serve() -> None:
    """Listen until nobody is left at the other end of standard input."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    sys.stdout.write(f"{server.get_host_and_port()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    serve()
