"""Decide whether a host's key is right, before the connection is used.

The strongest kind of evidence that is available decides. The kinds of evidence, from the strongest to the weakest:

    pinned            the key's fingerprint is known: from the settings, or stored by an earlier login
      injected        the fingerprint is known because this program put the key on the machine at its creation
      provider        the fingerprint is known because the provider reported it over a separate connection
    known_hosts       a known_hosts file of the user or of this program has a key for this host
    first_use         the host is unknown, and the settings allow to accept and store its first key

Not here: connections (connection.py).
"""

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rollouts.infra.errors import HostKeyError, PermanentInfraError
from rollouts.infra.node import SSH_PORT
from rollouts.infra.offers import HostKeyPair
from rollouts.infra.regular_file import read_text


class HostKeyEvidence(StrEnum):
    PINNED = "pinned"
    INJECTED = "injected"
    PROVIDER = "provider"
    KNOWN_HOSTS = "known_hosts"
    FIRST_USE = "first_use"


@dataclass(frozen=True, slots=True)
class HostKey:
    type: str
    """The key's type, for example ssh-ed25519."""
    blob: bytes
    """The key's bytes in the format of the SSH protocol."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint in the format of `ssh-keygen -l`: SHA256:..."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKeyPolicy:
    """The known keys of one host, and the rules for accepting its key."""

    host: str
    port: int
    alias: str = ""
    """The host's name in known_hosts files, independent of its address. Without `alias`, the host's address is used."""
    pinned: str
    """The required fingerprint, or "" if no fingerprint is known."""
    known_hosts: tuple[Path, ...]
    """Files in OpenSSH's format. Missing files are ignored."""
    first_use_file: Path | None
    """File that stores a key accepted at the first login. Without `first_use_file`, unknown hosts are refused."""
    pinned_file: Path | None = None
    """File that stores a key after a match with `pinned`, so that later logins know the key's type. Without
    `pinned_file`, `first_use_file` is used."""
    likely_type: str = ""
    """Type of the host's key in an earlier connection, or "" before the first connection."""

    @property
    def address(self) -> str:
        if self.alias:
            return self.alias
        return self.host if self.port == SSH_PORT else f"[{self.host}]:{self.port}"

    def known_keys(self) -> list[HostKey]:
        """Return this host's keys from the known_hosts files.

        Raises:
            PermanentInfraError: a file cannot be read.
        """
        return [key for marker, key in self._entries() if marker == ""]

    def likely_types(self, usable: Sequence[str]) -> tuple[str, ...]:
        """Return the types of the host's known keys that are in `usable`, or an empty tuple if no key is known.

        Raises:
            PermanentInfraError: a file cannot be read.
        """
        if self.likely_type in usable:
            return (self.likely_type,)
        known = self.known_keys()
        fitting = [key for key in known if not self.pinned or key.fingerprint == self.pinned]
        return tuple(dict.fromkeys(key.type for key in fitting if key.type in usable))

    def check(self, shown: HostKey) -> HostKeyEvidence:
        """Return the evidence for accepting the key. Stores the key unless a known_hosts file already has it.

        Raises:
            HostKeyError: the key is not accepted. The error's text says what to do.
        """
        if any(key == shown for marker, key in self._entries() if marker == "@revoked"):
            raise HostKeyError(self.address, shown.fingerprint, "that key is marked as @revoked in known_hosts")
        if self.pinned:
            if hmac.compare_digest(self.pinned.encode(), shown.fingerprint.encode()):
                noted_in = self.pinned_file or self.first_use_file
                if noted_in is not None and shown not in self.known_keys():
                    with suppress(OSError):  # without the stored key, later logins only need more connections
                        self._remember(shown, noted_in)
                return HostKeyEvidence.PINNED
            raise HostKeyError(
                self.address,
                shown.fingerprint,
                f"expected is {self.pinned}, which the settings name, an earlier login stored, the machine was created "
                "with or its provider reported: another machine may be answering; give another node.host_key, or rent "
                'with node.host_keys = "first_use", only if you know why the key is new',
            )
        if known := self.known_keys():
            if any(hmac.compare_digest(key.blob, shown.blob) for key in known):
                return HostKeyEvidence.KNOWN_HOSTS
            names = " and ".join(str(path) for path in self.known_hosts if path.exists())
            raise HostKeyError(
                self.address,
                shown.fingerprint,
                f"{names} has another one: another machine may be answering; if the host was set up anew, remove its "
                f"line by `ssh-keygen -R '{self.address}'`",
            )
        if self.first_use_file is None:
            raise HostKeyError(
                self.address,
                shown.fingerprint,
                "that key is unconfirmed: run `ssh-keygen -lf` on the host, compare, then set node.host_key",
            )
        self._remember(shown, self.first_use_file)
        return HostKeyEvidence.FIRST_USE

    def _entries(self) -> Iterator[tuple[str, HostKey]]:
        for path in self.known_hosts:
            if path == Path(os.devnull):  # OpenSSH uses this path to say "no file"
                continue
            try:
                text = read_text(path, errors="replace")
            except FileNotFoundError:
                continue
            except OSError as error:
                raise PermanentInfraError(f"{path} cannot be read: {error.strerror}") from error
            yield from parse_known_hosts(text, self.address)

    def _remember(self, key: HostKey, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        line = f"{self.address} {key.type} {base64.b64encode(key.blob).decode()}\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, line.encode())  # a single write does not mix with lines of other processes
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_host_key() -> HostKeyPair:
    """Create a new host key for a machine that is about to be created."""
    from cryptography.hazmat.primitives import serialization as formats  # a late import, because only renting needs it
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(formats.Encoding.PEM, formats.PrivateFormat.OpenSSH, formats.NoEncryption())
    public = key.public_key().public_bytes(formats.Encoding.OpenSSH, formats.PublicFormat.OpenSSH)
    return HostKeyPair(private=private.decode(), public=public.decode())


def fingerprint_of(public: str) -> str:
    """Return the fingerprint of a public key given as a line of authorized_keys."""
    key_type, blob = public.split()[:2]
    return HostKey(key_type, base64.b64decode(blob)).fingerprint


def noted_fingerprint(path: Path) -> str:
    """Return the fingerprint of the latest key in a machine's known_hosts file, or "" if the file has no key."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return fingerprint_of(lines[-1].partition(" ")[2]) if lines else ""


def parse_known_hosts(text: str, address: str) -> Iterator[tuple[str, HostKey]]:
    """Yield the marker ("" or "@revoked") and the key of every known_hosts line that names this host."""
    for line in text.splitlines():
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) < 3 or fields[0].startswith("#") or marker not in ("", "@revoked"):
            continue
        names, key_type, encoded = fields[:3]
        if not _names_match(names.split(","), address):
            continue
        try:
            yield marker, HostKey(key_type, base64.b64decode(encoded, validate=True))
        except binascii.Error:
            continue


def _names_match(names: Sequence[str], address: str) -> bool:
    """Whether one of a line's names matches the host. Names may be hashed, contain * and ?, or exclude a host by !."""
    if any(name.startswith("!") and _name_matches(name[1:], address) for name in names):
        return False
    return any(_name_matches(name, address) for name in names)


def _name_matches(name: str, address: str) -> bool:
    if name.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in name.split("|")[2:4])
        except (ValueError, binascii.Error):
            return False
        return hmac.compare_digest(hmac.digest(salt, address.lower().encode(), "sha1"), digest)
    # Brackets are a part of the address, but fnmatch would read them as a character set.
    return fnmatch.fnmatchcase(address.lower(), name.lower().replace("[", "[[]"))
