"""Reject a process without a home folder, because libraries would write their caches into a folder named `~`."""

from __future__ import annotations

import os

from rollouts_core.errors import ConfigError


def check_home() -> None:
    """Raise ConfigError if neither HOME nor the system's list of users gives a home folder.

    Some containers and schedulers start processes under a user id that is not in the list of users.
    """
    if os.path.expanduser("~") == "~":  # noqa: PTH111 - Path.home raises without a home
        raise ConfigError(
            f"HOME is not set, and user {os.getuid()} has no entry in the list of users: set HOME to a folder that the "
            "user may write to, for example `export HOME=/scratch/me`"
        )
