"""Two real processes joined by gloo, started once for many tests, which run functions on both at once."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from rollouts_core.backends.ranks import Ranks, join_ranks

Work = Callable[..., Any]  # Any: whatever a test wants to know
"""Called on both ranks with `Ranks` and the arguments of `TwoProcesses.run`."""

ANSWER_TIMEOUT_S = 90.0


class TwoProcesses:
    """Rank 0 and rank 1. After a failure both are started anew, because they may wait for each other."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []  # Any: the class depends on the start method

    def run(self, work: Work, *arguments: object) -> list[Any]:
        """What `work(ranks, *arguments)` gave on each rank.

        Raises:
            AssertionError: it raised, with the traceback.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((work, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(ANSWER_TIMEOUT_S):
                self.stop()
                raise AssertionError(f"rank {rank} did not answer within {ANSWER_TIMEOUT_S} s")
            succeeded, answer = pipe.recv()
            if not succeeded:
                self.stop()
                raise AssertionError(f"rank {rank} raised:\n{answer}")
            answers.append(answer)
        return answers

    def stop(self) -> None:
        """End both."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in (0, 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)


@contextmanager
def two_processes() -> Iterator[TwoProcesses]:
    """The pair, for as long as the block runs; nothing is started before it is used."""
    pair = TwoProcesses()
    try:
        yield pair
    finally:
        pair.stop()


def _serve(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with join_ranks(device="cpu") as ranks:
        while True:
            work, arguments = pipe.recv()
            pipe.send(_try(work, ranks, arguments))


def _try(work: Work, ranks: Ranks, arguments: tuple[object, ...]) -> tuple[bool, Any]:
    try:
        return True, work(ranks, *arguments)
    except Exception:  # noqa: BLE001 - the test's process raises it again
        return False, traceback.format_exc()
