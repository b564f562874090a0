"""Install an inference engine on a node, in a separate environment, once for all runs.

    exact versions ──> <root>/engines/<kind>-<version>-<digest>/ on the node: env/, log.txt, result.json

A supervised job does the installation. Several runs that need the engine at the same time share one job. The job
continues when a connection breaks. pip and uv cache their downloads, so a restarted installation does not download
packages again.

Not here: the choice of versions (rollouts_core/engine_kinds/requirements/), a test of the engine
(tasks/engine_trial.py).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollouts.infra.engines import CHECK_TIMEOUT_S
from rollouts.infra.environment import Installer, build_environment, digest_of_build
from rollouts.infra.environment_builder import ENVIRONMENT
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import Node
from rollouts.infra.session import Session
from rollouts.infra.sync.push import has_files, publish_files

ROOM_FACTOR = 1.5
"""Disk space that an installation needs, as a multiple of the environment's size. The downloaded wheels need space,
too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInstallation:
    """The packages of an engine, and how to install them."""

    kind: str
    version: str
    requirements: tuple[str, ...]
    """`name==version` of every package, because the installer adds no dependencies."""
    installer: Installer
    index: str = ""
    """URL of the package index. Without `index`, the index in the node's own settings of pip or uv is used."""
    further_index: str = ""
    """URL of a second index for packages that the first index lacks."""
    wheels: str = ""
    """Folder on this machine with wheels of all packages. If this folder is set, no package index is used."""
    disk_gb: float = 0.0
    """Disk space of the installed environment in GB."""
    python_setting: str = "rollout.engine.python"
    """The setting or option that names the interpreter of an environment made by the user, for messages."""


def place_of_engine(session: Session, node: Node, wanted: EngineInstallation) -> str:
    identity = {"kind": wanted.kind, "requirements": list(wanted.requirements)}
    return f"{node.root}/engines/{wanted.kind}-{wanted.version}-{digest_of_build(session, identity)}"


def python_of_engine(session: Session, node: Node, wanted: EngineInstallation) -> str:
    """Return the path that the engine's interpreter has on the node after the installation."""
    return f"{place_of_engine(session, node, wanted)}/{ENVIRONMENT}/bin/python"


def install_engine(session: Session, node: Node, wanted: EngineInstallation) -> str:
    """Install the engine if it is missing. Returns the path of the engine's interpreter on the node.

    Raises:
        PermanentInfraError: the disk has too little room, or the packages cannot be installed. The error's text
            contains the last lines of the installer's output.
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
    # `rollouts prune` uses the folder's time as the time of the engine's last use.
    session.run(["touch", "-c", "--", folder], timeout_s=CHECK_TIMEOUT_S, may_repeat=True)
    return python


def is_installed(session: Session, folder: str) -> bool:
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
            f"are free: free some space, choose another root, or name an installed one as {wanted.python_setting}"
        )


def free_disk_gb(session: Session, root: str) -> float:
    """Return the free space on the disk of a folder, in GB. The folder need not exist yet."""
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
    """Return the arguments for pip or uv in addition to the requirements. Uploads `wanted.wheels` to a remote node if
    the node does not have these files."""
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
