"""Rewards that subprocesses of the kill tests name; graded after a random delay, so that timing decides the order."""

import secrets

import anyio

from rollouts_core.types import Sample


def grade_even_digits(sample: Sample) -> float:
    """The share of even digits: it differs within the groups of an untrained model."""
    return sum(character in "02468" for character in sample.response) / 8


async def grade_even_digits_late(sample: Sample) -> float:
    """The same, up to 20 ms later; the delay takes nothing from the random state of a seeded library."""
    await anyio.sleep(secrets.randbelow(20) / 1000)
    return grade_even_digits(sample)
