"""The interface of environments. An environment grades the policy's samples and may reply to its turns.

A single-turn environment has only the method `grade`. A multi-turn environment also has the method `respond`:

    prompt --> policy --> respond --> policy --> respond --> no message --> grade
                  ^          |
                  +- message-+

One environment object serves all conversations of a run concurrently, so it keeps the data of a conversation in
`Conversation.state`.

Mistakes of the policy are reported as an `Outcome`, with a message that the policy reads before its next turn. Failures
that the policy did not cause are raised as `EnvironmentUnavailableError`, and do not affect its reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeGuard, runtime_checkable

from rollouts_core.types import Message, Sample


class Outcome(StrEnum):
    """The result of one turn of the policy, as judged by the environment."""

    OK = "ok"
    """The environment did what the policy requested."""
    PARSE_FAILURE = "parse_failure"
    """The policy's request has a wrong syntax."""
    TOOL_ERROR = "tool_error"
    """A tool refused its arguments or failed."""
    TIMEOUT = "timeout"
    """The policy's request took too long to carry out."""
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    """The policy did not cause the failure. The conversation restarts and is not graded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the policy may call."""

    name: str
    description: str
    """What the tool does, as text for the policy."""
    parameters: dict[str, Any]  # Any: JSON
    """JSON Schema of the arguments, with the type "object"."""
    function: Callable[..., Any]  # Any: text, another JSON value, or a coroutine of one
    """The function that the tool calls, with arguments by name. The function returns text or a JSON value for the
    policy, or raises `ToolError` if it cannot do what the policy requested."""

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """The description of the tool in the form that chat templates expect."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}


class ToolError(Exception):
    """A tool cannot do what the policy requested. The error's message is sent to the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An environment's reply to a turn of the policy. Without messages the conversation ends."""

    messages: tuple[Message, ...] = ()
    """Messages for the policy before its next turn, usually a single message with the role `tool` or `user`."""
    outcome: Outcome = Outcome.OK
    """The environment's judgement of the turn to which it replies."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A running conversation between policy and environment; the argument of `respond`."""

    sample: Sample
    """The unfinished sample, with the prompt. The sample's metadata has the answer and the other fields of the prompt's
    row."""
    messages: list[Message]
    """All messages so far, from the prompt to the policy's latest turn. Do not modify the list."""
    num_turns: int = 0
    """Number of the policy's turns so far."""
    state: dict[str, Any] = field(default_factory=dict)  # Any: the environment's own
    """Data that the environment keeps between turns. Dropped at the end of the conversation."""
    metadata: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    """JSON values to add to the sample's metadata, for `grade` and reports."""

    @property
    def text(self) -> str:
        """The text of the policy's latest turn."""
        return self.messages[-1]["content"]


class Environment(Protocol):
    """An environment that grades completions.

    Optional members:
        row_fields      names of the fields that every row of the prompt file must have
        check_row(row)  raises ValueError for an invalid row, with a message for the author of the data. It is called
                        for every row before a run starts, so it should be fast
        vote(sample)    returns the final answer of a completion in comparable form for majority@k, or None
    """

    def grade(self, sample: Sample) -> float | Awaitable[float]:
        """Return the reward of a finished sample. `sample.response` is the policy's last turn.

        May be a coroutine function. Raises EnvironmentUnavailableError for failures that the policy did not cause.
        """
        ...


@runtime_checkable
class MultiTurnEnvironment(Protocol):
    """An environment that replies to the policy's turns.

    Optional members:
        tools                a sequence of `Tool`; the chat template describes these tools to the policy
        close(conversation)  a coroutine method that is called once at the end of every conversation
    """

    def grade(self, sample: Sample) -> float | Awaitable[float]:
        """Return the reward of a finished sample, as in `Environment`."""
        ...

    async def respond(self, conversation: Conversation) -> Reply:
        """Return the reply to the policy's latest turn.

        Raises:
            EnvironmentUnavailableError: a failure that the policy did not cause. OSError and httpx.TransportError are
                treated in the same way. Every other exception is a bug of the environment and ends the run.
        """
        ...


def is_multi_turn(environment: Environment) -> TypeGuard[MultiTurnEnvironment]:
    """True if the environment replies to the policy."""
    return isinstance(environment, MultiTurnEnvironment)


def describe_tools(environment: Environment) -> list[dict[str, Any]]:  # Any: JSON
    """The descriptions of an environment's tools in the form that chat templates expect."""
    tools: Sequence[Tool] = getattr(environment, "tools", ())
    return [tool.to_json() for tool in tools]
