"""Pins what every session promises: commands as records, streams that end with their block, files whole or absent.

Without it a hung command hangs the pipeline, and a reader sees half a file.
"""

import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollouts.infra.chunks import CHUNK_BYTES, Chunk
from rollouts.infra.errors import (
    CommandFailedError,
    CommandTimeoutError,
    CompletedCommand,
    DiskFullError,
    FileMissingError,
    PermanentInfraError,
    TransientInfraError,
)
from rollouts.infra.ports import find_free_port, is_port_free
from rollouts.infra.providers.ssh import expand_root
from rollouts.infra.reach import own_address
from rollouts.infra.renting.acceptance import require_speed
from rollouts.infra.session import LOOPBACK, LocalSession, Session
from tests.infra.shell_jobs import is_alive, read_pid
from tests.infra.splitting import chunks_of
from tests.kit.waiting import wait_until


def test_a_command_becomes_a_record(session: Session) -> None:
    completed = session.run(["sh", "-c", "cat; echo e >&2"], stdin=b"in", timeout_s=10)
    assert completed == CompletedCommand(argv=("sh", "-c", "cat; echo e >&2"), exit_code=0, stdout=b"in", stderr=b"e\n")


def test_a_failure_raises_the_same_record_or_returns_it(session: Session) -> None:
    with pytest.raises(CommandFailedError) as caught:
        session.run(["sh", "-c", "exit 4"], timeout_s=10)
    assert caught.value.completed == session.run(["sh", "-c", "exit 4"], timeout_s=10, check=False)


def test_arguments_are_never_interpreted(session: Session, tmp_path: Path) -> None:
    hostile = f"$(touch {tmp_path}/x); `id`\n'\""
    assert session.run(["printf", "%s", hostile], timeout_s=10).stdout == hostile.encode()
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_command_that_hangs_is_killed_with_its_children(session: Session, tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/child; wait"
    with pytest.raises(CommandTimeoutError, match=r"0\.5 s"):
        session.run(["sh", "-c", script], timeout_s=0.5)
    wait_until(lambda: not is_alive(read_pid(tmp_path / "child")))


def test_a_missing_program_is_named(session: Session) -> None:
    with pytest.raises(PermanentInfraError, match="/nowhere/tool cannot be run"):
        session.run(["/nowhere/tool"], timeout_s=1)


def test_much_output_on_both_channels_does_not_block(session: Session) -> None:
    script = "head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2"
    completed = session.run(["sh", "-c", script], timeout_s=20)
    assert (len(completed.stdout), len(completed.stderr)) == (3_000_000, 3_000_000)


def test_leaving_a_stream_kills_its_command(session: Session, tmp_path: Path) -> None:
    with session.stream(["sh", "-c", f"echo $$ > {tmp_path}/pid; echo one; sleep 60"]) as lines:
        assert next(lines) == b"one\n"
    assert not is_alive(read_pid(tmp_path / "pid"))


def test_a_stream_delivers_input_and_keeps_it_open(session: Session) -> None:
    with session.stream(["sh", "-c", "read x; echo got $x; cat; echo end"], stdin=b"a\n") as lines:
        started = time.monotonic()
        assert next(lines) == b"got a\n"
        assert time.monotonic() - started < 5


def test_a_stream_whose_command_fails_raises_at_its_end(session: Session) -> None:
    with (
        session.stream(["sh", "-c", "echo a; echo why >&2; exit 3"]) as lines,
        pytest.raises(CommandFailedError, match="why"),
    ):
        list(lines)


def test_a_written_file_is_read_back_and_nothing_else_appears(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "a" / "job.json"
    session.write_file(str(path), b"old")
    session.write_file(str(path), b"\x00new")
    assert session.read_file(str(path)) == b"\x00new"
    assert [entry.name for entry in path.parent.iterdir()] == ["job.json"]


def test_a_missing_file_has_its_own_error(session: Session, tmp_path: Path) -> None:
    with pytest.raises(FileMissingError):
        session.read_file(str(tmp_path / "none"))


def test_a_write_that_is_refused_leaves_the_old_file(session: Session, tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    with pytest.raises(PermanentInfraError, match="cannot be written"):
        session.write_file(str(tmp_path / "f"), b"new")
    assert (tmp_path / "f").is_dir() and len(list(tmp_path.iterdir())) == 1


def test_chunks_are_written_in_their_places_and_the_rest_stays(session: Session, tmp_path: Path) -> None:
    content = os.urandom(2 * CHUNK_BYTES + 12_345)
    path = tmp_path / "a" / "file"
    path.parent.mkdir()
    path.write_bytes(b"?" * CHUNK_BYTES + content[CHUNK_BYTES : 2 * CHUNK_BYTES])
    first, _, last = chunks_of(content)
    digests = session.write_chunks(str(path.parent), [last, first])
    assert path.read_bytes() == content
    expected = {("file", 0): content[:CHUNK_BYTES], ("file", 2): content[2 * CHUNK_BYTES :]}
    assert digests == {chunk: hashlib.sha256(each).hexdigest() for chunk, each in expected.items()}
    assert session.write_chunks(str(path.parent), []) == {}


def test_chunks_of_many_files_are_written_by_one_call(session: Session, tmp_path: Path) -> None:
    contents = {f"{number % 3}/it's file {number}": os.urandom(1 + 40_000 * number) for number in range(20)}
    chunks = [chunk for name, content in contents.items() for chunk in chunks_of(content, name=name)]
    digests = session.write_chunks(str(tmp_path / "there"), chunks)
    assert {name: (tmp_path / "there" / name).read_bytes() for name in contents} == contents
    assert digests == {(name, 0): hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def test_the_file_that_cannot_be_written_is_named(session: Session, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    chunks = [*chunks_of(b"1", name="first"), *chunks_of(b"2", name="second")]
    with pytest.raises(PermanentInfraError, match=re.escape(f"{tmp_path / 'second'} cannot be written: Is a dir")):
        session.write_chunks(str(tmp_path), chunks)


def test_a_file_that_somebody_takes_over_is_left_alone(session: Session, tmp_path: Path) -> None:
    """What is late must not be in the file of the copy that went on with it."""
    path, taken = tmp_path / "file", tmp_path / "taken"

    def pieces() -> Iterator[bytes]:
        yield b"early"
        wait_until(lambda: path.exists() and path.read_bytes() == b"early")
        path.rename(taken)
        yield b"late"

    with pytest.raises(TransientInfraError, match="another copy has taken it over"):
        session.write_chunks(str(tmp_path), [Chunk("file", 0, pieces())])
    assert taken.read_bytes() == b"early"


@pytest.mark.slow
def test_a_full_disk_is_named(session: Session, tiny_disk: Path) -> None:
    with pytest.raises(DiskFullError):
        session.write_chunks(str(tiny_disk), chunks_of(bytes(4 << 20), name="big"))
    with pytest.raises(DiskFullError):
        session.write_file(str(tiny_disk / "big"), bytes(4 << 20))
    assert [path.name for path in tiny_disk.iterdir()] == ["big"]


def test_commands_are_out_of_reach_of_an_interrupt_at_our_terminal(session: Session) -> None:
    own = session.run([sys.executable, "-c", "import os; print(os.getsid(0))"], timeout_s=20).stdout
    assert int(own) != os.getsid(0)


def test_an_interpreter_that_says_something_at_its_start_is_understood(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "loading modules"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    session = LocalSession(str(python))
    assert expand_root(session, session.python, f"{tmp_path}/a/../b") == f"{tmp_path}/b"
    assert is_port_free(session, LOOPBACK, find_free_port(session))
    assert own_address(session).count(".") == 3
    assert require_speed(session, str(tmp_path), min_link_mbit_s=1e-3, min_disk_mb_s=1e-3).disk_mb_s > 0
