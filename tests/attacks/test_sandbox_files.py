"""Programs in the sandbox that read what is expected of them: data and stores in folders that hold programs, too.

Without these tests a policy could print the right answers wherever a project lies below /usr or in an environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.environments import sandbox
from rollouts_core.environments.sandbox import SandboxLimits, SandboxResult, run_in_sandbox
from rollouts_core.errors import RewardError
from rollouts_core.system import private_files
from rollouts_core.system.private_files import keep_private
from tests.kit.excuses import ExcusedSkip

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
SECRET = "expected-7341"
PROJECTS = [
    *("/usr/src", "/usr/share", "/usr/local", "/usr/local/src", "/usr/local/share", "/usr/games", "/usr", "/opt"),
    *(sys.prefix, sys.base_prefix, f"{sys.prefix}/share", f"{sys.base_prefix}/projects"),
]
"""Folders that hold projects on some machines, beside programs or libraries."""


def run(code: str) -> SandboxResult:
    # A walk over all files that the sandbox shows takes longer than the default limits if the disk is busy.
    return asyncio.run(run_in_sandbox(code, limits=SandboxLimits(wall_s=120, cpu_s=60)))


@pytest.fixture
def project(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A project in a folder of this machine, with data that everybody could read."""
    parent = Path(request.param)
    first_new = next((each for each in (parent, *parent.parents) if each.parent.exists()), parent)
    folder = parent / f"rollouts-test-{secrets.token_hex(4)}"
    if not os.access(first_new.parent if not parent.exists() else parent, os.W_OK):
        raise ExcusedSkip("only root may write there")
    is_new = not parent.exists()
    try:
        folder.mkdir(parents=True)
        (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1?", "answer": SECRET}) + "\n")
        yield folder
    finally:
        shutil.rmtree(first_new if is_new else folder)


@pytest.fixture(autouse=True)
def no_private_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files, "_private", set())


@pytest.mark.parametrize("project", PROJECTS, indirect=True)
def test_a_project_beside_programs_is_not_seen(project: Path) -> None:
    load_prompts_from_jsonl(project / "prompts.jsonl")
    code = (
        "import os\n"
        f"for place in ({str(project)!r}, '/proc/1/root{project}', '/proc/self/cwd/..{project}'):\n"
        "    print(os.path.exists(place))\n"
        "for folder, _, names in os.walk('/'):\n"
        "    if folder.startswith('/proc'): continue\n"
        "    for name in names:\n"
        "        if name == 'prompts.jsonl': print(open(os.path.join(folder, name)).read())\n"
    )
    assert run(code).stdout.split() == ["False"] * 3


@pytest.mark.parametrize(
    "project",
    ["/usr/lib", f"{sys.prefix}/lib", f"{sys.base_prefix}/bin", "/usr/local/lib/python3/dist-packages"],
    indirect=True,
)
def test_data_in_a_folder_that_programs_see_are_refused(project: Path, tmp_path: Path) -> None:
    load_prompts_from_jsonl(project / "prompts.jsonl")
    with pytest.raises(RewardError, match=r"prompts.jsonl is in .*, where programs in the sandbox can read it: move"):
        run("print(1)")


@pytest.mark.parametrize("project", ["/usr/lib"], indirect=True)
def test_a_link_to_such_data_and_a_store_there_are_refused(project: Path, tmp_path: Path) -> None:
    (tmp_path / "linked.jsonl").symlink_to(project / "prompts.jsonl")
    load_prompts_from_jsonl(tmp_path / "linked.jsonl")
    with pytest.raises(RewardError, match="can read it"):
        run("print(1)")
    private_files._private.clear()
    keep_private(project / "store")
    with pytest.raises(RewardError, match="can read it"):
        run("print(1)")


def test_programs_find_their_interpreter_with_its_packages_and_time_zones() -> None:
    code = (
        "import os, site, ssl, sqlite3, ctypes, lzma, subprocess, sys, zoneinfo\n"
        "assert subprocess.run(['ls', '/'], capture_output=True).returncode == 0\n"
        "print(bool(os.listdir(site.getsitepackages()[0])), zoneinfo.ZoneInfo('Europe/Berlin'))\n"
    )
    result = run(code)
    has_zones = Path("/usr/share/zoneinfo/Europe/Berlin").exists()
    assert result.stdout == "True Europe/Berlin\n" or not has_zones, result.stderr


def test_no_folder_is_seen_that_is_more_than_programs_and_libraries() -> None:
    folders = set(sandbox.visible_folders())
    assert not folders & {"/", "/usr", "/usr/local", "/usr/share", "/home", "/root", sys.prefix, sys.base_prefix}
