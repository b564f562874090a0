"""Install exact versions of packages into an environment of their own, on the node itself.

The node's side of environment.py. Runs as a supervised job: `python -I environment_builder.py RUN_DIR`.
Standard library only and one file, because it is sent to nodes by content.

    job.json      {"installer": "pip" or "uv", "index": URL or "", "requirements": [name==version, ...]}, and "options"
                  for further arguments that both installers know
    env/          the environment
    tmp/          what the installer needs meanwhile
    python/       an interpreter that uv has fetched, where it has no place for those in the user's home
    result.json   {"python": path of its interpreter}, written when everything is installed

What an attempt that was killed has left of the two folders is removed first.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

TEMPORARY = "tmp"
SETTINGS = {"PYTHONNOUSERSITE": "1", "UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}
"""uv believes the certificates that the node believes, as pip does; older versions know the second name."""
CACHE = "../../cache/uv"
"""Where uv keeps packages, below the node's root, where it has no place for them in the user's home."""

FOLDERS_OF_UV = ("~/.local/bin", "~/.cargo/bin")

PIP = ["-P", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]


def main() -> int:
    """Build the environment in the run directory that is given; returns the exit code."""
    os.chdir(sys.argv[1])  # -I keeps Python from importing what lies there
    directory = Path.cwd()
    job = json.loads((directory / "job.json").read_text())  # Any: JSON
    environment, temporary = directory / "env", directory / TEMPORARY
    for folder in (environment, temporary):
        shutil.rmtree(folder, ignore_errors=True)
    temporary.mkdir()
    lock = directory / "requirements.txt"
    lock.write_text("".join(line + "\n" for line in job["requirements"]))
    python = str(environment / "bin" / "python")
    install = {"pip": install_by_pip, "uv": install_by_uv}[job["installer"]]
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


def install_by_pip(environment: Path, arguments: "list[str]") -> None:
    """Make the environment with the interpreter that runs this, and install into it."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the node's own may be older
        found = f"{sys.executable} is {sys.version.split()[0]}"
        raise_refusal(f"Python 3.11 or newer is needed, {found}: name another interpreter, or install by uv")
    run([sys.executable, "-P", "-m", "venv", str(environment)])
    run([str(environment / "bin" / "python"), *PIP, *arguments])


def install_by_uv(environment: Path, arguments: "list[str]") -> None:
    """Make the environment with a new enough interpreter, which uv fetches where the node has none, and install."""
    uv = find_uv() or fetch_uv(environment.with_name("tools"), arguments[2:])
    run([uv, "venv", "--python", ">=3.11", str(environment)])
    # pip compares the versions of all indexes; uv would look only in the first one that has a package of the name.
    strategy = ["--index-strategy", "unsafe-best-match"] if "--extra-index-url" in arguments else []
    run([uv, "pip", "install", "--python", str(environment / "bin" / "python"), *strategy, *arguments])


def find_uv() -> "str | None":
    """The node's own uv; where its installer puts it is on the PATH of terminals, and not of our sessions."""
    folders = [os.path.dirname(sys.executable), *map(os.path.expanduser, FOLDERS_OF_UV)]  # noqa: PTH120 - as below
    return shutil.which("uv") or shutil.which("uv", path=os.pathsep.join(folders))


def fetch_uv(tools: Path, index: "list[str]") -> str:
    """Get uv from the index, by this interpreter's pip or, where it has none, by that of an environment of its own."""
    if importlib.util.find_spec("pip") is not None:
        run([sys.executable, *PIP, "--target", str(tools), "--upgrade", *index, "uv"])
    else:
        run([sys.executable, "-P", "-m", "venv", "--clear", str(tools)])
        run([str(tools / "bin" / "python"), *PIP, *index, "uv"])
    return str(tools / "bin" / "uv")


def places_of_uv(directory: Path) -> "dict[str, str]":
    """Where uv keeps what it fetches, but for what it has a place for in the home: that may be small, or read-only."""
    places = {"UV_PYTHON_INSTALL_DIR": ("~/.local/share/uv/python", "python")}
    if not os.environ.get("XDG_CACHE_HOME"):
        places["UV_CACHE_DIR"] = ("~/.cache/uv", CACHE)
    return {
        name: os.path.normpath(str(directory / own))
        for name, (of_home, own) in places.items()
        if not os.access(os.path.expanduser(of_home), os.W_OK)  # noqa: PTH111 - Path's raises where there is no home
    }


def raise_refusal(message: str) -> None:
    """Say why nothing can be installed, and end as an installer that failed."""
    sys.stdout.write(message + "\n")
    sys.stdout.flush()
    raise subprocess.CalledProcessError(1, sys.executable)


def run(command: "list[str]") -> None:
    """Run a command; what it says goes into the log."""
    sys.stdout.write("$ " + " ".join(command) + "\n")
    sys.stdout.flush()
    settings = {**SETTINGS, **places_of_uv(Path.cwd()), **os.environ, "TMPDIR": str(Path.cwd() / TEMPORARY)}
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env=settings)


if __name__ == "__main__":
    sys.exit(main())
