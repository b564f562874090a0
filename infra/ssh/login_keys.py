"""Find the keys for the login on a machine: in a file, in an environment variable, or in the SSH agent.

paramiko's own agent client is not used, for three reasons: it knows only SSH_AUTH_SOCK, fails at a key comment that is
not UTF-8, and signs with a wrong key for a certificate.

Not here: the login (connection.py), keys of machines (host_keys.py).
"""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import logging
import os
import re
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import SSH2_AGENT_IDENTITIES_ANSWER, AgentKey, AgentSSH, cSSH2_AGENTC_REQUEST_IDENTITIES

from rollouts.infra.errors import LoginError, PermanentInfraError
from rollouts.infra.node import NO_AGENT, SSHAccess
from rollouts.infra.regular_file import read_bytes, read_text

# ── keys of an SSH agent ──


_CERTIFICATE = "-cert-v01@openssh.com"
_NUM_PUBLIC_FIELDS = {"ssh-ed25519": 1, "ssh-rsa": 2}
"""Number of fields in a public key, by key type. Key types that are not listed have two fields."""
LIST_TIMEOUT_S = 15.0
SIGNING_TIMEOUT_S = 60.0
"""Seconds to wait for a signature. The user may have to touch a security key or unlock a password manager."""

logger = logging.getLogger(__name__)


class SigningRefusedError(paramiko.SSHException):  # type: ignore[misc]  # paramiko has no types
    """The agent refuses to sign because it is locked, its user declined, or the key was removed."""

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
    """A key of the agent. The agent signs with this key; the private key stays in the agent."""

    is_signing = False
    """Whether a signature was requested and the agent has not answered yet."""

    def __init__(self, agent: _Agent, blob: bytes) -> None:
        super().__init__(agent, blob)
        if self.name.endswith(_CERTIFICATE):
            self.inner_key = None  # if set, paramiko would offer the key without its certificate

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> bytes:
        self.is_signing = True
        try:
            return bytes(super().sign_ssh_data(data, algorithm))
        except paramiko.SSHException as error:
            raise SigningRefusedError(self) from error
        finally:
            self.is_signing = False


def _agent_keys(place: str = "") -> list[Any]:  # Any: paramiko has no types
    """Return the agent's keys, or an empty list if there is no agent or the agent fails, for example a forwarded agent
    that is gone.

    Args:
        place: the agent's socket, or NO_AGENT. Without `place`, SSH_AUTH_SOCK is used.
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
    """Return the public key in the format of the SSH protocol. For a certificate, return the certified key."""
    if not key.get_name().endswith(_CERTIFICATE):
        return bytes(key.asbytes())
    certificate = paramiko.Message(key.asbytes())
    name = certificate.get_string().removesuffix(_CERTIFICATE.encode())
    certificate.get_string()  # skip the certificate's nonce
    alone = paramiko.Message()
    alone.add_string(name)
    for _ in range(_NUM_PUBLIC_FIELDS.get(name.decode(), 2)):
        alone.add_string(certificate.get_string())
    return bytes(alone.asbytes())


_DEFAULT_KEY_FILES = ("id_ed25519", "id_ecdsa", "id_rsa")
_KEY_TYPES = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)
_PEM = re.compile(r"-----BEGIN (?P<label>[A-Z ]*PRIVATE KEY)-----(?P<body>.*?)-----END (?P=label)-----", re.DOTALL)
_PEM_WIDTH = 64
_PUBLIC = ("ssh-", "ecdsa-", "sk-")
"""Possible beginnings of a public key's file."""
_OPENSSH_MAGIC = b"openssh-key-v1\0"


@dataclass(frozen=True, slots=True)
class LoginKey:
    key: Any  # paramiko has no types
    file: str = ""
    """File of the unencrypted private key, or "" for a key of the agent or of an environment variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginKeys:
    """Keys to offer at the login, in this order."""

    keys: tuple[LoginKey, ...]
    left_out: tuple[str, ...] = ()
    """One sentence for each existing key that is unusable, with the reason."""

    def without(self, key: Any, reason: str) -> LoginKeys:  # Any: paramiko has no types
        return LoginKeys(
            keys=tuple(each for each in self.keys if each.key is not key), left_out=(*self.left_out, reason)
        )


def load_keys(access: SSHAccess) -> LoginKeys:
    """Return the keys for the login: the key that the settings name, or else the keys of the agent and of ~/.ssh.

    If there are several key files, unusable ones are skipped, as OpenSSH does.

    Raises:
        LoginError: the key of the settings is unusable, or there is no key.
    """
    if access.key_variable:
        try:
            return LoginKeys(keys=(LoginKey(read_key_variable(access.key_variable)),))
        except PermanentInfraError as error:
            raise LoginError(access.address, str(error)) from error
    of_agent = _agent_keys(access.agent)
    if access.key_file:
        files = [Path(each).expanduser() for each in (access.key_file, *access.further_key_files)]
        keys = []
    else:
        files = [path for name in _DEFAULT_KEY_FILES if (path := Path.home() / ".ssh" / name).is_file()]
        keys = [LoginKey(key) for key in of_agent]
    refusals = []
    for path in files:
        try:
            keys += _load_key(path, access.address, of_agent)
        except LoginError as error:
            refusals.append(error)
    if not keys and refusals:
        raise refusals[0]
    if not keys:
        raise LoginError(access.address, "the agent and ~/.ssh have no key: name one as node.key_file")
    return LoginKeys(keys=tuple(keys), left_out=tuple(each.problem for each in refusals))


def read_key_variable(variable: str) -> Any:  # Any: paramiko has no types
    """Read a private key from an environment variable.

    Raises:
        PermanentInfraError: the variable holds no usable key. The error's text does not contain the variable's value.
    """
    text = os.environ.get(variable, "")
    if not text:
        raise PermanentInfraError(
            f"node.key_variable {variable} is not set: export it with the private key before the run starts, or save "
            "the key in the credentials of run.credentials"
        )
    pem = _restore_lines(text)
    for key_type in _KEY_TYPES:
        try:
            return key_type.from_private_key(io.StringIO(pem))
        except paramiko.PasswordRequiredException as error:
            raise PermanentInfraError(
                f"the key in {variable} is encrypted: use one without passphrase, or the SSH agent"
            ) from error
        except (paramiko.SSHException, ValueError, TypeError):
            continue  # try the next type of key
    raise PermanentInfraError(
        f"{variable} does not contain a usable private key: expected the text that `ssh-keygen -t ed25519` writes, "
        "from -----BEGIN to END-----"
    )


def require_login_key(*, key_file: str, key_variable: str) -> None:
    """Check that the private key of the settings is usable, before a machine is rented.

    Raises:
        PermanentInfraError: the key is unusable.
    """
    if key_variable:
        read_key_variable(key_variable)
    else:
        _load_key(Path(key_file).expanduser(), "a machine that is not rented yet", _agent_keys())


def read_public_key(*, key_file: str, key_variable: str) -> str:
    """Return the public half of the settings' key as a line of authorized_keys.

    Raises:
        PermanentInfraError: the public key cannot be read.
    """
    if key_variable:
        key = read_key_variable(key_variable)
        return f"{key.get_name()} {key.get_base64()}"
    path = Path(f"{key_file}.pub").expanduser()
    try:
        words = read_text(path, errors="replace").split()  # the key's comment may have any encoding
    except OSError as error:
        raise PermanentInfraError(
            f"the public key {path} cannot be read ({error}): make a key by `ssh-keygen -t ed25519`, or name "
            "another as node.key_file"
        ) from error
    if len(words) < 2 or not words[0].startswith(_PUBLIC):
        raise PermanentInfraError(f"{path} is not a public key of OpenSSH: name another key as node.key_file")
    return " ".join(words[:2])


def _restore_lines(text: str) -> str:
    """Restore the line breaks of a private key. One-line input fields and some secret stores remove line breaks."""
    match = _PEM.search(text.replace("\\n", "\n"))
    if match is None or "Proc-Type" in match["body"]:  # the headers of old encrypted keys need their line breaks
        return text
    body = "".join(match["body"].split())
    lines = [body[start : start + _PEM_WIDTH] for start in range(0, len(body), _PEM_WIDTH)]
    return "\n".join([f"-----BEGIN {match['label']}-----", *lines, f"-----END {match['label']}-----", ""])


def _load_key(path: Path, address: str, of_agent: Sequence[Any]) -> list[LoginKey]:  # Any: paramiko has no types
    """Load the private key of a file. If the file has no usable private key, return the agent's copy of the key.

    If a certificate lies next to the key, the key is offered first with the certificate and then alone. The certificate
    may have expired or be meant for other machines.
    """
    try:
        key = _read_key(path, address)
        alone = copy.copy(key)
        alone.public_blob = None
        return [LoginKey(each, str(path)) for each in ([key, alone] if key.public_blob else [key])]
    except LoginError:
        public = _read_public_blob(path)
        copies = [LoginKey(key) for key in of_agent if public_half(key) == public]
        if not copies:
            raise
        return copies


def _read_key(path: Path, address: str) -> Any:  # Any: paramiko has no types
    try:
        if read_bytes(path).startswith(tuple(each.encode() for each in _PUBLIC)):
            raise LoginError(
                address,
                f"{path} is a public key, and the SSH agent does not have the private one: give it to the agent by "
                "`ssh-add`, or name the private key",
            )
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise LoginError(address, f"other users may read the key {path} (mode {mode:04o}): chmod 600 it")
        return paramiko.PKey.from_path(path)
    except (TypeError, paramiko.PasswordRequiredException) as error:  # the key is encrypted
        raise LoginError(address, f"the key {path} is encrypted: give it to the agent by `ssh-add {path}`") from error
    except OSError as error:
        raise LoginError(address, f"the key {path} cannot be read: {error.strerror}") from error
    except (UnsupportedAlgorithm, paramiko.UnknownKeyType) as error:  # a security key, or an obsolete type
        raise LoginError(
            address,
            f"{path} has an unsupported type of key: make one by `ssh-keygen -t ed25519`, or let the SSH "
            f"agent use it (`ssh-add {path}`)",
        ) from error
    except (ValueError, paramiko.SSHException) as error:
        reason = str(error).strip() or type(error).__name__
        raise LoginError(address, f"{path} is not a usable private key: {reason}") from error


def _read_public_blob(path: Path) -> bytes | None:
    """Return the public half of a key, from the key's file or from the `.pub` file next to it, or None if neither file
    has a public half."""
    for each in (path, Path(f"{path}.pub")):
        with contextlib.suppress(OSError, ValueError):  # ValueError: the text is not base64
            text = read_text(each, errors="replace")
            words = text.split()
            if len(words) > 1 and words[0].startswith(_PUBLIC):
                return base64.b64decode(words[1])
            pem = _PEM.search(text)
            content = base64.b64decode(pem["body"]) if pem else b""
            if content.startswith(_OPENSSH_MAGIC):
                head = paramiko.Message(content[len(_OPENSSH_MAGIC) :])
                for _ in ("cipher", "derivation of its key", "options of that"):
                    head.get_binary()
                head.get_int()  # skip the number of keys, which is always one
                return bytes(head.get_binary())
    return None
