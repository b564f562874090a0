"""Pins that a large file that receives itself is as whole and as right as one whose every byte we take.

Without it what a shell prints, a cut connection or a flipped bit ends up in a checkpoint, because nobody looked.
"""

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import pytest

import rollouts.infra.session
from rollouts.infra.chunks import CHUNK_BYTES
from rollouts.infra.errors import InfraError, PermanentInfraError, TransientInfraError
from rollouts.infra.session import MAX_GREETING_BYTES, LocalSession, Session, split_lines
from rollouts.infra.sync import sender
from rollouts.infra.sync.mirror import pull_run
from tests.infra.ssh_server import SSHServer, running_server
from tests.infra.sync.noting import NotingSession, Said, session_on
from tests.kit.mounts import fill, mounted_tmpfs

SIZE = 2 * CHUNK_BYTES + 12_345
LITTLE = 64 << 10
"""What comes beside the file is less."""
GREETING = """ForceCommand sh -c 'echo "Welcome!"; echo "{\\"a\\"" >&2; eval "$SSH_ORIGINAL_COMMAND"'"""


@pytest.fixture(autouse=True)
def _any_size_is_large_and_any_node_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.infra.sync.mirror.DIRECT_BYTES", 1 << 20)
    monkeypatch.setattr("rollouts.infra.ssh.connection._NEAR_S", 5.0)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    path = tmp_path / "node" / "run"
    checkpoint = path / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(os.urandom(SIZE))
    (checkpoint / "manifest.json").write_text("{}")
    (path / "result.json").write_text("{}")
    return path


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "store" / "run"


def assert_equal(there: Path, here: Path) -> None:
    files = sorted(path.relative_to(there) for path in there.rglob("*") if path.is_file())
    assert [path for path in files if (here / path).read_bytes() != (there / path).read_bytes()] == []
    assert not (here / ".incoming").exists()


def test_a_large_file_that_is_new_is_poured_and_known_the_next_time(
    noting: NotingSession, there: Path, here: Path
) -> None:
    assert pull_run(noting, str(there), here) == 3
    assert_equal(there, here)
    assert noting.num_poured == 1 and noting.num_streamed_bytes < LITTLE
    assert pull_run(noting, str(there), here) == 0


def test_only_a_chunk_that_arrived_damaged_comes_again(noting: NotingSession, there: Path, here: Path) -> None:
    def flip_a_bit(said: Said, into: FileIO) -> Said:
        everything = list(said)  # now it is written
        byte = os.pread(into.fileno(), 1, CHUNK_BYTES + 5)[0]
        os.pwrite(into.fileno(), bytes([byte ^ 1]), CHUNK_BYTES + 5)
        yield from everything

    noting.change_poured = flip_a_bit
    pull_run(noting, str(there), here)
    assert_equal(there, here)
    assert noting.num_poured == 1 and CHUNK_BYTES < noting.num_streamed_bytes < CHUNK_BYTES + LITTLE


def test_a_file_that_is_written_to_meanwhile_never_appears_as_a_mixture(
    noting: NotingSession, there: Path, here: Path
) -> None:
    model = there / "checkpoints" / "step_000001" / "model.safetensors"

    def write_anew(said: Said, into: FileIO) -> Said:
        model.write_bytes(os.urandom(SIZE))
        yield from said

    noting.change_poured = write_anew
    for _ in range(2):
        try:
            pull_run(noting, str(there), here)
        except TransientInfraError:
            assert not list(here.glob("checkpoints/*/manifest.json"))
    assert_equal(there, here)


def test_what_came_before_a_break_does_not_come_again(noting: NotingSession, there: Path, here: Path) -> None:
    def break_off(said: Said, into: FileIO) -> Said:
        for number, each in enumerate(said):
            if number == 1:
                raise TransientInfraError("the connection broke")
            yield each

    noting.change_poured = break_off
    pull_run(noting, str(there), here)
    assert_equal(there, here)
    assert noting.num_poured == 1 and noting.num_streamed_bytes < SIZE - CHUNK_BYTES + LITTLE


def test_an_interrupt_is_passed_on_and_the_next_pull_goes_on(noting: NotingSession, there: Path, here: Path) -> None:
    def interrupt(said: Said, into: FileIO) -> Said:
        yield next(said)
        raise KeyboardInterrupt

    noting.change_poured = interrupt
    with pytest.raises(KeyboardInterrupt):
        pull_run(noting, str(there), here)
    assert not list(here.glob("checkpoints/*/*"))
    pull_run(noting, str(there), here)
    assert_equal(there, here)
    assert noting.num_poured == 1, "what is begun is looked at by chunks"


def test_a_disk_that_fills_up_meanwhile_is_named(noting: NotingSession, there: Path, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", f"size={SIZE + CHUNK_BYTES}") as disk:

        def take_the_rest(said: Said, into: FileIO) -> Said:
            yield next(said)
            fill(disk)
            yield from said

        noting.change_poured = take_the_rest
        with pytest.raises(InfraError, match=r"No space left|is full"):
            pull_run(noting, str(there), disk / "run")
        (disk / "filler").unlink()
        pull_run(noting, str(there), disk / "run")
        assert_equal(there, disk / "run")


@pytest.mark.slow
def test_what_a_shell_prints_when_it_starts_is_not_in_the_file(tmp_path: Path, there: Path, here: Path) -> None:
    with running_server(tmp_path / "sshd", more_config=GREETING) as server, session_on(server, tmp_path) as session:
        pull_run(session, str(there), here)
        assert session.num_poured == 1 and session.num_streamed_bytes < LITTLE
    assert_equal(there, here)


@pytest.mark.slow
def test_over_a_connection_that_breaks_amid_a_file_only_what_is_missing_comes_again(
    tmp_path: Path, there: Path, here: Path
) -> None:
    with running_server(tmp_path / "sshd") as server, session_on(server, tmp_path) as session:

        def cut(said: Said, into: FileIO) -> Said:
            yield next(said)
            server.signal_sessions(signal.SIGKILL)
            yield from said

        session.change_poured = cut
        pull_run(session, str(there), here)
        assert session.num_poured == 1
    assert_equal(there, here)


@pytest.mark.slow
@pytest.mark.usefixtures("client_that_fails")
def test_a_client_that_fails_is_replaced_by_the_agent(
    ssh_server: SSHServer, tmp_path: Path, there: Path, here: Path
) -> None:
    with session_on(ssh_server, tmp_path) as session:
        pull_run(session, str(there), here)
    assert_equal(there, here)


@pytest.mark.slow
def test_a_distant_node_pours_nothing(far_session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.infra.ssh.connection._NEAR_S", 0.005)
    assert not far_session.can_pour


@contextmanager
def poured_by(program: str, folder: Path, *, max_bytes: int = 1) -> Iterator[Said]:
    """What a program says that is to write a file, and that file, `folder / "file"`."""
    (folder / "program.py").write_text(program)
    session = LocalSession(sys.executable)
    with (
        (folder / "file").open("w+b", buffering=0) as file,
        session.pour_program(folder / "program.py", [], stdin=b"", into=file, max_bytes=max_bytes) as said,
    ):
        yield said


def test_a_program_that_does_not_begin_is_named(tmp_path: Path) -> None:
    program = "import sys; sys.exit('no such module')"
    reason = "ended before it began: no such module"
    with poured_by(program, tmp_path) as said, pytest.raises(TransientInfraError, match=reason):
        next(said)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="nobody here can see to it")
def test_a_node_that_sends_more_than_a_file_has_fills_no_disk(tmp_path: Path) -> None:
    program = (
        "import sys\nsys.stderr.write('{}\\n'); sys.stderr.flush()\n"
        "for _ in range(64): sys.stdout.buffer.write(bytes(1 << 20))\n"
    )
    with poured_by(program, tmp_path, max_bytes=1 << 20) as said:
        assert list(said) == []
    assert (tmp_path / "file").stat().st_size <= (1 << 20) + MAX_GREETING_BYTES


def test_a_node_that_says_something_else_without_end_is_not_listened_to(tmp_path: Path) -> None:
    program = "import sys\nwhile True: sys.stderr.write('x' * 99 + '\\n')"
    with poured_by(program, tmp_path) as said, pytest.raises(TransientInfraError, match="too much other text"):
        next(said)


def test_a_line_without_end_is_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts.infra.session, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(PermanentInfraError, match="a line on the machine has more than 1048576 bytes"):
        list(split_lines(itertools.repeat(bytes(1 << 16))))


def test_a_node_whose_asker_is_gone_stops_sending(tmp_path: Path) -> None:
    """The program that takes the file may outlive us, and would write into what the next pull has begun."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(100 * CHUNK_BYTES)
    status = (tmp_path / "large").stat()
    request = {"chunk_bytes": CHUNK_BYTES, "digest": "sha256", "name": "large", "size": status.st_size}
    command = [sys.executable, sender.__file__, "pour", str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({**request, "modified_ns": status.st_mtime_ns}).encode() + b"\n")
        process.stdin.flush()
        assert len(process.stdout.read(1 << 20)) == 1 << 20
        process.stdin.close()
        assert len(process.stdout.read()) < 3 * CHUNK_BYTES and process.wait() == 0


def test_a_file_here_that_cannot_be_written_is_named(noting: NotingSession, there: Path, here: Path) -> None:
    here.mkdir(parents=True)
    (here / ".incoming").write_text("in the way")
    with pytest.raises(PermanentInfraError, match="cannot be written"):
        pull_run(noting, str(there), here)
