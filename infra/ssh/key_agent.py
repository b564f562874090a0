"""List the keys of an SSH agent, and sign with them.

paramiko's own agent client is not used: it only knows SSH_AUTH_SOCK, fails at a comment that is not UTF-8, and signs
with another key than the certificate's. Not here: the choice of keys to offer (login_keys.py).
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import paramiko
from paramiko.agent import SSH2_AGENT_IDENTITIES_ANSWER, AgentKey, AgentSSH, cSSH2_AGENTC_REQUEST_IDENTITIES

from rollouts.infra.node import NO_AGENT

_CERTIFICATE = "-cert-v01@openssh.com"
_NUM_PUBLIC_FIELDS = {"ssh-ed25519": 1, "ssh-rsa": 2}
"""Number of fields of a public key; other types have two."""
LIST_TIMEOUT_S = 15.0
SIGNING_TIMEOUT_S = 60.0
"""A user may have to touch a security key or unlock a password manager."""

logger = logging.getLogger(__name__)


class SigningRefusedError(paramiko.SSHException):  # type: ignore[misc]  # paramiko has no types
    """The agent refuses to sign: it is locked, its user declined, or the key was removed."""

    def __init__(self, key: Any) -> None:  # Any: as above
        self.key = key
        super().__init__("the SSH agent refuses to sign")


class _Agent(AgentSSH):  # type: ignore[misc]  # as above
    def __init__(self, path: str) -> None:
        super().__init__()
        self._conn = socket.socket(socket.AF_UNIX)
        self._conn.settimeout(LIST_TIMEOUT_S)
        self._conn.connect(path)
        kind, answer = self._send_message(cSSH2_AGENTC_REQUEST_IDENTITIES)
        if kind != SSH2_AGENT_IDENTITIES_ANSWER:
            raise paramiko.SSHException("it does not list its keys")
        keys = []
        for _ in range(answer.get_int()):
            blob, _comment = answer.get_binary(), answer.get_binary()
            keys.append(KeyOfAgent(self, blob))
        self._keys = tuple(keys)
        self._conn.settimeout(None)


class KeyOfAgent(AgentKey):  # type: ignore[misc]  # as above
    """A key of the agent. The agent signs with it."""

    is_signing = False
    """Whether a signature was requested and not answered yet."""

    def __init__(self, agent: _Agent, blob: bytes) -> None:
        super().__init__(agent, blob)
        if self.name.endswith(_CERTIFICATE):
            self.inner_key = None  # otherwise paramiko offers the key without its certificate

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> bytes:
        self.is_signing = True
        try:
            return bytes(super().sign_ssh_data(data, algorithm))
        except paramiko.SSHException as error:
            raise SigningRefusedError(self) from error
        finally:
            self.is_signing = False


def agent_keys(place: str = "") -> list[Any]:  # Any: paramiko has no types
    """Return the agent's keys; empty if it breaks off, as a forwarded agent does after its other end is gone.

    Args:
        place: the agent's socket, or NO_AGENT; empty uses SSH_AUTH_SOCK.
    """
    path = place or os.environ.get("SSH_AUTH_SOCK", "")
    if not path or path == NO_AGENT:
        return []
    try:
        return list(_Agent(path).get_keys())
    except (FileNotFoundError, ConnectionRefusedError):
        return []  # the agent has ended
    except (paramiko.SSHException, OSError, EOFError) as error:
        logger.warning("ignored the SSH agent at %s: %s", path, error)
        return []


def public_half(key: Any) -> bytes:  # Any: paramiko has no types
    """Return the public key in the format of the SSH protocol; for a certificate, the key that it certifies."""
    if not key.get_name().endswith(_CERTIFICATE):
        return bytes(key.asbytes())
    certificate = paramiko.Message(key.asbytes())
    name = certificate.get_string().removesuffix(_CERTIFICATE.encode())
    certificate.get_string()  # the certificate's nonce
    alone = paramiko.Message()
    alone.add_string(name)
    for _ in range(_NUM_PUBLIC_FIELDS.get(name.decode(), 2)):
        alone.add_string(certificate.get_string())
    return bytes(alone.asbytes())
