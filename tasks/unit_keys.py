"""The API key that engines and trainers on several machines require of each other if the settings name no key.

Each store has one such key. Not here: keys that the settings name, and when a key is required (rollouts_core/keys.py).
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
    """The store's API key for engines and trainers. The first call creates the key in a file that only its owner can
    read."""
    return own_secret(store / KEY_FILE, lambda: secrets.token_urlsafe(32))


def own_keys(job: Mapping[str, Any], scope: RunScope) -> dict[str, str]:  # Any: JSON
    """The environment variable with the store's API key, for the job's process. Empty if the job needs no such key."""
    is_own = engine_key_variable(job) == OWN_KEY_VARIABLE or job.get("further_trainers")
    return {OWN_KEY_VARIABLE: own_unit_key(Path(scope.store))} if is_own else {}
