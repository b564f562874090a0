"""Pins what a future of finished work gives, for everyone who writes a backend or awaits one.

Without it a backend that works at once and one that works elsewhere could not stand in for each other.
"""

import asyncio

from rollouts_core.backends.protocol import ImmediateTrainFuture


def test_an_immediate_future_gives_its_value() -> None:
    value = {"loss": 1.0}
    assert asyncio.run(ImmediateTrainFuture(value).result()) is value


def test_an_immediate_future_can_be_asked_again() -> None:
    async def ask_twice() -> tuple[int, int]:
        future = ImmediateTrainFuture(3)
        return await future.result(), await future.result()

    assert asyncio.run(ask_twice()) == (3, 3)
