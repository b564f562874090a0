"""Pins that a node gets exactly the versions of this machine, once, and that what went wrong there is told here.

Without it a rented machine would train with other versions than the ones that were tried, or be filled anew each time.
"""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import pytest

from rollouts.infra.bootstrap import check_imports
from rollouts.infra.environment import PROJECT, Installer, ensure_environment, installed_requirements, read_requirements
from rollouts.infra.errors import JobLostError, PermanentInfraError
from rollouts.infra.node import Node, SSHNode
from rollouts.infra.session import LocalSession, Session
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[2]
SMALL = [f"orjson=={metadata.version('orjson')}"]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(name="box", kind="ssh", root=str(tmp_path / "root"), python=sys.executable)


def write_distribution(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> None:
    """Let Python believe that a package is installed."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines]) + "\n")


def versions_seen(python: str, module: str) -> str:
    command = [python, "-c", f"import {module}, sys; print({module}.__version__, sys.prefix)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ── which versions ──


def test_the_versions_are_those_of_everything_that_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(
        tmp_path,
        "toy-project",
        "1.0",
        [
            "toy-math>=1",
            "prefect",
            'toy-lora; extra == "lora"',
            'toy-tests; extra == "dev"',
            'toy-absent; extra == "math"',
        ],
    )
    write_distribution(tmp_path, "toy_math", "2.9.0+cpu", ["toy-deep[fast]", 'toy-old; python_version < "3"'])
    write_distribution(tmp_path, "toy-deep", "0.3", ['toy-fast; extra == "fast"', 'toy-slow; extra == "slow"'])
    for name in ("toy-lora", "toy-tests", "toy-fast", "toy-slow", "toy-old"):
        write_distribution(tmp_path, name, "7")
    monkeypatch.syspath_prepend(tmp_path)
    expected = ["toy-deep==0.3", "toy-fast==7", "toy-lora==7", "toy-math==2.9.0"]
    assert installed_requirements("toy-project") == expected


def test_a_package_that_is_missing_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "toy-broken", "1.0", ["toy-nowhere"])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PermanentInfraError, match="toy-nowhere is not installed here"):
        installed_requirements("toy-broken")
    with pytest.raises(PermanentInfraError, match=r"toy-unknown is not installed here.*node\.requirements"):
        installed_requirements("toy-unknown")


def test_a_file_of_versions_is_read_without_its_comments_and_hashes(tmp_path: Path) -> None:
    path = tmp_path / "lock.txt"
    hashes = " \\\n    --hash=sha256:ab \\\n    --hash=sha256:cd"
    path.write_text(f"# made by hand\n\norjson==3.11.0{hashes}\nanyio==4.9.0 # via httpx\n")
    assert read_requirements(path) == ["orjson==3.11.0", "anyio==4.9.0"]


@pytest.mark.parametrize("line", ["orjson>=3", "orjson", "-r other.txt", "orjson==3 ==4 ;;", "--index-url https://a"])
def test_a_line_that_is_no_exact_version_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "lock.txt").write_text(line + "\n")
    with pytest.raises(PermanentInfraError, match=r"lock\.txt"):
        read_requirements(tmp_path / "lock.txt")


@pytest.mark.parametrize("index", ["https://me:secret@example.org/simple", "ftp://example.org", "example.org/ simple"])
def test_an_index_with_a_password_is_no_setting(index: str) -> None:
    with pytest.raises(ValueError, match="without user, password, query and key"):
        SSHNode(host="me@box", python="/usr/bin/python3", package_index=index)


# ── installing ──


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["pip", pytest.param("uv", marks=pytest.mark.matrix)])
def test_an_environment_has_the_versions_and_is_made_once(session: Session, node: Node, installer: Installer) -> None:
    python = ensure_environment(session, node, SMALL, installer=installer)
    assert Path(python).is_relative_to(node.root)
    version, prefix = versions_seen(python, "orjson").split()
    assert (f"orjson=={version}", prefix) == (SMALL[0], str(Path(python).parents[1]))
    made_at = Path(python).lstat().st_mtime_ns
    assert ensure_environment(session, node, SMALL, installer=installer) == python
    assert Path(python).lstat().st_mtime_ns == made_at


def write_wheel(folder: Path, name: str, version: str) -> None:
    """A package that can be installed, of one empty module."""
    folder.mkdir()
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"__version__ = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.mark.matrix
@pytest.mark.slow
def test_uv_is_found_where_its_installer_puts_it_and_fetched_without_a_pip(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environments of uv have no pip, nor have Pythons of Debian; sessions of SSH have a shorter PATH."""
    own = tmp_path / "home" / ".local" / "bin"
    own.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "theirs")], check=True)
    session = LocalSession(str(tmp_path / "theirs" / "bin" / "python"))
    python = ensure_environment(session, node, SMALL, installer="uv")
    assert versions_seen(python, "orjson")
    (Path(python).parents[2] / "tools" / "bin" / "uv").rename(own / "uv")
    other = dataclasses.replace(node, root=str(tmp_path / "other"))
    python = ensure_environment(session, other, SMALL, installer="uv")
    assert versions_seen(python, "orjson") and not (Path(python).parents[2] / "tools").exists()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("installer", [pytest.param("pip", marks=pytest.mark.matrix), "uv"])
def test_what_variables_of_the_machine_say_about_packages_counts(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installer: Literal["pip", "uv"]
) -> None:
    write_wheel(tmp_path / "shelf", "toy_shelf", "1.0")
    monkeypatch.setenv(f"{installer.upper()}_FIND_LINKS", str(tmp_path / "shelf"))
    python = ensure_environment(LocalSession(sys.executable), node, ["toy-shelf==1.0"], installer=installer)
    assert versions_seen(python, "toy_shelf").startswith("1.0")


def old_interpreters() -> list[str]:
    """Those of this machine that are too old for the training; none on many machines."""
    found = [shutil.which(name) for name in ("python3.10",)]
    return [each for each in found if each and subprocess.run([each, "-c", ""], check=False).returncode == 0]


@pytest.mark.slow
@pytest.mark.parametrize("python", [*old_interpreters(), sys.executable])
def test_uv_finds_an_interpreter_that_is_new_enough(node: Node, python: str) -> None:
    environment = ensure_environment(LocalSession(python), node, SMALL, installer="uv")
    show = [environment, "-c", "import orjson, sys; print(sys.version_info >= (3, 11))"]
    assert subprocess.run(show, capture_output=True, text=True, check=True).stdout == "True\n"


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("home", ["nothing can be made in it", "it is there", "it has them"])
def test_uv_keeps_packages_below_the_root_where_the_home_has_no_place_for_them(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    """A home may be read-only, or have room for less than torch."""
    own = tmp_path / "home" / ".cache" / "uv"
    if home == "it has them":
        own.mkdir(parents=True)
    elif home == "it is there":
        (tmp_path / "home").mkdir()
    else:
        (tmp_path / "home").touch()
    for variable in ("UV_CACHE_DIR", "UV_PYTHON_INSTALL_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    python = ensure_environment(LocalSession(sys.executable), node, SMALL, installer="uv")
    assert versions_seen(python, "orjson").split()[0] in SMALL[0]
    below_root = Path(node.root) / "cache" / "uv"
    assert (below_root.is_dir(), own.is_dir()) == (home != "it has them", home == "it has them")


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("change", ["removed", "upgraded"])
def test_an_environment_whose_interpreter_the_machine_has_not_any_more_is_made_anew(node: Node, change: str) -> None:
    session = LocalSession(sys.executable)
    python = Path(ensure_environment(session, node, SMALL, installer="pip"))
    if change == "removed":
        python.unlink()
        python.symlink_to("/usr/bin/python-of-the-release-before")
    else:  # what `python3` means is another version now, for which nothing lies there
        [library] = (python.parents[1] / "lib").glob("python3*")
        library.rename(library.with_name("python3.1"))
    assert ensure_environment(session, node, SMALL, installer="pip") == str(python)
    assert versions_seen(str(python), "orjson").split()[0] in SMALL[0]


@pytest.mark.matrix
@pytest.mark.slow
def test_other_versions_get_another_environment(node: Node) -> None:
    session = LocalSession(sys.executable)
    without, with_one = (ensure_environment(session, node, wanted, installer="pip") for wanted in ([], SMALL))
    assert without != with_one
    with pytest.raises(subprocess.CalledProcessError):
        versions_seen(without, "orjson")


@pytest.mark.matrix
@pytest.mark.slow
def test_what_the_installer_said_last_is_told(session: Session, node: Node) -> None:
    with pytest.raises(
        PermanentInfraError, match=r"pip could not install the packages on box(.|\n)*no-such-package"
    ) as told:
        ensure_environment(session, node, ["rollouts-no-such-package==9.9"], installer="pip")
    assert "log.txt" in str(told.value)


@pytest.mark.matrix
@pytest.mark.slow
def test_an_installation_that_is_killed_is_made_anew_and_leaves_nothing(node: Node) -> None:
    session = LocalSession(sys.executable)

    def kill() -> None:
        wait_until(lambda: any(Path(node.root).glob("environments/*/tmp/*")))
        for meta in Path(node.root).glob("environments/*/.job/meta-1.json"):
            os.kill(json.loads(meta.read_text())["supervisor_pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(JobLostError):
        ensure_environment(session, node, SMALL, installer="pip")
    killer.join()
    python = ensure_environment(session, node, SMALL, installer="pip")
    assert versions_seen(python, "orjson").split()[0] in SMALL[0]
    assert not list(Path(node.root).glob("environments/*/tmp"))


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_training_can_be_imported_in_an_environment_with_the_versions_of_this_machine(node: Node) -> None:
    try:
        metadata.version(PROJECT)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{PROJECT} is not installed, so what it needs is unknown")
    session = LocalSession(sys.executable)
    python = ensure_environment(session, node, installed_requirements(), installer="pip")
    check_imports(session, dataclasses.replace(node, python=python), str(ROOT))
