"""Pins that a watch that saw nothing has looked.

Without it a thread that died would prove that no secret was ever on a command line.
"""

from __future__ import annotations

import secrets
import subprocess

import pytest

from tests.kit.processes import Watch


def test_what_shows_the_text_within_the_block_is_seen_and_nothing_else() -> None:
    text = f"a secret\nof {secrets.token_hex(8)}"
    with Watch(text) as nothing:
        pass
    with subprocess.Popen(["sh", "-c", "read line", "sh", text], stdin=subprocess.PIPE) as process:
        with Watch(text) as sightings:
            pass  # the last look alone has to see it
        process.kill()
    assert nothing == []
    assert sightings != [] and all(text in each for each in sightings)


def test_a_watch_whose_thread_has_died_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def see_once_and_die(self: Watch) -> None:
        while not self._sightings:
            self._look_at_all()

    monkeypatch.setattr(Watch, "_watch", see_once_and_die)
    watch = Watch(secrets.token_hex(8))
    with pytest.raises(AssertionError, match="nobody looked any more"), watch:
        watch._thread.join()
    assert not watch._thread.is_alive()
