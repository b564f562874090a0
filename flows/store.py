"""Which folder keeps everything, where nobody says.

Not here: what lies in it (docs/run_directory.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

STORE_VARIABLE = "ROLLOUTS_STORE"
"""Names it for commands, and in what `rollouts up` serves for runs that are asked for without it."""


def with_store(settings: Any) -> Any:  # Any: what a form, a request or a program gives
    """The settings, and in them the store of this process where they name none."""
    if isinstance(settings, Mapping) and "store" not in settings and (store := os.environ.get(STORE_VARIABLE)):
        return {**settings, "store": store}
    return settings
