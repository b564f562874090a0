"""The `rollouts` command over a store, in a process of its own, and the processes that it leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rollouts_core.checkpoint import verify_checkpoint
from tests.kit.processes import dies_with_us
from tests.kit.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 480.0


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The `rollouts` command over one store."""

    store: Path
    output: Path
    code: Path | None = None
    """The folder of the code that is run, also as the current folder; None for this project's."""

    def start(self, *arguments: str, with_store: bool = True) -> subprocess.Popen[bytes]:
        """Begin a command; what it prints goes to `output`."""
        store = ["--store", str(self.store)] if with_store else []
        with self.output.open("wb") as output:
            return subprocess.Popen(
                [*dies_with_us("INT"), sys.executable, "-m", "rollouts.flows.cli", *arguments, *store],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.code,
                env=clean_environment(self.code or ROOT),
                start_new_session=True,
            )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run a command to its end; returns its exit code and what it printed."""
        process = self.start(*arguments)
        return process.wait(RUN_TIMEOUT_S), self.said()

    def said(self) -> str:
        """What the last command has printed so far."""
        return self.output.read_text(errors="replace")

    def wait_until_said(self, text: str, process: subprocess.Popen[bytes]) -> None:
        """Return when the running command has printed `text`."""
        wait_until(lambda: text in self.said() or process.poll() is not None, what=f"{text!r} in {self.output}")
        assert text in self.said(), f"the command ended without saying {text!r}:\n{self.said()}"


def clean_environment(code: Path = ROOT) -> dict[str, str]:
    """The environment of a user who never set anything of Prefect's or of ours but what names a provider."""
    ours = ("PREFECT_", "ROLLOUTS_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours) or key == "ROLLOUTS_SKY"}
    return kept | {"PYTHONPATH": str(code / "src")}


def processes_of(store: Path) -> list[str]:
    """The command lines of processes that mention the store, or whose job lies in it."""
    return list(pids_of(store).values())


def pids_of(store: Path) -> dict[int, str]:
    """The processes that mention the store, or whose job lies in it, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_zombie = b") Z" in (entry / "stat").read_bytes()
        except OSError:
            continue
        if str(store) in command and not is_zombie:
            found[int(entry.name)] = command
    return found


def copy_home(home: Path, store: Path) -> None:
    """Give a store the database of another one, whose server does not run."""
    shutil.copytree(home, store / "prefect", ignore=shutil.ignore_patterns("*.lock", "server.*", "ui"))


def join_home(home: Path, store: Path) -> None:
    """Make the running server of a home that of a store, too; what Prefect's clients write stays the store's own."""
    (store / "prefect").mkdir(parents=True)
    for path in home.iterdir():
        if path.is_file():  # locks, address, password, database
            (store / "prefect" / path.name).symlink_to(path)


def digest_trained_here(config: Path, home: Path, folder: Path) -> str:
    """The digest of the checkpoint to which the configuration leads on this machine, in a store of its own."""
    rollouts = Rollouts(folder / "other-store", folder / "other-output")
    join_home(home, rollouts.store)
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    return digest_of_the_run(rollouts)


def digest_of_the_run(rollouts: Rollouts) -> str:
    """The digest of the checkpoint of the only run of a store."""
    (run,) = (rollouts.store / "runs").iterdir()
    return verify_checkpoint(run / "checkpoint").digest
