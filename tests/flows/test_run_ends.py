"""Pins that the kept ends of runs are found, and that a file which is none hides no other.

Without it one damaged file would keep every run whose end Prefect missed Running for ever.
"""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from prefect.states import Completed

from rollouts.flows.run_ends import FOLDER, forget_end, note_end, read_end, read_ends


@pytest.mark.parametrize("content", ["", "[" * 100_000, "[]", '{"type": "COMPLETED"}', "\udcff"])
def test_a_file_that_is_no_end_hides_no_other(tmp_path: Path, content: str) -> None:
    kept, damaged = str(uuid4()), str(uuid4())
    note_end(tmp_path, kept, Completed(message="done"))
    (tmp_path / FOLDER / damaged).write_text(content, errors="surrogateescape")
    assert list(read_ends(tmp_path, older_than_s=0.0)) == [kept]
    assert read_end(tmp_path, damaged) is None


def test_an_end_is_kept_until_it_is_forgotten(tmp_path: Path) -> None:
    run_id = str(uuid4())
    assert read_end(tmp_path, run_id) is None and read_ends(tmp_path, older_than_s=0.0) == {}
    note_end(tmp_path, run_id, Completed(message="done"))
    end = read_end(tmp_path, run_id)
    assert end is not None and (end.type, end.message) == ("COMPLETED", "done")
    assert read_ends(tmp_path, older_than_s=3600.0) == {}
    forget_end(tmp_path, run_id)
    assert read_end(tmp_path, run_id) is None
