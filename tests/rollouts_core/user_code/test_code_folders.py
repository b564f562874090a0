"""Pins that modules of the user are found in the configuration's folder, and never in place of installed ones.

Without it a run would need PYTHONPATH, or a file `json.py` beside a configuration would break every job.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def run_python(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_installed_module_wins_over_a_file_beside_the_configuration(tmp_path: Path) -> None:
    for name in ("json", "typer", "own_thing"):
        (tmp_path / f"{name}.py").write_text("IS_OWN = True\n")
    code = (
        "from rollouts_core.user_code.code_folders import add_code_folders\n"
        f"add_code_folders([{str(tmp_path)!r}])\n"
        "import json, typer, own_thing\nprint([hasattr(each, 'IS_OWN') for each in (json, typer, own_thing)])"
    )
    assert run_python(code) == "[False, False, True]"


def test_a_process_that_is_started_finds_the_same_modules(tmp_path: Path) -> None:
    (tmp_path / "own_thing.py").write_text("def reward(): ...\n")
    code = (
        "from rollouts_core.user_code.functions import resolve_function\n"
        "print(resolve_function('own_thing:reward', {}, setting='x').__name__)"
    )
    assert run_python(code, ROLLOUTS_CODE_PATH=str(tmp_path)) == "reward"


def test_the_folder_that_was_added_last_comes_first_and_pythonpath_before_it(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_thing.py").write_text(f"NAME = {name!r}\n")
    code = (
        "from rollouts_core.user_code.code_folders import add_code_folders\n"
        f"add_code_folders([{str(tmp_path / 'a')!r}]); add_code_folders([{str(tmp_path / 'b')!r}])\n"
        "import own_thing; print(own_thing.NAME)"
    )
    assert run_python(code) == "b"
    assert run_python(code, PYTHONPATH=f"{REPOSITORY / 'src'}{os.pathsep}{tmp_path / 'c'}") == "c"
