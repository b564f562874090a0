"""Make a command use UTF-8 for files, file names, arguments, output and child processes, whatever the locale.

Programs on nodes are started in UTF-8 mode anyway (infra/node_agent.py, infra/supervisor/variables.py).
"""

from __future__ import annotations

import codecs
import locale
import os
import sys


def ensure_utf8() -> None:
    """Restart this process in Python's UTF-8 mode if its locale has another encoding; otherwise do nothing.

    Call it first, because the process loses its state.
    """
    if codecs.lookup(locale.getencoding()).name == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"  # for child processes
    if not sys.flags.utf8_mode:
        # As an option, because `-E` and `-I` ignore the variable, and the process would restart forever.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
