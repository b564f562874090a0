"""Pins that SGLang and vLLM leave nothing in shared memory when they are killed.

Without it each of them that dies takes memory of the machine until that is rebooted.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rollouts_core.config import EngineKind
from rollouts_core.engines import cleanup_process
from tests.engines.models import SavedModel
from tests.engines.servers import serving

pytestmark = [pytest.mark.engine, pytest.mark.matrix, pytest.mark.timeout(400)]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_killed_engine_leaves_no_shared_memory_behind(kind: EngineKind, start: SavedModel, tmp_path: Path) -> None:
    with serving(kind, start.directory, tmp_path / "run") as server:
        assert server.process is not None
        variables = Path(f"/proc/{server.process.pid}/environ").read_bytes().decode().split("\0")
        [folder] = [each.partition("=")[2] for each in variables if each.startswith("TMPDIR=")]
        time.sleep(2 * cleanup_process.LOOK_S)  # as long as it takes that its processes were looked at
        inodes = cleanup_process.mapped_by(cleanup_process.find_processes(folder))
        made = [path for path in cleanup_process.SHARED_MEMORY.iterdir() if path.stat().st_ino in inodes]
        assert made, "the engine makes none any more: this test, and what it tests, can go"
        server.kill()
    deadline = time.monotonic() + 60
    while Path(folder).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [path for path in made if path.exists()] == []
