"""Pins that an engine comes to a node of any kind from a folder of wheels, and once for runs that ask together.

Without it a node without a network could have no engine, or two runs would write into one environment.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollouts.infra.engine_environment import EngineInstallation, free_disk_gb, install_engine, place_of_engine
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import Node
from rollouts.infra.session import LocalSession, Session
from tests.infra.test_environment import write_wheel


@pytest.fixture
def wanted(tmp_path: Path) -> EngineInstallation:
    write_wheel(tmp_path / "wheels", "toy_engine", "1.2")
    return EngineInstallation(
        kind="toy",
        version="1.2",
        requirements=("toy_engine==1.2",),
        installer="pip",
        wheels=str(tmp_path / "wheels"),
    )


def version_seen(python: str) -> str:
    show = [python, "-c", "import toy_engine; print(toy_engine.__version__)"]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wheels_are_brought_to_the_node_and_installed_there(
    session: Session, wanted: EngineInstallation, tmp_path: Path
) -> None:
    mirror = "" if isinstance(session, LocalSession) else str(tmp_path / "mirror")
    node = Node(name="box", kind="ssh", root=str(tmp_path / "root"), python=sys.executable, mirror=mirror)
    python = install_engine(session, node, wanted)
    assert version_seen(python) == "1.2"
    assert Path(python).parents[2] == Path(place_of_engine(session, node, wanted))
    assert len(list(Path(node.root).glob("wheels/*/*.whl"))) == (1 if mirror else 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_that_ask_together_share_one_installation(wanted: EngineInstallation, tmp_path: Path) -> None:
    node = Node(name="here", kind="local", root=str(tmp_path / "root"), python=sys.executable)
    found: list[str] = []
    asking = [
        threading.Thread(target=lambda: found.append(install_engine(LocalSession(sys.executable), node, wanted)))
        for _ in range(2)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len({*found}) == 1 and len(found) == 2
    assert version_seen(found[0]) == "1.2"
    assert len(list(Path(node.root).glob("engines/*/.job/meta-*.json"))) == 1, "one attempt"


def test_a_full_disk_is_refused_before_anything_is_installed(wanted: EngineInstallation, tmp_path: Path) -> None:
    session = LocalSession(sys.executable)
    node = Node(name="here", kind="local", root=str(tmp_path / "not/yet"), python=sys.executable)
    assert 0 < free_disk_gb(session, node.root) < 1e6
    large = EngineInstallation(
        kind="toy", version="1.2", requirements=wanted.requirements, installer="pip", disk_gb=1e6
    )
    with pytest.raises(PermanentInfraError, match=r"installing toy 1\.2 takes 1500000\.0 GB at .*/not/yet, and"):
        install_engine(session, node, large)
    assert not Path(node.root).exists()
