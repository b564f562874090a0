"""Refuse a process without a home folder, because libraries would put their caches in a folder called `~`."""

from __future__ import annotations

import os

from rollouts_core.errors import ConfigError


def check_home() -> None:
    """Raise ConfigError if neither HOME nor the user database gives a home folder.

    Containers and schedulers may start processes this way, under a bare user number.
    """
    if os.path.expanduser("~") == "~":  # noqa: PTH111 - Path.home raises without a home
        raise ConfigError(
            f"HOME is not set, and user {os.getuid()} has no entry in the list of users: set HOME to a folder that the "
            "user may write, as `export HOME=/scratch/me`"
        )
