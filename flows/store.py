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
    """The settings with the store of this process, where they name none, or the field of a form was emptied."""
    if not isinstance(settings, Mapping) or settings.get("store") not in (None, ""):
        return settings
    others = {name: value for name, value in settings.items() if name != "store"}
    store = os.environ.get(STORE_VARIABLE)
    return {**others, "store": store} if store else others
