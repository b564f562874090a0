"""The password of a store's Prefect server: made once, in a file that only its owner can read.

Not here: the server that asks for it (lend.py). A configuration names functions, so starting a run means running any
program as the owner of the server. Therefore other users of the machine, and web pages in the owner's browser, must not
be able to start runs.
"""

import base64
import secrets
from pathlib import Path

from rollouts.infra.secret_file import own_secret

FILE_NAME = "password"
USER = "rollouts"
"""The part before the colon, so that `curl --user` takes the string as it is."""


def password_file(home: Path) -> Path:
    """The password's file in Prefect's folder of a store."""
    return home / FILE_NAME


def own_password(home: Path) -> str:
    """Return the password, `rollouts:<token>`. The first call creates the password."""
    return own_secret(password_file(home), lambda: f"{USER}:{secrets.token_urlsafe(18)}")


def basic_authorization(password: str) -> str:
    """The value of the header `Authorization` that the server accepts."""
    return f"Basic {base64.b64encode(password.encode()).decode()}"
