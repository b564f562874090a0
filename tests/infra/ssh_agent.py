"""An SSH agent of a test's own, and keys for it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.processes import dies_with_us
from tests.kit.waiting import wait_until


@contextmanager
def running_agent(path: Path) -> Iterator[Path]:
    """The socket of an agent that has nothing yet, and that agrees to nothing that it has to ask for."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("there is no ssh-agent on this machine: install openssh-client")
    process = subprocess.Popen(
        [*dies_with_us(), "ssh-agent", "-D", "-a", str(path)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "SSH_ASKPASS": "/bin/false", "SSH_ASKPASS_REQUIRE": "force"},
    )
    try:
        wait_until(path.exists, what="the agent")
        yield path
    finally:
        process.kill()
        process.wait()


def give_to_agent(key: Path, folder: Path, *options: str, agent: Path | None = None, passphrase: str = "") -> None:
    """Add a key, with the certificate beside it, to an agent; to that of SSH_AUTH_SOCK if none is given."""
    ask = folder / "ask"
    ask.write_text(f"#!/bin/sh\necho {passphrase}\n")
    ask.chmod(0o755)
    variables = {"SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": "none"}
    if agent is not None:
        variables["SSH_AUTH_SOCK"] = str(agent)
    command = ["ssh-add", "-q", *options, str(key)]
    subprocess.run(command, check=True, env={**os.environ, **variables}, stdin=subprocess.DEVNULL)
