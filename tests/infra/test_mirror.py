"""Pins that a mirrored run directory holds, at any moment, only what is whole on the node.

Without it a report reads half a result, or the only copy of a checkpoint is deleted with the machine it lay on.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.errors import PermanentInfraError, TransientInfraError
from infra.mirror import mirrored, pull_run
from infra.session import LocalSession, Session
from tests.infra.shell_jobs import wait_until


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
    for breaks_after in (1_000, 100_000, 150_000):
        breaking.breaks_after = breaks_after
        with pytest.raises(TransientInfraError):
            pull_run(breaking, str(there), here)
        assert "result.json" not in content_of(here)
        assert not any(name.endswith("manifest.json") for name in content_of(here))
        seen.append(max((path.stat().st_size for path in here.glob(".incoming/*")), default=0))
    assert 0 < seen[0] < seen[1] < seen[2] < 300_000
    breaking.breaks_after = 1 << 30
    pull_run(breaking, str(there), here)
    assert content_of(here) == public(content_of(there))


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


def test_symbolic_links_are_not_followed(session: Session, there: Path, here: Path) -> None:
    (there / "samples").symlink_to("/etc")
    (there / "passwd").symlink_to("/etc/passwd")
    pull_run(session, str(there), here)
    assert not any(name.startswith(("samples", "passwd")) for name in content_of(here))


def test_a_name_that_cannot_be_printed_is_refused(session: Session, there: Path, here: Path) -> None:
    (there / "a\nb").write_text("")
    with pytest.raises(PermanentInfraError, match="not printable"):
        pull_run(session, str(there), here)


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
