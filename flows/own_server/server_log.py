"""Explain from a server's log why the server ended, and what the user should do.

Not here: the processes that write logs (lend.py, flows/commands/up.py).
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

FULL_DISK = "the disk of the store, or of temporary files (TMPDIR), is full: free space there, or choose another"
KNOWN_DEATHS = (
    (
        "unexpected keyword argument 'min_items'",
        "the installed fastapi is too new: pip install 'fastapi<0.151'",
    ),
    (
        "No module named 'prefect'",
        f"Prefect is not installed for {sys.executable}: pip install 'prefect<3.9'",
    ),
    ("Can't locate revision", "another version of Prefect wrote the database: install that version again"),
    ("No space left on device", FULL_DISK),
    ("database or disk is full", FULL_DISK),
    (
        "file is not a database",
        "prefect.db is no longer a database: move it away; Prefect then forgets past runs",
    ),
    ("database disk image is malformed", "prefect.db is damaged: move it away; Prefect then forgets past runs"),
)
"""Text in the log of a dead server, and the advice for the user."""


def describe_death(server: str, log: Path) -> str:
    """A sentence about a server that ended during its start: with advice for a known cause, else with the log's end."""
    tail = log_tail(log)
    advice = next((f": {advice}" for text, advice in KNOWN_DEATHS if text in tail), f"; its log ends with: {tail}")
    return f"{server} ended while it started{advice}"


def log_tail(log: Path) -> str:
    """The last 15 lines of a process's log."""
    try:
        lines = log.read_bytes()[-16_384:].decode(errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(lines[-15:]) or "(nothing)"


def set_log_aside(log: Path) -> None:
    """Rename the log of the last server, because it may show why the server ended."""
    with suppress(FileNotFoundError):
        if log.stat().st_size:
            log.replace(f"{log}.1")
