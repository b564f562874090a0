"""Pins that digests are the same, and mistakes told alike, whether one thread takes them or several.

Without it a large model could get another identity than a small one, or a damaged file be named that is not the first.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rollouts_core.checkpoint import new_checkpoint, verify_checkpoint
from rollouts_core.data.rows import digest_path
from rollouts_core.errors import CheckpointError
from rollouts_core.system import concurrency
from rollouts_core.system.concurrency import read_each


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few bytes be many."""
    monkeypatch.setattr(concurrency, "MIN_BYTES_PER_THREAD", 1)
    monkeypatch.setattr(concurrency, "count_processors", lambda: 4)


def test_many_bytes_are_read_by_several_threads_at_a_time_which_end(threaded: None) -> None:
    together = threading.Barrier(4, timeout=30)

    def read(item: int) -> tuple[int, str]:
        if item < 4:
            together.wait()
        return item, threading.current_thread().name

    read_by = read_each(read, range(9), num_bytes=100)
    assert [item for item, _ in read_by] == list(range(9))
    assert not {name for _, name in read_by} & {thread.name for thread in threading.enumerate()}


def test_few_bytes_are_read_here() -> None:
    assert read_each(lambda _: threading.current_thread(), range(3), num_bytes=100) == [threading.current_thread()] * 3


def test_a_folder_has_the_same_digest_whoever_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(6):
        (tmp_path / f"{i}.bin").write_bytes(bytes([i]) * 1000)
    alone = digest_path(tmp_path)
    monkeypatch.setattr(concurrency, "MIN_BYTES_PER_THREAD", 1)
    assert digest_path(tmp_path) == alone


def test_of_several_damaged_files_the_first_is_named(tmp_path: Path, threaded: None) -> None:
    names = [f"{i}.safetensors" for i in range(6)]
    with new_checkpoint(tmp_path / "step_000001", step=1) as folder:
        for name in names:
            (folder / name).write_bytes(b"weights")
    path = tmp_path / "step_000001"
    assert [*verify_checkpoint(path).files] == names
    for name in names[2:]:
        (path / name).write_bytes(b"WEIGHTS")
    (path / names[4]).unlink()
    with pytest.raises(CheckpointError, match=r"2\.safetensors does not have the content"):
        verify_checkpoint(path)
