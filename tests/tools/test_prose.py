"""Pins the measure of sentence shapes. A measure that finds nothing would let every sentence pass."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "prose.py"

SENTENCES = {
    "people": "The file is kept for whoever needs it.",
    "headless": "What the user asked for is done here.",
    "pronouns": "A job that gives one of those back waits.",
    "where": "The file is copied where there is room.",
    "none": "A file with this name is none here.",
}
PLAIN = "The job writes its checkpoint to the store."


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_question_begins_with_its_word(prose: ModuleType) -> None:
    assert not prose.is_of("headless", "What does this curve of the report mean?")


@pytest.mark.parametrize("shape", SENTENCES)
@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("docstring.py", '"""{}"""\n'),
        ("comment.py", "x = 1  # {}\n"),
        ("message.py", 'raise ValueError("{}")\n'),
        ("filled.py", 'raise ValueError(f"{{x}}: {}")\n'),
        ("paragraph.md", "Title\n\n{}\n"),
        ("item.md", "- {}\n"),
        ("cell.md", "| {} | 1 |\n"),
    ],
)
def test_a_shape_is_found_wherever_people_read_it(
    prose: ModuleType, tmp_path: Path, name: str, template: str, shape: str
) -> None:
    if name == "filled.py" and shape == "headless":
        template = template.replace("{{x}}: ", "")
    (tmp_path / name).write_text(template.format(SENTENCES[shape]))
    assert prose.rates(tmp_path)[shape] == 1000


@pytest.mark.parametrize("shape", SENTENCES)
def test_code_blocks_short_texts_and_plain_sentences_have_no_shape(
    prose: ModuleType, tmp_path: Path, shape: str
) -> None:
    (tmp_path / "a.md").write_text(f"{PLAIN}\n\n```\n{SENTENCES[shape]}\n```\n\n    {SENTENCES[shape]}\n")
    (tmp_path / "b.py").write_text('who = "Who is it?"\n')
    assert prose.rates(tmp_path)[shape] == 0


def test_a_rate_is_per_thousand_sentences(prose: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(" ".join([PLAIN] * 3 + [SENTENCES["people"]]))
    assert prose.rates(tmp_path)["people"] == 250


def test_a_rate_above_its_ceiling_is_named_and_fails(
    prose: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.md").write_text(f"{PLAIN} {SENTENCES['where']}")
    ceilings = "people = 0, headless = 0, pronouns = 0, where = {}, none = 0"
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text(f'[tool.prose]\n"text.md" = {{ {ceilings.format(500)} }}\n')
    assert prose.check() == 0
    (tmp_path / "pyproject.toml").write_text(f'[tool.prose]\n"text.md" = {{ {ceilings.format(499)} }}\n')
    assert prose.check() == 1
    assert "where 500.0/499, none 0.0/0  ABOVE ITS CEILING: where\n" in capsys.readouterr().out


def test_the_sentences_of_a_shape_are_shown_with_their_places(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(f"{PLAIN}\n\n{SENTENCES['people']}\n")
    command = [sys.executable, str(SCRIPT), "--show"]
    shown = subprocess.run([*command, "people", str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert shown == f"{tmp_path / 'a.md'}:3: {SENTENCES['people']}\n"
    unknown = subprocess.run([*command, "poeple", str(tmp_path)], capture_output=True, text=True)
    assert (unknown.returncode, "expected one of people, headless" in unknown.stdout) == (2, True)
