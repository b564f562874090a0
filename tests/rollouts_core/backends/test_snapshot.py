"""Pins that a copy is of one moment, that it takes its memory only once, and that it leaves the training its cores.

Without it a checkpoint could hold some weights of one step and some of the next, or every step beside a save would be
slowed down by threads that do nothing.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollouts_core.backends.snapshot import HostSnapshot

COUNT_THREADS = """
import os, threading, torch
from rollouts_core.backends.snapshot import HostSnapshot
torch.set_num_threads(2)
tensors = {str(i): torch.ones(1000, 1000) for i in range(4)}
tensors["0"].mul_(2)
before = len(os.listdir("/proc/self/task"))
def copy():
    HostSnapshot().take(tensors)
    print(len(os.listdir("/proc/self/task")) - before)
thread = threading.Thread(target=copy)
thread.start()
thread.join()
"""


def test_a_copy_does_not_follow_its_source() -> None:
    weight = torch.arange(6.0).view(2, 3)
    copied = HostSnapshot().take({"weight": weight})
    weight += 1
    assert torch.equal(copied["weight"], torch.arange(6.0).view(2, 3))


def test_the_next_copy_takes_the_same_memory() -> None:
    snapshot, weight = HostSnapshot(), torch.zeros(3)
    places = []
    for value in (1.0, 2.0):
        weight.fill_(value)
        copied = snapshot.take({"weight": weight})["weight"]
        assert copied.tolist() == [value] * 3
        places.append(copied.data_ptr())
    assert places[0] == places[1] != weight.data_ptr()


def test_a_tensor_of_another_shape_or_format_gets_memory_of_its_own() -> None:
    snapshot = HostSnapshot()
    for tensor in (torch.ones(3), torch.ones(4), torch.ones(4, dtype=torch.bfloat16), torch.ones(())):
        copied = snapshot.take({"weight": tensor})["weight"]
        assert copied.dtype == tensor.dtype and torch.equal(copied, tensor)


def test_tied_tensors_stay_tied() -> None:
    weight = torch.ones(2, 2)
    copied = HostSnapshot().take({"embedding": weight, "head": weight, "other": torch.ones(2, 2), "rows": weight[:1]})
    assert copied["embedding"].data_ptr() == copied["head"].data_ptr()
    assert copied["other"].data_ptr() != copied["head"].data_ptr()
    assert copied["rows"].shape == (1, 2)


def test_empty_tensors_are_not_taken_for_each_other() -> None:
    copied = HostSnapshot().take({"a": torch.ones(0), "b": torch.ones(0, 4)})
    assert copied["a"].shape == (0,) and copied["b"].shape == (0, 4)


def test_a_view_with_gaps_is_copied() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert torch.equal(HostSnapshot().take({"transposed": matrix.T})["transposed"], matrix.T)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc, which only Linux has")
def test_the_thread_that_copies_starts_no_other() -> None:
    found = subprocess.run([sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, check=True)
    assert found.stdout == "1\n", "itself"
