"""What is copied in the tests of copies that broke off: here (test_sync_resume.py), and over SSH."""

from __future__ import annotations

import os
from pathlib import Path

from rollouts.infra.chunks import CHUNK_BYTES

NUM_CHUNKS = 5
LAST_BYTES = 3_212_345
"""The last chunk is shorter."""
SIZE = (NUM_CHUNKS - 1) * CHUNK_BYTES + LAST_BYTES


def write_source(path: Path) -> Path:
    """A folder with a small file and one of several chunks."""
    path.mkdir()
    (path / "config.json").write_bytes(b"{}")
    (path / "model").write_bytes(os.urandom(SIZE))
    return path


def assert_copied(source: Path, target: Path) -> None:
    assert {p.name: p.read_bytes() for p in target.iterdir()} == {p.name: p.read_bytes() for p in source.iterdir()}
    assert [path.name for path in target.parent.iterdir()] == [target.name]
