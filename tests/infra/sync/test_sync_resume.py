"""Pins that a copy of large files that broke off, however it did, goes on at the chunks that are missing.

Without it a shard of 50 GB that is cut at 49 begins again, or what was left of another version ends up in the copy.
"""

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollouts.infra.chunks import CHUNK_BYTES, SHA256, Chunk
from rollouts.infra.errors import DiskFullError, NodeUnreachableError, TransientInfraError
from rollouts.infra.session import LocalSession, Session
from rollouts.infra.sync import receiver
from rollouts.infra.sync.push import MAX_VAIN_ATTEMPTS, publish_directory
from tests.infra.sync.resuming import LAST_BYTES, NUM_CHUNKS, SIZE, assert_copied, write_source
from tests.kit.mounts import mounted_tmpfs
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "model"


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.infra.sync.push.FIRST_PAUSE_S", 0.0)


class CountingSession(LocalSession):
    """Remembers the chunks that were sent, and does something amid one of them."""

    def __init__(self, at: int = -1, action: Callable[[], object] = lambda: None) -> None:
        super().__init__(sys.executable)
        self._at = at
        self._action = action
        self.sent: list[int] = []
        self.expected: list[int] = []

    def expect_chunks(self, num_chunks: int) -> None:
        self.expected.append(num_chunks)

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        return super().write_chunks(
            directory, [each._replace(pieces=self._watched(each)) for each in chunks], digest=digest
        )

    def _watched(self, chunk: Chunk) -> Iterator[bytes]:
        if chunk.name == "model":
            self.sent.append(chunk.number)
        for number, piece in enumerate(chunk.pieces):
            if number == 3 and chunk.number == self._at:
                self._action()
            yield piece


def break_off() -> None:
    raise TransientInfraError("the machine here fails")


def cut_off() -> None:
    raise NodeUnreachableError("node", "the connection broke")


def left_part(target: Path) -> Path:
    """The file that a copy that broke off has left."""
    [part] = target.parent.glob(f".{target.name}.incoming-*/model")
    return part


def break_off_amid_the_fourth_chunk(source: Path, target: Path) -> Path:
    with pytest.raises(TransientInfraError, match="the machine here fails"):
        publish_directory(CountingSession(3, break_off), source, str(target))
    return left_part(target)


def flip_a_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_the_chunks_of_what_is_large_are_expected_before_they_are_sent(source: Path, target: Path) -> None:
    session = CountingSession()
    publish_directory(session, source, str(target))
    (source / "model").write_bytes(bytes(CHUNK_BYTES))
    publish_directory(session, source, str(target.with_name("small")))
    assert session.expected == [NUM_CHUNKS + 1]


def test_the_next_copy_sends_the_chunks_that_are_missing(source: Path, target: Path) -> None:
    break_off_amid_the_fourth_chunk(source, target)
    session = CountingSession()
    report = publish_directory(session, source, str(target))
    assert session.sent == [3, 4] and report.num_sent_bytes == CHUNK_BYTES + LAST_BYTES
    assert_copied(source, target)


def test_a_bit_that_is_flipped_in_what_is_left_costs_its_chunk(source: Path, target: Path) -> None:
    flip_a_bit(break_off_amid_the_fourth_chunk(source, target), CHUNK_BYTES + 77)
    session = CountingSession()
    publish_directory(session, source, str(target))
    assert session.sent == [1, 3, 4]
    assert_copied(source, target)


@pytest.mark.parametrize("change", ["one byte", "longer", "shorter"])
def test_a_source_that_changed_meanwhile_is_what_arrives(source: Path, target: Path, change: str) -> None:
    break_off_amid_the_fourth_chunk(source, target)
    if change == "one byte":
        flip_a_bit(source / "model", 5)
    else:
        os.truncate(source / "model", SIZE + 1 if change == "longer" else 2 * CHUNK_BYTES + 1)
    session = CountingSession()
    publish_directory(session, source, str(target))
    assert session.sent == {"one byte": [0, 3, 4], "longer": [3, 4], "shorter": [2]}[change]
    assert_copied(source, target)


def test_a_source_that_changes_between_two_attempts_is_refused(source: Path, target: Path) -> None:
    def change_and_cut_off() -> None:
        flip_a_bit(source / "model", 5)
        cut_off()

    with pytest.raises(TransientInfraError, match="changed during the copy"):
        publish_directory(CountingSession(3, change_and_cut_off), source, str(target))
    assert not target.exists()
    publish_directory(LocalSession(sys.executable), source, str(target))
    assert_copied(source, target)


def test_a_connection_that_breaks_is_gone_on_with_by_the_same_call(source: Path, target: Path) -> None:
    breaks = iter([cut_off, cut_off])
    session = CountingSession(3, lambda: next(breaks, lambda: None)())
    report = publish_directory(session, source, str(target))
    assert session.sent == [0, 1, 2, 3, 3, 3, 4] and report.num_sent_bytes == SIZE + 2
    assert_copied(source, target)


def test_attempts_that_bring_nothing_are_counted(source: Path, target: Path) -> None:
    (source / "config.json").unlink()
    session = CountingSession(0, cut_off)
    with pytest.raises(NodeUnreachableError):
        publish_directory(session, source, str(target))
    assert session.sent == [0] * MAX_VAIN_ATTEMPTS
    publish_directory(LocalSession(sys.executable), source, str(target))
    assert_copied(source, target)


def test_a_link_that_breaks_at_every_chunk_brings_it_all_in_the_end(source: Path, target: Path) -> None:
    class BreakingSession(CountingSession):
        def _watched(self, chunk: Chunk) -> Iterator[bytes]:
            if self.sent and chunk.number != self.sent[-1]:
                self.sent.append(chunk.number)
                cut_off()
            return super()._watched(chunk)

    session = BreakingSession()
    report = publish_directory(session, source, str(target))
    assert sorted(set(session.sent)) == list(range(NUM_CHUNKS)) and not report.was_identical
    assert_copied(source, target)


def test_of_a_large_file_the_changed_chunks_are_sent(session: Session, source: Path, target: Path) -> None:
    publish_directory(session, source, str(target))
    flip_a_bit(source / "model", CHUNK_BYTES)
    with (source / "model").open("ab") as file:
        file.write(b"more")
    before = (target / "model").read_bytes()
    with (target / "model").open("rb") as reader:  # whoever reads the old one reads it to its end
        assert publish_directory(session, source, str(target)).num_sent_bytes == CHUNK_BYTES + LAST_BYTES + 4
        assert reader.read() == before
    assert_copied(source, target)


def test_what_another_copy_holds_is_copied_and_not_taken_away(source: Path, target: Path) -> None:
    inner = CountingSession()

    def copy_meanwhile() -> None:
        flip_a_bit(other / "model", 0)
        publish_directory(inner, other, str(target))

    other = target.parent.parent / "other"
    other.mkdir()
    for path in source.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    outer = CountingSession(3, copy_meanwhile)
    publish_directory(outer, source, str(target))
    assert outer.sent == list(range(NUM_CHUNKS)) and inner.sent == [0, 3, 4]
    assert_copied(source, target)


KILLED = """
import os, signal, sys
from pathlib import Path
from rollouts.infra.chunks import Chunk
from rollouts.infra.session import LocalSession
from rollouts.infra.sync.push import publish_directory

class KilledSession(LocalSession):
    def write_chunks(self, directory, chunks, **digest):
        return super().write_chunks(directory, [each._replace(pieces=self.watched(each)) for each in chunks], **digest)

    def watched(self, chunk):
        for number, piece in enumerate(chunk.pieces):
            if chunk.number == 3 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield piece

publish_directory(KilledSession(sys.executable), Path(sys.argv[1]), sys.argv[2])
"""


def test_another_process_goes_on_after_the_first_one_was_killed(source: Path, target: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(source), str(target)], cwd=Path(__file__).parents[3], check=False
    )
    assert killed.returncode == -signal.SIGKILL and not target.exists()
    session = CountingSession()
    publish_directory(session, source, str(target))
    assert session.sent == [3, 4]
    wait_until(lambda: (publish_directory(session, source, str(target)), list(target.parent.iterdir()))[1] == [target])


def test_a_disk_that_is_too_full_for_the_rest_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", f"size={SIZE + CHUNK_BYTES}") as disk:
        target = disk / "model"
        break_off_amid_the_fourth_chunk(source, target)
        (disk / "filler").write_bytes(bytes(CHUNK_BYTES))
        with pytest.raises(DiskFullError):
            publish_directory(LocalSession(sys.executable), source, str(target))
        assert [path.name for path in disk.iterdir()] == ["filler"]
        (disk / "filler").unlink()
        publish_directory(LocalSession(sys.executable), source, str(target))
        assert_copied(source, target)


def test_a_part_needs_no_room_of_its_own_when_it_is_gone_on_with(source: Path, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", f"size={SIZE + CHUNK_BYTES}") as disk:
        break_off_amid_the_fourth_chunk(source, disk / "model")
        session = CountingSession()
        publish_directory(session, source, str(disk / "model"))
        assert session.sent == [3, 4]


def test_a_large_file_takes_little_memory(tmp_path: Path, target: Path) -> None:
    (tmp_path / "source").mkdir()
    with (tmp_path / "source" / "sparse").open("wb") as file:
        file.truncate(256 << 20)
    tracemalloc.start()
    publish_directory(LocalSession(sys.executable), tmp_path / "source", str(target))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_no_late_call_of_an_earlier_attempt_lets_a_copy_appear(source: Path, target: Path) -> None:
    """The connection broke before the answer to `commit`, which is carried out when the next attempt has begun."""
    part = break_off_amid_the_fourth_chunk(source, target)
    manifest = {"config.json": [2, None], "model": [part.stat().st_size, None]}
    request = json.dumps({"files": manifest, "executable": [], "private": []}).encode()

    def commit_late() -> None:
        arguments = ["commit", str(target), str(part.parent)]
        LocalSession(sys.executable).run_program(
            Path(receiver.__file__), arguments, stdin=request, timeout_s=30, check=False
        )
        assert not target.exists()

    publish_directory(CountingSession(3, commit_late), source, str(target))
    assert_copied(source, target)


@pytest.mark.parametrize(("copy", "is_moved"), [("0123", True), ("4567", False)])
def test_what_seems_to_be_under_way_is_taken_over_by_the_same_copy_alone(
    source: Path, target: Path, copy: str, is_moved: bool
) -> None:
    """A node may not notice for hours that a link is gone: then it holds the lock of an earlier attempt."""
    session = LocalSession(sys.executable)
    part = target.with_name(".model.incoming-0123-0") / "model"
    with prepared(session, part.parent, {}) as taken:
        assert taken == {}
        part.write_bytes((source / "model").read_bytes()[: 2 * CHUNK_BYTES])
        status = part.stat()
        chunks = list(enumerate(receiver.hash_chunks(part, CHUNK_BYTES, SHA256)))
        reused = [str(part.parent), "model", status.st_size, status.st_mtime_ns, SIZE, chunks]
        new = target.with_name(f".model.incoming-{copy}-1")
        with prepared(session, new, {"model": reused}) as taken:
            assert taken == {"model": [0, 1]} and (new / "model").stat().st_size == 2 * CHUNK_BYTES
            assert ((new / "model").stat().st_ino == status.st_ino) == is_moved
            assert part.exists() == (not is_moved)


@pytest.fixture
def left(source: Path, target: Path) -> tuple[Path, list[object]]:
    """Two chunks that the first attempt of a copy brought, and how they are described to a next one."""
    part = target.with_name(".model.incoming-0123-0") / "model"
    part.parent.mkdir(parents=True)
    part.write_bytes((source / "model").read_bytes()[: 2 * CHUNK_BYTES])
    status = part.stat()
    chunks = list(enumerate(receiver.hash_chunks(part, CHUNK_BYTES, SHA256)))
    return part, [str(part.parent), "model", status.st_size, status.st_mtime_ns, SIZE, chunks]


def test_what_a_late_call_of_an_earlier_attempt_took_meanwhile_is_found_where_it_is(
    left: tuple[Path, list[object]], target: Path
) -> None:
    """It waited on the node while its connection broke, and came between what the next attempt asked and took."""
    _, described = left
    session = LocalSession(sys.executable)
    second, third = (target.with_name(f".model.incoming-0123-{attempt}") for attempt in (1, 2))
    with prepared(session, second, {"model": described}) as taken:
        assert taken == {"model": [0, 1]}
        with prepared(session, third, {"model": described}) as taken:
            assert taken == {"model": [0, 1]} and (third / "model").stat().st_size == 2 * CHUNK_BYTES


def test_what_was_still_on_its_way_when_it_was_described_costs_the_chunks_that_it_changed(
    left: tuple[Path, list[object]], source: Path, target: Path
) -> None:
    """A link that was silent for a while brings the rest of a broken connection when the next one is there."""
    part, described = left
    flip_a_bit(part, 7)
    with part.open("ab") as file:
        file.write((source / "model").read_bytes()[2 * CHUNK_BYTES : 2 * CHUNK_BYTES + 1000])
    new = target.with_name(".model.incoming-0123-1")
    with prepared(LocalSession(sys.executable), new, {"model": described}) as taken:
        assert taken == {"model": [1]} and (new / "model").stat().st_size == 2 * CHUNK_BYTES + 1000


def test_a_small_file_that_was_still_on_its_way_when_it_was_described_is_sent_again(source: Path, target: Path) -> None:
    (source / "model").unlink()
    part = target.with_name(".model.incoming-0123-0") / "config.json"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"{}")

    class LateSession(CountingSession):
        @contextmanager
        def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
            part.write_bytes(b"[]")
            with super().stream(argv, stdin=stdin) as lines:
                yield lines

    publish_directory(LateSession(), source, str(target))
    assert_copied(source, target)


def test_no_late_call_of_an_earlier_attempt_removes_what_a_later_one_has(tmp_path: Path) -> None:
    """It may have waited on the node while its connection broke and the copy was gone on with."""
    session = LocalSession(sys.executable)
    early, later = (tmp_path / f".model.incoming-0123-{attempt}" for attempt in (9, 10))
    with prepared(session, later, {}):
        (later / "model").write_bytes(b"has come")
        with prepared(session, early, {}):
            assert (later / "model").read_bytes() == b"has come"
        with prepared(session, later.with_name(".model.incoming-0123-11"), {}):
            assert not later.exists() and not early.exists()


def test_a_folder_that_a_late_call_made_anew_after_it_was_set_aside_is_in_nobodys_way(
    source: Path, target: Path
) -> None:
    """Its connection broke before, and that of the attempt that set it aside a moment later."""
    part = break_off_amid_the_fourth_chunk(source, target)
    set_aside = part.parent.rename(part.parent.with_name(f"{part.parent.name}-left"))
    part.parent.mkdir()
    part.write_bytes(b"late")
    publish_directory(LocalSession(sys.executable), source, str(target))
    assert_copied(source, target)
    assert not set_aside.exists() and not part.exists()


@contextmanager
def prepared(session: Session, incoming: Path, reused: dict[str, list[object]]) -> Iterator[dict[str, list[int]]]:
    """A folder that is held, with what was taken into it."""
    request = json.dumps({"reused": reused, "chunk_bytes": CHUNK_BYTES, "digest": SHA256}).encode() + b"\n"
    target = incoming.with_name("model")
    argv = [session.python, "-I", receiver.__file__, "prepare", str(target), str(incoming), "0"]
    with session.stream(argv, stdin=request) as lines:
        yield json.loads(next(lines))["taken"]
