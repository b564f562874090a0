"""Download the files of unfinished stages from a remote machine before a run releases the machine.

A cancelled job writes its last checkpoint when the run no longer copies files from the machine (infra/sync/mirror.py).
Without the download by this module, that checkpoint would be lost with a rented machine.

Not here: ending the jobs (stage.py), releasing the machine (provision.py).
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from rollouts.infra.errors import InfraError
from rollouts.infra.jobs import JobState, job_status
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import Node
from rollouts.infra.providers import open_session
from rollouts.infra.session import Session
from rollouts.infra.sync.mirror import is_behind, pull_run
from rollouts.tasks.records import RunScope
from rollouts_core.checkpoint import list_checkpoints
from rollouts_core.run_directory import RunDirectory

SALVAGE_S = 600.0
"""Time limit for all downloads in seconds, because a waiting machine costs money and its connection may be dead."""


def salvage(scope: RunScope, node: Node, *, timeout_s: float = SALVAGE_S) -> list[str]:
    """Download the files of the run's unfinished stages from the node.

    Returns one sentence per stage: its last checkpoint, or why the download failed.
    """
    said = []
    deadline = time.monotonic() + timeout_s
    with Ledger(scope.ledger_path) as ledger, open_session(node) as session:
        used = {use.stage for use in ledger.stage_uses() if use.run_id == scope.run_id}
        for name in sorted(used):
            here, there = RunDirectory(Path(scope.store) / "stages" / name), f"{node.root}/stages/{name}"
            if _is_unfinished(here) and job_status(session, there).state is not JobState.ABSENT:
                said.append(_fetch(session, there, here, max(0.0, deadline - time.monotonic())))
    return [sentence for sentence in said if sentence]


def _is_unfinished(directory: RunDirectory) -> bool:
    """True if a stage has no readable result.json."""
    try:
        return directory.read_result() is None
    except (ValueError, RecursionError):
        return True


def _fetch(session: Session, source: str, here: RunDirectory, timeout_s: float) -> str:
    """Download the directory of a stage's job. Returns a sentence about the last checkpoint or a failure, or ""."""
    failures: list[str] = []

    def pull() -> None:
        try:
            # If another machine has trained further since, the files of this node would replace newer files.
            if not is_behind(session, source, here.root):
                pull_run(session, source, here.root)
        except InfraError as error:
            failures.append(str(error))

    # The session's timeouts limit single reads, but not a slow download. So the download runs in a thread, which this
    # function leaves after the timeout. Closing the session then ends the thread.
    thread = threading.Thread(target=pull, name=f"salvage of {source}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    checkpoints = list_checkpoints(here.checkpoints)
    kept = f"{checkpoints[-1].name} is the last checkpoint in {here.root}" if checkpoints else ""
    if thread.is_alive() or failures:
        reason = failures[0] if failures else f"it took longer than {timeout_s:.0f} s"
        return f"not all of {source} could be fetched ({reason}){f'; {kept}' if kept else ''}"
    return kept
