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
        # With `-E` or `-I`, Python ignores PYTHONUTF8. Without the option `-X utf8`, the process would then restart
        # forever.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
