"""Pins that a mirrored run directory holds, at any moment, only what is whole on the node.

Without it a report reads half a result, or the only copy of a checkpoint is deleted with the machine it lay on.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.chunks import CHUNK_BYTES
from rollouts.infra.errors import CompletedCommand, DiskFullError, PermanentInfraError, TransientInfraError
from rollouts.infra.node_agent import DIGESTS
from rollouts.infra.session import LocalSession, Session
from rollouts.infra.ssh.ssh_session import SSHSession
from rollouts.infra.sync import sender
from rollouts.infra.sync.mirror import is_job_file, mirrored
from rollouts.infra.sync.receiver import hash_file
from tests.infra.ssh_server import SSHServer, running_server
from tests.infra.sync.pulling import pull_run
from tests.kit.waiting import wait_until


@pytest.fixture
def there(tmp_path: Path) -> Path:
    path = tmp_path / "node" / "sft-0123"
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    (path / "result.json").write_text("{}")
    write_checkpoint(path, "step_000001")
    for hidden in (".job/lock", "weights/v1/model", "damaged-1/result.json", "checkpoints/.step_2.partial/x"):
        (path / hidden).parent.mkdir(parents=True, exist_ok=True)
        (path / hidden).write_text("not for readers")
    return path


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "store" / "sft-0123"


def write_checkpoint(run_dir: Path, name: str) -> Path:
    path = run_dir / "checkpoints" / name
    (path / "trainer").mkdir(parents=True)
    (path / "trainer" / "state.json").write_text("{}")
    (path / "model.safetensors").write_bytes(os.urandom(300_000))
    (path / "manifest.json").write_text(json.dumps({"name": name}))
    return path


def content_of(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".mirror.lock")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def public(files: dict[str, bytes]) -> dict[str, bytes]:
    hidden = ("weights/", "damaged-1/")
    return {n: c for n, c in files.items() if not n.startswith(hidden) and not any(p[0] == "." for p in n.split("/"))}


class BreakingSession(LocalSession):
    """Its transfers break after some bytes, whatever they carry."""

    breaks_after = 0

    @contextmanager
    def pipe(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        with super().pipe(argv, stdin=stdin) as chunks:
            yield self._some_of(chunks)

    def _some_of(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        num_bytes = 0
        for chunk in chunks:
            yield chunk[: max(0, self.breaks_after - num_bytes)]
            num_bytes += len(chunk)
            if num_bytes >= self.breaks_after:
                raise TransientInfraError("the connection broke")


class CountingSession(SSHSession):
    """Knows how much came, and breaks its connection once, amid that."""

    num_bytes = 0
    breaks_after: int | None = None

    def __init__(self, server: SSHServer, programs_dir: Path) -> None:
        super().__init__(server.access, python=sys.executable, programs_dir=str(programs_dir))
        self._server = server

    @contextmanager
    def pipe_program(self, source: Path, arguments: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        with super().pipe_program(source, arguments, stdin=stdin) as chunks:
            yield map(self._counted, chunks)

    def _counted(self, chunk: bytes) -> bytes:
        self.num_bytes += len(chunk)
        if self.breaks_after is not None and self.num_bytes > self.breaks_after:
            self.breaks_after = None
            self._server.signal_sessions(signal.SIGKILL)
        return chunk


@pytest.mark.slow
def test_over_a_connection_that_breaks_only_what_is_missing_comes_again(
    there: Path, here: Path, tmp_path: Path
) -> None:
    size = 60 << 20
    (there / "large").write_bytes(os.urandom(size))
    with running_server(tmp_path / "sshd") as server, CountingSession(server, tmp_path / "programs") as session:
        session.breaks_after = size // 2
        with pytest.raises(TransientInfraError):
            pull_run(session, str(there), here)
        assert content_of(here).keys().isdisjoint({"large", "result.json"})
        pull_run(session, str(there), here)
        assert size < session.num_bytes < size + (2 << 20)
    assert content_of(here) == public(content_of(there))


AS_NOBODY = f"""
import os, sys
program = {{"__name__": "sender"}}
exec({Path(sender.__file__).read_text()!r}, program)
os.setgid(65534); os.setuid(65534)
program["main"](["sender.py", "list", sys.argv[1]])
"""
MAX_LINE = 1000
"""What is longer is no line about a file, but of its content."""


class ChangingSession(LocalSession):
    """Does something to the files on the node, or to what comes from there, amid the first transfers."""

    num_times = 1

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        super().__init__(sys.executable)
        self._change = change

    @contextmanager
    def pipe(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        with super().pipe(argv, stdin=stdin) as chunks:
            yield self._changed(chunks)

    def _changed(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        self.num_times -= 1
        is_due = self.num_times >= 0
        for chunk in chunks:
            is_now = is_due and len(chunk) > MAX_LINE
            yield self._change(chunk) if is_now else chunk
            is_due = is_due and not is_now


def test_everything_that_readers_read_arrives_and_nothing_else(session: Session, there: Path, here: Path) -> None:
    assert pull_run(session, str(there), here) == 5
    assert content_of(here) == public(content_of(there))


def test_only_what_is_new_is_fetched_again(session: Session, there: Path, here: Path) -> None:
    pull_run(session, str(there), here)
    assert pull_run(session, str(there), here) == 0
    with (there / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    (there / "result.json").write_text('{"best": 1}')
    assert pull_run(session, str(there), here) == 2
    assert content_of(here) == public(content_of(there))


def test_a_file_that_was_written_anew_replaces_ours(session: Session, there: Path, here: Path) -> None:
    pull_run(session, str(there), here)
    (there / "metrics.jsonl").write_text('{"step": 9, "attempt": 2}\n')
    pull_run(session, str(there), here)
    assert content_of(here) == public(content_of(there))


def test_an_interrupted_transfer_goes_on_where_it_broke_and_shows_nothing_half(there: Path, here: Path) -> None:
    breaking = BreakingSession(sys.executable)
    seen = []
    breaking.breaks_after = 100_000
    for _ in range(2):
        with pytest.raises(TransientInfraError):
            pull_run(breaking, str(there), here)
        assert "result.json" not in content_of(here)
        assert not any(name.endswith("manifest.json") for name in content_of(here))
        seen.append(max((path.stat().st_size for path in here.glob(".incoming/*")), default=0))
    assert 90_000 < seen[0] < 100_000 and 190_000 < seen[1] < 200_000, "each try brings what is missing"
    breaking.breaks_after = 1 << 30
    pull_run(breaking, str(there), here)
    assert content_of(here) == public(content_of(there))


@pytest.mark.parametrize("problem", ["breaks", "damages"])
def test_a_checkpoint_that_was_trained_again_replaces_ours_as_a_whole(there: Path, here: Path, problem: str) -> None:
    node = LocalSession(sys.executable)
    pull_run(node, str(there), here)
    name = "checkpoints/step_000001"
    before = content_of(here / name)
    shutil.rmtree(there / name)  # as a job does that finds its newest one damaged, and goes on from the one before
    write_checkpoint(there, "step_000001")
    (there / name / "manifest.json").write_text('{"name": "another"}')
    (there / name / "trainer/state.json").write_text('{"step": 1}')
    (there / name / "vocabulary").write_bytes(os.urandom(300_000))
    unlucky: LocalSession
    if problem == "breaks":
        unlucky = breaking = BreakingSession(sys.executable)
        breaking.breaks_after = 450_000  # all but the vocabulary has come
    else:
        unlucky = damaging = ChangingSession(lambda chunk: flip(chunk) if len(chunk) < 100_000 else chunk)
        damaging.num_times = 2
    with pytest.raises(TransientInfraError):
        pull_run(unlucky, str(there), here)
    assert content_of(here / name) == before
    pull_run(node, str(there), here)
    assert content_of(here) == public(content_of(there))


def test_a_checkpoint_that_is_written_anew_while_it_is_fetched_is_no_mixture(there: Path, here: Path) -> None:
    name = "checkpoints/step_000001"

    def write_anew(chunk: bytes) -> bytes:
        if not (there / name / "added").exists():
            shutil.rmtree(there / name)
            write_checkpoint(there, "step_000001")
            (there / name / "manifest.json").write_text('{"name": "another"}')
            (there / name / "added").touch()
        return chunk

    session = ChangingSession(write_anew)
    (there / name / "model.safetensors").write_bytes(bytes(2 << 20))
    with pytest.raises(TransientInfraError, match=r"manifest\.json"):
        pull_run(session, str(there), here)
    assert "manifest.json" not in content_of(here / name)
    pull_run(session, str(there), here)
    assert content_of(here) == public(content_of(there))


def flip(chunk: bytes) -> bytes:
    """A piece of a file of which one bit is another one."""
    middle = len(chunk) // 2  # lines about files may be at its ends
    return chunk[:middle] + bytes([chunk[middle] ^ 1]) + chunk[middle + 1 :]


def test_a_line_that_arrives_damaged_is_an_error_that_may_pass(there: Path, here: Path) -> None:
    session = ChangingSession(lambda chunk: chunk.replace(b'"size"', b'"sise"'))
    for path in there.glob("checkpoints/*/model*"):
        path.write_bytes(b"small")
    with (
        pytest.raises(TransientInfraError, match="came from the node instead of"),
        pytest.MonkeyPatch.context() as each,
    ):
        each.setattr("tests.infra.sync.test_mirror.MAX_LINE", 0)
        pull_run(session, str(there), here)
    assert pull_run(session, str(there), here) == 5


def test_a_file_that_arrives_damaged_is_fetched_again_and_is_never_shown(there: Path, here: Path) -> None:
    write_large(there / "large", besides=here)
    session = ChangingSession(flip)
    pull_run(session, str(there), here)
    assert content_of(here) == public(content_of(there)) and session.num_times == -1
    os.utime(there / "large", (1, 1))
    (here / "large").unlink()
    session.num_times = 2
    with pytest.raises(TransientInfraError, match=r"1 files of .* arrived damaged, the first is 'large'"):
        pull_run(session, str(there), here)
    assert "large" not in content_of(here)


def test_what_says_that_files_are_whole_waits_for_one_that_arrived_damaged(there: Path, here: Path) -> None:
    write_checkpoint(there, "step_000002")
    session = ChangingSession(flip)
    session.num_times = 2
    with pytest.raises(
        TransientInfraError, match=r"damaged, the first is 'checkpoints/step_000001/model\.safetensors'"
    ):
        pull_run(session, str(there), here)
    shown = content_of(here)
    assert "checkpoints/step_000002/manifest.json" in shown
    assert "checkpoints/step_000001/manifest.json" not in shown and "result.json" not in shown
    pull_run(session, str(there), here)
    assert content_of(here) == public(content_of(there))


def test_a_file_that_changes_while_it_is_fetched_is_fetched_again_and_is_never_shown_torn(
    there: Path, here: Path
) -> None:
    write_large(there / "large", besides=here)

    def overwrite_its_ends(chunk: bytes) -> bytes:  # the last was not read yet: it is larger than what pipes hold
        with (there / "large").open("r+b") as file:
            file.write(os.urandom(10))
            file.seek(-10, os.SEEK_END)
            file.write(os.urandom(10))
        return chunk

    session = ChangingSession(overwrite_its_ends)
    pull_run(session, str(there), here)
    assert content_of(here) == public(content_of(there)) and session.num_times == -1
    session.num_times = 3
    overwrite_its_ends(b"")
    before = (here / "large").read_bytes()
    with pytest.raises(TransientInfraError, match="arrived damaged, the first is 'large'"):
        pull_run(session, str(there), here)
    assert (here / "large").read_bytes() == before
    session.num_times = 0
    pull_run(session, str(there), here)
    assert content_of(here) == public(content_of(there))


LARGE_BYTES = 3 * CHUNK_BYTES + 12_345


def break_off_at_the_third_chunk(there: Path, here: Path) -> Path:
    """What a pull of a large file leaves that broke off."""
    breaking = BreakingSession(sys.executable)
    pull_run(LocalSession(sys.executable), str(there), here)
    (there / "large").write_bytes(os.urandom(LARGE_BYTES))
    breaking.breaks_after = 2 * CHUNK_BYTES + 1_000_000
    with pytest.raises(TransientInfraError):
        pull_run(breaking, str(there), here)
    [part] = here.glob(".incoming/*")
    assert 2 * CHUNK_BYTES < part.stat().st_size < 3 * CHUNK_BYTES
    return part


def flip_a_bit(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


class WatchingSession(LocalSession):
    """Knows how much came."""

    num_bytes = 0

    @contextmanager
    def pipe(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        with super().pipe(argv, stdin=stdin) as chunks:
            yield map(self._counted, chunks)

    def _counted(self, chunk: bytes) -> bytes:
        self.num_bytes += len(chunk)
        return chunk


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["none", "a flipped bit", "truncated", "too long"])
def test_of_a_part_that_is_damaged_the_wrong_chunks_are_fetched_again(there: Path, here: Path, damage: str) -> None:
    part = break_off_at_the_third_chunk(there, here)
    missing = LARGE_BYTES - part.stat().st_size
    if damage == "a flipped bit":
        flip_a_bit(part, 5)
        missing += CHUNK_BYTES
    elif damage == "truncated":
        missing = LARGE_BYTES - 5
        os.truncate(part, 5)
    elif damage == "too long":
        missing = CHUNK_BYTES + 12_345  # the third was incomplete, and is wrong; so is the last
        os.truncate(part, LARGE_BYTES + 5)
    session = WatchingSession(sys.executable)
    assert pull_run(session, str(there), here) == 1
    assert missing < session.num_bytes < missing + 1000
    assert content_of(here) == public(content_of(there))


@pytest.mark.slow
def test_a_bit_that_is_flipped_on_the_way_costs_its_chunk(there: Path, here: Path) -> None:
    pull_run(LocalSession(sys.executable), str(there), here)
    (there / "large").write_bytes(os.urandom(LARGE_BYTES))
    session, counting = ChangingSession(flip), WatchingSession(sys.executable)
    session.num_times = 2
    with pytest.raises(TransientInfraError, match="arrived damaged, the first is 'large'"):
        pull_run(session, str(there), here)
    assert "large" not in content_of(here)
    pull_run(counting, str(there), here)
    assert CHUNK_BYTES < counting.num_bytes < CHUNK_BYTES + 1000
    assert content_of(here) == public(content_of(there))


def test_of_a_large_file_of_which_a_version_is_here_the_changed_chunks_come(
    session: Session, there: Path, here: Path
) -> None:
    (there / "large").write_bytes(os.urandom(LARGE_BYTES))
    pull_run(session, str(there), here)
    flip_a_bit(there / "large", CHUNK_BYTES)
    counting = WatchingSession(sys.executable)
    pull_run(counting, str(there), here)
    assert CHUNK_BYTES < counting.num_bytes < CHUNK_BYTES + 1000
    assert content_of(here) == public(content_of(there))


def test_a_log_that_arrives_damaged_shows_what_is_right(there: Path, here: Path) -> None:
    (there / "log.txt").write_bytes(os.urandom(CHUNK_BYTES))
    pull_run(LocalSession(sys.executable), str(there), here)
    first = (there / "log.txt").read_bytes()
    with (there / "log.txt").open("ab") as file:
        file.write(os.urandom(2_000_000))
    session = ChangingSession(flip)
    session.num_times = 2
    with pytest.raises(TransientInfraError, match=r"arrived damaged, the first is 'log\.txt'"):
        pull_run(session, str(there), here)
    assert (here / "log.txt").read_bytes() == first
    pull_run(LocalSession(sys.executable), str(there), here)
    assert content_of(here) == public(content_of(there))


@pytest.mark.slow
def test_of_a_log_that_was_damaged_here_what_follows_the_damage_is_right_too(there: Path, here: Path) -> None:
    """What follows a chunk that differs is cut off, so it must not count as what is here already."""
    (there / "log.txt").write_bytes(os.urandom(LARGE_BYTES))
    pull_run(LocalSession(sys.executable), str(there), here)
    flip_a_bit(here / "log.txt", CHUNK_BYTES + 1)
    pull_run(LocalSession(sys.executable), str(there), here)
    assert content_of(here) == public(content_of(there))


def test_what_is_appended_to_a_log_while_it_is_fetched_comes_the_next_time(there: Path, here: Path) -> None:
    write_large(there / "log.txt", besides=here)

    def append(chunk: bytes) -> bytes:
        with (there / "log.txt").open("ab") as file:
            file.write(b"more\n")
        return chunk

    pull_run(ChangingSession(append), str(there), here)
    content = (there / "log.txt").read_bytes()
    assert (here / "log.txt").read_bytes() == content.removesuffix(b"more\n")
    pull_run(LocalSession(sys.executable), str(there), here)
    assert (here / "log.txt").read_bytes() == content


def write_large(path: Path, *, besides: Path) -> None:
    """A file that goes through a pipe in several pieces, and the only one that is new."""
    pull_run(LocalSession(sys.executable), str(path.parent), besides)
    path.write_bytes(os.urandom(3 << 20))


def test_a_clock_that_is_an_hour_off_changes_nothing(session: Session, there: Path, here: Path) -> None:
    for number, path in enumerate(sorted(path for path in there.rglob("*") if path.is_file())):
        off = time.time() + (3600 if number % 2 else -3600)
        os.utime(path, (off, off))
    assert pull_run(session, str(there), here) == 5
    assert pull_run(session, str(there), here) == 0
    (there / "result.json").write_text('{"best": 1}')
    os.utime(there / "result.json", (1, 1))  # older than what we have, and newer in truth
    assert pull_run(session, str(there), here) == 1
    assert content_of(here) == public(content_of(there))


@pytest.mark.slow
def test_a_disk_here_without_room_is_found_before_anything_is_fetched(there: Path, tiny_disk: Path) -> None:
    session = LocalSession(sys.executable)
    here = tiny_disk / "sft-0123"
    pull_run(session, str(there), here)
    (there / "large").write_bytes(bytes(3 << 20))
    before = content_of(here)
    with pytest.raises(DiskFullError, match=rf"the disk of {here} is full: {3 << 20} bytes are needed there"):
        pull_run(session, str(there), here)
    assert content_of(here) == before


def test_a_place_that_cannot_be_made_is_named(there: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a folder must be")
    with pytest.raises(PermanentInfraError, match=r"file/sft-0123 cannot be written: Not a directory"):
        pull_run(LocalSession(sys.executable), str(there), tmp_path / "file" / "sft-0123")


@pytest.mark.slow
def test_a_disk_here_that_fills_up_meanwhile_keeps_what_came_and_goes_on_from_there(
    there: Path, tiny_disk: Path
) -> None:
    here, filler = tiny_disk / "sft-0123", tiny_disk / "filler"
    (there / "large").write_bytes(os.urandom(1 << 20))

    def fill(chunk: bytes) -> bytes:
        filler.write_bytes(bytes(1_400_000))
        return chunk

    with pytest.raises(PermanentInfraError, match=f"{here} cannot be written: No space left on device"):
        pull_run(ChangingSession(fill), str(there), here)
    [part] = here.glob(".incoming/*")
    num_kept = part.stat().st_size
    assert 0 < num_kept < 1 << 20 and "large" not in content_of(here) and "result.json" not in content_of(here)
    filler.unlink()
    pull_run(LocalSession(sys.executable), str(there), here)
    assert content_of(here) == public(content_of(there))


@pytest.mark.parametrize("name", ["rows.json", "credit/step_000001.jsonl", "samples/step_000001.jsonl"])
def test_what_a_training_says_of_its_samples_is_mirrored(name: str) -> None:
    assert is_job_file(name) and not is_job_file(f"other/{name}")


HOSTILE_NAMES = [
    "../outside",
    "/tmp/outside",
    "checkpoints/../../outside",
    "samples//outside",
    "samples/two\nlines",
    "samples/\x1b[2J",
    "samples\\outside",
    ".git/hooks/post-checkout",
    "checkpoints/.mirror.lock",
    ".incoming/part",
    "x" * 300,
    "result.json/inside",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_node_that_lies_about_its_names_writes_nothing_elsewhere(there: Path, here: Path, name: str) -> None:
    class LyingSession(LocalSession):
        def run_program(self, source: Path, arguments: Sequence[str], **more: Any) -> CompletedCommand:
            told = super().run_program(source, arguments, **more)
            listed = json.loads(told.stdout)
            listed["files"][name] = [2, 1]
            return replace(told, stdout=json.dumps(listed).encode() + b"\n")

        @contextmanager
        def pipe(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
            request = json.loads(stdin)
            yield iter([b"".join(self._file(each, request["digest"]) for each, _, _ in request["files"])])

        def _file(self, wanted: str, algorithm: str) -> bytes:
            head = {"name": wanted, "size": 2, "modified_ns": 1}
            digest, tail = {"digest": DIGESTS[algorithm](b"{}").hexdigest()}, {"is_changed": False}
            lines = [json.dumps(head), "{}" + json.dumps(digest), json.dumps(tail), ""]
            return "\n".join(lines).encode()

    pull_run(LocalSession(sys.executable), str(there), here)
    before, around = content_of(here), sorted(here.parent.iterdir())
    with pytest.raises(PermanentInfraError):
        pull_run(LyingSession(sys.executable), str(there), here)
    assert sorted(here.parent.iterdir()) == around and not Path("/tmp/outside").exists()
    assert content_of(here).keys() <= before.keys()


class LyingAboutSizes(LocalSession):
    """Says something else about its files than it has, and sends zeros for as long as somebody takes them."""

    def __init__(self, *, listed: object = None, head: dict[str, object] | None = None) -> None:
        super().__init__(sys.executable)
        self._listed, self._head = listed, head
        self.num_bytes = 0

    def run_program(self, source: Path, arguments: Sequence[str], **more: Any) -> CompletedCommand:
        told = super().run_program(source, arguments, **more)
        if self._listed is None:
            return told
        answer = json.loads(told.stdout) | {"files": self._listed}
        return replace(told, stdout=json.dumps(answer).encode() + b"\n")

    @contextmanager
    def pipe(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        wanted = json.loads(stdin)["files"][0][0]
        yield self._sent(json.dumps({"name": wanted, "size": 1, "modified_ns": 1} | (self._head or {})))

    def _sent(self, head: str) -> Iterator[bytes]:
        yield head.encode() + b"\n"
        while self.num_bytes < 64 << 20:
            self.num_bytes += 1 << 20
            yield bytes(1 << 20)


@pytest.mark.parametrize(
    ("head", "error"),
    [
        ({"size": -1}, TransientInfraError),
        ({"size": 1 << 62}, DiskFullError),
        ({"size": 10**400}, TransientInfraError),
        ({"size": True}, TransientInfraError),
        ({"modified_ns": 10**40}, TransientInfraError),
        ({"modified_ns": None}, TransientInfraError),
    ],
)
def test_a_size_that_a_file_cannot_have_or_that_does_not_fit_is_refused_before_a_byte_is_taken(
    there: Path, here: Path, head: dict[str, object], error: type[Exception]
) -> None:
    session = LyingAboutSizes(head=head)
    with pytest.raises(error):
        pull_run(session, str(there), here)
    assert session.num_bytes == 0 and sum(path.stat().st_size for path in here.rglob("*") if path.is_file()) == 0


@pytest.mark.parametrize("found", [[-5, 1], [1], [1, 2, 3], "12", None, [1.5, 2], [10**40, 1], [1, 10**40]])
def test_a_list_with_what_no_file_has_is_refused(there: Path, here: Path, found: object) -> None:
    with pytest.raises(PermanentInfraError, match=r"metrics\.jsonl cannot have size and time"):
        pull_run(LyingAboutSizes(listed={"metrics.jsonl": found}), str(there), here)
    with pytest.raises(PermanentInfraError, match="expected its files, found"):
        pull_run(LyingAboutSizes(listed=[found]), str(there), here)


def test_names_that_are_odd_and_harmless_arrive_as_they_are(session: Session, there: Path, here: Path) -> None:
    for name in ("-rf", "--", "a b", "A", "a", "ü", "x" * 255, "$(touch x)", "CON", "name.", "%2e%2e"):
        (there / "samples").mkdir(exist_ok=True)
        (there / "samples" / name).write_text(name)
    (there / "empty").touch()
    os.mkfifo(there / "samples" / "fifo")
    pull_run(session, str(there), here)
    (there / "samples" / "fifo").unlink()
    assert content_of(here) == public(content_of(there))


@pytest.mark.slow
def test_a_large_file_with_holes_arrives_and_takes_little_memory(there: Path, here: Path) -> None:
    num_bytes = 256 << 20
    with (there / "sparse").open("wb") as file:
        file.write(b"begin")
        file.seek(num_bytes - 3)
        file.write(b"end")
    tracemalloc.start()
    pull_run(LocalSession(sys.executable), str(there), here)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
    assert (here / "sparse").stat().st_size == num_bytes
    assert hash_file(here / "sparse") == hash_file(there / "sparse")


@pytest.mark.slow
def test_a_thousand_files_arrive_and_are_known_the_next_time(there: Path, here: Path) -> None:
    (there / "samples").mkdir()
    for number in range(1000):
        (there / "samples" / f"{number}.json").write_text(str(number))
    session = LocalSession(sys.executable)
    assert pull_run(session, str(there), here) == 1005
    assert pull_run(session, str(there), here) == 0
    assert content_of(here) == public(content_of(there))


def test_what_somebody_puts_beside_the_checkpoints_here_is_left_alone(there: Path, here: Path, tmp_path: Path) -> None:
    pull_run(LocalSession(sys.executable), str(there), here)
    linked = write_checkpoint(tmp_path / "elsewhere", "best")
    (here / "checkpoints/latest").symlink_to(linked)
    (here / "checkpoints/notes.txt").write_text("step 1 looks good")
    before = content_of(linked)
    write_checkpoint(there, "step_000002")
    pull_run(LocalSession(sys.executable), str(there), here)
    assert (here / "checkpoints/step_000002/manifest.json").exists()
    assert content_of(linked) == before and (here / "checkpoints/notes.txt").read_text() == "step 1 looks good"


def test_a_checkpoint_without_manifest_is_not_mirrored_and_a_deleted_one_is_deleted(
    session: Session, there: Path, here: Path
) -> None:
    pull_run(session, str(there), here)
    (write_checkpoint(there, "step_000002") / "manifest.json").unlink()
    pull_run(session, str(there), here)
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["step_000001"]
    write_checkpoint(there, "step_000003")
    for path in sorted((there / "checkpoints" / "step_000001").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    pull_run(session, str(there), here)
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["step_000003"]


def test_checkpoints_here_are_kept_while_the_node_has_none(session: Session, there: Path, here: Path) -> None:
    pull_run(session, str(there), here)
    (there / "checkpoints").rename(there / ".gone")
    pull_run(session, str(there), here)
    there.rename(there.with_name("gone"))
    assert pull_run(session, str(there), here) == 0
    assert (here / "checkpoints" / "step_000001" / "manifest.json").is_file()


def test_checkpoints_beyond_the_newest_of_the_node_are_kept(session: Session, there: Path, here: Path) -> None:
    write_checkpoint(here, "step_000000")
    write_checkpoint(here, "step_000900")
    pull_run(session, str(there), here)
    assert sorted(path.name for path in (here / "checkpoints").iterdir()) == ["step_000001", "step_000900"]


def test_symbolic_links_are_not_followed(session: Session, there: Path, here: Path) -> None:
    (there / "samples").symlink_to("/etc")
    (there / "passwd").symlink_to("/etc/passwd")
    pull_run(session, str(there), here)
    assert not any(name.startswith(("samples", "passwd")) for name in content_of(here))


def test_what_cannot_be_copied_is_named_once_and_keeps_nothing_else_back(
    session: Session, there: Path, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (b"a\nb", b"a\\b", b"\xff"):
        (there / "samples").mkdir(exist_ok=True)
        Path(os.fsdecode(os.fsencode(there / "samples") + b"/" + name)).write_text("")
    for _ in range(2):
        pull_run(session, str(there), here)
    assert content_of(here) == {n: c for n, c in public(content_of(there)).items() if not n.startswith("samples/")}
    [said] = [record.getMessage() for record in caplog.records if "is not copied" in record.getMessage()]
    assert said.count("samples/") == 3 and "\n" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read")
def test_a_folder_that_cannot_be_read_is_left_out(there: Path) -> None:
    for path in (there, *there.parents):
        path.chmod(path.stat().st_mode | 0o055)
        if path.name.startswith("pytest-of-"):
            break
    (there / "samples").mkdir(mode=0o700)
    listed = subprocess.run(
        [sys.executable, "-IXutf8", "-c", AS_NOBODY, str(there)], stdout=subprocess.PIPE, text=True, check=True
    )
    answer = json.loads(listed.stdout)
    assert answer["left_out"] == ["'samples'"] and "metrics.jsonl" in answer["files"]


def test_files_arrive_while_the_job_runs(there: Path, here: Path) -> None:
    with mirrored(LocalSession(sys.executable), str(there), here, interval_s=0.05):
        wait_until(lambda: (here / "result.json").is_file())
        write_checkpoint(there, "step_000002")
        wait_until(lambda: (here / "checkpoints" / "step_000002" / "manifest.json").is_file())


def test_an_interrupt_does_not_wait_for_the_mirror(there: Path, here: Path) -> None:
    class EndlessSession(LocalSession):
        @contextmanager
        def pipe(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
            is_asked.set()
            threading.Event().wait(60)
            yield iter(())

    is_asked = threading.Event()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), mirrored(EndlessSession(sys.executable), str(there), here, interval_s=0.01):
        assert is_asked.wait(20)
        raise KeyboardInterrupt
    assert time.monotonic() - started < 30


def test_directories_are_flushed_for_many_files_at_once_and_before_what_says_that_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, here = tmp_path / "run", tmp_path / "here"
    names = ["checkpoints/a/model", "checkpoints/a/manifest.json", "result.json"]
    for name in [*names, *(f"samples/{number}" for number in range(50))]:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(name)
    flushed: list[tuple[str, list[str]]] = []

    def note(directory: Path) -> None:
        flushed.append((directory.name, [name for name in names if (here / name).exists()]))

    monkeypatch.setattr("rollouts.infra.sync.receiver.flush_directory", note)
    assert pull_run(LocalSession(sys.executable), str(run_dir), here) == 53
    assert ("a", names[:1]) in flushed, "the model before the manifest"
    assert ("a", names[:2]) in flushed, "the manifest before the result"
    assert flushed[-1] == ("here", names) and len(flushed) == 4
