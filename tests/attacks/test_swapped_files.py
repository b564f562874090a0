"""FIFOs that take the place of files since these were listed: nothing waits for their writers.

Without these tests a machine that runs a stage, or another user of a shared folder, could stop a transfer for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollouts.infra.chunks import SourceFile
from rollouts.infra.errors import TransientInfraError
from rollouts.infra.sync import sender

TIMEOUT_S = 20.0


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Where the file `log.txt` was when it was listed."""
    os.mkfifo(tmp_path / "log.txt")
    return tmp_path / "log.txt"


def test_a_node_sends_no_fifo_in_place_of_a_file(fifo: Path) -> None:
    request = {"chunk_bytes": 1 << 20, "digest": "sha256", "files": [["log.txt", 0, []]]}
    command = [sys.executable, "-P", str(sender.__file__), "send", str(fifo.parent)]
    asked = json.dumps(request).encode() + b"\n"
    sent = subprocess.run(command, input=asked, capture_output=True, timeout=TIMEOUT_S, check=True)
    assert json.loads(sent.stdout) == {"name": "log.txt", "size": None}


def test_a_fifo_in_place_of_a_file_to_upload_has_changed(fifo: Path) -> None:
    problems: list[str] = []

    def read() -> None:
        try:
            list(SourceFile(fifo, 5).read(0))
        except TransientInfraError as error:
            problems.append(str(error))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(TIMEOUT_S)
    assert [problem.partition(" changed")[1] for problem in problems] == [" changed"]
