"""Pins that commands say in one sentence what a machine lacks: a home, its loopback, a store that can be written.

Without it a container with a number as its user gets a folder called `~`, and a network namespace a command that hangs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from tests.kit.commands import clean_environment
from tests.kit.small_pipeline import write_small_pipeline

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(180)]

COMMAND = "from rollouts.flows.command import main; main()"
NO_NAME = (
    *("setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups"),
    *("--inh-caps", "+dac_override,+dac_read_search", "--ambient-caps", "+dac_override,+dac_read_search"),
)
"""A user that is a number, and may read this folder all the same."""


def run(prefix: tuple[str, ...], *arguments: str, home: str | None = None, cwd: Path) -> tuple[int, str]:
    """What a command prints, started by another program."""
    if shutil.which(prefix[0]) is None or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip(f"{prefix[0]} may not do that here")
    environment = {
        name: value for name, value in clean_environment().items() if name not in ("HOME", "USER", "LOGNAME")
    }
    environment |= {"HOME": home} if home else {}
    ended = subprocess.run(
        [*prefix, sys.executable, "-c", COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
        timeout=150,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("command", [("status",), ("validate", "small/small.toml"), ("run", "small/small.toml")])
def test_a_user_without_a_home_and_a_name_is_told_to_set_one(command: tuple[str, ...], tmp_path: Path) -> None:
    write_small_pipeline(tmp_path / "small", mode="sft")
    before = sorted(tmp_path.rglob("*"))
    code, said = run(NO_NAME, *command, cwd=tmp_path)
    assert (code, len(said.splitlines())) == (2, 1), said
    assert "HOME is not set, and user 54321 has no entry in the list of users: set HOME to a folder" in said
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "command",
    [
        ("up",),
        *(
            pytest.param(command, marks=pytest.mark.matrix)
            for command in (("run", "small/small.toml"), ("serve", "small/base_model"))
        ),
    ],
)
def test_a_machine_whose_loopback_is_down_is_told_so(command: tuple[str, ...], tmp_path: Path) -> None:
    write_small_pipeline(tmp_path / "small", mode="sft")
    code, said = run(("unshare", "-n"), *command, home=str(tmp_path), cwd=tmp_path)
    assert code == 2, said
    assert "nothing reaches 127.0.0.1 on this machine" in said and "`ip link set lo up`" in said
    assert "Traceback" not in said


READ_ONLY = ("unshare", "-m", "sh", "-c", 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"')


def test_a_store_that_cannot_be_written_is_shown(tmp_path: Path) -> None:
    """With what is in the log of its ledger alone, as SQLite has it before it tidies up."""
    store = tmp_path / "store"
    (store / "prefect").mkdir(parents=True)
    (store / "prefect" / "serving.lock").touch()
    with Ledger(store / LEDGER_FILE) as ledger:
        ledger.add_lease(f"{store}/stages/sft-0123", "run-a", "elsewhere")
        code, said = run((*READ_ONLY, str(store)), "status", "--store", str(store), home=str(tmp_path), cwd=tmp_path)
    assert code == 0, said
    assert "stages/sft-0123 may go on on elsewhere" in said
    for command in (("down",), ("prune",), ("cancel", "nothing"), ("finish", "nothing"), ("up",)):
        code, said = run((*READ_ONLY, str(store)), *command, "--store", str(store), home=str(tmp_path), cwd=tmp_path)
        assert "Traceback" not in said and len(said.splitlines()) <= 2, (command, said)
