"""What OpenSSH's configuration says about a machine that is called by a name there, as `ssh -G` reads it.

    Host box                      box ──> HostName, Port, User, IdentityFile, ProxyJump, UserKnownHostsFile
        HostName 10.0.0.7

Read anew wherever a machine is logged in to for the first time in a run: what it says then is what counts. The other
settings of OpenSSH are not read, and one of them, ProxyCommand, is refused: without it nothing could be reached.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from infra.errors import PermanentInfraError

PROGRAM = "ssh"
TIMEOUT_S = 15.0
"""A configuration may run commands to find out what applies (Match exec)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredHost:
    """How a machine is reached."""

    host: str
    port: int
    user: str
    key_file: str
    """The first private key that it names and that is there; empty takes those of the agent and of ~/.ssh."""
    known_hosts: tuple[str, ...]
    proxy_jump: str
    """Machines on the way there, with commas between them; empty where there are none."""


def read_ssh_config(name: str, config: str) -> ConfiguredHost:
    """The settings that apply to a name; to one that nothing is said about, those of a host that is called so.

    Args:
        config: file in place of ~/.ssh/config and that of the system; empty takes these.

    Raises:
        PermanentInfraError: there is no such client here, it refuses its configuration, or that names a ProxyCommand.
    """
    command = [PROGRAM, "-G", *(["-F", str(Path(config).expanduser())] if config else []), "--", name]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or f"it did not answer within {TIMEOUT_S:g} s"
        raise PermanentInfraError(
            f"node.host {name!r} is looked up by OpenSSH's client `{PROGRAM} -G` on this machine ({reason}): install "
            "it, or give user@host"
        ) from error
    if completed.returncode != 0:
        said = completed.stderr.strip().splitlines() or [f"it ended with {completed.returncode}"]
        raise PermanentInfraError(f"node.host {name!r}: `{PROGRAM} -G {name}` says {said[0]}")
    settings: dict[str, list[str]] = {}
    for line in completed.stdout.splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key, []).append(value)
    if settings.get("proxycommand", ["none"]) != ["none"]:
        raise PermanentInfraError(
            f"node.host {name!r}: OpenSSH's configuration reaches it by a ProxyCommand, which is not run here: give "
            "the machines on the way as ProxyJump, or as node.proxy_jump"
        )
    jump = settings.get("proxyjump", ["none"])[0]
    keys = [Path(each).expanduser() for each in settings.get("identityfile", [])]
    return ConfiguredHost(
        host=settings["hostname"][0],
        port=int(settings["port"][0]),
        user=settings["user"][0],
        key_file=next((str(key) for key in keys if not _is_usual(key) and key.is_file()), ""),
        known_hosts=tuple(settings.get("userknownhostsfile", [""])[0].split()),
        proxy_jump="" if jump == "none" else jump,
    )


def _is_usual(key: Path) -> bool:
    """Whether OpenSSH names the key where its configuration names none."""
    return key.name.startswith("id_") and key.parent == Path("~/.ssh").expanduser()
