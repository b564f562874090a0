"""Kill a process as soon as its parent process ends, so that no process is left over on a machine.

Run as a program, this file replaces itself by COMMAND, which the kernel also kills when its parent ends. The file
imports only the standard library, so that the program starts quickly:

    python -I -S parent_death.py PARENT COMMAND...      PARENT: the process id of the parent
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
ORPHANED = 125
"""Exit code if the parent process had already ended when this process started to watch it."""
NO_PROGRAM = 127
"""Exit code if the command cannot be started. Shells use the same code."""


def die_with_parent(parent: int = 0) -> None:
    """Tell the kernel to kill this process when its parent process ends (Linux only).

    Args:
        parent: the parent's process id; 0 means the current parent. Give the id if the parent may already have ended.
    """
    if sys.platform == "linux":
        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the call of prctl
            os._exit(ORPHANED)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    try:
        os.execv(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.stderr.write(f"{sys.argv[2]}: {error.strerror}\n")
        sys.exit(NO_PROGRAM)
