"""Addresses as providers give them: believed only when no program could misread them.

Not here: the settings' own addresses (infra/node.py).
"""

import re
from urllib.parse import quote

from rollouts.infra.node import SSH_PORT

_HOST = re.compile(r"[A-Za-z0-9][\w.-]*|[0-9a-fA-F:.]+", re.ASCII)
_PORT = re.compile(r"\d{1,5}", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


def usable_host(host: str | None) -> str:
    """The host, or nothing where it is none that could be reached."""
    return host if host and _HOST.fullmatch(host) else ""


def usable_port(port: int | str | None) -> int:
    """The port, or SSH's own."""
    if not _PORT.fullmatch(str(port)):
        return SSH_PORT
    return int(str(port)) if int(str(port)) in range(1, 65536) else SSH_PORT


def usable_user(user: str | None, default: str) -> str:
    """The name to log in with."""
    return user if user and _USER.fullmatch(user) else default


def quoted(instance_id: str) -> str:
    """The id as one part of a path, whatever is in it, also where that leads upwards."""
    return quote(instance_id, safe="").replace(".", "%2E")
