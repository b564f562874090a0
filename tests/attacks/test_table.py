"""The table of attacks in docs/security.md names tests that exist, and every file of this folder.

Without this test the page would promise what nothing tries.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "security.md"
ROW = re.compile(r"^\|[^|]+\|[^|]+\| `(test_\w+\.py)::(test_\w+)` \|$", re.MULTILINE)


def test_each_row_names_a_test_and_each_file_has_a_row() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Attacks that are tried")[2].partition("\n## ")[0]
    rows = ROW.findall(section)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) == len(lines) - 2, "a row has another form"
    assert len(set(rows)) == len(rows), "two rows name the same test"
    files = {path.name: path for path in FOLDER.glob("test_*.py") if path != Path(__file__)}
    assert {name for name, _ in rows} == files.keys()
    for name, test in rows:
        functions = [node.name for node in ast.parse(files[name].read_text()).body if isinstance(node, ast.FunctionDef)]
        assert test in functions, f"{name} has no {test}"
