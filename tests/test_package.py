"""What is installed: everything that the product needs, and nothing of its tests.

Without these tests a file that is no module would be missing wherever the product is not run from its checkout.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app

ROOT = Path(__file__).parents[1]
PACKAGES = ("flows", "infra", "rollouts_core", "tasks")


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_packages_and_no_other(tmp_path: Path) -> None:
    source = tmp_path / "source"  # building leaves files beside what it builds
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        if name.startswith(PACKAGES) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", "."]
    subprocess.run([*command, str(source)], cwd=tmp_path, check=True)
    [wheel] = tmp_path.glob("*.whl")
    installed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert installed == {name for name in names if name.startswith(PACKAGES)}
    assert {f"{package}/py.typed" for package in PACKAGES} <= installed


def test_the_version_is_that_of_the_project() -> None:
    outcome = CliRunner().invoke(app, ["--version"])
    assert outcome.exit_code == 0
    assert f'version = "{outcome.stdout.split()[1]}"' in (ROOT / "pyproject.toml").read_text()
