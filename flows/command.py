"""Start the `rollouts` command. The command's imports take a second, and Ctrl-C during this time prints no traceback.

`rollouts --help` starts without importing the commands (overview.py).

Not here: the commands (cli.py).
"""

from __future__ import annotations

import os
import sys

from rollouts_core.errors import ConfigError
from rollouts_core.system.home import check_home
from rollouts_core.system.standard_error import open_standard_streams

INTERRUPTED_CODE = 130
USER_ERROR_CODE = 2
NO_IMPROVEMENT_CODE = 3


def run_status() -> None:
    """Run `rollouts status` without importing the other commands, which would take a second."""
    import logging

    from rollouts.flows.commands.explained import explained
    from rollouts.flows.commands.status import status
    from rollouts.flows.overview import create_app
    from rollouts_core.system.utf8 import ensure_utf8

    ensure_utf8()
    logging.raiseExceptions = False  # no traceback if a log line cannot be sent
    app = create_app()
    app.command()(explained(status))
    app()


def main() -> None:
    """Entry point of the `rollouts` command."""
    open_standard_streams()
    try:
        check_home()
    except ConfigError as error:
        sys.stderr.write(f"rollouts: {error}\n")
        sys.exit(USER_ERROR_CODE)
    try:
        from rollouts.flows.overview import ALONE, ASKED_BY, create_overview

        if sys.argv[1:] in ALONE and ASKED_BY not in os.environ:
            create_overview()()  # exits
        if sys.argv[1:2] == ["status"]:
            run_status()  # exits
        from rollouts.flows.cli import main as run_command
    except KeyboardInterrupt:
        sys.stderr.write("\nrollouts: interrupted before the command began.\n")
        sys.exit(INTERRUPTED_CODE)
    run_command()
