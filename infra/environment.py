"""Install the packages for the training on a node, once, in the versions that are installed on this machine.

    installed here ──> name==version, ... ──> <root>/environments/<digest>/ on the node: env/, log.txt, result.json

A supervised job does the installation, so broken connections do not interrupt it. Runs with equal requirements share
one job.

Not here: the program on the node (environment_builder.py), the project's own code (tasks/upload_inputs.py).
"""

import hashlib
import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from rollouts.infra import environment_builder
from rollouts.infra.errors import JobFailedError, PermanentInfraError
from rollouts.infra.jobs import JobSpec, follow_job, read_result, require_finished, start_or_attach
from rollouts.infra.node import Node
from rollouts.infra.node_agent import ISOLATED
from rollouts.infra.regular_file import read_text
from rollouts.infra.session import Session

Installer = Literal["pip", "uv"]

PROJECT = "rollouts"
_PIPELINE_ONLY = frozenset({"prefect", "fastapi", "typer", "rich", "paramiko"})
"""Requirements of the pipeline that nodes do not need."""
NODE_EXTRAS = ("lora", "math", "verifiers")
"""Extras of this project. Nodes get the packages of these extras that are installed on this machine."""
_BUILD_TIMEOUT_S = 3600.0
CHECK_TIMEOUT_S = 60.0
LOOK = "import os, sys, sysconfig; sys.exit(not os.path.isdir(sysconfig.get_path('purelib')))"
"""Code that exits with 0 if the interpreter still has the version for which the packages were installed."""
_DIGEST_CHARS = 16

logger = logging.getLogger(__name__)


def installed_requirements(project: str = PROJECT) -> list[str]:
    """Return sorted `name==version` lines for all packages that nodes need, in the versions that this machine has.

    The build tag of a version (torch 2.9.0+cpu) is removed, because a node with GPUs needs another build.

    Raises:
        PermanentInfraError: the project, or one of its packages, is not installed on this machine.
    """
    try:
        texts = metadata.requires(project) or []
    except metadata.PackageNotFoundError as error:
        raise PermanentInfraError(
            f"{project} is not installed here, so its versions are unknown: install it, or name a file as "
            "node.requirements"
        ) from error
    required = [requirement for requirement in map(Requirement, texts) if requirement.name not in _PIPELINE_ONLY]
    needed = [requirement for requirement in required if _applies(requirement, ("", *NODE_EXTRAS))]
    versions: dict[str, str] = {}
    pending = deque(needed)
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement = pending.popleft()
        name = canonicalize_name(requirement.name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            if requirement in needed and _applies(requirement, ("",)):
                raise PermanentInfraError(f"{name} is not installed here: install {project} anew") from error
            continue  # an optional package that is not installed on this machine
        versions[name] = Version(found.version).public
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) not in seen:
                seen.add((name, extra))
                pending.extend(r for text in found.requires or [] if _applies(r := Requirement(text), (extra,)))
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def _applies(requirement: Requirement, extras: Sequence[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)


def read_requirements(path: Path) -> list[str]:
    """Return the requirements in a file of exact versions, without comments and hashes.

    Raises:
        PermanentInfraError: the file cannot be read, or a line is not an exact version.
    """
    try:
        text = read_text(path.expanduser())
    except (OSError, UnicodeDecodeError) as error:
        raise PermanentInfraError(f"the requirements {path} cannot be read: {error}") from error
    lines = [line.split(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    return [_check_exact(line.split(" --hash")[0].strip(), path) for line in lines if line and not line.startswith("#")]


def _check_exact(line: str, path: Path) -> str:
    try:
        requirement = Requirement(line)
    except InvalidRequirement as error:
        raise PermanentInfraError(
            f"{path}: expected lines like name==1.2.3, found {line!r}: write one with `uv pip compile` or `pip freeze`"
        ) from error
    if not requirement.url and not any(each.operator in ("==", "===") for each in requirement.specifier):
        raise PermanentInfraError(
            f"{path}: {line!r} is not an exact version: write name==1.2.3, so that runs can be repeated"
        )
    return line


def ensure_environment(
    session: Session, node: Node, requirements: Sequence[str], *, installer: Installer, index: str = ""
) -> str:
    """Install the packages unless the node has them. Returns the path of the environment's interpreter on the node.

    Args:
        index: URL of the package index. Without `index`, the index in the node's own settings of pip or uv is used.

    Raises:
        PermanentInfraError: the installer failed. The error's text contains the last lines of the installer's output.
        InfraError: the node cannot be reached.
    """
    job = {"installer": installer, "index": index, "requirements": list(requirements)}
    return build_environment(session, node, f"{node.root}/environments/{digest_of_build(session, job)}", job)


def digest_of_build(session: Session, job: Mapping[str, Any]) -> str:  # Any: JSON
    """Return the digest for the name of an environment's folder. The digest depends on `job` and on the path of the
    session's interpreter."""
    content = json.dumps([job, session.python], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:_DIGEST_CHARS]


def build_environment(session: Session, node: Node, run_dir: str, job: Mapping[str, Any]) -> str:  # Any: JSON
    """Build an environment in a folder of the node if it is missing. Returns the path of the environment's interpreter.

    Args:
        job: the input of environment_builder.py.

    Raises: see `ensure_environment`.
    """
    installer = job["installer"]
    if (built := read_result(session, run_dir)) is not None:
        if _is_usable(session, str(built["python"])):
            return str(built["python"])
        logger.warning("reinstalling the environment of %s: %s does not run any more", node.name, built["python"])
        session.run(["rm", "-f", "--", f"{run_dir}/result.json"], timeout_s=CHECK_TIMEOUT_S, may_repeat=True)
    program = session.place_program(Path(environment_builder.__file__))
    argv = (session.python, ISOLATED, program, run_dir)
    spec = JobSpec(run_dir=run_dir, argv=argv, job=job, timeout_s=_BUILD_TIMEOUT_S)
    start_or_attach(session, spec)
    ended = follow_job(session, spec.run_dir, on_metrics=_ignore, on_event=_ignore)
    try:
        require_finished(session, ended)
    except JobFailedError as error:
        raise PermanentInfraError(
            f"{installer} could not install the packages on {node.name}. {error}\nSee {spec.run_dir}/log.txt there."
        ) from error
    result = read_result(session, spec.run_dir)
    assert result is not None, f"{spec.run_dir} is finished without a result.json"
    logger.info("the environment of %s is %s", node.name, result["python"])
    return str(result["python"])


def _is_usable(session: Session, python: str) -> bool:
    """Return whether an environment's interpreter runs and still has the Python version for which the packages were
    installed.

    The environment's interpreter is a link to the machine's interpreter, which may have been removed or upgraded.
    """
    try:
        found = session.run([python, ISOLATED, "-c", LOOK], timeout_s=CHECK_TIMEOUT_S, check=False, may_repeat=True)
    except PermanentInfraError:
        return False
    return found.exit_code == 0


def _ignore(_: object) -> None:
    """Discard metrics and events of the job."""
