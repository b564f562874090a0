"""Install an inference server on a node, into an environment of its own, once for all runs.

    exact versions ──> <root>/engines/<kind>-<version>-<digest>/ on the node: env/, log.txt, result.json

The job layer makes it once if several runs ask at the same time, and goes on when a connection breaks. pip and uv keep
their downloads in caches, so an interrupted installation does not repeat them. Not here: which
versions (rollouts_core/engine_kinds/requirements/), whether the engine works (tasks/engine_trial.py).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollouts.infra.engines import CHECK_TIMEOUT_S
from rollouts.infra.environment import Installer, build_environment, digest_of_build
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import Node
from rollouts.infra.session import Session
from rollouts.infra.sync.push import has_files, publish_files

ROOM_FACTOR = 1.5
"""Room that an installation takes, as a multiple of the environment: the wheels lie beside it for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInstallation:
    """The packages of an engine, and the way to install them."""

    kind: str
    """The engine's name in the settings."""
    version: str
    requirements: tuple[str, ...]
    """`name==version` of every package: nothing else is installed."""
    installer: Installer
    index: str = ""
    """URL of the package index of the node; empty for its own settings."""
    further_index: str = ""
    """URL of a second index, with packages that the first one lacks."""
    wheels: str = ""
    """Folder of this machine with all packages; then no index is asked."""
    disk_gb: float = 0.0
    """What the environment takes."""


def place_of_engine(session: Session, node: Node, wanted: EngineInstallation) -> str:
    """The folder of the installation on the node."""
    identity = {"kind": wanted.kind, "requirements": list(wanted.requirements)}
    return f"{node.root}/engines/{wanted.kind}-{wanted.version}-{digest_of_build(session, identity)}"


def install_engine(session: Session, node: Node, wanted: EngineInstallation) -> str:
    """The interpreter of the engine's environment on the node, after installing it if it is not there.

    Raises:
        PermanentInfraError: the disk has too little room, or the packages cannot be installed; with the last lines of
            the installer.
        InfraError: the node cannot be reached.
    """
    folder = place_of_engine(session, node, wanted)
    if not is_installed(session, folder):
        check_room(session, node, wanted)
    job = {
        "installer": wanted.installer,
        "index": wanted.index,
        "requirements": list(wanted.requirements),
        "options": _options(session, node, wanted),
    }
    python = build_environment(session, node, folder, job)
    # The folder's time says when a run used it last, which `rollouts prune` goes by.
    session.run(["touch", "-c", "--", folder], timeout_s=CHECK_TIMEOUT_S, may_repeat=True)
    return python


def is_installed(session: Session, folder: str) -> bool:
    """Whether an installation is complete."""
    looked = session.run(
        ["test", "-e", f"{folder}/result.json"], timeout_s=CHECK_TIMEOUT_S, check=False, may_repeat=True
    )
    return looked.exit_code == 0


def check_room(session: Session, node: Node, wanted: EngineInstallation) -> None:
    """Raise PermanentInfraError if the disk of the node's root has too little room for the installation."""
    needed_gb, free_gb = ROOM_FACTOR * wanted.disk_gb, free_disk_gb(session, node.root)
    if free_gb < needed_gb:
        raise PermanentInfraError(
            f"installing {wanted.kind} {wanted.version} takes {needed_gb:.1f} GB at {node.root}, and {free_gb:.1f} GB "
            "are free: free some space, choose another root, or name an installed engine as rollout.engine.python"
        )


def free_disk_gb(session: Session, root: str) -> float:
    """Free space on the disk of a folder that may not exist yet."""
    script = 'd=$1; until [ -e "$d" ]; do d=$(dirname "$d"); done; df -Pk "$d"'
    done = session.run(["/bin/sh", "-c", script, "sh", root], timeout_s=CHECK_TIMEOUT_S, may_repeat=True)
    return int(done.stdout.decode().splitlines()[-1].split()[-3]) * 1024 / 1e9


def check_programs(session: Session, programs: Sequence[str], *, kind: str) -> None:
    """Raise PermanentInfraError if the node lacks a program that the engine calls."""
    for program in programs:
        look = ["/bin/sh", "-c", 'command -v -- "$1"', "sh", program]
        if session.run(look, timeout_s=CHECK_TIMEOUT_S, check=False, may_repeat=True).exit_code != 0:
            raise PermanentInfraError(
                f"{kind} calls {program}, which the node lacks: install it there, or choose another rollout.engine.kind"
            )


def _options(session: Session, node: Node, wanted: EngineInstallation) -> list[str]:
    """The arguments for pip or uv besides the requirements; the wheels are on the node then."""
    if not wanted.wheels:
        return ["--no-deps", *(["--extra-index-url", wanted.further_index] if wanted.further_index else [])]
    folder = wanted.wheels
    if node.is_remote:
        files = {path.name: path for path in sorted(Path(wanted.wheels).glob("*.whl"))}
        names = hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]
        folder = f"{node.root}/wheels/{names}"
        if not has_files(session, files, folder):
            publish_files(session, files, folder)
    return ["--no-deps", "--no-index", "--find-links", folder]
