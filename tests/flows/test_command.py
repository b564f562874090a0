"""Pins what somebody sees who changes their mind at once: the first second of every command goes into imports.

Without it Ctrl-C prints thirty lines about modules that nobody has heard of.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rollouts.flows.command import main
from tests.kit.commands import clean_environment


class Interrupted:
    """Finds no module: somebody presses Ctrl-C meanwhile."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        raise KeyboardInterrupt


def test_ctrl_c_while_the_commands_are_imported_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rollouts", "run"])
    monkeypatch.delitem(sys.modules, "rollouts.flows.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "\nrollouts: interrupted before the command began.\n"


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_that_is_started_without_standard_streams_works(tmp_path: Path, closed: str) -> None:
    """As some schedulers and daemons start programs."""
    command = shlex.join([sys.executable, "-c", "from rollouts.flows.command import main; main()", "status", "--store"])
    environment = clean_environment()
    subprocess.run(["sh", "-c", f"exec {command} {tmp_path} {closed}"], cwd=tmp_path, env=environment, check=True)
