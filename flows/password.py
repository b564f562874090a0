"""The password of a store's Prefect server: made once, in a file that only its owner can read.

Not here: the server that asks for it (server.py). Whoever may start a run may run any program as the owner of the
server, because a configuration names functions; so other users of the machine, and web pages in the owner's browser,
must not be able to.
"""

import base64
import os
import secrets
from pathlib import Path

FILE_NAME = "password"
USER = "rollouts"
"""What stands before the colon, so that `curl --user` takes the string as it is."""


def password_file(home: Path) -> Path:
    """Where the password lies in Prefect's folder of a store."""
    return home / FILE_NAME


def own_password(home: Path) -> str:
    """Return the password, `rollouts:<token>`, after making one where there is none."""
    path = password_file(home)
    if (known := read_password(home)) is not None:
        return known
    partial = home / f"{FILE_NAME}.{os.getpid()}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{USER}:{secrets.token_urlsafe(18)}")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(partial, path)  # of two processes that make one at once, the first one counts
    except FileExistsError:
        if read_password(home) is None:  # it is empty: written when the disk was full
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    made = read_password(home)
    assert made is not None, f"{path} was just written"
    return made


def read_password(home: Path) -> str | None:
    """Return the password of a server that was started once; None where there is none."""
    try:
        return password_file(home).read_text().strip() or None
    except FileNotFoundError:
        return None


def basic_authorization(password: str) -> str:
    """The value of the header `Authorization` that the server accepts."""
    return f"Basic {base64.b64encode(password.encode()).decode()}"
