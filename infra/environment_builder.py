"""Install exact versions of packages into a separate environment, on the node itself.

This program is the node's side of environment.py. The program runs as a supervised job: `python -I
environment_builder.py RUN_DIR`. The program is one file and uses only the standard library, because its text is sent to
nodes.

    job.json      {"installer": "pip" or "uv", "index": URL or "", "requirements": [name==version, ...]}, and "options"
                  for further arguments that both installers accept
    env/          the environment; the rest of a killed attempt is removed first
    tmp/          temporary files of the installer; the rest of a killed attempt is removed first
    python/       an interpreter that uv has downloaded, if uv cannot store interpreters in the user's home
    result.json   {"python": path of the environment's interpreter}, written when everything is installed
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ENVIRONMENT, _TEMPORARY = "env", "tmp"
SETTINGS = {"PYTHONNOUSERSITE": "1", "UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}
"""Environment variables for the installers. UV_SYSTEM_CERTS makes uv use the system's certificates, as pip does. Older
versions of uv know only UV_NATIVE_TLS."""
_CACHE = "../../cache/uv"
"""Folder for uv's cache if uv cannot write to the user's home. The path is relative to the run directory, so the folder
is below the node's root."""
_FOLDERS_OF_UV = ("~/.local/bin", "~/.cargo/bin")

_PIP = ["-P", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]


def main() -> int:
    """Build the environment in the run directory that the command line names. Returns the exit code."""
    os.chdir(sys.argv[1])  # because of -I, Python does not import files of this directory
    directory = Path.cwd()
    job = json.loads((directory / "job.json").read_text())  # Any: JSON
    environment, temporary = directory / ENVIRONMENT, directory / _TEMPORARY
    for folder in (environment, temporary):
        shutil.rmtree(folder, ignore_errors=True)
    temporary.mkdir()
    lock = directory / "requirements.txt"
    lock.write_text("".join(line + "\n" for line in job["requirements"]))
    python = str(environment / "bin" / "python")
    install = {"pip": _install_by_pip, "uv": _install_by_uv}[job["installer"]]
    index = ["--index-url", job["index"]] if job["index"] else []
    try:
        install(environment, ["--requirement", str(lock), *index, *job.get("options", ())])
    except subprocess.CalledProcessError as error:
        return error.returncode or 1
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    part = directory / "result.json.part"
    part.write_text(json.dumps({"python": python}))
    part.replace(directory / "result.json")
    return 0


def _install_by_pip(environment: Path, arguments: "list[str]") -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - the node's own interpreter may be older
        found = f"{sys.executable} is {sys.version.split()[0]}"
        _raise_refusal(f"Python 3.11 or newer is needed, {found}: name another interpreter, or install by uv")
    run([sys.executable, "-P", "-m", "venv", str(environment)])
    run([str(environment / "bin" / "python"), *_PIP, *arguments])


def _install_by_uv(environment: Path, arguments: "list[str]") -> None:
    """Create the environment with Python 3.11 or newer and install the packages. If the node has no Python 3.11, uv
    downloads Python."""
    uv = _find_uv() or _fetch_uv(environment.with_name("tools"), arguments[2:])
    run([uv, "venv", "--python", ">=3.11", str(environment)])
    # pip compares the versions in all indexes. Without this option, uv uses only the first index that has the package.
    strategy = ["--index-strategy", "unsafe-best-match"] if "--extra-index-url" in arguments else []
    run([uv, "pip", "install", "--python", str(environment / "bin" / "python"), *strategy, *arguments])


def _find_uv() -> "str | None":
    """Return the path of the node's uv. uv's installer changes the PATH only for terminals, so its folders are
    searched, too."""
    folders = [os.path.dirname(sys.executable), *map(os.path.expanduser, _FOLDERS_OF_UV)]  # noqa: PTH120 - as below
    return shutil.which("uv") or shutil.which("uv", path=os.pathsep.join(folders))


def _fetch_uv(tools: Path, index: "list[str]") -> str:
    """Install uv from the index with pip, and return the path of uv. If this interpreter has no pip, use the pip of a
    new environment."""
    if importlib.util.find_spec("pip") is not None:
        run([sys.executable, *_PIP, "--target", str(tools), "--upgrade", *index, "uv"])
    else:
        run([sys.executable, "-P", "-m", "venv", "--clear", str(tools)])
        run([str(tools / "bin" / "python"), *_PIP, *index, "uv"])
    return str(tools / "bin" / "uv")


def _places_of_uv(directory: Path) -> "dict[str, str]":
    """Return environment variables that make uv store downloads below the node's root if the user's home cannot be
    written."""
    places = {"UV_PYTHON_INSTALL_DIR": ("~/.local/share/uv/python", "python")}
    if not os.environ.get("XDG_CACHE_HOME"):
        places["UV_CACHE_DIR"] = ("~/.cache/uv", _CACHE)
    return {
        name: os.path.normpath(str(directory / own))
        for name, (of_home, own) in places.items()
        if not os.access(os.path.expanduser(of_home), os.W_OK)  # noqa: PTH111 - Path.expanduser raises without a home
    }


def _raise_refusal(message: str) -> None:
    """Print why the packages cannot be installed, and raise the error of a failed installer."""
    sys.stdout.write(message + "\n")
    sys.stdout.flush()
    raise subprocess.CalledProcessError(1, sys.executable)


def run(command: "list[str]") -> None:
    """Run a command with its output in the job's log."""
    sys.stdout.write("$ " + " ".join(command) + "\n")
    sys.stdout.flush()
    settings = {**SETTINGS, **_places_of_uv(Path.cwd()), **os.environ, "TMPDIR": str(Path.cwd() / _TEMPORARY)}
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env=settings)


if __name__ == "__main__":
    sys.exit(main())
