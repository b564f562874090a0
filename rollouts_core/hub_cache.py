"""Choose a folder for downloads from the Hugging Face hub if no variable of the machine names a folder.

The hub's default is a folder in the home directory. On rented machines, the disk of the home directory is often small,
but the volume with this project's files is large. An SSH session has few environment variables, so a variable of the
image may not be set.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

FALLBACK = "ROLLOUTS_HUB_HOME"
"""Environment variable with the folder for downloads that is used if no other variable names a folder."""
_CHOSEN_BY = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")


def use_fallback(environment: MutableMapping[str, str]) -> None:
    """Set HF_HOME to the fallback folder, unless a variable names a folder or the default folder already contains
    models.

    The token stays at its default path, so a login to the hub on this machine stays valid.
    """
    usual = Path(environment.get("HOME", "/nowhere"), ".cache", "huggingface")
    fallback = environment.get(FALLBACK, "")
    if not fallback or any(environment.get(name) for name in _CHOSEN_BY) or (usual / "hub").exists():
        return
    environment["HF_HOME"] = fallback
    environment.setdefault("HF_TOKEN_PATH", str(usual / "token"))
