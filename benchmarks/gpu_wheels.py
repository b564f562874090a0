"""Collect the packages that a machine without network lacks as wheels, and install them there.

    python benchmarks/gpu_wheels.py collect [--has benchmarks/gpu_machine.txt] [--to .wheels]
    python benchmarks/gpu_wheels.py install [--from .wheels] [--env .gpu-venv]

`collect` needs a package index. It takes the versions that are installed here, which constraints.txt
pins, so nothing is resolved anew. The machine runs Python 3.12 on x86-64 Linux (`--python` names another version).
`--has` lists its packages, as `pip list --format=freeze` prints them there; versions may be left out. torch and what
drives the GPU must be among them.

`install` runs on the machine. It makes a virtual environment that sees the machine's own packages, and needs no index.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[1]
MAX_BYTES = 50 << 20
"""Limit for all wheels together, so that the folder is quickly copied to the machine."""
PEERS = {"trl"}
"""Lines of requirements.txt that the check is measured against."""
EXTRAS = {"lora"}
"""The extras of this project that the check uses."""
NOT_CARRIED = {"torch"}
"""Too large to be a wheel among others, and bound to the machine's CUDA."""
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17))
OLD_PLATFORMS = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")
USER_ERROR_CODE = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect", help="download the wheels that the machine lacks")
    collecting.add_argument("--has", type=Path, default=REPOSITORY / "benchmarks/gpu_machine.txt", metavar="FILE")
    collecting.add_argument("--to", type=Path, default=REPOSITORY / ".wheels", metavar="FOLDER")
    collecting.add_argument("--python", default="3.12", help="Python of the machine (default: 3.12)")
    installing = commands.add_parser("install", help="install them with no index")
    installing.add_argument("--from", dest="wheels", type=Path, default=REPOSITORY / ".wheels", metavar="FOLDER")
    installing.add_argument("--env", type=Path, default=REPOSITORY / ".gpu-venv", metavar="FOLDER")
    options = parser.parse_args()
    if options.command == "collect":
        collect(options.has, options.to, python=options.python)
    else:
        install(options.wheels, options.env)


def collect(has: Path, folder: Path, *, python: str) -> None:
    """Download one wheel for each missing package; says how many, and how large they are.

    Exits with 2 if the wheels take more than MAX_BYTES, or if the machine's torch is too old.
    """
    present = read_packages(has.read_text(encoding="utf-8"))
    needed = find_missing(own_requirements(), present, python=python)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    tags = [f"--platform={each}" for each in (*PLATFORMS, *OLD_PLATFORMS)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *tags]
    command += [f"--python-version={python}", "--implementation=cp", f"--dest={folder}"]
    subprocess.run([*command, *(f"{name}=={version}" for name, version in needed.items())], check=True)
    num_bytes = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(needed)} wheels, {num_bytes / 2**20:.1f} MiB, in {folder}: {', '.join(sorted(needed))}")
    if num_bytes > MAX_BYTES:
        stop(f"the wheels take {num_bytes / 2**20:.1f} MiB, the limit is {MAX_BYTES >> 20} MiB: install more there")


def install(wheels: Path, environment: Path) -> None:
    """Make the environment and install all wheels into it; exits with 2 without wheels."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        stop(f"{wheels} has no wheels: run `python benchmarks/gpu_wheels.py collect` on a machine with a package index")
    venv.create(environment, system_site_packages=True, with_pip=False, clear=True)
    link_packages(environment)
    target = site_packages(environment)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run(
        [*command, "--no-cache-dir", "--disable-pip-version-check", f"--target={target}", *found], check=True
    )
    print(f"{len(found)} wheels are installed in {environment}: {environment}/bin/python benchmarks/gpu_check.py")


def link_packages(environment: Path) -> None:
    """Let the environment see this project, and the packages of the environment that this Python runs in, if any.

    `system_site_packages` alone shows those of the Python below both.
    """
    own = [REPOSITORY / "src", *(Path(each) for each in sys.path if each.endswith("site-packages"))]
    lines = "".join(f"{each}\n" for each in own)
    (site_packages(environment) / "seen.pth").write_text(lines, encoding="utf-8")


def site_packages(environment: Path) -> Path:
    """The folder of a virtual environment's packages."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def own_requirements() -> list[Requirement]:
    """Direct requirements of this project and of the check."""
    own = [Requirement(each) for each in metadata.requires("rollouts") or ()]
    wanted = [each for each in own if each.marker is None or any(each.marker.evaluate({"extra": x}) for x in EXTRAS)]
    lines = (REPOSITORY / "benchmarks/requirements.txt").read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [*wanted, *(each for each in pinned if each.name in PEERS)]


def read_packages(text: str) -> dict[str, Version | None]:
    """Names and versions of a list like that of `pip list --format=freeze`; None for a line without a version."""
    found: dict[str, Version | None] = {}
    for line in text.splitlines():
        words = line.partition("#")[0].strip()
        if not words:
            continue
        name, _, version = words.partition("==")
        found[canonicalize_name(name.strip())] = Version(version) if re.match(r"\d", version) else None
    return found


def find_missing(
    requirements: Iterable[Requirement], present: Mapping[str, Version | None], *, python: str
) -> dict[str, str]:
    """The packages that the requirements lead to and the machine lacks, with the versions that are installed here.

    A package that is older there than what needs it allows is missing, too. Exits with 2 if that is torch.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": "x86_64"}
    missing: dict[str, str] = {}
    waiting = [(each, "the project") for each in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted, needed_by = waiting.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        version = present.get(name)
        is_too_old = version is not None and not wanted.specifier.contains(version, prereleases=True)
        if is_too_old and name in NOT_CARRIED:
            stop(f"the machine has {name} {version}, {needed_by} needs {wanted.specifier}: upgrade it there")
        if name in present and not is_too_old:
            continue
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        missing[name] = _pinned_version(wanted) or metadata.version(name)
        for line in _requires(name):
            further = Requirement(line)
            asked = [{**environment, "extra": extra} for extra in ("", *extras)]
            if further.marker is None or any(further.marker.evaluate(each) for each in asked):
                waiting.append((further, name))
    return missing


def _pinned_version(requirement: Requirement) -> str | None:
    return next((each.version for each in requirement.specifier if each.operator == "=="), None)


def _requires(name: str) -> list[str]:
    """Requirements of an installed package. A peer that is not installed here adds none."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def stop(sentence: str) -> None:
    """Say what the user must change, and end."""
    sys.stderr.write(f"gpu_wheels: {sentence}\n")
    raise SystemExit(USER_ERROR_CODE)


if __name__ == "__main__":
    main()
