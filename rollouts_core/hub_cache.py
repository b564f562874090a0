"""Where a job keeps what it downloads from the hub, on a machine where nobody has said so.

Not here: which models and datasets it downloads. A session of SSH has few variables, and the hub's own default is the
home directory, whose disk is often a small one beside the volume on which everything else of ours lies.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

FALLBACK = "ROLLOUTS_HUB_HOME"
"""The variable that names the folder to use where the machine has none of its own."""
_CHOSEN_BY = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")


def use_fallback(environment: MutableMapping[str, str]) -> None:
    """Set HF_HOME to the fallback, unless the machine's variables choose a folder, or the usual one holds models.

    Who has logged in to the hub on the machine stays so: the token is looked for where it was.
    """
    usual = Path(environment.get("HOME", "/nowhere"), ".cache", "huggingface")
    fallback = environment.get(FALLBACK, "")
    if not fallback or any(environment.get(name) for name in _CHOSEN_BY) or (usual / "hub").exists():
        return
    environment["HF_HOME"] = fallback
    environment.setdefault("HF_TOKEN_PATH", str(usual / "token"))
