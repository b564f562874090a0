"""Restrict the variables in credentials to keys: a variable must not change which code a process runs.

Every user with the server's password may write credentials, and the processes of a run get their variables. PYTHONPATH,
LD_PRELOAD or ROLLOUTS_TRUSTED_CODE in credentials could run any code there.

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
"""Allowed variables whose names do not match KEY_SHAPE, or begin with one of OWNERS."""
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
"""Prefixes of variables that control programs. Variables with these prefixes are refused even if they match
KEY_SHAPE."""


def check_carried(name: str, variable: str) -> None:
    """Raise ConfigError if the credentials of this name may not carry the variable."""
    if variable in CARRIED or (KEY_SHAPE.fullmatch(variable) and not variable.startswith(OWNERS)):
        return
    raise ConfigError(
        f"the credentials {name} may not carry {variable!r}: they hold keys, in variables whose names end in KEY, "
        "TOKEN, SECRET or PASSWORD (as JUDGE_KEY) and do not belong to Python, Prefect or rollouts: rename it, or "
        "export it where runs are served"
    )
