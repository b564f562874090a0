"""Pins that a published directory is all there and verified, or not there at all.

Without it an engine loads half a checkpoint, or a file name in one reaches outside its directory.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.chunks import SHA256, Chunk
from rollouts.infra.errors import DiskFullError, PermanentInfraError, TransientInfraError
from rollouts.infra.jobs import cancel_job, job_status, start_or_attach
from rollouts.infra.session import LocalSession, Session
from rollouts.infra.sync.push import publish_directory, publish_files
from rollouts.infra.sync.receiver import CopyError, check_name
from tests.infra.shell_jobs import shell_spec
from tests.kit.waiting import wait_until


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "step_000100"
    (path / "trainer").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(os.urandom(300_000))
    (path / "trainer" / "state.json").write_bytes(b"{}")
    (path / "empty").write_bytes(b"")
    return path


@pytest.fixture(autouse=True)
def _no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would go with one call goes in chunks, as more does; `test_files_that_go_with_one_call_...` undoes it."""
    monkeypatch.setattr("rollouts.infra.sync.push.BATCH_BYTES", 1)


def content_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


class DamagingSession(LocalSession):
    """Loses the last byte of every chunk on its way."""

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        return super().write_chunks(
            directory, [each._replace(pieces=[b"".join(each.pieces)[:-1]]) for each in chunks], digest=digest
        )


class FlippingSession(LocalSession):
    """Changes a byte of every chunk on its way."""

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        return super().write_chunks(
            directory, [each._replace(pieces=[b"?", b"".join(each.pieces)[1:]]) for each in chunks], digest=digest
        )


class DyingSession(LocalSession):
    """Breaks at the large file, when the small ones are there."""

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        raise TransientInfraError("the connection broke")


def test_a_directory_arrives_whole_and_alone(session: Session, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "best"
    report = publish_directory(session, source, str(target))
    assert content_of(target) == content_of(source)
    assert [path.name for path in target.parent.iterdir()] == ["best"]
    assert (report.num_bytes, report.was_identical, report.num_files) == (300_002, False, 3)
    assert report.num_sent_bytes == report.num_bytes


def test_what_is_there_already_is_not_written_again(session: Session, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "best"
    first = publish_directory(session, source, str(target))
    inode = target.stat().st_ino
    second = publish_directory(session, source, str(target))
    assert second.was_identical and second.num_bytes == first.num_bytes and target.stat().st_ino == inode


def test_a_flipped_byte_or_an_extra_file_at_the_destination_is_replaced(
    session: Session, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out" / "best"
    publish_directory(session, source, str(target))
    (target / "trainer" / "state.json").write_bytes(b"[]")
    assert not publish_directory(session, source, str(target)).was_identical
    (target / "old.bin").write_bytes(b"old")
    assert not publish_directory(session, source, str(target)).was_identical
    assert content_of(target) == content_of(source)
    assert [path.name for path in target.parent.iterdir()] == ["best"]


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (DamagingSession, "2 files arrived damaged, the first is .model.safetensors."),
        (FlippingSession, "2 files arrived damaged, the first is .model.safetensors."),
        (DyingSession, "connection broke"),
    ],
)
def test_a_damaged_or_broken_copy_leaves_the_old_destination_and_the_next_one_nothing_else(
    broken: type[LocalSession], sentence: str, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out" / "best"
    target.mkdir(parents=True)
    (target / "old").write_bytes(b"old")
    with pytest.raises(TransientInfraError, match=sentence):
        publish_directory(broken(sys.executable), source, str(target))
    assert content_of(target) == {"old": b"old"}
    publish_directory(LocalSession(sys.executable), source, str(target))
    assert content_of(target) == content_of(source)
    assert [path.name for path in target.parent.iterdir()] == ["best"]


@pytest.mark.slow
def test_the_directory_of_a_job_that_runs_is_not_replaced_and_that_of_one_that_ended_is(
    session: Session, source: Path, run_dir: Path
) -> None:
    job = start_or_attach(session, shell_spec(run_dir, "sleep 60"))
    with pytest.raises(TransientInfraError, match=f"a job runs in {run_dir}, so it is not replaced: try again"):
        publish_directory(session, source, str(run_dir))
    assert job_status(session, str(run_dir)).pid == job.pid
    assert [path.name for path in run_dir.parent.iterdir() if path != source] == [run_dir.name]
    cancel_job(session, str(run_dir), grace_s=0.2)
    publish_directory(session, source, str(run_dir))
    assert content_of(run_dir) == content_of(source)


@pytest.mark.parametrize("change", ["grows", "shrinks", "is overwritten", "is gone", "is a link"])
def test_a_file_that_changes_while_it_is_copied_leaves_the_old_destination(
    change: str, source: Path, tmp_path: Path
) -> None:
    class ChangingSession(LocalSession):
        def write_chunks(
            self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
        ) -> dict[tuple[str, int], str]:
            if change.startswith("is a"):
                file.rename(tmp_path / "elsewhere")
                file.symlink_to(tmp_path / "elsewhere")
            if change == "is gone":
                file.unlink()
            return super().write_chunks(
                directory, [each._replace(pieces=self._changed(each.pieces)) for each in chunks], digest=digest
            )

        def _changed(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
            for number, piece in enumerate(pieces):
                yield piece
                if number == 0 and change in changes:
                    changes[change]()

    file, target = source / "model.safetensors", tmp_path / "out" / "best"
    changes: dict[str, Callable[[], object]] = {
        "grows": lambda: os.truncate(file, 400_000),
        "shrinks": lambda: os.truncate(file, 290_000),
        "is overwritten": lambda: os.pwrite(os.open(file, os.O_WRONLY), b"other", 280_000),
    }
    target.mkdir(parents=True)
    (target / "old").write_bytes(b"old")
    with pytest.raises(TransientInfraError, match=r"changed during the copy|cannot be read any more"):
        publish_directory(ChangingSession(sys.executable), source, str(target))
    assert content_of(target) == {"old": b"old"}
    (source / "model.safetensors").unlink(missing_ok=True)
    publish_directory(LocalSession(sys.executable), source, str(target))
    assert content_of(target) == content_of(source) and [path.name for path in target.parent.iterdir()] == ["best"]


def test_a_file_that_is_removed_while_files_are_listed_is_an_error_that_a_retry_may_mend(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, walk = LocalSession(sys.executable), os.walk

    # Any: whatever os.walk takes.
    def walk_slowly(*arguments: Any, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        found = list(walk(*arguments, **options))
        (source / "empty").unlink(missing_ok=True)
        yield from found

    monkeypatch.setattr(os, "walk", walk_slowly)
    with pytest.raises(TransientInfraError, match="empty cannot be read any more"):
        publish_directory(session, source, str(tmp_path / "there"))
    with pytest.raises(TransientInfraError, match="empty cannot be read any more"):
        publish_files(session, {"empty": source / "empty"}, str(tmp_path / "there"))


@pytest.mark.parametrize("link_to", ["/etc/passwd", "model.safetensors", "trainer", "missing"])
def test_symbolic_links_are_refused(link_to: str, session: Session, source: Path, tmp_path: Path) -> None:
    (source / "link").symlink_to(link_to)
    with pytest.raises(PermanentInfraError, match="symbolic link"):
        publish_directory(session, source, str(tmp_path / "out" / "best"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", "../x", "/etc/x", "a/../x", "a//b", "./a", "a\nb", "a\x00b", "a\\b", "\udcff"])
def test_names_that_leave_the_directory_or_cannot_be_printed_are_refused(name: str) -> None:
    with pytest.raises(CopyError, match="is refused"):
        check_name(name)


@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_what_is_no_file_is_refused(kind: str, session: Session, source: Path, tmp_path: Path) -> None:
    if kind == "fifo":
        os.mkfifo(source / "odd")
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(source / "odd"))  # absolute paths of tests are too long for a socket
    with pytest.raises(PermanentInfraError, match="symbolic link or a device"):
        publish_directory(session, source, str(tmp_path / "out" / "best"))
    assert not (tmp_path / "out").exists()


def test_odd_names_arrive_as_they_are(session: Session, source: Path, tmp_path: Path) -> None:
    for name in ("-rf", "--", "a b", "A", "a", "ü", "x" * 255, "$(touch x)", ".git/hooks/pre-commit"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    publish_directory(session, source, str(tmp_path / "out" / "best"))
    assert content_of(tmp_path / "out" / "best") == content_of(source)


def test_a_name_that_is_too_long_for_the_node_leaves_nothing(session: Session, source: Path, tmp_path: Path) -> None:
    files = {"x" * 300: source / "empty", "y" * 300: source / "model.safetensors"}
    for name, file in files.items():
        with pytest.raises(PermanentInfraError, match="File name too long"):
            publish_files(session, {name: file}, str(tmp_path / "out" / "best"))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_newline_in_a_source_name_is_refused(session: Session, source: Path, tmp_path: Path) -> None:
    (source / "a\nb").write_bytes(b"")
    with pytest.raises(PermanentInfraError, match="not printable"):
        publish_directory(session, source, str(tmp_path / "out" / "best"))


def test_an_empty_or_missing_source_is_refused(session: Session, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(PermanentInfraError, match="holds no files"):
        publish_directory(session, tmp_path / "empty", str(tmp_path / "out"))
    with pytest.raises(PermanentInfraError, match="cannot be read"):
        publish_directory(session, tmp_path / "missing", str(tmp_path / "out"))


def test_a_destination_around_or_inside_the_source_is_refused(session: Session, source: Path) -> None:
    for destination in (source.parent, source / "inner"):
        with pytest.raises(PermanentInfraError, match="lie in one another"):
            publish_directory(session, source, str(destination))


def test_a_destination_that_is_a_link_is_refused(session: Session, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermanentInfraError, match="symbolic link"):
        publish_directory(session, source, str(tmp_path / "link"))


@pytest.mark.slow
def test_a_full_disk_is_found_before_anything_is_written(session: Session, source: Path, tiny_disk: Path) -> None:
    (source / "big").write_bytes(bytes(3 << 20))
    target = tiny_disk / "best"
    with pytest.raises(DiskFullError, match=rf"{target} is full: 3445730 bytes are needed"):
        publish_directory(session, source, str(target))
    assert list(tiny_disk.iterdir()) == []


class FillingSession(LocalSession):
    """Somebody else fills the disk just before the files arrive."""

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        filler = Path(directory).parent / "filler"
        if not filler.exists():
            filler.write_bytes(bytes(1_900_000))
        return super().write_chunks(directory, chunks, digest=digest)


@pytest.mark.slow
def test_a_disk_that_fills_up_meanwhile_leaves_nothing_half_written(source: Path, tiny_disk: Path) -> None:
    with pytest.raises(DiskFullError, match="300002 bytes are needed"):
        publish_directory(FillingSession(sys.executable), source, str(tiny_disk / "best"))
    assert [path.name for path in tiny_disk.iterdir()] == ["filler"]


# ── only what is missing is sent ──


LARGE = 300_000


class CountingSession(LocalSession):
    """Remembers which files were sent, and breaks at one of them, halfway."""

    def __init__(self, breaks_at: str = "") -> None:
        super().__init__(sys.executable)
        self.breaks_at = breaks_at
        self.sent: list[str] = []

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        return super().write_chunks(
            directory, [each._replace(pieces=self._watched(each)) for each in chunks], digest=digest
        )

    def _watched(self, chunk: Chunk) -> Iterator[bytes]:
        pieces = iter(chunk.pieces)
        yield next(pieces)
        if chunk.name == self.breaks_at:
            raise TransientInfraError("the connection broke")
        yield from pieces
        self.sent.append(chunk.name)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for number in range(3):
        (path / f"shard-{number}").write_bytes(os.urandom(LARGE + number))
    (path / "config.json").write_bytes(b"{}")
    (path / "empty").touch()
    return path


def break_off(source: Path, target: Path) -> Path:
    """Let a copy break amid one of its files; returns the folder that it leaves."""
    session = CountingSession("shard-1")
    with pytest.raises(TransientInfraError, match="connection broke"):
        publish_directory(session, source, str(target))
    [left] = target.parent.glob(f".{target.name}.incoming-*")
    assert sorted([*session.sent, "shard-1", "empty"]) == sorted(path.name for path in left.iterdir())
    return left


def test_a_copy_that_broke_off_is_gone_on_with_at_the_files_that_are_missing(shards: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    left = {path.name for path in break_off(shards, target).iterdir()}
    session = CountingSession()
    report = publish_directory(session, shards, str(target))
    assert content_of(target) == content_of(shards)
    assert set(session.sent) == {"shard-0", "shard-1", "shard-2"} - left | {"shard-1"}
    assert report.num_sent_bytes == sum((shards / name).stat().st_size for name in session.sent)
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_files_that_go_with_one_call_need_no_connection_of_their_own(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, session = tmp_path / "out" / "model", CountingSession()
    monkeypatch.setattr("rollouts.infra.sync.push.BATCH_BYTES", 3 * LARGE + 5)
    publish_directory(session, shards, str(target))
    assert session.sent == [] and content_of(target) == content_of(shards)
    (shards / "one-byte-more").write_bytes(b"?")
    publish_directory(session, shards, str(tmp_path / "other"))
    assert len(session.sent) == 5 and content_of(tmp_path / "other") == content_of(shards)


def test_of_many_files_the_changed_one_is_sent(session: Session, shards: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    publish_directory(session, shards, str(target))
    (shards / "shard-1").write_bytes(os.urandom(LARGE + 1))
    assert publish_directory(session, shards, str(target)).num_sent_bytes == LARGE + 1
    assert content_of(target) == content_of(shards)
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_file_that_was_renamed_is_not_sent(session: Session, shards: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    publish_directory(session, shards, str(target))
    (shards / "shard-1").rename(shards / "shard-7")
    assert publish_directory(session, shards, str(target)).num_sent_bytes == 0
    assert content_of(target) == content_of(shards)


def test_a_file_that_was_damaged_where_it_lies_is_sent_again(shards: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    left = break_off(shards, target)
    (left / "config.json").write_bytes(b"[]")
    session = CountingSession()
    report = publish_directory(session, shards, str(target))
    assert report.num_sent_bytes == sum((shards / name).stat().st_size for name in session.sent)
    assert content_of(target) == content_of(shards)


def test_what_changed_after_it_was_looked_at_is_sent(shards: Path, tmp_path: Path) -> None:
    class LateSession(CountingSession):
        def place_program(self, source: Path) -> str:
            (target / "shard-1").write_bytes(os.urandom(LARGE + 1))
            return super().place_program(source)

    target = tmp_path / "out" / "model"
    publish_directory(LocalSession(sys.executable), shards, str(target))
    (shards / "new").write_bytes(b"new")
    session = LateSession()
    publish_directory(session, shards, str(target))
    assert session.sent == ["new", "shard-1"] and content_of(target) == content_of(shards)


def test_files_of_the_same_content_stay_files_of_their_own(session: Session, source: Path, tmp_path: Path) -> None:
    """Else what a job appends to one of them would be in the other, too."""
    target = tmp_path / "out" / "best"
    (source / "metrics.jsonl").touch()
    publish_directory(session, source, str(target))
    for name in ("twin", "triplet"):
        (source / name).write_bytes((source / "model.safetensors").read_bytes())
    publish_directory(session, source, str(target))
    assert content_of(target) == content_of(source)
    assert {path.stat().st_nlink for path in target.rglob("*") if path.is_file()} == {1}


def test_two_copies_at_once_do_not_disturb_each_other(shards: Path, tmp_path: Path) -> None:
    class SlowSession(CountingSession):
        def write_chunks(
            self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
        ) -> dict[tuple[str, int], str]:
            if not self.sent:  # one copy amid the other
                publish_directory(LocalSession(sys.executable), shards, str(target))
                publish_directory(LocalSession(sys.executable), other, str(target))
            return super().write_chunks(directory, chunks, digest=digest)

    other, target = tmp_path / "other", tmp_path / "out" / "model"
    other.mkdir()
    (other / "shard-1").write_bytes(os.urandom(LARGE + 1))
    publish_directory(SlowSession(), shards, str(target))
    assert content_of(target) == content_of(shards)
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.slow
def test_what_a_killed_copy_left_is_used_and_removed(shards: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    code = f"""
import os, signal, sys
from pathlib import Path
from rollouts.infra.session import LocalSession
from rollouts.infra.sync import push

class KilledSession(LocalSession):
    def write_chunks(self, directory, chunks, **digest):
        return super().write_chunks(directory, [each._replace(pieces=self.watched(each)) for each in chunks], **digest)

    def watched(self, chunk):
        if chunk.name == "shard-1":
            os.kill(os.getpid(), signal.SIGKILL)
        yield from chunk.pieces

push.BATCH_BYTES = 1
push.publish_directory(KilledSession(sys.executable), Path({str(shards)!r}), {str(target)!r})
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False)
    assert killed.returncode == -signal.SIGKILL and not target.exists()
    session = CountingSession()
    publish_directory(session, shards, str(target))
    assert session.sent == ["shard-1", "shard-2"] and content_of(target) == content_of(shards)
    # Who kept the folder for the killed one ends by itself: at the latest the next copy removes it.
    wait_until(lambda: publish_and_list(shards, target) == ["model"])


def publish_and_list(source: Path, target: Path) -> list[str]:
    """What lies beside a destination once something else was published there, and the source again."""
    (source / "config.json").write_bytes(os.urandom(8))
    publish_directory(LocalSession(sys.executable), source, str(target))
    return [path.name for path in target.parent.iterdir()]


def test_what_nobody_goes_on_with_is_removed_after_a_day(shards: Path, tmp_path: Path) -> None:
    left = break_off(shards, tmp_path / "out" / "model")
    downloaded = tmp_path / "out" / ".data.incoming-0123"  # which has a lock of its own
    downloaded.mkdir()
    downloaded.with_name(f"{downloaded.name}.lock").touch()
    publish_directory(LocalSession(sys.executable), shards, str(tmp_path / "out" / "young"))
    assert left.exists()
    for path in (left, downloaded):
        os.utime(path, (0, 0))
    publish_directory(LocalSession(sys.executable), shards, str(tmp_path / "out" / "other"))
    assert not left.exists() and downloaded.exists()


def test_a_file_that_is_a_link_there_is_sent(session: Session, shards: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    publish_directory(session, shards, str(target))
    (target / "shard-1").rename(tmp_path / "elsewhere")
    (target / "shard-1").symlink_to(tmp_path / "elsewhere")
    assert publish_directory(session, shards, str(target)).num_sent_bytes == LARGE + 1
    assert content_of(target) == content_of(shards) and not (target / "shard-1").is_symlink()
