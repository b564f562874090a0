"""Pins that continuous integration accepts no skip but those whose reason it cannot mend.

Without it a program that is missing there would take hundreds of tests with it, and nobody would see it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra import separate_node
from tests.kit.excuses import ExcusedSkip

ROOT = Path(__file__).parents[1]
SKIPPING = """
import pytest
from tests.kit.excuses import ExcusedSkip

def test_without_a_program():
    pytest.skip("there is no sshd")

def test_without_a_right():
    raise ExcusedSkip("Operation not permitted")

@pytest.fixture
def node():
    raise ExcusedSkip("Operation not permitted")

def test_with_a_fixture_without_a_right(node):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(("value", "counts"), [("true", "1 failed, 2 skipped"), ("", "3 skipped")])
def test_in_continuous_integration_a_skip_fails_unless_it_is_excused(tmp_path: Path, value: str, counts: str) -> None:
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-q", f"--rootdir={tmp_path}"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "CI": value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.splitlines()[-1].startswith(counts), ended.stdout + ended.stderr


def skip_of_a_node(folder: Path) -> type[BaseException]:
    """The kind of skip with which a node is not had."""
    with (
        pytest.raises(pytest.skip.Exception) as skipped,
        separate_node.separate_node(folder, hidden=()),
    ):
        pass
    return skipped.type


def test_a_node_without_its_programs_is_not_excused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separate_node, "_PATH", str(tmp_path))
    assert skip_of_a_node(tmp_path) is not ExcusedSkip


@pytest.mark.parametrize(
    ("said", "is_excused"),
    [
        ("unshare: unshare failed: Operation not permitted", True),
        ("unshare: unrecognized option '--kill-child'", False),
    ],
)
def test_a_node_is_excused_for_want_of_rights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, is_excused: bool
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: f"/usr/bin/{name}")  # all are there
    monkeypatch.setattr(separate_node, "_UNSHARE", ("sh", "-c", 'echo "$1" >&2; exit 1', "sh", said))
    assert (skip_of_a_node(tmp_path) is ExcusedSkip) == is_excused
