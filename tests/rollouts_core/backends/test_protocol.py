"""Pins what a future of finished work gives, for everyone who writes a backend or awaits one.

Without it a backend that works at once and one that works elsewhere could not stand in for each other.
"""

import asyncio

import pytest

from rollouts_core.backends.protocol import ImmediateTrainFuture, LateTrainFuture


def test_an_immediate_future_gives_its_value() -> None:
    value = {"loss": 1.0}
    assert asyncio.run(ImmediateTrainFuture(value).result()) is value


def test_an_immediate_future_can_be_asked_again() -> None:
    async def ask_twice() -> tuple[int, int]:
        future = ImmediateTrainFuture(3)
        return await future.result(), await future.result()

    assert asyncio.run(ask_twice()) == (3, 3)


def test_a_late_future_reads_once_and_is_done_then() -> None:
    reads: list[int] = []

    def read() -> list[int]:
        reads.append(1)
        return [*reads]

    future = LateTrainFuture(read, lambda: False)
    assert not future.done()
    assert asyncio.run(future.result()) is asyncio.run(future.result())
    assert future.done() and reads == [1]


def test_a_late_future_raises_its_error_each_time() -> None:
    reads: list[int] = []

    def fail() -> None:
        reads.append(1)
        raise MemoryError("device")

    future = LateTrainFuture(fail, lambda: False)
    for _ in range(2):
        with pytest.raises(MemoryError, match="device"):
            asyncio.run(future.result())
    assert future.done() and reads == [1]
