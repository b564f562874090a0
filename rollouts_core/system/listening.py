"""Listen on a port, or say which process should give the port up."""

from __future__ import annotations

import errno
import socket

from rollouts_core.errors import InputError

LISTEN_BACKLOG = 2048
"""Number of connections that wait to be accepted."""


class PortInUseError(InputError):
    """Another process already listens on the port. The server process should end with exit code 2."""


def bind_port(host: str, port: int) -> socket.socket:
    """Create a listening socket. Connections wait in its backlog until the server runs."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise InputError(f"cannot listen on {host}:{port} ({error}): choose another address") from error
        raise PortInUseError(
            f"port {port} on {host} is in use by another process: stop that process or choose another port"
        ) from error
    # Accepted connections inherit this option. asyncio sets it only on sockets with an explicit protocol. Without it,
    # an answer's body would wait 40 ms for the client's delayed acknowledgement of the header.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
