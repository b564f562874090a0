"""Look up a machine's SSH settings in OpenSSH's configuration with `ssh -G`.

    Host box                      box ──> HostName, Port, User, IdentityFile, IdentityAgent, ProxyJump,
        HostName 10.0.0.7                 HostKeyAlias, UserKnownHostsFile, GlobalKnownHostsFile

The lookup happens at a run's first login to the machine. A configured ProxyCommand raises an error, because this
program does not run it and the machine is unreachable without it. All other settings of OpenSSH are ignored.
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
from rollouts.infra.ssh.proxy_jump import PROGRAM

TIMEOUT_S = 15.0
"""Time limit of the lookup. The configuration may run commands (Match exec)."""
_USUAL_KEY = re.compile(r"~/\.ssh/id_(dsa|rsa|xmss|(ecdsa|ed25519)(_sk)?)")
"""Key files that OpenSSH lists if the configuration names no key."""

_FILES_OF_KEYS = ("userknownhostsfile", "globalknownhostsfile")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredHost:
    host: str
    port: int
    user: str
    key_files: tuple[str, ...]
    """Existing key files that the configuration names, in order. Without `key_files`, keys of the agent and of ~/.ssh
    are used."""
    known_hosts: tuple[str, ...]
    host_key_alias: str
    """The machine's name in known_hosts files. Without `host_key_alias`, the machine's address is used."""
    agent: str
    """The SSH agent's socket, or "none", or "" if the configuration names no agent."""
    proxy_jump: str
    """Jump hosts, separated by commas, or "" for a direct connection."""


def read_ssh_config(name: str, config: str) -> ConfiguredHost:
    """Return the SSH settings for a name. A name without an entry is used as the host name.

    Args:
        config: configuration file to read. Without `config`, ~/.ssh/config and the system's configuration are read.

    Raises:
        PermanentInfraError: the OpenSSH client is not installed, the client rejects its configuration, or the
            configuration sets a ProxyCommand.
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
        raise PermanentInfraError(f"node.host {name!r}: `{PROGRAM} -G {name}` failed: {said[0]}")
    settings: dict[str, list[str]] = {}
    for line in completed.stdout.splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key, []).append(value)
    if settings.get("proxycommand", ["none"]) != ["none"]:
        raise PermanentInfraError(
            f"node.host {name!r}: OpenSSH's configuration reaches it by a ProxyCommand, which is not supported: give "
            "the jump hosts as ProxyJump, or as node.proxy_jump"
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
        # A key that only the agent holds still has its public half in a .pub file.
        key_files=tuple(str(key) for key in keys if key.is_file() or Path(f"{key}.pub").is_file()),
        known_hosts=tuple(path for name in _FILES_OF_KEYS for path in settings.get(name, [""])[0].split()),
        host_key_alias=settings.get("hostkeyalias", [""])[0],
        agent=_read_agent(settings.get("identityagent", [""])[0]),
        proxy_jump="" if jump == "none" else jump,
    )


def _read_agent(named: str) -> str:
    """Return the socket that IdentityAgent names, directly or through an environment variable."""
    if named == "SSH_AUTH_SOCK":
        return ""
    return os.environ.get(named[1:], NO_AGENT) if named.startswith("$") else named


def _expand(path: str, tokens: Mapping[str, str]) -> str:
    """Expand the percent tokens (%h, %d, ...) and ${variables} of a path, which `ssh -G` leaves unexpanded.

    Args:
        tokens: values of the tokens for the remote machine. This function adds the tokens for the local machine.
    """
    this_host = socket.gethostname()
    of_this_machine = {"%": "%", "d": str(Path.home()), "i": str(os.getuid()), "u": getpass.getuser()}
    known = {**of_this_machine, "l": this_host, "L": this_host.partition(".")[0], **tokens}
    with_variables = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), path)
    return re.sub("%(.)", lambda match: known.get(match[1], match[0]), with_variables)
