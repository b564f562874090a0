"""How what a test starts ends with the test, also where that was killed, and what command lines show meanwhile."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path


def dies_with_us(by: str = "KILL") -> list[str]:
    """What to put before a command that gets this signal when the thread that starts it is gone; Linux only."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", by] if setpriv else []


class Watch:
    """Looks at the command lines of all processes of this machine, the node's too, as long as the block runs."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._sightings: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> list[str]:
        self._thread.start()
        return self._sightings

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and int(entry.name) != os.getpid():
                    self._look(entry / "cmdline")

    def _look(self, cmdline: Path) -> None:
        try:
            words = cmdline.read_bytes()
        except OSError:
            return
        if self._text in words:
            self._sightings.append(words.decode(errors="replace"))
