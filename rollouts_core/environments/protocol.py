"""The interface of environments, which answer the policy's turns and grade its samples.

An environment has a method `grade`, which is enough if the policy has one turn. For conversations it also has
`respond`:

    prompt --> policy --> respond --> policy --> respond --> no message --> grade
                  ^          |
                  +- message-+

One object serves all conversations of a run concurrently, so the data of one conversation belong into its `state`.

Failures are separated by cause. A failure of the policy is an `Outcome`, and the policy reads about it in its next
turn. Any other failure is raised as `EnvironmentUnavailableError` and does not affect the policy's reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeGuard, runtime_checkable

from rollouts_core.types import Message, Sample


class Outcome(StrEnum):
    """An environment's judgement of one turn of the policy."""

    OK = "ok"
    """The request was understood and done."""
    PARSE_FAILURE = "parse_failure"
    """The environment could not read the request."""
    TOOL_ERROR = "tool_error"
    """A tool refused its arguments."""
    TIMEOUT = "timeout"
    """The request took too long."""
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    """A failure that the policy did not cause: the conversation restarts and is not graded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the policy may call."""

    name: str
    description: str
    """Purpose of the tool, for the policy."""
    parameters: dict[str, Any]  # Any: JSON
    """JSON Schema of the arguments, an object."""
    function: Callable[..., Any]  # Any: text, another JSON value, or a coroutine of one
    """Takes the arguments by name. Returns text, or a value that is sent as JSON, for the policy; raises `ToolError`
    for requests that it cannot do."""

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """The tool in the form of chat templates."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}


class ToolError(Exception):
    """A tool cannot do what the policy requested; the policy gets the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An environment's reply to a turn of the policy. Without messages the conversation ends."""

    messages: tuple[Message, ...] = ()
    """Messages for the policy before its next turn, usually one of the role `tool` or `user`."""
    outcome: Outcome = Outcome.OK
    """Judgement of the answered turn."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A running conversation, as `respond` sees it."""

    sample: Sample
    """The pending sample: its prompt, and in its metadata the reference answer and other fields of the row."""
    messages: list[Message]
    """All turns so far, beginning with the prompt and ending with the policy's latest. Do not change it."""
    num_turns: int = 0
    """Turns of the policy so far."""
    state: dict[str, Any] = field(default_factory=dict)  # Any: the environment's own
    """Data of the environment between turns; dropped at the end of the conversation."""
    metadata: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    """JSON values to add to the sample's metadata, for `grade` and reports."""

    @property
    def text(self) -> str:
        """The policy's latest turn."""
        return self.messages[-1]["content"]


class Environment(Protocol):
    """Grades completions.

    Three optional members: `row_fields`, the names of fields that a row of prompts must have, `check_row(row)`, which
    raises ValueError for a row with invalid fields or answer, with a message for the author of the data, and
    `vote(sample)`, the final answer of a completion in comparable form, or None, for majority@k. Every row is checked
    before a run, so the check should be cheap.
    """

    def grade(self, sample: Sample) -> float | Awaitable[float]:
        """The reward of a finished sample, whose `response` is the policy's last turn.

        May be a coroutine function. Raises EnvironmentUnavailableError for failures that the policy did not cause.
        """
        ...


@runtime_checkable
class MultiTurnEnvironment(Protocol):
    """An environment that replies to the policy.

    Two optional members: `tools`, a sequence of `Tool` that the chat template describes to the policy, and a coroutine
    method `close(conversation)`, which is called once at the end of every conversation.
    """

    def grade(self, sample: Sample) -> float | Awaitable[float]:
        """The reward of a finished sample, as in `Environment`."""
        ...

    async def respond(self, conversation: Conversation) -> Reply:
        """The reply to the policy's latest turn.

        Raises:
            EnvironmentUnavailableError: a failure that the policy did not cause. OSError and httpx.TransportError are
                treated the same; any other exception is a bug in the environment and ends the run.
        """
        ...


def is_multi_turn(environment: Environment) -> TypeGuard[MultiTurnEnvironment]:
    """True if the environment replies to the policy."""
    return isinstance(environment, MultiTurnEnvironment)


def describe_tools(environment: Environment) -> list[dict[str, Any]]:  # Any: JSON
    """The environment's tools in the form of chat templates."""
    tools: Sequence[Tool] = getattr(environment, "tools", ())
    return [tool.to_json() for tool in tools]
