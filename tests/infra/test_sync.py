"""Pins that a published directory is all there and verified, or not there at all.

Without it an engine loads half a checkpoint, or a file name in one reaches outside its directory.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from infra.errors import DiskFullError, PermanentInfraError, TransientInfraError
from infra.receiver import CopyError, check_name
from infra.session import LocalSession, Session
from infra.sync import publish_directory, publish_files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "step_000100"
    (path / "trainer").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(os.urandom(300_000))
    (path / "trainer" / "state.json").write_bytes(b"{}")
    (path / "empty").write_bytes(b"")
    return path


def content_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


class DamagingSession(LocalSession):
    """Loses the last byte of every large file on its way."""

    def write_chunks(self, path: str, chunks: Iterable[bytes]) -> str:
        return super().write_chunks(path, [b"".join(chunks)[:-1]])


class FlippingSession(LocalSession):
    """Changes a byte of every large file on its way, which nobody hashes while it is written."""

    def write_chunks(self, path: str, chunks: Iterable[bytes]) -> str | None:  # type: ignore[override]
        content = bytearray(b"".join(chunks))
        content[0] ^= 1
        super().write_chunks(path, [bytes(content)])
        return None


class DyingSession(LocalSession):
    """Breaks at the large file, when the small ones are there."""

    def write_chunks(self, path: str, chunks: Iterable[bytes]) -> str:
        raise TransientInfraError("the connection broke")


def test_a_directory_arrives_whole_and_alone(session: Session, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "best"
    report = publish_directory(session, source, str(target))
    assert content_of(target) == content_of(source)
    assert [path.name for path in target.parent.iterdir()] == ["best"]
    assert (report.num_bytes, report.was_identical, len(report.files)) == (300_002, False, 3)


def test_what_is_there_already_is_not_written_again(session: Session, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "best"
    first = publish_directory(session, source, str(target))
    inode = target.stat().st_ino
    second = publish_directory(session, source, str(target))
    assert second.was_identical and second.files == first.files and target.stat().st_ino == inode


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
        (DamagingSession, "1 files arrived damaged"),
        (FlippingSession, "1 files arrived damaged"),
        (DyingSession, "connection broke"),
    ],
)
def test_a_damaged_or_broken_copy_leaves_the_old_destination_and_nothing_else(
    broken: type[LocalSession], sentence: str, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out" / "best"
    target.mkdir(parents=True)
    (target / "old").write_bytes(b"old")
    with pytest.raises(TransientInfraError, match=sentence):
        publish_directory(broken(sys.executable), source, str(target))
    assert content_of(target) == {"old": b"old"}
    assert [path.name for path in target.parent.iterdir()] == ["best"]


@pytest.mark.parametrize("change", ["grows", "shrinks", "is overwritten", "is gone", "is a link"])
def test_a_file_that_changes_while_it_is_copied_leaves_the_old_destination(
    change: str, source: Path, tmp_path: Path
) -> None:
    class ChangingSession(LocalSession):
        def write_chunks(self, path: str, chunks: Iterable[bytes]) -> str:
            if change.startswith("is a"):
                file.rename(tmp_path / "elsewhere")
                file.symlink_to(tmp_path / "elsewhere")
            if change == "is gone":
                file.unlink()
            return super().write_chunks(path, self._changed(chunks))

        def _changed(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
            for number, chunk in enumerate(chunks):
                yield chunk
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
    with pytest.raises(TransientInfraError, match=r"changed while it was copied|cannot be read any more"):
        publish_directory(ChangingSession(sys.executable), source, str(target))
    assert content_of(target) == {"old": b"old"} and [path.name for path in target.parent.iterdir()] == ["best"]


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

    def write_chunks(self, path: str, chunks: Iterable[bytes]) -> str:
        filler = Path(path).parents[1] / "filler"
        if not filler.exists():
            filler.write_bytes(bytes(1_900_000))
        return super().write_chunks(path, chunks)


@pytest.mark.slow
def test_a_disk_that_fills_up_meanwhile_leaves_nothing_half_written(source: Path, tiny_disk: Path) -> None:
    with pytest.raises(DiskFullError, match="300002 bytes are needed"):
        publish_directory(FillingSession(sys.executable), source, str(tiny_disk / "best"))
    assert [path.name for path in tiny_disk.iterdir()] == ["filler"]
