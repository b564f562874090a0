"""HTTPS for a store's Prefect server: its certificate, and one socket that accepts both HTTP and HTTPS.

After a server was killed, another program may listen on its port. Therefore clients connect by TLS and accept only the
store's certificate, before they send the password. The certificate's private key is in a file that only the owner of
the store can read. Browsers would warn about a self-signed certificate, so they use HTTP at the same port. The first
byte of a connection shows its protocol.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rollouts.infra.secret_file import own_secret

HOST = "127.0.0.1"
"""The IP address at which a store's own server listens."""
FILE_NAME = "certificate.pem"
VALID_FROM = datetime(2020, 1, 1, tzinfo=UTC)
"""Start of the certificate's validity: a date in the past, because the machine's clock may be wrong."""
VALID_FOR = timedelta(days=365 * 80)


def certificate_file(home: Path) -> Path:
    """The path of the file with the certificate and its private key, in the Prefect folder of a store."""
    return home / FILE_NAME


def own_certificate(home: Path) -> Path:
    """Return the path of the store's certificate. The first call generates the certificate."""
    path = certificate_file(home)
    own_secret(path, _make_certificate)
    return path


def server_context(home: Path) -> ssl.SSLContext:
    """The TLS settings of the server of a store."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own_certificate(home))
    return context


def client_context(certificate: Path) -> ssl.SSLContext:
    """The TLS settings of a client that accepts only this certificate."""
    return ssl.create_default_context(cafile=certificate)


def _make_certificate() -> str:
    """A private key and a self-signed certificate for this machine, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rollouts: Prefect server of a store")])
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
    )
    # Python 3.13 requires all these extensions in a self-signed certificate.
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), False),
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (
            x509.KeyUsage(
                digital_signature=True, key_cert_sign=True, encipher_only=False, decipher_only=False, **usage
            ),
            True,
        ),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False),
    ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_FROM + VALID_FOR)
    )
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, critical=is_critical)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (private + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)).decode()


BEGINS_TLS = b"\x16"
"""The first byte of every TLS connection. An HTTP request begins with a letter instead."""
PAUSE_S = 1.0
"""Pause after `accept` failed, usually because this process has too many open files."""


async def accept_both(
    listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext
) -> None:
    """Accept HTTP and HTTPS connections until cancelled."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    beginning: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            task = asyncio.create_task(_begin(connection, make_protocol, tls))
            beginning.add(task)
            task.add_done_callback(beginning.discard)
    finally:
        for task in beginning:
            task.cancel()


async def _begin(connection: socket.socket, make_protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext) -> None:
    """Wait for the first byte of a connection, then connect a protocol object to it, with or without TLS."""
    loop = asyncio.get_running_loop()
    has_begun = asyncio.Event()
    loop.add_reader(connection, has_begun.set)
    try:
        await has_begun.wait()
        is_tls = connection.recv(1, socket.MSG_PEEK) == BEGINS_TLS
    except (OSError, asyncio.CancelledError):
        loop.remove_reader(connection)
        connection.close()
        return
    loop.remove_reader(connection)
    try:
        await loop.connect_accepted_socket(make_protocol, connection, ssl=tls if is_tls else None)
    except OSError:  # for example, the TLS handshake failed
        connection.close()
