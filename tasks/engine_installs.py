"""Find an installed inference engine (such as SGLang) on a node, or install the engine.

    rollout.engine.python is set ── this interpreter must have the engine
    the jobs' interpreter or .engines/<kind> of this machine has the engine ── it is used
    otherwise, if rollout.engine.install permits ── check disk, driver, programs ── install ── try one completion

Not here: the installation itself (infra/engine_environment.py), the trial (engine_trial.py), installing while other
stages run (engines_beside.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rollouts.infra.engine_environment import (
    EngineInstallation,
    check_programs,
    check_room,
    install_engine,
    is_installed,
    place_of_engine,
    python_of_engine,
)
from rollouts.infra.engines import CHECK_TIMEOUT_S, check_engine_installed
from rollouts.infra.environment import Installer, read_requirements
from rollouts.infra.errors import CommandFailedError, PermanentInfraError
from rollouts.infra.gpu_state import GpuState, driver_version, read_gpus
from rollouts.infra.node import FurtherNode, Node, NodeSettings, PackageSettings
from rollouts.infra.session import Session
from rollouts.tasks.engine_trial import try_engine
from rollouts_core.config import EngineConfig
from rollouts_core.engine_kinds import EngineBuild
from rollouts_core.errors import ConfigError

MADE_BY_HAND = Path(".engines")
"""The folder in the current directory into which `make engines` installs engines."""
CPU_BUILD = "+cpu"
"""Versions of torch without GPU support end with this suffix, for example 2.9.0+cpu."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """An interpreter that has the inference engine, or the installation that a run has to make."""

    python: str = ""
    """The interpreter in which the engine is installed. Empty if a run has to install the engine."""
    wanted: EngineInstallation | None = None
    build: EngineBuild | None = None
    is_there: bool = False
    """Whether an earlier run has already installed `wanted`."""

    def describe(self, engine: EngineConfig, *, first_stage: str = "") -> str:
        """Text about the installation, for messages. Empty if the engine was installed by the user.

        Args:
            first_stage: the stage that runs during the installation, or empty if the run waits for the installation.
        """
        if self.wanted is None or self.build is None:
            return ""
        name = f"{engine.spec.title} {self.wanted.version}"
        if self.is_there:
            return f"rollout.engine: {name} is installed by an earlier run"
        return (
            f"rollout.engine: the run installs {name} by {self.wanted.installer}, {len(self.wanted.requirements)} "
            f"packages, {self.build.disk_gb:g} GB, about {self.build.minutes:g} minutes"
            f"{f', while {first_stage} runs' if first_stage else ''}"
        )


def plan_engine_of(
    session: Session,
    node: Node,
    settings: NodeSettings | FurtherNode,
    engine: EngineConfig,
    gpus: Sequence[GpuState] | None = None,
) -> EnginePlan:
    """Find an interpreter on the node that has the engine, or plan an installation. Installs nothing.

    Args:
        gpus: the node's GPUs; None queries the node.

    Raises:
        PermanentInfraError: the engine is not installed on the node and cannot be installed.
    """
    spec = engine.spec
    if spec.is_own:
        return EnginePlan()
    if engine.python:
        check_engine_installed(session, spec.package, python=engine.python)
        return EnginePlan(python=engine.python)
    found_gpus = read_gpus(session) if gpus is None else gpus
    build = spec.cuda_build if found_gpus else spec.cpu_build
    if found := find_installed(session, node, spec.package, has_gpus=bool(found_gpus)):
        return EnginePlan(python=found)
    if engine.install == "never" or build is None:
        check_engine_installed(session, spec.package, python=node.python)
        return EnginePlan(python=node.python)
    wanted = installation_of(engine, build, settings)
    is_there = is_installed(session, place_of_engine(session, node, wanted))
    check_driver(found_gpus, build, engine)
    check_programs(session, build.programs, kind=engine.kind)
    if not is_there:
        check_room(session, node, wanted)
    return EnginePlan(wanted=wanted, build=build, is_there=is_there)


def with_engine(
    session: Session,
    node: Node,
    settings: NodeSettings | FurtherNode,
    engine: EngineConfig,
    *,
    gpu_ranks: Sequence[int],
    say: Callable[[str], None],
) -> Node:
    """Install the inference engine on the node if the node lacks the engine (`install_planned`).

    Returns the node, changed to use the engine's interpreter.
    """
    ready = with_planned_engine(session, node, settings, engine, say=say)
    install_planned(session, ready, settings, engine, gpu_ranks=gpu_ranks, say=say)
    return ready


def with_planned_engine(
    session: Session,
    node: Node,
    settings: NodeSettings | FurtherNode,
    engine: EngineConfig,
    *,
    first_stage: str = "",
    say: Callable[[str], None],
) -> Node:
    """Check whether the node has the engine or can get it. Installs nothing.

    Returns the node, changed to use the interpreter that has the engine, or will have it after `install_planned`.

    Args:
        first_stage: the stage that runs during the installation, or empty if the run waits for the installation.

    Raises:
        PermanentInfraError: the engine cannot be installed on the node.
    """
    plan = plan_engine_of(session, node, settings, engine)
    if plan.wanted is None:
        return replace(node, engine_python="" if plan.python in (engine.python, node.python) else plan.python)
    say(plan.describe(engine, first_stage=first_stage))
    return replace(node, engine_python=python_of_engine(session, node, plan.wanted))


def install_planned(
    session: Session,
    node: Node,
    settings: NodeSettings | FurtherNode,
    engine: EngineConfig,
    *,
    gpu_ranks: Sequence[int],
    say: Callable[[str], None],
) -> None:
    """Install the engine that `with_planned_engine` planned, unless the node has the engine.

    After an installation, the engine must complete a prompt with a tiny model.

    Args:
        session: a session with the same interpreter as the session of `with_planned_engine`.
        node: the node that `with_planned_engine` returned.
        gpu_ranks: the GPUs of the engines; empty means the first GPU.

    Raises:
        PermanentInfraError: the engine cannot be installed on the node, or does not work.
    """
    plan = plan_engine_of(session, node, settings, engine)
    if plan.wanted is None:
        return
    install_engine(session, node, plan.wanted)
    if not plan.is_there:
        say(f"rollout.engine: {engine.spec.title} {plan.wanted.version} is installed")
    try_engine(session, node, engine, place_of_engine(session, node, plan.wanted), gpu_ranks=gpu_ranks, say=say)


def find_installed(session: Session, node: Node, package: str, *, has_gpus: bool) -> str:
    """Find an interpreter with the engine's package: the jobs' interpreter, or the interpreter from `make engines`.

    Returns "" if neither interpreter has the package. On a node with GPUs, the interpreter's torch must support GPUs.
    """
    by_hand = MADE_BY_HAND.resolve() / package / "bin/python"
    candidates = [node.python, *([] if node.is_remote or not by_hand.exists() else [str(by_hand)])]
    look = (
        "import importlib.util, sys\n"
        "from importlib.metadata import version\n"
        f"sys.exit(importlib.util.find_spec({package!r}) is None or "
        f"({has_gpus!r} and version('torch').endswith({CPU_BUILD!r})))"
    )
    for python in candidates:
        try:
            session.run([python, "-c", look], timeout_s=CHECK_TIMEOUT_S, may_repeat=True)
        except (CommandFailedError, PermanentInfraError):
            continue
        return python
    return ""


def installation_of(
    engine: EngineConfig, build: EngineBuild, settings: NodeSettings | FurtherNode
) -> EngineInstallation:
    """Describe the packages to install for an engine, by the user's requirements file or else by this project's file.

    Raises:
        PermanentInfraError, ConfigError: the requirements file or the folder of wheels cannot be used.
    """
    requirements = read_requirements(Path(engine.requirements or build.file))
    packages = settings if isinstance(settings, PackageSettings) else None
    installer: Installer = "uv" if packages is not None and packages.install == "uv" else "pip"
    if engine.install in ("uv", "pip"):
        installer = "uv" if engine.install == "uv" else "pip"
    if engine.wheels and not any(Path(engine.wheels).glob("*.whl")):
        raise ConfigError(f"rollout.engine.wheels: {engine.wheels} has no *.whl: give the folder of the wheels")
    return EngineInstallation(
        kind=engine.kind,
        version=version_in(requirements, (build.package, engine.spec.package), source=engine.requirements),
        requirements=tuple(requirements),
        installer=installer,
        index=packages.package_index if packages is not None else "",
        further_index=engine.package_index,
        wheels=engine.wheels,
        disk_gb=build.disk_gb,
    )


def version_in(requirements: Sequence[str], packages: Sequence[str], *, source: str = "") -> str:
    """The version in the first requirement for one of the packages.

    Raises:
        ConfigError: the requirements do not name any of the packages.
    """
    for requirement in map(Requirement, requirements):
        if canonicalize_name(requirement.name) in packages:
            return str(requirement.specifier).lstrip("=")
    raise ConfigError(f"rollout.engine.requirements: {source} has no line {packages[-1]}==VERSION: add it")


def warn_of_busy_gpus(gpus: Sequence[GpuState], ranks: Sequence[int]) -> list[str]:
    """A warning for each GPU of an engine on which other programs already compute."""
    return [
        f"GPU {rank}, {gpus[rank].name}, is used by {' and '.join(map(str, gpus[rank].programs))}, and has "
        f"{gpus[rank].free_gb:.1f} of {gpus[rank].total_gb:.1f} GB free: the run waits for jobs of this project, but "
        "not for other programs"
        for rank in (ranks or (0,))
        if rank < len(gpus) and gpus[rank].programs
    ]


def check_driver(gpus: Sequence[GpuState], build: EngineBuild, engine: EngineConfig) -> None:
    """Raise PermanentInfraError if the NVIDIA driver is too old for the engine's packages.

    Packages that the user lists in `rollout.engine.requirements` are not checked.
    """
    if not gpus or engine.requirements:
        return
    found = driver_version(gpus[0].driver)
    if found and found < build.min_driver:
        raise PermanentInfraError(
            f"{engine.spec.title}, as a run installs it, needs NVIDIA's driver {'.'.join(map(str, build.min_driver))} "
            f"or newer, and the node has {gpus[0].driver}: choose a machine with a newer driver "
            "(node.query.min_cuda), or list packages for another version of CUDA in a file and name it as "
            "rollout.engine.requirements, with rollout.engine.package_index"
        )
