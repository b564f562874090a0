"""Restrict the environment variables in credentials to keys and tokens, to prevent code injection.

Every user with the server's password may write credentials, and the processes of a run get these variables.
PYTHONPATH, LD_PRELOAD or ROLLOUTS_TRUSTED_CODE in credentials could make these processes run any code.

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
"""Prefixes of variables that control other programs. Variables with these prefixes are refused, even if they match
KEY_SHAPE."""


def check_carried(name: str, variable: str) -> None:
    """Raise ConfigError if credentials may not contain the variable.

    Args:
        name: name of the credentials, for the message.
        variable: name of the environment variable.
    """
    if variable in CARRIED or (KEY_SHAPE.fullmatch(variable) and not variable.startswith(OWNERS)):
        return
    raise ConfigError(
        f"the credentials {name} may not contain {variable!r}: expected a name that ends in KEY, TOKEN, SECRET or "
        "PASSWORD (as JUDGE_KEY) and does not belong to Python, Prefect or rollouts: rename it, or export it in the "
        "environment of rollouts up"
    )
