"""End a process when the one that started it is gone, however that ended: nothing is left running on a rented machine.

Run as a file it becomes another program that ends so. It imports nothing of ours, so that it starts at once:

    python -I -S parent_death.py PARENT COMMAND...      PARENT is the process id of who starts it
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
ORPHANED = 125
"""Exit code of a process whose parent died before it could ask to be told."""
NO_PROGRAM = 127
"""Exit code where the command cannot be run, as of a shell."""


def die_with_parent(parent: int = 0) -> None:
    """Let the kernel kill this process when the one that started it is gone, however that ended (Linux only).

    Args:
        parent: who started it, where it may be gone by now.
    """
    if sys.platform == "linux":
        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(ORPHANED)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    try:
        os.execv(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.stderr.write(f"{sys.argv[2]}: {error.strerror}\n")
        sys.exit(NO_PROGRAM)
