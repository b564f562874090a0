"""Ask the SSH agent for its keys, and have it sign with them: one that the environment names, or another socket.

Not here: which of them a machine is offered (login_keys.py). paramiko's own client of agents knows no other socket,
fails at a comment that is not UTF-8, and has the agent sign with another key than the certificate that it has.
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
"""Of how many fields the public half of a key consists; that of others of two."""
LIST_TIMEOUT_S = 15.0
SIGNING_TIMEOUT_S = 60.0
"""A person may have to touch a key, or to open a password manager."""

logger = logging.getLogger(__name__)


class SigningRefusedError(paramiko.SSHException):  # type: ignore[misc]  # paramiko has no types
    """The agent does not sign with a key: it is locked, asks a person who says no, or the key is not there any more."""

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
            raise paramiko.SSHException("it does not say which keys it has")
        keys = []
        for _ in range(answer.get_int()):
            blob, _comment = answer.get_binary(), answer.get_binary()
            keys.append(KeyOfAgent(self, blob))
        self._keys = tuple(keys)
        self._conn.settimeout(None)


class KeyOfAgent(AgentKey):  # type: ignore[misc]  # as above
    """A key that signs where it lies."""

    is_signing = False
    """Whether the agent has been asked, and has not answered yet."""

    def __init__(self, agent: _Agent, blob: bytes) -> None:
        super().__init__(agent, blob)
        if self.name.endswith(_CERTIFICATE):
            self.inner_key = None  # the key without the certificate, which would be offered in its place

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> bytes:
        self.is_signing = True
        try:
            return bytes(super().sign_ssh_data(data, algorithm))
        except paramiko.SSHException as error:
            raise SigningRefusedError(self) from error
        finally:
            self.is_signing = False


def agent_keys(place: str = "") -> list[Any]:  # Any: paramiko has no types
    """The keys that the agent has; none where it breaks off, as a forwarded one does whose other end is gone.

    Args:
        place: its socket, or NO_AGENT; empty takes that of SSH_AUTH_SOCK.
    """
    path = place or os.environ.get("SSH_AUTH_SOCK", "")
    if not path or path == NO_AGENT:
        return []
    try:
        return list(_Agent(path).get_keys())
    except (FileNotFoundError, ConnectionRefusedError):
        return []  # it has ended
    except (paramiko.SSHException, OSError, EOFError) as error:
        logger.warning("went on without the SSH agent at %s: %s", path, error)
        return []


def public_half(key: Any) -> bytes:  # Any: paramiko has no types
    """The key as the protocol sends it; of a certificate the key that it is for."""
    if not key.get_name().endswith(_CERTIFICATE):
        return bytes(key.asbytes())
    certificate = paramiko.Message(key.asbytes())
    name = certificate.get_string().removesuffix(_CERTIFICATE.encode())
    certificate.get_string()  # a random number
    alone = paramiko.Message()
    alone.add_string(name)
    for _ in range(_NUM_PUBLIC_FIELDS.get(name.decode(), 2)):
        alone.add_string(certificate.get_string())
    return bytes(alone.asbytes())
