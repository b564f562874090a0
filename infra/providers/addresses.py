"""Addresses as providers report them. They are accepted only if no program could misread them."""

import re
from urllib.parse import quote

from rollouts.infra.node import SSH_PORT

_HOST = re.compile(r"[A-Za-z0-9][\w.-]*|[0-9a-fA-F:.]+", re.ASCII)
_PORT = re.compile(r"\d{1,5}", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


def usable_host(host: str | None) -> str:
    """Return the host; empty if it is not a valid host name or address."""
    return host if host and _HOST.fullmatch(host) else ""


def usable_port(port: int | str | None) -> int:
    """Return the port, or SSH's default for anything that is not a port."""
    if not _PORT.fullmatch(str(port)):
        return SSH_PORT
    return int(str(port)) if int(str(port)) in range(1, 65536) else SSH_PORT


def usable_user(user: str | None, default: str) -> str:
    """Return the user for the login, or the default if the name is invalid."""
    return user if user and _USER.fullmatch(user) else default


def quoted(instance_id: str) -> str:
    """Return the id as one part of a path; dots are escaped, too, so that it cannot lead upwards."""
    return quote(instance_id, safe="").replace(".", "%2E")
