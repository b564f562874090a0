"""Pins that a command reads and writes UTF-8 where the locale has another encoding, and so does what it starts.

Without it, on a machine whose locale is ASCII or Latin-1, a folder with an umlaut in its name is not found, or found
and written down under a name that nobody else can read.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ASCII_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from rollouts_core.system.utf8 import ensure_utf8
ensure_utf8()
child = [sys.executable, "-c", "import pathlib, sys; print(pathlib.Path(sys.argv[1]).read_text())", sys.argv[1]]
found = subprocess.run(child, text=True, capture_output=True, check=True).stdout.strip()
print(sys.argv[1], found, sys.flags.utf8_mode)
"""


def said(folder: Path, *options: str, locale: dict[str, str]) -> str:
    """What a program says that calls `ensure_utf8`: the name of a file, what its child reads in it, Python's mode."""
    (folder / "größe.txt").write_bytes("naïve".encode())
    command = [sys.executable, *options, "-c", PROGRAM, str(folder / "größe.txt"), str(ROOT)]
    return subprocess.run(command, env={**os.environ, **locale}, capture_output=True, check=True).stdout.decode()


@pytest.mark.parametrize("options", [(), ("-E",), ("-I",)])
def test_another_encoding_of_the_locale_gives_way_to_utf8(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert said(tmp_path, *options, locale=ASCII_LOCALE) == f"{tmp_path / 'größe.txt'} naïve 1\n"


def test_a_locale_that_is_utf8_is_left_alone(tmp_path: Path) -> None:
    locale = {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "0"}
    assert said(tmp_path, locale=locale) == f"{tmp_path / 'größe.txt'} naïve 0\n"


def test_the_library_keeps_settings_in_utf8_in_a_process_of_another_encoding(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom rollouts_core.config import Config\n"
        'data = {"sft": "gr\\u00f6\\u00dfe.jsonl", "selection": "b", "heldout": "c"}\n'
        'config = Config.model_validate({"mode": "sft", "model": {"path": "m"}, "data": data})\n'
        "config.save(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.toml")]
    subprocess.run(command, env={**os.environ, **ASCII_LOCALE}, cwd=ROOT, check=True)
    assert 'größe.jsonl"' in (tmp_path / "a.toml").read_text(encoding="utf-8")
