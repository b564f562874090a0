"""What OpenSSH's configuration says about a machine that is called by a name there, as `ssh -G` reads it.

    Host box                      box ──> HostName, Port, User, IdentityFile, IdentityAgent, ProxyJump,
        HostName 10.0.0.7                 HostKeyAlias, UserKnownHostsFile, GlobalKnownHostsFile

Read anew wherever a machine is logged in to for the first time in a run: what it says then is what counts. The other
settings of OpenSSH are not read, and one of them, ProxyCommand, is refused: without it nothing could be reached.
"""

import getpass
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import NO_AGENT

PROGRAM = "ssh"
TIMEOUT_S = 15.0
"""A configuration may run commands to find out what applies (Match exec)."""
_USUAL_KEY = re.compile(r"~/\.ssh/id_(dsa|rsa|xmss|(ecdsa|ed25519)(_sk)?)")
"""A key that OpenSSH names where its configuration names none."""

_FILES_OF_KEYS = ("userknownhostsfile", "globalknownhostsfile")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredHost:
    """How a machine is reached."""

    host: str
    port: int
    user: str
    key_files: tuple[str, ...]
    """The keys that it names and that are there, in its order; none takes those of the agent and of ~/.ssh."""
    known_hosts: tuple[str, ...]
    host_key_alias: str
    """The name of its key there; empty where its address is that."""
    agent: str
    """The socket of the SSH agent, or "none"; empty where it is not named."""
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
    host, port, user = (settings[each][0] for each in ("hostname", "port", "user"))
    tokens = {"h": host, "n": name, "p": port, "r": user}
    named = [each for each in settings.get("identityfile", []) if not _USUAL_KEY.fullmatch(each)]
    keys = [Path(_expand(each, tokens)).expanduser() for each in named]
    return ConfiguredHost(
        host=host,
        port=int(port),
        user=user,
        # Of a key that the agent has alone there is the public half.
        key_files=tuple(str(key) for key in keys if key.is_file() or Path(f"{key}.pub").is_file()),
        known_hosts=tuple(path for name in _FILES_OF_KEYS for path in settings.get(name, [""])[0].split()),
        host_key_alias=settings.get("hostkeyalias", [""])[0],
        agent=_read_agent(settings.get("identityagent", [""])[0]),
        proxy_jump="" if jump == "none" else jump,
    )


def _read_agent(named: str) -> str:
    """The socket of IdentityAgent, which may be that of a variable."""
    if named == "SSH_AUTH_SOCK":
        return ""
    return os.environ.get(named[1:], NO_AGENT) if named.startswith("$") else named


def _expand(path: str, tokens: Mapping[str, str]) -> str:
    """A path with what its percent signs and ${variables} stand for, which `ssh -G` leaves as they are.

    Args:
        tokens: those that tell of the machine; what tells of this one is known here.
    """
    this_host = socket.gethostname()
    of_this_machine = {"%": "%", "d": str(Path.home()), "i": str(os.getuid()), "u": getpass.getuser()}
    known = {**of_this_machine, "l": this_host, "L": this_host.partition(".")[0], **tokens}
    with_variables = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), path)
    return re.sub("%(.)", lambda match: known.get(match[1], match[0]), with_variables)
