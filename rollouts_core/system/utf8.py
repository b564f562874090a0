"""Make a command use UTF-8 for files, file names, arguments, output and child processes, with any locale.

Programs on nodes always start in UTF-8 mode (infra/node_agent.py, infra/supervisor/variables.py).
"""

from __future__ import annotations

import codecs
import locale
import os
import sys


def ensure_utf8() -> None:
    """Restart this process in Python's UTF-8 mode if its locale has another encoding.

    Call this before anything else, because a restart loses the state of the process.
    """
    if codecs.lookup(locale.getencoding()).name == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"  # for child processes
    if not sys.flags.utf8_mode:
        # An option is needed, because `-E` and `-I` ignore the variable, and the process would restart forever.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
