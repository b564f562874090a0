"""Pins that programs of ours on a node read and write UTF-8 where the node's locale is another: here Latin-1.

Without it a file `größe.txt` of such a node is `grÃ¶Ã\x9fe.txt` in every copy of its folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.infra.session import LocalSession, Session
from rollouts.infra.sync import sender

pytestmark = pytest.mark.skipif(shutil.which("localedef") is None, reason="locales cannot be made here")

CHARMAP = """<code_set_name> ISO-8859-1
<comment_char> %
<escape_char> /
CHARMAP
{characters}
END CHARMAP
"""
SOURCE = "LC_CTYPE\nupper <U0041>\nlower <U0061>\nEND LC_CTYPE\n"
ENCODING = "import locale; print(locale.getencoding(), end='')"


@pytest.fixture
def latin1_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session on this machine whose programs find a Latin-1 locale."""
    characters = "\n".join(f"<U{code:04X}> /x{code:02x} X" for code in range(256))
    (tmp_path / "charmap").write_text(CHARMAP.format(characters=characters), encoding="ascii")
    (tmp_path / "source").write_text(SOURCE, encoding="ascii")
    # It ends with 1, because the locale has no other categories, and writes it all the same.
    command = ["localedef", "--force", "-f", "charmap", "-i", "source", "./latin1"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    for name in ("LC_ALL", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    monkeypatch.setenv("LC_CTYPE", "latin1")
    session = LocalSession(sys.executable)
    assert session.run([sys.executable, "-c", ENCODING], timeout_s=60).stdout == b"ISO-8859-1"
    return session


def test_names_of_files_are_those_that_they_have(tmp_path: Path, latin1_session: Session) -> None:
    folder = tmp_path / "run ü"
    folder.mkdir()
    (folder / "größe.txt").touch()
    listed = latin1_session.run_program(Path(sender.__file__), ["list", str(folder)], timeout_s=60)
    assert list(json.loads(listed.stdout)["files"]) == ["größe.txt"]
