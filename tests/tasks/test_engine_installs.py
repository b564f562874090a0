"""Pins which engine a node gets: the one that is there, or one that the run installs once and tries.

Without it a run would use an engine of another build, install one twice, or fail for want of one after hours of SFT.
The engine is a toy: a package of one module, in a folder of wheels.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.engine_environment import install_engine, python_of_engine
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.gpu_state import GpuProgram, GpuState
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import LocalNode, Node, SSHNode
from rollouts.infra.session import LocalSession
from rollouts.tasks.engine_installs import find_installed, plan_engine_of, version_in, warn_of_busy_gpus
from rollouts.tasks.prune import plan_prune, remove_folders
from rollouts_core.config import EngineConfig
from rollouts_core.engine_kinds import ENGINES, SGLANG, EngineBuild
from rollouts_core.errors import ConfigError
from tests.infra.test_environment import write_wheel

SESSION = LocalSession(sys.executable)
GPU = GpuState(name="NVIDIA H100", total_gb=85.0, free_gb=84.0, driver="580.95.05")
OLD = dataclasses.replace(GPU, driver="535.54.03")
REQUIREMENTS = "toy_engine==1.2\n"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A kind of engine that a run can install on machines with GPUs and without."""
    monkeypatch.chdir(tmp_path)  # away from .engines of this repository
    build = EngineBuild(package="toy-engine", requirements="vllm-cpu.txt", disk_gb=0.001, minutes=0.1)
    cuda = dataclasses.replace(build, min_driver=(580, 65, 6), disk_gb=0.002)
    spec = dataclasses.replace(SGLANG, title="Toy", package="toy_engine", cpu_build=build, cuda_build=cuda)
    monkeypatch.setitem(ENGINES, "toy", spec)
    return "toy"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(name="here", kind="local", root=str(tmp_path / "store"), python=sys.executable)


def engine_of(kind: str, folder: Path, **settings: Any) -> EngineConfig:  # Any: settings of every type
    (folder / "lock.txt").write_text(REQUIREMENTS)
    return EngineConfig(kind=kind, requirements=str(folder / "lock.txt"), **settings)


@pytest.mark.parametrize(("gpus", "disk_gb"), [([], 0.001), ([GPU], 0.002)])
def test_the_build_is_that_of_the_machine(
    toy: str, node: Node, tmp_path: Path, gpus: Sequence[GpuState], disk_gb: float
) -> None:
    engine = engine_of(toy, tmp_path)
    plan = plan_engine_of(SESSION, node, LocalNode(), engine, gpus)
    assert plan.wanted is not None and plan.wanted.disk_gb == disk_gb
    assert plan.describe(engine) == (
        f"rollout.engine: the run installs Toy 1.2 by pip, 1 packages, {disk_gb:g} GB, about 0.1 minutes"
    )
    assert plan.describe(engine, first_stage="sft").endswith("about 0.1 minutes, while sft runs")


@pytest.mark.parametrize(
    ("install", "of_node", "expected"),
    [
        ("auto", "nothing", "pip"),
        ("auto", "uv", "uv"),
        ("auto", "pip", "pip"),
        ("uv", "pip", "uv"),
        ("pip", "uv", "pip"),
    ],
)
def test_it_is_installed_by_what_the_settings_or_the_node_say(
    toy: str, node: Node, tmp_path: Path, install: str, of_node: str, expected: str
) -> None:
    settings = SSHNode.model_validate({"host": "me@box", "python": "/usr/bin/python3", "install": of_node})
    plan = plan_engine_of(SESSION, node, settings, engine_of(toy, tmp_path, install=install), [])
    assert plan.wanted is not None and plan.wanted.installer == expected


def test_what_cannot_be_installed_is_one_sentence(toy: str, node: Node, tmp_path: Path) -> None:
    engine = engine_of(toy, tmp_path)
    with pytest.raises(PermanentInfraError, match=r"has no toy_engine, which this rollout\.engine\.kind needs"):
        plan_engine_of(SESSION, node, LocalNode(), engine.model_copy(update={"install": "never"}), [])
    shipped = engine.model_copy(update={"requirements": ""})
    with pytest.raises(ConfigError, match=r"has no line toy_engine==VERSION"):
        plan_engine_of(SESSION, node, LocalNode(), shipped, [])


def test_a_driver_that_is_too_old_is_refused_for_the_shipped_versions_alone(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        PermanentInfraError, match=r"needs NVIDIA's driver 580\.65\.6 or newer, and the node has 535\.54"
    ):
        plan_engine_of(SESSION, node, LocalNode(), EngineConfig(kind="sglang"), [OLD])
    (tmp_path / "lock.txt").write_text("sglang==0.5.23\n")
    own = EngineConfig(kind="sglang", requirements=str(tmp_path / "lock.txt"))
    assert plan_engine_of(SESSION, node, LocalNode(), own, [OLD]).wanted is not None


def test_no_room_and_a_missing_program_are_refused(
    toy: str, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(toy, tmp_path)
    build = ENGINES[toy].cpu_build
    assert build is not None
    for changed, said in (
        ({"disk_gb": 1e9}, "takes 1500000000.0 GB at"),
        ({"programs": ("no-such-c++",)}, "calls no-such"),
    ):
        spec = dataclasses.replace(ENGINES[toy], cpu_build=dataclasses.replace(build, **changed))
        monkeypatch.setitem(ENGINES, toy, spec)
        with pytest.raises(PermanentInfraError, match=said.replace("+", r"\+")):
            plan_engine_of(SESSION, node, LocalNode(), engine, [])


def test_a_folder_without_wheels_and_a_kind_without_a_build_are_refused(toy: str, node: Node, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.wheels: .* has no \*\.whl"):
        plan_engine_of(SESSION, node, LocalNode(), engine_of(toy, tmp_path, wheels=str(tmp_path)), [])
    with pytest.raises(PermanentInfraError, match="has no sglang"):  # it has no build for CPUs
        plan_engine_of(SESSION, node, LocalNode(), EngineConfig(kind="sglang"), [])


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_the_shipped_versions_name_the_engine_and_are_exact(kind: str, node: Node, tmp_path: Path) -> None:
    builds = [each for each in (ENGINES[kind].cuda_build, ENGINES[kind].cpu_build) if each]
    for build in builds:
        lines = [line for line in build.file.read_text().splitlines() if not line.startswith("#")]
        assert version_in(lines, (build.package,)) in ("0.5.23", "0.32.0")
        assert all("==" in line for line in lines)


def test_a_busy_gpu_is_named_with_its_program() -> None:
    busy = dataclasses.replace(GPU, free_gb=20.0, programs=(GpuProgram(pid=7, name="python3", used_gb=64.0),))
    assert warn_of_busy_gpus([GPU, busy], [0]) == []
    [said] = warn_of_busy_gpus([GPU, busy], [1])
    assert said.startswith("GPU 1, NVIDIA H100, is used by python3 (pid 7, 64.0 GB), and has 20.0 of 85.0 GB free")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_is_installed_once_from_wheels_and_pruned(toy: str, node: Node, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", "toy_engine", "1.2")
    engine = engine_of(toy, tmp_path, wheels=str(tmp_path / "wheels"))
    plan = plan_engine_of(SESSION, node, LocalNode(), engine, [])
    assert plan.wanted is not None
    planned = python_of_engine(SESSION, node, plan.wanted)
    python = install_engine(SESSION, node, plan.wanted)
    assert python == planned
    show = [python, "-c", "import toy_engine; print(toy_engine.__version__)"]
    assert subprocess.run(show, capture_output=True, text=True, check=True).stdout == "1.2\n"
    made_at = Path(python).lstat().st_mtime_ns
    again = plan_engine_of(SESSION, node, LocalNode(), engine, [])
    assert again.describe(engine) == "rollout.engine: Toy 1.2 is installed by an earlier run"
    assert install_engine(SESSION, node, plan.wanted) == python
    assert Path(python).lstat().st_mtime_ns == made_at
    store = Path(node.root)
    with Ledger(store / LEDGER_FILE) as ledger:
        found = plan_prune(store, ledger, unused_days=0.0)
        assert [folder.place for folder in remove_folders(store, ledger, found)] == [
            Path(python).parents[2].relative_to(store).as_posix()
        ]
    assert not Path(python).exists()


@pytest.mark.slow
def test_an_engine_that_make_engines_installed_is_found(toy: str, node: Node, tmp_path: Path) -> None:
    environment = tmp_path / ".engines/toy_engine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    [packages] = environment.glob("lib/python3*/site-packages")
    (packages / "toy_engine.py").touch()
    python = str(environment / "bin/python")
    assert find_installed(SESSION, node, "toy_engine", has_gpus=False) == python
    plan = plan_engine_of(SESSION, node, LocalNode(), EngineConfig(kind=toy), [])
    assert (plan.python, plan.wanted) == (python, None)
    assert find_installed(SESSION, node, "toy_engine", has_gpus=True) == ""  # it has no torch for them
