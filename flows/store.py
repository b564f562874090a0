"""Which folder keeps everything, where nobody says.

Not here: what lies in it (docs/run_directory.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STORE_VARIABLE = "ROLLOUTS_STORE"
"""Names it for commands, and in what `rollouts up` serves for runs that are asked for without it."""


def with_store(settings: Any) -> Any:  # Any: what a form, a request or a program gives
    """The settings with the store of this process, where they name none, or the field of a form was emptied."""
    if not isinstance(settings, Mapping):
        return settings
    store = settings.get("store")
    if store in (None, ""):
        store = os.environ.get(STORE_VARIABLE)
    others = {name: value for name, value in settings.items() if name != "store"}
    if isinstance(store, str) and store.startswith("~"):
        store = str(from_home(Path(store)))
    return {**others, "store": store} if store else others


def from_home(path: Path | None) -> Path | None:
    """The path with a ~ at its beginning made the home folder, which shells do not in --store=~/runs."""
    try:
        return path and path.expanduser()
    except RuntimeError:  # of somebody whom this machine does not know
        return path
