"""Pins that a nonsensical or lying manifest in a store ends in one sentence, and that nothing is fetched.

`rollouts pull` said "fetched 0 files, all compared" of a checkpoint called `..`, and showed a traceback of `[[[[`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.infra.errors import InfraError, ObjectDamagedError
from rollouts.infra.stores.download import find_wanted
from rollouts.infra.stores.object_store import ObjectStore
from rollouts.infra.stores.publication import parse_publication, publish_run
from rollouts_core.checkpoint import adopt_checkpoint, load_manifest, new_checkpoint
from rollouts_core.errors import CheckpointError

NONSENSE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, math.nan, math.inf, 10**400, "", "x", ".", "..", "../x", "/etc", "/", "a//b", "a/../b"),
    *("\x1b[31m", "\u202eexe", "a\\b", "c/", [], {}, [[]], {"size": 1}, "0" * 64, "x" * 100_000, "\0"),
)
"""Each field of a manifest is replaced by each of these values."""
ACCEPTED: dict[str, Callable[[Any], bool]] = {
    "format": lambda value: value == 1,
    "run_id": lambda value: isinstance(value, str),  # compared with names of runs, never a path
    "records": lambda value: value in ("x", "0" * 64, "x" * 100_000),
    "size": lambda value: value == 0,
    "sha256": lambda value: value == "0" * 64,
    "published_at": lambda value: float(value) < math.inf,
}
"""Which of these values each field may have."""


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A folder in which a run has published a checkpoint and its records."""
    with new_checkpoint(tmp_path / "step_000001", step=1) as folder:
        (folder / "config.json").write_text("{}")
    (tmp_path / "report.html").write_text("report")
    store = ObjectStore(f"file://{tmp_path}/run")
    publish_run(store, run_id="run", checkpoint=tmp_path / "step_000001", records={"r": tmp_path / "report.html"})
    return tmp_path / "run"


def read(content: Any) -> None:  # Any: JSON
    parse_publication(json.dumps(content).encode(), "s3://bucket/publication.json")


def places_in(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:  # Any: JSON
    """The way to each value in nested objects."""
    named = content.items() if isinstance(content, dict) else ()
    return [at, *(place for name, each in named for place in places_in(each, (*at, name)))]


def replaced(content: Any, at: tuple[Any, ...], value: Any) -> Any:  # Any: JSON
    return {**content, at[0]: replaced(content[at[0]], at[1:], value)} if at else value


def test_no_value_of_any_field_is_a_traceback_or_leaves_its_folder(published: Path) -> None:
    valid = json.loads((published / "publication.json").read_text())
    read(valid)

    for place in places_in(valid):
        for value in NONSENSE:
            try:
                read(replaced(valid, place, value))
            except ObjectDamagedError as error:
                assert len(str(error)) < 1000 and str(error).isprintable(), (place, value)
            else:
                assert ACCEPTED[place[-1]](value), (place, value)
    for name in valid:
        with pytest.raises(ObjectDamagedError):
            read({key: value for key, value in valid.items() if key != name})


@pytest.mark.parametrize("name", ["..", "../x", "/etc/passwd", "c/../../x", "c/\x1b[31m", "c/a//b", "c/.", "", "c/\n"])
def test_names_of_files_that_leave_their_folder_are_refused(name: str, published: Path) -> None:
    valid = json.loads((published / "publication.json").read_text())
    entry = {"size": 1, "sha256": "0" * 64}
    with pytest.raises(ObjectDamagedError):
        read({**valid, "files": {**valid["files"], name: entry}})


def test_ten_thousand_files_are_the_most(published: Path) -> None:
    valid = json.loads((published / "publication.json").read_text())
    files = {f"{valid['checkpoint']}/{number}": {"size": 1, "sha256": "0" * 64} for number in range(10_001)}
    with pytest.raises(ObjectDamagedError, match="names 10001 files, the limit is 10000"):
        read({**valid, "files": files})


def _brackets(valid: dict[str, Any]) -> str:
    return "[" * 100_000


def _parent(valid: dict[str, Any]) -> str:
    return json.dumps({**valid, "checkpoint": ".."})


def _empty(valid: dict[str, Any]) -> str:
    return json.dumps({**valid, "checkpoint": "elsewhere"})


def _twice(valid: dict[str, Any]) -> str:
    return json.dumps(valid)[:-1] + ', "checkpoint": "runs"}'


def _no_digest(valid: dict[str, Any]) -> str:
    return json.dumps({**valid, "files": {f"{valid['checkpoint']}/a": {"size": 1, "sha256": ""}}})


def _parts(valid: dict[str, Any]) -> str:
    return json.dumps({**valid, "files": {f"{valid['checkpoint']}/.parts/a": {"size": 1, "sha256": "0" * 64}}})


@pytest.mark.parametrize("attack", [_brackets, _parent, _empty, _twice, _no_digest, _parts])
def test_a_pull_of_nonsense_is_one_sentence_with_code_2(
    attack: Callable[[dict[str, Any]], str], published: Path, tmp_path: Path
) -> None:
    manifest = published / "publication.json"
    manifest.write_text(attack(json.loads(manifest.read_text())))
    pulled = CliRunner().invoke(app, ["pull", f"file://{published}", str(tmp_path / "pulled")])
    assert pulled.exit_code == 2 and str(published) in "".join(pulled.stderr.split()), pulled.output
    assert "Traceback" not in pulled.stderr
    assert not (tmp_path / "pulled").exists()


@pytest.mark.parametrize(
    ("entry", "is_damaged"),
    [
        ({"size": -1, "sha256": "0" * 64}, True),
        ({"size": 1, "sha256": ""}, True),
        ({"size": True, "sha256": "0" * 64}, True),
        ({"size": 1}, False),
        ("x", False),
    ],
)
def test_a_manifest_of_a_folder_is_believed_whole_or_not_at_all(entry: Any, is_damaged: bool, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("a")
    (folder / "manifest.json").write_text(json.dumps({"files": {"a": entry}}))
    store = ObjectStore(f"file://{folder}")
    if is_damaged:
        with pytest.raises(InfraError, match=r"manifest\.json"):
            find_wanted(store)
    else:
        assert [each.sha256 for each in find_wanted(store)] == ["", ""]
    (folder / "manifest.json").write_text("[" * 100_000)
    assert len(find_wanted(store)) == 2


def test_no_value_in_the_manifest_of_a_checkpoint_is_a_traceback(tmp_path: Path) -> None:
    with new_checkpoint(tmp_path / "step_000001", step=1) as folder:
        (folder / "config.json").write_text("{}")
    path = tmp_path / "step_000001" / "manifest.json"
    valid = json.loads(path.read_text())
    for place in [(name,) for name in valid] + [("files", "config.json"), ("files", "config.json", "size")]:
        for value in NONSENSE:
            path.write_text(json.dumps(replaced(valid, place, value)))
            try:
                manifest = load_manifest(path.parent)
            except CheckpointError:
                continue
            assert type(manifest.step) is int
    path.write_text(json.dumps({**valid, "files": {"../../x": {"size": 1, "sha256": ""}}}))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        load_manifest(path.parent)


def test_a_link_beside_the_files_of_a_checkpoint_is_not_taken_over(tmp_path: Path) -> None:
    with new_checkpoint(tmp_path / "theirs" / "step_000001", step=1) as folder:
        (folder / "config.json").write_text("{}")
    (tmp_path / "key").write_text("SECRET")
    (tmp_path / "theirs" / "step_000001" / "notes.txt").symlink_to(tmp_path / "key")
    own = adopt_checkpoint(tmp_path / "theirs" / "step_000001", tmp_path / "own")
    assert sorted(path.name for path in own.iterdir()) == ["config.json", "manifest.json"]
