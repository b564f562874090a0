"""Pins that memory that was shared for a server which never took it does not outlive the attempt.

Without it every engine that dies amid an update leaves half a gigabyte in memory until the machine's next start.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollouts_core.engines.transfer.cuda_ipc import forget, render_handles, share

SHARED = Path("/dev/shm")


@pytest.mark.skipif(not SHARED.is_dir(), reason="this system keeps shared memory elsewhere")
def test_memory_that_nobody_took_is_removed_and_no_other() -> None:
    before = set(SHARED.iterdir())
    kept = share({"kept": torch.ones(10)}, "cpu")
    render_handles(kept)
    of_kept = set(SHARED.iterdir()) - before
    shared = share({"a": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.int8)}, "cpu")
    render_handles(shared)
    render_handles(shared)
    assert len(set(SHARED.iterdir()) - before) == len(of_kept) + 1
    forget(shared)
    assert set(SHARED.iterdir()) - before == of_kept
    assert shared["a"].sum() == 499500, "what is mapped here stays usable"
    forget(kept)
    forget(kept)
    assert set(SHARED.iterdir()) == before
