"""Pins which files count as the user's own code: those that are imported, and never what is installed, secret or data.

Without it a reward function is trained with the code of last week, fails on a rented machine after SFT, or takes a
folder of data and a private key along.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts_core.user_code.own_files import own_code

FILES = {
    "graders.py": "import json\nimport numpy\nimport helpers, missing_one\nfrom rubrics.math import score\n",
    "helpers.py": "def late():\n    from deep.inner import thing\n",
    "rubrics/math.py": "import helpers\n",
    "rubrics/data.jsonl": "{}",
    "rubrics/venv/pyvenv.cfg": "",
    "rubrics/venv/installed.py": "",
    "deep/__init__.py": "from . import inner\nimport graders\n",
    "deep/inner.py": "thing = 1\n",
    "deep/words.txt": "a b",
    "deep/.env": "SECRET=1",
    "deep/.git/config": "",
    "deep/server.pem": "",
    "deep/id_ed25519": "",
    "deep/__pycache__/inner.pyc": "",
    "deep/broken.py": "def (",
    "unrelated.py": "",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def files_of(*modules: str) -> set[str]:
    return {name for code in own_code(modules) for name in code.files}


def test_a_single_file_has_all_that_it_imports_of_the_users(folder: Path) -> None:
    package = {f"deep/{name}.py" for name in ("__init__", "inner", "broken")} | {"deep/words.txt"}
    assert files_of("graders") == {"graders.py", "helpers.py", "rubrics/math.py"} | package


def test_of_a_folder_without_init_the_python_files_count(folder: Path) -> None:
    (folder / "rubrics" / "math.py").write_text("")
    assert files_of("rubrics.math") == {"rubrics/math.py"}


def test_a_linked_folder_of_code_belongs_to_it_under_each_of_its_names(folder: Path) -> None:
    for name in ("shared/scale.py", "shared/sub/words.txt", "corpus/rows.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("import unrelated\n")
    (folder / "deep" / "shared").symlink_to("../shared")
    (folder / "deep" / "again").symlink_to(folder / "shared")
    (folder / "deep" / "corpus").symlink_to("../corpus")  # data that lies elsewhere stays there
    (folder / "shared" / "back").symlink_to("../deep")
    (folder / "deep" / "up").symlink_to("..")
    (folder / "deep" / "gone").symlink_to("nowhere")
    linked = {name for name in files_of("deep") if name.count("/") > 1}
    assert linked == {f"deep/{each}/{name}" for each in ("shared", "again") for name in ("scale.py", "sub/words.txt")}
    assert "unrelated.py" in files_of("deep")


def test_an_edit_of_the_imports_is_seen(folder: Path) -> None:
    assert "unrelated.py" not in files_of("deep")
    (folder / "deep" / "inner.py").write_text("import unrelated\n")
    assert "unrelated.py" in files_of("deep")


@pytest.mark.parametrize("name", ["json", "numpy", "rollouts_core.rewards", "no_such_module_of_a_test", "sys"])
def test_what_is_installed_or_ours_or_nowhere_is_not_the_users(name: str) -> None:
    assert own_code([name]) == []
