"""Pins that the report of a finished run is rendered again from its files, also from files of older versions.

Without it an old report keeps its old mistakes, and rendering it again could lose what only the old file still shows.
"""

import json
import shutil
from pathlib import Path

import pytest

from rollouts.tasks.earlier_report import load_report_input, render_again
from rollouts_core.errors import InputError
from tests.tasks.stored_run import write_stored_run

RUN = "small-11111111"


def test_a_report_is_rendered_again_and_has_everything(tmp_path: Path) -> None:
    write_stored_run(tmp_path, RUN)
    page = render_again(tmp_path, RUN).read_text()
    for text in ("the verdict of small-11111111", "95.0 %", "step_000004 ✓", "3.00 USD", "49.0 s", "node-1"):
        assert text in page, text
    assert "the first report" not in page and 'id="data-settings"' in page and 'id="data-index"' in page


def test_a_store_that_was_moved_is_read_at_its_new_place(tmp_path: Path) -> None:
    write_stored_run(tmp_path / "old", RUN)
    shutil.move(tmp_path / "old", tmp_path / "new")
    render_again(tmp_path / "new", RUN)
    report = load_report_input(tmp_path / "new", RUN)
    assert report.evaluation_dir.parent == tmp_path / "new" / "stages"


def test_files_of_an_older_version_make_the_report_without_what_they_lack(tmp_path: Path) -> None:
    folder = write_stored_run(tmp_path, RUN)
    described = json.loads((folder / "run.json").read_text())
    del described["spent"]
    for stage in described["stages"]:
        for name in ("usd", "finished_early", "began_at", "why"):
            del stage[name]
    described["config"]["training"]["rl"]["a_former_setting"] = 3
    (folder / "run.json").write_text(json.dumps(described))
    for events in (tmp_path / "stages").glob("*/events.jsonl"):
        events.unlink()
    page = render_again(tmp_path, RUN).read_text()
    assert "the verdict of small-11111111" in page and "95.0 %" in page
    assert "USD" not in page.partition('<script type="text/plain"')[0] and "Whole wall time" not in page
    assert 'id="data-settings"' not in page, "a default of today may not have been the default of the run"


@pytest.mark.parametrize("place", ["stages/rl-1111111111111111", "runs/small-11111111/checkpoint"])
def test_a_report_that_would_lose_something_is_kept(tmp_path: Path, place: str) -> None:
    folder = write_stored_run(tmp_path, RUN)
    shutil.rmtree(tmp_path / place)
    with pytest.raises(InputError, match=f"report of {RUN} cannot be rendered again, because .*{place} no longer"):
        render_again(tmp_path, RUN)
    assert (folder / "report.html").read_text() == "<html>the first report</html>"


@pytest.mark.parametrize("content", ["", "[]", '{"run_id": 3}', "[" * 9999])
def test_a_damaged_record_is_a_sentence(tmp_path: Path, content: str) -> None:
    folder = write_stored_run(tmp_path, RUN)
    (folder / "run.json").write_text(content)
    with pytest.raises(InputError, match=r"run\.json cannot be read"):
        render_again(tmp_path, RUN)
