"""Pins how a node goes on when a store's server misbehaves, with a server that does so at will.

Without it one broken connection among thousands costs a transfer of hours, or a server's mistake becomes a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.stores import node_transfer

pytestmark = pytest.mark.slow

CONTENT = os.urandom(1 << 20)
BROKEN_AT = 300_000
Answer = Callable[[BaseHTTPRequestHandler, int], None]
"""Answers the n-th request."""


class Server(ThreadingHTTPServer):
    """Answers as it is told, and remembers what was asked for."""

    answer: Answer
    ranges: list[str]
    bodies: list[bytes]


class Handler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    server: Server

    def do_HEAD(self) -> None:
        assert "?" not in self.path, "the first look needs no signature"
        self.send_error(403)

    def do_GET(self) -> None:
        self.server.ranges.append(self.headers["Range"])
        self.server.answer(self, len(self.server.ranges))

    def do_PUT(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.answer(self, len(self.server.bodies))

    def log_message(self, *_: Any) -> None:  # Any: of the library
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.ranges, server.bodies = [], []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run(verb: str, folder: Path, **request: Any) -> tuple[int, dict[str, Any], str]:
    """Exit code, answer and standard error of the program."""
    command = [sys.executable, "-I", node_transfer.__file__, verb, str(folder)]
    text = json.dumps({"probe_s": 5.0, "limit_s": 60.0, **request})
    ended = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, json.loads(ended.stdout), ended.stderr


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/bucket/file?X-Amz-Signature=CANARY"


def fetch(server: Server, folder: Path, **request: Any) -> tuple[int, dict[str, Any], str]:
    folder.mkdir()
    files = [{"path": "deep/file", "size": len(CONTENT), "url": url_of(server)}]
    return run("fetch", folder, files=files, **request)


def send_range(handler: BaseHTTPRequestHandler, content: bytes, *, is_cut: bool = False) -> None:
    """What was asked for, or the first part of it."""
    start, end = (int(text) for text in handler.headers["Range"].removeprefix("bytes=").split("-"))
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
    handler.send_header("Content-Length", str(end + 1 - start))
    handler.end_headers()
    handler.wfile.write(content[start : start + BROKEN_AT if is_cut else end + 1])


def refuse(handler: BaseHTTPRequestHandler, status: int = 403, code: str = "AccessDenied") -> None:
    body = f"<Error><Code>{code}</Code><Message>Request has ended</Message><Signature>CANARY</Signature></Error>"
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body.encode())


def test_a_piece_that_broke_off_is_fetched_on_from_there(server: Server, tmp_path: Path) -> None:
    server.answer = lambda handler, number: send_range(handler, CONTENT, is_cut=number == 1)
    assert fetch(server, tmp_path / "node") == (0, {"num_bytes": len(CONTENT)}, "")
    assert (tmp_path / "node/deep/file").read_bytes() == CONTENT
    last = len(CONTENT) - 1
    assert server.ranges == [f"bytes=0-{last}", f"bytes={BROKEN_AT}-{last}"]


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (429, ""), (400, "RequestTimeout")])
def test_a_server_that_is_overloaded_is_asked_again(server: Server, tmp_path: Path, status: int, code: str) -> None:
    server.answer = lambda handler, number: (
        refuse(handler, status, code) if number == 1 else send_range(handler, CONTENT)
    )
    assert fetch(server, tmp_path / "node")[0] == 0
    assert (tmp_path / "node/deep/file").read_bytes() == CONTENT


def test_a_refusal_is_not_tried_again_and_its_sentence_holds_no_secret(server: Server, tmp_path: Path) -> None:
    server.answer = lambda handler, number: refuse(handler)
    sentence = f"127.0.0.1:{server.server_port}: status 403 AccessDenied"
    assert fetch(server, tmp_path / "node") == (1, {"error": sentence}, "")
    assert len(server.ranges) == 1


@pytest.mark.parametrize("size", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_an_object_of_another_size_is_refused(server: Server, tmp_path: Path, size: int) -> None:
    server.answer = lambda handler, number: send_range(handler, bytes(size))
    code, answer, _ = fetch(server, tmp_path / "node")
    assert code == 1 and f"does not have {len(CONTENT)} bytes of file" in answer["error"]


def test_a_server_that_knows_no_ranges_is_refused(server: Server, tmp_path: Path) -> None:
    def send_all(handler: BaseHTTPRequestHandler, number: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()

    server.answer = send_all
    assert fetch(server, tmp_path / "node")[0] == 1


def test_a_transfer_ends_at_its_limit(server: Server, tmp_path: Path) -> None:
    server.answer = lambda handler, number: send_range(handler, CONTENT, is_cut=True)
    code, answer, _ = fetch(server, tmp_path / "node", limit_s=0.2)
    assert (code, answer) == (1, {"error": "it took longer than 0.2 s"})


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("nonsense?X-Amz-Signature=CANARY", id="no scheme"),
        pytest.param("http://127.0.0.1:1/a b?X-Amz-Signature=CANARY", id="a space"),
    ],
)
def test_a_url_that_cannot_be_used_is_not_repeated(tmp_path: Path, url: str) -> None:
    code, answer, stderr = run("fetch", tmp_path, files=[{"path": "file", "size": 1, "url": url}])
    assert code == 1 and "cannot be reached" in answer["error"]
    assert "CANARY" not in json.dumps(answer) + stderr


def test_what_is_said_of_a_broken_url_does_not_repeat_it(server: Server, tmp_path: Path) -> None:
    file = {"path": "file", "size": 1, "url": f"{url_of(server)} b"}
    code, answer, stderr = run("fetch", tmp_path, files=[file])
    assert code == 1 and "URL can't contain control characters" in answer["error"]
    assert "CANARY" not in json.dumps(answer) + stderr


def test_a_piece_that_the_server_did_not_take_is_sent_again_whole(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)

    def answer(handler: BaseHTTPRequestHandler, number: int) -> None:
        handler.send_response(500 if number == 1 else 200)
        handler.send_header("ETag", '"tag"')
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    server.answer = answer
    piece = {"path": "file", "offset": 5, "length": 400_000, "url": url_of(server)}
    assert run("send", tmp_path, pieces=[piece]) == (0, {"etags": ['"tag"']}, "")
    assert server.bodies == [CONTENT[5:400_005]] * 2


def test_a_file_that_is_gone_is_one_sentence(server: Server, tmp_path: Path) -> None:
    piece = {"path": "file", "offset": 0, "length": 1, "url": url_of(server)}
    code, answer, stderr = run("send", tmp_path, pieces=[piece])
    assert (code, answer, stderr) == (1, {"error": f"{tmp_path}/file: No such file or directory"}, "")
