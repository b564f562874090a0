"""Answer HTTP and HTTPS at one listening socket: the first byte of a connection tells which one it is.

Clients of this project use HTTPS, by which the server proves itself (certificate.py). Browsers, which would warn of a
certificate that no authority has signed, use HTTP at the same port.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

BEGINS_TLS = b"\x16"
"""The first byte of every TLS connection. Every request in plain HTTP begins with a letter."""
PAUSE_S = 1.0
"""Pause after the system refused a connection, usually because this process has too many open files."""


async def accept_both(
    listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext
) -> None:
    """Accept connections of both kinds, until cancelled."""
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
    """Hand a connection to a protocol as soon as its first byte is there."""
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
    except OSError:  # a failed handshake, too
        connection.close()
