"""Rewards that subprocesses of the kill tests name; graded after a random delay, so that timing decides the order."""

import secrets

import anyio

from rollouts_core.environments.protocol import Conversation, Reply
from rollouts_core.types import Message, Sample


def grade_even_digits(sample: Sample) -> float:
    """The share of even digits: it differs within the groups of an untrained model."""
    return sum(character in "02468" for character in sample.response) / 8


async def grade_even_digits_late(sample: Sample) -> float:
    """The same, up to 20 ms later; the delay takes nothing from the random state of a seeded library."""
    await anyio.sleep(secrets.randbelow(20) / 1000)
    return grade_even_digits(sample)


class GoOn:
    """Asks for two further turns, and rewards even digits in the last one."""

    async def respond(self, conversation: Conversation) -> Reply:
        if conversation.num_turns > 2:
            return Reply()
        return Reply(messages=(Message(role="user", content="go on"),))

    def grade(self, sample: Sample) -> float:
        return grade_even_digits(sample)
