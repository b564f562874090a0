"""Install a harness, such as lm-evaluation-harness, in an environment of its own on this machine.

    --harness-python is set ── this interpreter must have the harness
    otherwise ── <store>/engines/<package>-<version>-<digest>/, installed once, as engines are

Not here: the installation itself (infra/engine_environment.py), starting the harness (flows/commands/benchmarks.py).
This module must not import prefect, because the `rollouts` command imports it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from rollouts.infra.engine_environment import EngineInstallation, install_engine, is_installed, place_of_engine
from rollouts.infra.environment import CHECK_TIMEOUT_S, read_requirements
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import LocalNode
from rollouts.infra.providers import open_session, provision_node
from rollouts.tasks.engine_installs import version_in
from rollouts_core.errors import InputError
from rollouts_core.harnesses import Harness


def find_harness(
    harness: Harness, store: Path, *, python: str, wheels: str, say: Callable[[str], None]
) -> tuple[str, str]:
    """Return the interpreter of the harness's environment and the version of the harness. Installs a missing harness.

    Args:
        python: interpreter of an environment that the user made; empty uses an environment in the store.
        wheels: folder with wheels of all packages; empty uses the package index of pip.

    Raises:
        InputError: the interpreter does not have the harness, or the folder has no wheels.
        PermanentInfraError: the harness cannot be installed.
    """
    if python:
        return python, _version_of(harness, python)
    if wheels and not any(Path(wheels).glob("*.whl")):
        raise InputError(f"--harness-wheels: {wheels} has no *.whl: give the folder of the wheels")
    requirements = read_requirements(harness.file)
    wanted = EngineInstallation(
        kind=harness.package,
        version=version_in(requirements, (harness.name, harness.package)),
        requirements=tuple(requirements),
        installer="pip",
        wheels=str(Path(wheels).absolute()) if wheels else "",
        disk_gb=harness.disk_gb,
        python_setting="--harness-python",
    )
    node = provision_node(LocalNode(), store)
    with open_session(node) as session:
        if not is_installed(session, place_of_engine(session, node, wanted)):
            say(f"installs {harness.name} {wanted.version}: {len(requirements)} packages, {harness.disk_gb:g} GB")
        try:
            return install_engine(session, node, wanted), wanted.version
        except PermanentInfraError as error:
            error.add_note(
                f"Without a package index, `pip wheel --no-deps -r {harness.file} -w FOLDER` on a machine with an "
                "index makes the wheels for --harness-wheels FOLDER. --harness-python PATH names an interpreter that "
                f"has {harness.package}."
            )
            raise


def _version_of(harness: Harness, python: str) -> str:
    show = f"from importlib.metadata import version; print(version({harness.package!r}))"
    try:
        asked = subprocess.run(
            [python, "-P", "-c", show], capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(
            f"--harness-python: {python} does not have {harness.package} ({error}): install {harness.package} there, "
            "or leave the option out to install it in the store"
        ) from error
    return asked.stdout.strip()
