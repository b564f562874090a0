"""Choose the folder for downloads from the hub on a machine without a setting for it.

An SSH session has few variables, and the hub's default is the home directory. On rented machines the home directory's
disk is often small, but the volume with this project's files is large.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

FALLBACK = "ROLLOUTS_HUB_HOME"
"""Variable with the folder to use if no other variable of the machine names a folder."""
_CHOSEN_BY = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")


def use_fallback(environment: MutableMapping[str, str]) -> None:
    """Set HF_HOME to the fallback folder unless a variable chooses a folder or the usual folder holds models.

    A login to the hub on this machine stays valid: the token's usual path is kept.
    """
    usual = Path(environment.get("HOME", "/nowhere"), ".cache", "huggingface")
    fallback = environment.get(FALLBACK, "")
    if not fallback or any(environment.get(name) for name in _CHOSEN_BY) or (usual / "hub").exists():
        return
    environment["HF_HOME"] = fallback
    environment.setdefault("HF_TOKEN_PATH", str(usual / "token"))
