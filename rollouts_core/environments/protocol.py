"""What an environment is: who answers the policy's turns, and who grades what came of them.

Not here: the loop that holds the conversation (conversation.py), tools (tools.py), the environments that ship.

An environment has a method `grade`. That is all where the policy has one turn. One that converses has `respond`, too:

    prompt --> policy --> respond --> policy --> respond --> no message --> grade
                  ^          |
                  +- message-+

One object serves all conversations of a run at the same time, so what belongs to one conversation lies in its `state`.

What goes wrong is told apart by whose doing it is. What the policy caused is an `Outcome`, which it reads about in its
next turn. What it did not cause is raised as `EnvironmentUnavailableError`, and is never held against it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeGuard, runtime_checkable

from rollouts_core.types import Message, Sample


class Outcome(StrEnum):
    """What an environment made of one turn of the policy."""

    OK = "ok"
    """It was understood and done."""
    PARSE_FAILURE = "parse_failure"
    """It asked for something in a form that the environment cannot read."""
    TOOL_ERROR = "tool_error"
    """A tool refused what it was given."""
    TIMEOUT = "timeout"
    """What it asked for took longer than it may."""
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    """Something failed that the policy has no part in: the conversation is begun again, and never graded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the policy may call."""

    name: str
    description: str
    """What it does, for the policy."""
    parameters: dict[str, Any]  # Any: JSON
    """JSON Schema of its arguments, an object."""
    function: Callable[..., Any]  # Any: text, another JSON value, or a coroutine of one
    """Takes the arguments by name and returns what the policy reads, text or a value that becomes JSON; raises
    `ToolError` for what it cannot do."""

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """The tool as chat templates take it."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}


class ToolError(Exception):
    """A tool cannot do what the policy asked for; the message tells the policy why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment answers to a turn of the policy. Without a message the conversation is over."""

    messages: tuple[Message, ...] = ()
    """What the policy reads before its next turn, usually one message of the role `tool` or `user`."""
    outcome: Outcome = Outcome.OK
    """What became of the turn that is answered."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A conversation under way, as `respond` sees it."""

    sample: Sample
    """The pending sample: its prompt, and in its metadata the reference answer and the other fields of the row."""
    messages: list[Message]
    """All turns so far, the prompt's first and the policy's latest last; to be read only."""
    num_turns: int = 0
    """Turns of the policy so far."""
    state: dict[str, Any] = field(default_factory=dict)  # Any: the environment's own
    """Whatever the environment keeps between turns; gone when the conversation is over."""
    metadata: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    """JSON values that join the sample's metadata, where `grade` and reports find them."""

    @property
    def text(self) -> str:
        """What the policy said last."""
        return self.messages[-1]["content"]


class Environment(Protocol):
    """What a sample's completion is held against.

    It may have `row_fields`, the names of what a row of prompts must have for it, and `check_row(row)`, which raises
    ValueError for a row whose fields (and `answer`) make no sense, in words for who wrote it. Every row is checked
    before a run, so the check should be cheap.
    """

    def grade(self, sample: Sample) -> float | Awaitable[float]:
        """The reward of a finished sample, whose `response` is the policy's last turn.

        May be a coroutine function. Raises EnvironmentUnavailableError where something else than the policy failed.
        """
        ...


@runtime_checkable
class MultiTurnEnvironment(Protocol):
    """An environment that answers the policy.

    It may have `tools`, a sequence of `Tool` that the chat template tells the policy about, and a coroutine method
    `close(conversation)`, which is called once at the end of every conversation, however it ended.
    """

    def grade(self, sample: Sample) -> float | Awaitable[float]:
        """The reward of a finished sample, as in `Environment`."""
        ...

    async def respond(self, conversation: Conversation) -> Reply:
        """The answer to what the policy said last.

        Raises:
            EnvironmentUnavailableError: something else than the policy failed. OSError and httpx.TransportError are
                taken for the same; any other exception is a mistake in the environment and ends the run.
        """
        ...


def is_multi_turn(environment: Environment) -> TypeGuard[MultiTurnEnvironment]:
    """Whether the environment answers the policy."""
    return isinstance(environment, MultiTurnEnvironment)


def describe_tools(environment: Environment) -> list[dict[str, Any]]:  # Any: JSON
    """The tools that an environment offers, as chat templates take them."""
    tools: Sequence[Tool] = getattr(environment, "tools", ())
    return [tool.to_json() for tool in tools]
