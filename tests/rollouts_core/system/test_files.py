"""Pins that a file or directory appears whole or not at all.

Without it a crash in the middle of writing would leave half a checkpoint under the name of a whole one.
"""

import json
from pathlib import Path

import pytest

from rollouts_core.system.files import (
    link_or_copy,
    new_directory,
    remove_partial_directories,
    write_atomically,
    write_json,
)
from tests.kit.mounts import mounted_tmpfs


class CrashError(Exception):
    """What a test raises in the middle of writing."""


def test_a_written_file_has_its_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "old")
    write_atomically(tmp_path / "a", "new ü")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "new ü"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"\x00\r\n\xff")
    assert (tmp_path / "a").read_bytes() == b"\x00\r\n\xff"


def test_a_value_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"step": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"step": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"step": 1}


def test_a_failed_rename_leaves_no_partial_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "a", "content")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_new_directory_is_not_visible_before_it_is_whole(tmp_path: Path) -> None:
    with new_directory(tmp_path / "run") as partial:
        (partial / "a").write_text("x")
        assert not (tmp_path / "run").exists()
    assert (tmp_path / "run" / "a").read_text() == "x"
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_crash_while_writing_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CrashError), new_directory(tmp_path / "run") as partial:
        (partial / "a").write_text("x")
        raise CrashError
    assert list(tmp_path.iterdir()) == []


def test_a_crash_while_writing_leaves_the_old_directory(tmp_path: Path) -> None:
    with new_directory(tmp_path / "run") as partial:
        (partial / "a").write_text("old")
    with pytest.raises(CrashError), new_directory(tmp_path / "run") as partial:
        raise CrashError
    assert (tmp_path / "run" / "a").read_text() == "old"


def test_a_new_directory_replaces_the_old_one_whole(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with new_directory(tmp_path / "run") as partial:
            (partial / name).write_text("x")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["b"]


def test_missing_parents_are_made(tmp_path: Path) -> None:
    with new_directory(tmp_path / "x" / "y" / "run"):
        pass
    assert (tmp_path / "x" / "y" / "run").is_dir()


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".step_000010.partial-abc", ".hidden", "step_000005"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    remove_partial_directories(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hidden", "step_000005"]


def test_a_copy_to_a_disk_that_fills_up_leaves_no_half_of_it(tmp_path: Path) -> None:
    """Whoever comes next takes a file that is there for the whole one."""
    source = tmp_path / "samples.jsonl"
    source.write_bytes(bytes(128 << 10))
    with mounted_tmpfs(tmp_path / "disk", "size=64k") as disk:
        with pytest.raises(OSError, match="No space left"):
            link_or_copy(source, disk / "run" / "samples.jsonl")
        assert list((disk / "run").iterdir()) == []
        source.write_bytes(b"short")
        link_or_copy(source, disk / "run" / "samples.jsonl")
        assert (disk / "run" / "samples.jsonl").read_bytes() == b"short"
