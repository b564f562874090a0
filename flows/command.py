"""Where the `rollouts` command begins: Ctrl-C while its modules are imported, which takes a second, is no traceback.

Not here: the commands (cli.py).
"""

from __future__ import annotations

import sys

INTERRUPTED_CODE = 130


def main() -> None:
    """Entry point of the `rollouts` command."""
    try:
        from flows.cli import main as run_command
    except KeyboardInterrupt:
        sys.stderr.write("\nrollouts: interrupted before it began.\n")
        sys.exit(INTERRUPTED_CODE)
    run_command()
