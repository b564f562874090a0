"""How what a test starts ends with the test, also where that was killed and no fixture ends it."""

from __future__ import annotations

import shutil


def dies_with_us(by: str = "KILL") -> list[str]:
    """What to put before a command that gets this signal when the thread that starts it is gone; Linux only."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", by] if setpriv else []
