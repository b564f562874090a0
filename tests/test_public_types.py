"""Pins the types of the public names. Without them a misspelt name or argument passes a user's type checker."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rollouts_core

ROOT = Path(__file__).resolve().parents[1]
USERS_CODE = """\
import rollouts_core
from rollouts_core import Config, RolloutConfig, Sample, SFTTrainingConfig

settings = SFTTrainingConfig(num_steps=10)
rollout = RolloutConfig(environment="math")
sample = Sample(response="4", reward=1.0)
loss = rollouts_core.grpo_loss
steps: int = settings.num_steps
"""
MISTAKES = {
    "name": "from rollouts_core import run_sft_trainin\n",
    "attribute": "import rollouts_core\nrollouts_core.grpo_los\n",
    "argument": "from rollouts_core import Sample\nSample(reward='high')\n",
    "setting": "from rollouts_core import SFTTrainingConfig\nSFTTrainingConfig(num_step=10)\n",
}


def test_type_checkers_see_every_public_name_and_no_other() -> None:
    stub = ast.parse((ROOT / "rollouts_core" / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    seen = {
        str(node.module).removeprefix("rollouts_core."): sorted(alias.asname or "" for alias in node.names)
        for node in imports
    }
    assert seen == {module: sorted(names.split()) for module, names in rollouts_core.PUBLIC_NAMES.items()}
    assert all(alias.name == alias.asname for node in imports for alias in node.names)  # else it is not exported


@pytest.fixture(scope="module")
def users_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "right.py").write_text(USERS_CODE)
    for name, code in MISTAKES.items():
        (folder / f"{name}.py").write_text(code)
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT / "src")]}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        # mypy reads torch and transformers anew, for two minutes.
        pytest.param(
            ["mypy", "--follow-imports=silent", "--python-executable", sys.executable],
            marks=pytest.mark.matrix,
            id="mypy",
        ),
        pytest.param(["basedpyright", "--level", "error", "--pythonpath", sys.executable], id="basedpyright"),
    ],
)
def test_a_type_checker_finds_the_mistakes_in_a_users_file(users_folder: Path, command: list[str]) -> None:
    files = ["right.py", *(f"{name}.py" for name in MISTAKES)]
    program = str(Path(sys.executable).with_name(command[0]))
    outcome = subprocess.run(
        [program, *command[1:], *files],
        cwd=users_folder,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    found = set(re.findall(r"(\w+)\.py:\d+(?::\d+ -)?:? error", outcome.stdout))
    assert found == set(MISTAKES), outcome.stdout + outcome.stderr
