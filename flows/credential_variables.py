"""Which environment variables credentials may carry: keys, and nothing that changes which code a process runs.

The variables of a block become the environment of the processes that act for a run, and everybody that knows the
server's password may write blocks. PYTHONPATH, LD_PRELOAD or ROLLOUTS_TRUSTED_CODE there would run any code.

Not here: the blocks (credentials.py), the readers of the keys.
"""

from __future__ import annotations

import re

from rollouts_core.errors import ConfigError

KEY_SHAPE = re.compile(r"[A-Z][A-Z0-9_]*(KEY|KEY_ID|TOKEN|SECRET|PASSWORD|PASSPHRASE)")
CARRIED = {
    *("ROLLOUTS_SSH_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_REGION"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "WANDB_ENTITY", "WANDB_PROJECT"),
}
"""Variables that are carried although their names do not have the shape of a key's, or begin like one of OWNERS."""
OWNERS = (
    "ROLLOUTS_",
    "PREFECT_",
    "PYTHON",
    "LD_",
    "DYLD_",
    "GIT_",
    "SSH_",
    "PIP_",
    "UV_",
    "OPENSSL_",
    "NODE_",
    "GCONV",
)
"""Beginnings of names by which programs are steered, whatever follows."""


def check_carried(name: str, variable: str) -> None:
    """Raise ConfigError if the credentials of this name may not carry the variable."""
    if variable in CARRIED or (KEY_SHAPE.fullmatch(variable) and not variable.startswith(OWNERS)):
        return
    raise ConfigError(
        f"the credentials {name} may not carry {variable!r}: they hold keys, in variables whose names end in KEY, "
        "TOKEN, SECRET or PASSWORD (as JUDGE_KEY) and do not belong to Python, Prefect or rollouts: rename it, or "
        "export it where runs are served"
    )
