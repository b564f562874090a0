"""Install exact versions of packages into an environment of their own, on the node itself.

The node's side of environment.py. Runs as a supervised job in its run directory: `python -I environment_builder.py`.
Standard library only and one file, because it is sent to nodes by content.

    job.json      {"installer": "pip" or "uv", "index": URL or "", "requirements": [name==version, ...]}
    env/          the environment; what an attempt that was killed has left is removed first
    result.json   {"python": path of its interpreter}, written when everything is installed
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS = {"PYTHONNOUSERSITE": "1", "UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}
"""uv believes the certificates that the node believes, as pip does; older versions know the second name."""


def main() -> int:
    """Build the environment of the working directory; returns the exit code."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the node's own may be older
        sys.stdout.write(f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}\n")
        return 1
    directory = Path.cwd()
    job = json.loads((directory / "job.json").read_text())  # Any: JSON
    environment = directory / "env"
    shutil.rmtree(environment, ignore_errors=True)
    lock = directory / "requirements.txt"
    lock.write_text("".join(line + "\n" for line in job["requirements"]))
    python = str(environment / "bin" / "python")
    try:
        run([sys.executable, "-m", "venv", str(environment)])
        run([*install_command(python, job), "--requirement", str(lock)])
    except subprocess.CalledProcessError as error:
        return error.returncode or 1
    part = directory / "result.json.part"
    part.write_text(json.dumps({"python": python}))
    part.replace(directory / "result.json")
    return 0


def install_command(python: str, job: "dict[str, Any]") -> "list[str]":  # Any: JSON
    """What installs into the environment; uv comes from the index where the node has none."""
    index = ["--index-url", job["index"]] if job["index"] else []
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *index]
    if job["installer"] == "pip":
        return pip
    uv = shutil.which("uv")
    if uv is None:
        run([*pip, "uv"])
        uv = str(Path(python).with_name("uv"))
    return [uv, "pip", "install", "--python", python, *index]


def run(command: "list[str]") -> None:
    """Run a command; what it says goes into the log."""
    sys.stdout.write("$ " + " ".join(command) + "\n")
    sys.stdout.flush()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env={**SETTINGS, **os.environ})


if __name__ == "__main__":
    sys.exit(main())
