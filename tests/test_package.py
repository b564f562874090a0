"""What is installed: all that the product needs, none of its tests, and no name that a user's package may have.

Without these tests a preset or a template would be missing wherever the product is not run from its checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollouts.flows.cli import app
from tests.kit.small_pipeline import OWN_REWARD, write_own_reward, write_small_pipeline

ROOT = Path(__file__).parents[1]
FOLDERS = {"flows/": "rollouts/flows/", "tasks/": "rollouts/tasks/", "infra/": "rollouts/infra/"}
FOLDERS |= {"rollouts_core/": "rollouts_core/", "src/rollouts/": "rollouts/"}
"""The repository's folders, and what they are called in the wheel."""
COMMAND = "from rollouts.flows.command import main; main()"


@pytest.fixture(scope="module")
def tracked_files() -> list[str]:
    """The files of the repository, without the links in src."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and not (ROOT / name).is_dir()]


@pytest.fixture(scope="module")
def wheel(tracked_files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # building leaves files beside what it builds
    for name in tracked_files:
        if name.startswith(tuple(FOLDERS)) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", symlinks=True, dirs_exist_ok=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", "."]
    subprocess.run([*command, str(source)], cwd=folder, check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path, tracked_files: list[str]) -> None:
    installed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        name.replace(folder, package, 1)
        for name in tracked_files
        for folder, package in FOLDERS.items()
        if name.startswith(folder)
    }
    assert installed == expected
    assert {"rollouts/py.typed", "rollouts_core/py.typed"} <= installed


@pytest.mark.slow
def test_what_is_installed_runs_beside_a_users_own_flows_tasks_and_infra(wheel: Path, tmp_path: Path) -> None:
    installed, own = tmp_path / "installed", tmp_path / "own"
    zipfile.ZipFile(wheel).extractall(installed)
    config = write_small_pipeline(own, rollout__environment="", rollout__reward_fn=f"tasks.{OWN_REWARD}")
    for name in ("flows", "tasks", "infra"):
        (own / name).mkdir()
        (own / name / "__init__.py").touch()
    write_own_reward(own / "tasks")
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, "run", str(config), "--store", str(tmp_path / "store")],
        cwd=own,
        env={**os.environ, "PYTHONPATH": f"{own}{os.pathsep}{installed}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    where = [sys.executable, "-c", "import rollouts.flows.cli as cli; print(cli.__file__)"]
    found = subprocess.run(where, cwd=own, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True)
    assert found.stdout.decode().startswith(str(installed)), "the test has run the checkout"


def test_the_version_is_that_of_the_project() -> None:
    outcome = CliRunner().invoke(app, ["--version"])
    assert outcome.exit_code == 0
    assert f'version = "{outcome.stdout.split()[1]}"' in (ROOT / "pyproject.toml").read_text()
