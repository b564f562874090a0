"""Let a command read and write UTF-8 whatever the locale says: files, their names, arguments, output, what it starts.

Naming the encoding of each file would leave the names of files and the output to the locale. Not here: programs that
run on nodes, which are started in UTF-8 mode (infra/node_agent.py, infra/supervisor/program.py).
"""

from __future__ import annotations

import codecs
import locale
import os
import sys


def ensure_utf8() -> None:
    """Begin this process anew in Python's UTF-8 mode if its locale has another encoding; otherwise do nothing.

    Call it first: nothing that the process has done until then is kept.
    """
    if codecs.lookup(locale.getencoding()).name == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"  # for the processes that this one starts
    if not sys.flags.utf8_mode:
        # An option, because `-E` and `-I` make a process blind to the variable: so it begins anew only once.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
