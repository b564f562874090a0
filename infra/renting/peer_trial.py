"""Test whether the GPUs of this machine can compute a sum together, and print one JSON object.

acceptance.py sends this program to a new machine. On some rented machines, each GPU alone can compute, but the first
all-reduce hangs forever, because one GPU cannot reach the memory of another (broken P2P, IOMMU, ACS). In this test, one
process per GPU joins a group, sums a tensor over all processes, and checks the result. Processes that have not finished
by the deadline are killed.

    arguments    BACKEND (nccl, or gloo for the CPU), number of processes, seconds until the deadline
    answer       {"is_tried": true, "problem": ""}; is_tried is false if torch is missing or cannot use a GPU

The program runs in the training's interpreter and environment. The program uses only the standard library and torch.
"""

import ctypes
import datetime
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import tempfile
import time
from typing import Any  # Any: a JSON object, torch

_CUDA_LIBRARY = "libcuda.so.1"
_NUM_NUMBERS = 1 << 22
SKIPPED, DONE, FAILED = "skipped", "done", "failed: "
_MAX_WORD_BYTES = 1000


def main() -> int:
    backend, num_ranks, deadline_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    answer = {"is_tried": False, "problem": ""}  # type: dict[str, Any]
    if _has_requirements(backend):
        with tempfile.TemporaryDirectory() as folder:
            answer = _try_together(backend, num_ranks, deadline_s, folder)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _has_requirements(backend: str) -> bool:
    """Return whether torch and, for nccl, the CUDA driver are installed. Does not import torch, because this process
    still has to fork."""
    if importlib.util.find_spec("torch") is None:
        return False
    try:
        return backend != "nccl" or bool(ctypes.CDLL(_CUDA_LIBRARY))
    except OSError:
        return False


def _try_together(backend: str, num_ranks: int, deadline_s: float, folder: str) -> "dict[str, Any]":
    """Start all processes. Wait until all processes have ended, one process has failed, or the deadline has passed."""
    ends_at = time.monotonic() + deadline_s
    pipes, pids = {}, []
    for rank in range(num_ranks):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            _run_rank(backend, rank, num_ranks, deadline_s, folder, theirs)
        os.close(theirs)
        pids.append(pid)
        pipes[ours] = rank
    try:
        words = follow(pipes, ends_at)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    late = sorted(rank for rank, word in words.items() if word not in (DONE, SKIPPED) and not word.startswith(FAILED))
    failed = [word[len(FAILED) :] for word in words.values() if word.startswith(FAILED)]
    problem = "; ".join(failed[:1])
    if late and not failed:
        stages = [f"{rank} {words[rank]}" for rank in late]
        problem = "after {:.0f} s rank {}".format(deadline_s, ", rank ".join(stages))
    return {"is_tried": SKIPPED not in words.values(), "problem": problem}


def follow(pipes: "dict[int, int]", ends_at: float) -> "dict[int, str]":
    """Return the last message of each rank, once all processes have ended, one process has failed, or the deadline has
    passed."""
    words = dict.fromkeys(pipes.values(), "did not begin")
    open_pipes = dict(pipes)
    while open_pipes and not any(word.startswith(FAILED) for word in words.values()):
        ready, _, _ = select.select(list(open_pipes), [], [], max(0.0, ends_at - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            said = os.read(pipe, 1 << 16).decode("utf-8", "replace").splitlines()
            rank = open_pipes[pipe]
            if said:
                words[rank] = said[-1]
            else:
                del open_pipes[pipe]
                if words[rank] not in (DONE, SKIPPED):
                    words[rank] = FAILED + f"rank {rank} ended and {words[rank]}"
    return words


def _run_rank(backend: str, rank: int, num_ranks: int, deadline_s: float, folder: str, pipe: int) -> None:
    """Run one process of the test. Never returns."""

    def say(word: str) -> None:
        os.write(pipe, word.encode()[:_MAX_WORD_BYTES] + b"\n")

    signal.alarm(int(deadline_s) + 1)  # ends this process if a driver's call hangs and the parent has died
    try:
        say("did not import torch")
        say(_sum_up(backend, rank, num_ranks, deadline_s, folder, say))
    except BaseException as error:  # noqa: BLE001 - any error is reported to the parent process
        said = str(error).strip().split("\n")[0]
        say(FAILED + f"rank {rank}: {type(error).__name__}: {said}")
    finally:
        os._exit(0)


def _sum_up(backend: str, rank: int, num_ranks: int, deadline_s: float, folder: str, say: Any) -> str:
    """Sum a tensor over all processes. Returns DONE if the sum is right, or SKIPPED if torch cannot use the GPUs.

    Raises:
        ValueError: the sum is wrong.
        RuntimeError: torch cannot compute the sum.
    """
    torch, group = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    is_nccl = backend == "nccl"
    if is_nccl and not (group.is_nccl_available() and torch.cuda.device_count() >= num_ranks):
        return SKIPPED
    say("did not join the others")
    group.init_process_group(
        backend,
        init_method="file://" + folder + "/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=deadline_s),
    )
    if is_nccl:
        torch.cuda.set_device(rank)
    say("did not sum up")
    numbers = torch.full((_NUM_NUMBERS,), float(rank + 1), device="cuda:" + str(rank) if is_nccl else "cpu")
    group.all_reduce(numbers)
    expected = num_ranks * (num_ranks + 1) / 2
    if not bool((numbers == expected).all()):
        raise ValueError("the sum of all is wrong")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
