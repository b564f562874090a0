"""End a process when its parent is gone, for whatever reason, so that no process is left on a rented machine.

Run as a program, this file becomes another program with this property. It imports only the standard library, to start
quickly:

    python -I -S parent_death.py PARENT COMMAND...      PARENT: the process id of the parent
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
ORPHANED = 125
"""Exit code of a process whose parent died before the process could register."""
NO_PROGRAM = 127
"""Exit code if the command cannot be started, as in a shell."""


def die_with_parent(parent: int = 0) -> None:
    """Let the kernel kill this process when its parent is gone, for whatever reason (Linux only).

    Args:
        parent: the parent's process id, if the parent may already be gone.
    """
    if sys.platform == "linux":
        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(ORPHANED)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    try:
        os.execv(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.stderr.write(f"{sys.argv[2]}: {error.strerror}\n")
        sys.exit(NO_PROGRAM)
