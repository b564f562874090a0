"""Pins the messages about files that cannot be read. Without them a message names a descriptor, or no reason."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from rollouts_core.system import regular_files
from rollouts_core.system.regular_files import describe_missing, open_file


def test_a_file_that_may_not_be_read_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()

    def refuse(name: str, _: str) -> None:  # as the kernel refuses users who are not root
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(regular_files, "open", refuse, raising=False)
    with pytest.raises(PermissionError, match=re.escape(str(path))):
        open_file(path)


def test_what_stands_at_a_path_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    said = {name: describe_missing(tmp_path / name) for name in ("fifo", "file", "nothing", ".")}
    assert said == {
        "fifo": "is a FIFO, not a file",
        "file": "cannot be read",
        "nothing": "does not exist",
        ".": "is a directory, not a file",
    }
