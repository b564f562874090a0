"""Pins that a large file that is read by whoever sends it arrives as whole and as right as one that we take.

Without it a flipped bit, a file that is written to meanwhile or a late packet ends up in a model: nobody looked.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from rollouts.infra.chunks import CHUNK_BYTES, SHA256
from rollouts.infra.errors import DiskFullError, TransientInfraError
from rollouts.infra.sync import receiver
from rollouts.infra.sync.push import publish_directory
from tests.infra.ssh_server import SSHServer, running_server
from tests.infra.sync.noting import NotingSession, NotingSSHSession, session_on
from tests.kit.mounts import fill, mounted_tmpfs
from tests.kit.waiting import wait_until

SIZE = 2 * CHUNK_BYTES + 12_345


@pytest.fixture(autouse=True)
def _any_size_is_large_and_any_node_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.infra.sync.push.DIRECT_BYTES", CHUNK_BYTES)
    monkeypatch.setattr("rollouts.infra.sync.push.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("rollouts.infra.ssh.connection._NEAR_S", 5.0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    (path / "parts").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "parts" / "it's $HOME.safetensors").write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "model"


def large_file(source: Path) -> Path:
    return next((source / "parts").iterdir())


def assert_copied(source: Path, target: Path) -> None:
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    assert files and [path for path in files if (target / path).read_bytes() != (source / path).read_bytes()] == []
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_large_file_that_is_new_is_read_by_who_sends_it(noting: NotingSession, source: Path, target: Path) -> None:
    report = publish_directory(noting, source, str(target))
    assert_copied(source, target)
    assert (noting.num_fed, noting.num_chunks) == (1, 0) and report.num_sent_bytes == SIZE + 2
    assert publish_directory(noting, source, str(target)).was_identical


def test_of_a_file_that_is_there_in_part_only_chunks_are_sent(
    noting: NotingSession, source: Path, target: Path
) -> None:
    publish_directory(noting, source, str(target))
    with large_file(source).open("r+b") as file:
        file.seek(CHUNK_BYTES + 5)
        file.write(b"other")
    publish_directory(noting, source, str(target))
    assert_copied(source, target)
    assert (noting.num_fed, noting.num_chunks) == (1, 1)


@pytest.mark.parametrize("digests_said", [lambda ours: [ours[0], ours[0], ours[2]], lambda ours: ours[:2]])
def test_a_file_that_arrives_damaged_does_not_appear(
    noting: NotingSession, source: Path, target: Path, digests_said: Callable[[list[str]], list[str]]
) -> None:
    def change(lines: Iterator[bytes]) -> Iterator[bytes]:
        answer = json.loads(b"".join(lines))
        yield json.dumps({"digests": digests_said(answer["digests"])}).encode()

    noting.change_fed = change
    with pytest.raises(TransientInfraError, match=r"1 files arrived damaged, the first is .*safetensors.: copy again"):
        publish_directory(noting, source, str(target))
    assert not target.exists()
    noting.change_fed = None
    publish_directory(noting, source, str(target))
    assert_copied(source, target)


def test_a_file_that_is_written_to_meanwhile_is_named(noting: NotingSession, source: Path, target: Path) -> None:
    def write_anew(lines: Iterator[bytes]) -> Iterator[bytes]:
        yield from lines
        large_file(source).write_bytes(os.urandom(SIZE))

    noting.change_fed = write_anew
    with pytest.raises(TransientInfraError, match=r"safetensors changed during the copy"):
        publish_directory(noting, source, str(target))
    assert not target.exists()
    noting.change_fed = None
    publish_directory(noting, source, str(target))
    assert_copied(source, target)


def test_a_program_that_says_nothing_has_written_nothing(noting: NotingSession, source: Path, target: Path) -> None:
    noting.change_fed = lambda lines: iter([b"Welcome!\n"])
    with pytest.raises(TransientInfraError, match="was not written: copy again"):
        publish_directory(noting, source, str(target))
    assert not target.exists()


@pytest.mark.slow
def test_a_disk_that_fills_up_meanwhile_is_named_and_nothing_is_left(
    ssh_server: SSHServer, source: Path, tmp_path: Path
) -> None:
    class FillingSession(NotingSSHSession):
        """Somebody else takes the room just before the file comes, and after it was looked at."""

        @contextmanager
        def feed_program(self, source: Path, arguments: Sequence[str], *, stdin: FileIO) -> Iterator[Iterator[bytes]]:
            fill(disk)
            with super().feed_program(source, arguments, stdin=stdin) as lines:
                yield lines

    with (
        mounted_tmpfs(tmp_path / "disk", f"size={SIZE + 2 * CHUNK_BYTES}") as disk,
        FillingSession(ssh_server.access, python=sys.executable, programs_dir=str(tmp_path / "programs")) as session,
    ):
        with pytest.raises(DiskFullError, match="is full"):
            publish_directory(session, source, str(disk / "model"))
        assert [path.name for path in disk.iterdir()] == ["filler"]


@pytest.mark.slow
def test_over_a_connection_that_breaks_amid_a_file_the_copy_goes_on_by_chunks(
    source: Path, target: Path, tmp_path: Path
) -> None:
    with running_server(tmp_path / "sshd") as server, session_on(server, tmp_path) as session:

        def cut(lines: Iterator[bytes]) -> Iterator[bytes]:
            server.signal_sessions(signal.SIGKILL)
            return lines

        session.change_fed = cut
        publish_directory(session, source, str(target))
        assert session.num_fed == 1 and session.num_chunks <= 4
    assert_copied(source, target)


@pytest.mark.slow
@pytest.mark.usefixtures("client_that_fails")
def test_a_client_that_fails_is_replaced_by_our_own_connection(
    ssh_server: SSHServer, tmp_path: Path, source: Path, target: Path
) -> None:
    with session_on(ssh_server, tmp_path) as session:
        publish_directory(session, source, str(target))
        assert session.num_chunks == 4, "with the small file"
    assert_copied(source, target)


@pytest.fixture
def incoming(tmp_path: Path) -> Iterator[Path]:
    """A folder that somebody holds."""
    path = tmp_path / ".model.incoming-1-0"
    path.mkdir()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield path
    os.close(descriptor)


@contextmanager
def accepting(incoming: Path, size: int) -> Iterator[tuple[BinaryIO, Callable[[], dict[str, Any]]]]:
    """The node's side alone: its input, and what it answers when that has ended."""
    arguments = ["accept_large", str(incoming), "file", str(size), str(CHUNK_BYTES), SHA256]
    with subprocess.Popen(
        [sys.executable, receiver.__file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield cast(BinaryIO, process.stdin), lambda: json.loads(process.communicate()[0])


def test_what_comes_late_is_not_written_into_a_file_that_another_copy_has_taken_over(
    incoming: Path, tmp_path: Path
) -> None:
    size = 1 << 20
    with accepting(incoming, 2 * size) as (stdin, ended):
        stdin.write(b"a" * size)
        stdin.flush()
        wait_until(lambda: (incoming / "file").exists() and (incoming / "file").stat().st_size == size)
        (incoming / "file").rename(tmp_path / "taken")
        stdin.write(b"b" * size)
        answer = ended()
    assert answer["kind"] == "busy" and "taken over by another copy" in answer["error"]
    assert (tmp_path / "taken").read_bytes() == b"a" * size


def test_what_nobody_waits_for_any_more_is_not_taken(tmp_path: Path) -> None:
    abandoned = tmp_path / ".model.incoming-2-0"
    abandoned.mkdir()
    with accepting(abandoned, 100) as (_, ended):
        answer = ended()
    assert answer["kind"] == "unheld" and "the client of the copy" in answer["error"]


def test_input_that_ends_early_is_damaged(incoming: Path) -> None:
    with accepting(incoming, 100) as (stdin, ended):
        stdin.write(b"a" * 99)
        answer = ended()
    assert answer["kind"] == "damaged" and "ends early" in answer["error"]
