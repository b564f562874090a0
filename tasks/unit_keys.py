"""The key between nodes of one unit if the settings name no key: one per store.

Not here: keys that the settings name, and which settings ask for one (rollouts_core/keys.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts.infra.secret_file import own_secret
from rollouts.tasks.records import RunScope
from rollouts_core.keys import OWN_KEY_VARIABLE, engine_key_variable

KEY_FILE = "unit-key"


def own_unit_key(store: Path) -> str:
    """The store's key for engines and trainers; made once, in a file that only its owner can read."""
    return own_secret(store / KEY_FILE, lambda: secrets.token_urlsafe(32))


def own_keys(job: Mapping[str, Any], scope: RunScope) -> dict[str, str]:  # Any: JSON
    """The variables of a job with their keys, which the user need not export."""
    is_own = engine_key_variable(job) == OWN_KEY_VARIABLE or job.get("further_trainers")
    return {OWN_KEY_VARIABLE: own_unit_key(Path(scope.store))} if is_own else {}
