"""A secret of a store: made once, in a file that only its owner can read.

Not here: what it opens.
"""

import os
from collections.abc import Callable
from pathlib import Path


def own_secret(path: Path, make: Callable[[], str]) -> str:
    """Return what the file holds, after writing what `make` returns where there is none."""
    if (known := read_secret(path)) is not None:
        return known
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(make())
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(partial, path)  # of two processes that make one at once, the first one counts
    except FileExistsError:
        if read_secret(path) is None:  # it is empty: written when the disk was full
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    made = read_secret(path)
    assert made is not None, f"{path} was just written"
    return made


def read_secret(path: Path) -> str | None:
    """Return what the file holds; None where there is none, or nothing in it."""
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
