"""How what a test starts ends with the test, also where that was killed, and what command lines show meanwhile."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import threading
from pathlib import Path

from tests.kit.waiting import wait_until

CONTROL = "control-of-a-watch-"
"""Begins the name of a process that shows what a watch looks for, so that it is known to see it."""


def dies_with_us(by: str = "KILL") -> list[str]:
    """What to put before a command that gets this signal when the thread that starts it is gone; Linux only."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", by] if setpriv else []


class Watch:
    """Looks at the command lines of all processes of this machine, the node's too, as long as the block runs.

    Before the block begins it is made sure that it sees what it looks for; after it, it has looked once more.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._control = f"{CONTROL}{secrets.token_hex(8)}"
        self._sightings: list[str] = []
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> list[str]:
        self._thread.start()
        shows_it = ["sh", "-c", "read line", self._control, self._text]
        with subprocess.Popen(shows_it, stdin=subprocess.PIPE) as process:
            try:
                wait_until(lambda: self._sightings, what="the sight of a process that shows what is looked for")
            finally:
                process.kill()
        with self._looking:
            self._sightings.clear()
        return self._sightings

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        was_looking = self._thread.is_alive()
        self._ended.set()
        self._thread.join()
        self._look_at_all()
        assert was_looking or error, "nobody looked any more"

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self._look_at_all()

    def _look_at_all(self) -> None:
        with self._looking:
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and int(entry.name) != os.getpid():
                    self._look(entry / "cmdline")

    def _look(self, cmdline: Path) -> None:
        try:
            words = cmdline.read_bytes()
        except OSError:
            return
        is_of_another = CONTROL.encode() in words and self._control.encode() not in words
        if self._text.encode() in words and not is_of_another:
            self._sightings.append(words.decode(errors="replace"))
