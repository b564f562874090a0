"""Listen on a port, and raise PortInUseError if another process uses the port."""

from __future__ import annotations

import errno
import socket

from rollouts_core.errors import InputError

LISTEN_BACKLOG = 2048
"""Largest number of connections that may wait to be accepted."""


class PortInUseError(InputError):
    """Another process already listens on the port. The server process should end with exit code 2."""


def bind_port(host: str, port: int) -> socket.socket:
    """Create a listening socket. Connections wait in the socket's backlog until the server accepts them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise InputError(f"cannot listen on {host}:{port} ({error}): choose another address") from error
        raise PortInUseError(
            f"port {port} on {host} is in use by another process: stop that process or choose another port"
        ) from error
    # Accepted connections inherit TCP_NODELAY. asyncio sets this option only on sockets with an explicit protocol.
    # Without TCP_NODELAY, an answer's body would wait 40 ms for the client's delayed acknowledgement of the header.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
