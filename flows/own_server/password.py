"""The password of a store's Prefect server, generated once into a file that only the owner can read.

The password keeps other users of the machine, and web pages in the owner's browser, from starting runs. A configuration
names functions, so a user who can start runs can execute any program as the server's owner.

Not here: the server that requires the password (lend.py).
"""

import base64
import secrets
from pathlib import Path

from rollouts.infra.secret_file import own_secret

FILE_NAME = "password"
USER = "rollouts"
"""The user name before the colon of the password, so that `curl --user` accepts the password unchanged."""


def password_file(home: Path) -> Path:
    """The path of the password's file in the Prefect folder of a store."""
    return home / FILE_NAME


def own_password(home: Path) -> str:
    """Return the password, `rollouts:<token>`. The first call generates the password."""
    return own_secret(password_file(home), lambda: f"{USER}:{secrets.token_urlsafe(18)}")


def basic_authorization(password: str) -> str:
    """The value of the header `Authorization` that the server accepts."""
    return f"Basic {base64.b64encode(password.encode()).decode()}"
