"""Pins that a killed engine leaves no shared memory behind, and that nobody else's is removed with it.

Without it each engine that is killed takes memory of the machine until it is started anew, or one that ends takes the
memory of another that runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from rollouts_core.engines import cleanup_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cleanup_process.SHARED_MEMORY.is_dir(), reason="no shared memory at a path here"),
]

ENGINE = """
import multiprocessing, sys
from multiprocessing import shared_memory
import multiprocessing.synchronize

context = multiprocessing.get_context("spawn")

def work(names):
    own = shared_memory.SharedMemory(create=True, size=4096)
    others = [shared_memory.SharedMemory(name=name) for name in sys.argv[1:]]
    names.send([own.name])
    names.recv()

if __name__ == "__main__":
    own, semaphore = shared_memory.SharedMemory(create=True, size=4096), context.Semaphore(1)
    here, there = context.Pipe()
    child = context.Process(target=work, args=(there,))
    child.start()
    others = [shared_memory.SharedMemory(name=name) for name in sys.argv[1:]]
    print(own.name, semaphore._semlock.name.lstrip("/"), *here.recv(), child.pid, flush=True)
    child.join()
"""


class Engine:
    """Processes that make shared memory, and what sweeps after them."""

    def __init__(self, folder: Path, *mapped: str) -> None:
        folder.mkdir()
        (program := folder.parent / f"{folder.name}.py").write_text(ENGINE)
        closed_at_the_end, self._held = os.pipe()
        subprocess.run(
            [sys.executable, "-I", "-S", cleanup_process.__file__, str(folder)], stdin=closed_at_the_end, check=True
        )
        os.close(closed_at_the_end)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(program), *mapped],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **cleanup_process.scratch_variables(str(folder))},
            start_new_session=True,
            text=True,
        )
        assert self.process.stdout is not None
        first, semaphore, second, _ = self.process.stdout.readline().split()
        self.paths = [cleanup_process.SHARED_MEMORY / name for name in (first, f"sem.{semaphore}", second)]

    def kill(self) -> None:
        """SIGKILL to all processes, the tracker of shared memory too."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def wait_for_looks() -> None:
    """As long as it takes that the processes were looked at."""
    time.sleep(2 * cleanup_process.LOOK_S)


def test_shared_memory_of_a_killed_engine_goes_with_it_and_that_of_others_stays(
    tmp_path: Path, stack: ExitStack
) -> None:
    mine = shared_memory.SharedMemory(create=True, size=4096)  # before the engine, which maps it too
    stack.callback(mine.unlink)
    stack.callback(mine.close)
    other = Engine(tmp_path / "other")
    stack.callback(other.kill)
    later = shared_memory.SharedMemory(create=True, size=4096)
    stack.callback(later.unlink)
    stack.callback(later.close)
    engine = Engine(tmp_path / "engine", mine.name, later.name, other.paths[0].name)
    stack.callback(engine.kill)
    wait_for_looks()
    assert all(path.exists() for path in engine.paths)
    engine.kill()
    deadline = time.monotonic() + 60
    while engine.folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not any(path.exists() for path in engine.paths)
    kept = [cleanup_process.SHARED_MEMORY / mine.name, cleanup_process.SHARED_MEMORY / later.name, *other.paths]
    assert all(path.exists() for path in kept)


def test_what_came_before_the_engine_or_is_of_another_kind_is_kept(stack: ExitStack) -> None:
    mine = shared_memory.SharedMemory(create=True, size=4096)
    stack.callback(mine.unlink)
    stack.callback(mine.close)
    path = cleanup_process.SHARED_MEMORY / mine.name
    other = cleanup_process.SHARED_MEMORY / f"rollouts_test_{os.getpid()}"
    stack.callback(other.unlink)
    other.touch()
    inodes = {path.stat().st_ino, other.stat().st_ino}
    assert cleanup_process.find_left_behind(inodes, time.time() - 60) == [path]
    assert cleanup_process.find_left_behind(inodes, time.time() + 60) == []
    assert cleanup_process.find_left_behind(set(), time.time() - 60) == []
