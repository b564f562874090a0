"""Refuse a process without a home folder: libraries would keep their caches in a folder called `~`."""

from __future__ import annotations

import os

from rollouts_core.errors import ConfigError


def check_home() -> None:
    """Raise ConfigError if neither HOME nor the list of users names a home folder.

    Containers and schedulers start processes so, with a number as the user.
    """
    if os.path.expanduser("~") == "~":  # noqa: PTH111 - Path's raises where there is no home
        raise ConfigError(
            f"HOME is not set, and user {os.getuid()} has no entry in the list of users: set HOME to a folder that the "
            "user may write, as `export HOME=/scratch/me`"
        )
