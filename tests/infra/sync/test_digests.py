"""Pins that copies are compared by what both sides can digest by, and that both kinds find the same differences.

Without it a node whose Python has nothing but itself could take no copy, or one with more would gain nothing by it.
"""

import errno
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.chunks import CHUNK_BYTES
from rollouts.infra.errors import CompletedCommand, PermanentInfraError
from rollouts.infra.session import LocalSession, Session
from rollouts.infra.ssh.ssh_session import SSHSession
from rollouts.infra.sync.push import publish_directory
from rollouts.infra.sync.receiver import DIGESTS
from rollouts.infra.sync.sender import Sender
from tests.infra.ssh_server import SSHServer
from tests.infra.sync.pulling import pull_run

INTERPRETERS = {"bare": "sha256", "with packages": "blake3"}


@pytest.fixture(params=INTERPRETERS)
def digest(request: pytest.FixtureRequest) -> str:
    """That of a node, by what its Python has."""
    return INTERPRETERS[request.param]


@pytest.fixture
def python(digest: str, tmp_path: Path) -> str:
    """An interpreter; the bare one sees no package but the standard library's."""
    if digest == "blake3":
        return sys.executable
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    return str(bare)


@pytest.fixture(params=["local", pytest.param("ssh", marks=pytest.mark.slow)])
def session(request: pytest.FixtureRequest, python: str, tmp_path: Path) -> Iterator[Session]:
    if request.param == "local":
        yield LocalSession(python)
        return
    server: SSHServer = request.getfixturevalue("ssh_server")
    with SSHSession(server.access, python=python, programs_dir=str(tmp_path / "programs")) as session:
        yield session


def test_a_node_digests_by_the_best_that_its_python_has(session: Session, digest: str, tmp_path: Path) -> None:
    import rollouts.infra.sync.receiver as receiver

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_bytes(b"content")
    request = json.dumps({"sizes": {"file": 7}, "chunk_bytes": CHUNK_BYTES}).encode()
    arguments = ["describe", str(tmp_path / "there")]
    told = session.run_program(Path(receiver.__file__), arguments, stdin=request, timeout_s=60)
    answer = json.loads(told.stdout)
    assert answer["digest"] == digest
    assert [digests for *_, digests in answer["usable"]] == [[DIGESTS[digest](b"content").hexdigest()]]


@pytest.mark.slow
def test_only_the_chunk_that_differs_is_sent_in_either_direction(session: Session, tmp_path: Path) -> None:
    ours, there, back = tmp_path / "ours", tmp_path / "there", tmp_path / "back"
    content = bytearray(i // 4096 % 251 for i in range(3 * CHUNK_BYTES + 5))
    ours.mkdir()
    (ours / "small").write_bytes(b"small")
    (ours / "model").write_bytes(content)
    publish_directory(session, ours, str(there))
    assert pull_run(session, str(there), back) == 2
    content[CHUNK_BYTES + 1] ^= 1
    (ours / "model").write_bytes(content)
    assert publish_directory(session, ours, str(there)).num_sent_bytes == CHUNK_BYTES
    assert publish_directory(session, ours, str(there)).was_identical
    assert pull_run(session, str(there), back) >= 1
    for folder in (there, back):
        assert (folder / "model").read_bytes() == content
        assert (folder / "small").read_bytes() == b"small"


def test_a_digest_that_is_not_known_here_is_refused_in_a_sentence(tmp_path: Path) -> None:
    class StrangeSession(LocalSession):
        def run_program(self, source: Path, arguments: Sequence[str], **more: Any) -> CompletedCommand:
            told = super().run_program(source, arguments, **more)
            return replace(told, stdout=told.stdout.replace(b'"blake3"', b'"crc32"'))

    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "file").write_bytes(b"content")
    (tmp_path / "there").mkdir()
    for copy in (
        lambda session: publish_directory(session, tmp_path / "ours", str(tmp_path / "copy")),
        lambda session: pull_run(session, str(tmp_path / "there"), tmp_path / "back"),
    ):
        with pytest.raises(PermanentInfraError, match=r"^the node digests files by 'crc32', which is not known here"):
            copy(StrangeSession(sys.executable))
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("num_handed_on", [None, 0, 70_000], ids=["all", "nothing", "a part"])
def test_what_the_system_does_not_hand_on_is_written(
    num_handed_on: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, where a file cannot go to a pipe without a copy."""
    content, chunk_bytes = os.urandom(1_000_000), 300_000
    (tmp_path / "file").write_bytes(content)
    system_sendfile, left = os.sendfile, num_handed_on

    def sendfile(output: int, file: int, offset: int, count: int) -> int:
        nonlocal left
        if left is None:
            return system_sendfile(output, file, offset, count)
        if left == 0:
            raise OSError(errno.EINVAL, "Invalid argument")
        num, left = system_sendfile(output, file, offset, min(left, count)), 0
        return num

    monkeypatch.setattr(os, "sendfile", sendfile)
    with (tmp_path / "sent").open("wb") as output:
        Sender(tmp_path, chunk_bytes, "sha256", output).send_file("file", 0, [])
    stream = io.BytesIO((tmp_path / "sent").read_bytes())
    assert json.loads(stream.readline())["size"] == len(content)
    for start in range(0, len(content), chunk_bytes):
        chunk = content[start : start + chunk_bytes]
        assert stream.read(len(chunk)) == chunk
        assert json.loads(stream.readline()) == {"digest": DIGESTS["sha256"](chunk).hexdigest()}
    assert json.loads(stream.readline()) == {"is_changed": False}
