"""Run one conversation between the policy and an environment, as a growing list of token ids.

    prompt --tokenize_prompt--> tokens --generate--> completion --+--> environment.respond --> messages
                                  ^                               |                               |
                                  +--- tokens of the completion --+                               |
                                  +--- tokenize_reply <-------------------------------------------+

If the conversation exhausts its budget of tokens, turns or time, it ends as TRUNCATED. The finish reason is the name of
the exhausted setting. The time budget counts only the environment's time, because an engine may be busy, restarting or
loading weights. If the chat template omits a reply from the policy's input, the conversation ends as INVALID.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import httpx

from rollouts_core.config import RolloutConfig, SamplingConfig
from rollouts_core.config.messages import first_line
from rollouts_core.data.chat import is_prefill, tokenize_prompt
from rollouts_core.data.decoding import decode_turn
from rollouts_core.data.dialects import DEFAULT_DIALECT, CallError, Dialect, ToolCall, find_dialect
from rollouts_core.data.replies import tokenize_reply
from rollouts_core.engines.completion import Completion
from rollouts_core.environments.protocol import Conversation, MultiTurnEnvironment, Outcome, Reply, describe_tools
from rollouts_core.environments.tools import reading_calls_in
from rollouts_core.errors import DataError, EnvironmentUnavailableError, RewardError, RolloutsError
from rollouts_core.rollout.agent import AgentTurn, Trajectory
from rollouts_core.rollout.validity import UNSEEN_REPLY
from rollouts_core.system.time_limits import BlockedError, OutOfTimeError, call_within
from rollouts_core.types import Sample, Status
from rollouts_core.user_code.failures import describe_raised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SampleTurn = Callable[[list[int], SamplingConfig, int], Awaitable[Completion]]
"""Samples one turn: (prompt tokens, sampling settings, turn number) -> completion."""

MACHINERY_ERRORS = (EnvironmentUnavailableError, OSError, httpx.TransportError)
"""Exceptions in an environment that come from files, networks or services, not from the policy or from a bug."""
CLOSE_TIMEOUT_S = 30.0


async def hold_conversation(
    pending: Sample,
    environment: MultiTurnEnvironment,
    sample_turn: SampleTurn,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
) -> Trajectory:
    """Run a conversation from the prompt until the environment gives no reply or a budget is exhausted.

    Raises:
        EnvironmentUnavailableError: a dependency of the environment failed, or the environment exceeded
            `reply_timeout_s`. The message names the prompt.
        RewardError: the environment raised an error of its own, or blocked the event loop for too long. The message
            names the prompt.
        EngineError: sampling failed.
    """
    limits = config.multi_turn
    conversation = Conversation(sample=pending, messages=list(pending.messages))
    tools = describe_tools(environment)
    dialect = policy_dialect(tokenizer, environment, config)
    tokens = tokenize_prompt(tokenizer, conversation.messages, tools)
    max_tokens = len(tokens) + config.sampling.max_new_tokens
    turns: list[AgentTurn] = []

    def end(status: Status, reason: str) -> Trajectory:
        messages, metadata = tuple(conversation.messages), dict(conversation.metadata)
        return Trajectory(turns=tuple(turns), messages=messages, status=status, finish_reason=reason, metadata=metadata)

    left_s = limits.timeout_s
    try:
        while True:
            num_left = max_tokens - len(tokens)
            num_new = min(limits.max_tokens_per_turn or num_left, num_left)
            sampling = config.sampling.model_copy(update={"max_new_tokens": num_new})
            completion = await sample_turn(tokens, sampling, len(turns))
            turns.append(AgentTurn(prompt_tokens=tokens, completion=completion))
            text = decode_turn(tokenizer, completion.tokens, completion.status, ends=dialect.ends)
            begun = (
                conversation.messages.pop()["content"] if not turns[1:] and is_prefill(conversation.messages) else ""
            )
            conversation.messages.append({"role": "assistant", "content": begun + text})
            conversation.num_turns += 1
            if completion.status is not Status.COMPLETED:
                return end(completion.status, completion.finish_reason)
            asked = anyio.current_time()
            with anyio.move_on_after(left_s) as time, reading_calls_in(dialect):
                reply = await _ask(environment, conversation, limits.reply_timeout_s)
            if time.cancelled_caught:
                return end(Status.TRUNCATED, "timeout_s")
            left_s -= anyio.current_time() - asked
            turns[-1] = replace(turns[-1], outcome=reply.outcome)
            if not reply.messages:
                return end(Status.COMPLETED, completion.finish_reason)
            if len(turns) == limits.max_turns:
                return end(Status.TRUNCATED, "max_turns")
            if left_s <= 0:
                return end(Status.TRUNCATED, "timeout_s")
            try:
                calls = _read_calls(dialect, text, tools)
                rest = tokenize_reply(tokenizer, reply.messages, completion.tokens, calls)
            except DataError as error:
                conversation.metadata["invalid"] = str(error)
                return end(Status.INVALID, UNSEEN_REPLY)
            tokens = [*tokens, *completion.tokens, *rest]
            if len(tokens) >= max_tokens:
                return end(Status.TRUNCATED, "max_new_tokens")
            conversation.messages.extend(reply.messages)
    finally:
        await _close(environment, conversation)


def policy_dialect(
    tokenizer: PreTrainedTokenizerBase, environment: MultiTurnEnvironment, config: RolloutConfig
) -> Dialect:
    """The format in which the policy writes calls of the environment's tools.

    Raises:
        DataError: no known format fits the chat template. Raised only if the environment has tools or the settings name
            a response template.
    """
    try:
        return find_dialect(tokenizer, config.multi_turn.response_template)
    except DataError:
        if config.multi_turn.response_template or describe_tools(environment):
            raise
        return DEFAULT_DIALECT


def _read_calls(dialect: Dialect, text: str, tools: Sequence[dict[str, Any]]) -> list[ToolCall]:  # Any: JSON schemas
    try:
        return dialect.read(text, tools)
    except CallError:
        return []


async def _ask(environment: MultiTurnEnvironment, conversation: Conversation, timeout_s: float) -> Reply:
    where = f"environment {type(environment).__name__} on prompt {_name(conversation.sample)}"
    try:
        reply = await call_within(timeout_s, environment.respond, conversation)
    except BlockedError as error:
        raise RewardError(f"{where} blocked the event loop, and so all other conversations: {error}") from error
    except OutOfTimeError as error:
        raise EnvironmentUnavailableError(f"{where} did not answer within {timeout_s:g} s") from error
    except MACHINERY_ERRORS as error:
        raise EnvironmentUnavailableError(f"{where} failed: {first_line(error)}") from error
    except RolloutsError:
        raise
    except Exception as error:
        raise RewardError(f"{where} {describe_raised(error)}") from error
    if not isinstance(reply, Reply) or not all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in reply.messages
    ):
        raise RewardError(f"{where} answered {reply!r}: expected a Reply whose messages have role and content")
    if reply.outcome is Outcome.INFRASTRUCTURE_ERROR:
        raise EnvironmentUnavailableError(f"{where} failed: {[message['content'] for message in reply.messages]}")
    return reply


async def _close(environment: MultiTurnEnvironment, conversation: Conversation) -> None:
    """Let the environment free its resources. A failure is logged and does not change the conversation."""
    close = getattr(environment, "close", None)
    if close is None:
        return
    where = f"environment {type(environment).__name__} on prompt {_name(conversation.sample)}"
    try:
        with anyio.CancelScope(shield=True):
            await call_within(CLOSE_TIMEOUT_S, close, conversation)
    except OutOfTimeError as error:
        logger.warning("%s was not closed in time, so its resources may stay open: %s", where, error)
    except MACHINERY_ERRORS as error:
        logger.warning("%s could not be closed: %s", where, first_line(error))


def _name(sample: Sample) -> str:
    return repr(sample.metadata.get("prompt_id", "?"))
