"""Pins the calculator: what it answers in both forms of a call, and which last turn is paid for.

Without it a policy could be paid for a number that the calculator said, or for an answer that was cut off.
"""

from __future__ import annotations

import asyncio
from time import perf_counter

import pytest

from rollouts_core.environments import CalculatorEnvironment, Conversation, Outcome
from rollouts_core.environments.protocol import describe_tools, is_multi_turn
from rollouts_core.errors import RewardError
from rollouts_core.types import Message, Sample, Status

CALCULATOR = CalculatorEnvironment()


@pytest.mark.parametrize(
    ("said", "answered", "outcome"),
    [
        ("<calc>57+83</calc>", ["140"], Outcome.OK),
        ("so <calc>57+83</calc> and <calc>1/4</calc>", ["140; 0.25"], Outcome.OK),
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "57+83"}}</tool_call>', ["140"], Outcome.OK),
        (":140", [], Outcome.OK),
        ("<calc>57+83", ["error: <calc> has no </calc>"], Outcome.PARSE_FAILURE),
        ("<calc>57+</calc>", ["error: the expression ends too early"], Outcome.TOOL_ERROR),
        ("<calc>__import__('os')</calc>", ["error: unexpected '_'"], Outcome.TOOL_ERROR),
    ],
)
def test_calls_are_answered(said: str, answered: list[str], outcome: Outcome) -> None:
    conversation = Conversation(sample=Sample(), messages=[Message(role="assistant", content=said)], num_turns=1)
    reply = asyncio.run(CALCULATOR.respond(conversation))
    assert ([message["content"] for message in reply.messages], reply.outcome) == (answered, outcome)


def test_a_policy_that_begins_thousands_of_calls_is_answered_at_once() -> None:
    """All other conversations wait meanwhile, and one that takes too long ends the run."""
    said = [Message(role="assistant", content="<calc>" * 20_000)]
    began = perf_counter()
    reply = asyncio.run(CALCULATOR.respond(Conversation(sample=Sample(), messages=said, num_turns=1)))
    assert reply.outcome is Outcome.PARSE_FAILURE
    assert perf_counter() - began < 5.0


@pytest.mark.parametrize(
    ("response", "status", "reward"),
    [
        (":140", Status.COMPLETED, 1.0),
        ("it is :140.0", Status.COMPLETED, 1.0),
        ("#### 140", Status.COMPLETED, 1.0),
        (r"\boxed{140}", Status.COMPLETED, 1.0),
        ("140", Status.COMPLETED, 1.0),
        (":141", Status.COMPLETED, 0.0),
        ("", Status.COMPLETED, 0.0),
        (":140", Status.TRUNCATED, 0.0),
        ("<calc>57+83</calc>", Status.TRUNCATED, 0.0),
    ],
)
def test_the_number_of_the_last_turn_decides(response: str, status: Status, reward: float) -> None:
    sample = Sample(response=response, status=status, metadata={"answer": "140"})
    assert CALCULATOR.grade(sample) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (":57+83-21", "119", 0.0),
        (r"\boxed{(57+83)-21}", "119", 0.0),
        (":119*1", "119", 0.0),
        (":238/2", "119", 0.0),
        (":1/3", "1/3", 1.0),
        (":−1/3", "-1/3", 1.0),
        (":2/6", "1/3", 0.0),
        (":2/6", "2/6", 1.0),
        (":1/2", "0.5", 1.0),
        (":(-119)", "-119", 1.0),
        (":−119", "-119", 1.0),
    ],
)
def test_a_sum_that_is_repeated_is_no_answer(response: str, answer: str, reward: float) -> None:
    sample = Sample(response=response, status=Status.COMPLETED, metadata={"answer": answer})
    assert CALCULATOR.grade(sample) == reward


@pytest.mark.parametrize("answer", ["1,250", "1250", "$1,250.00", "1 thousand is 1000, so\n#### 1,250"])
@pytest.mark.parametrize(
    ("response", "reward"), [(":1,250", 1.0), (": $1250.", 1.0), ("#### 1,250", 1.0), (":1", 0.0), (":250", 0.0)]
)
def test_numbers_are_read_as_people_write_them(response: str, answer: str, reward: float) -> None:
    sample = Sample(response=response, status=Status.COMPLETED, metadata={"answer": answer})
    assert CALCULATOR.grade(sample) == reward


@pytest.mark.parametrize("answer", ["", "about ten", "1,25,0"])
def test_a_reference_that_is_no_number_is_an_error_that_names_it(answer: str) -> None:
    sample = Sample(response=":10", status=Status.COMPLETED, metadata={"answer": answer})
    with pytest.raises(RewardError, match=f"the row's answer '{answer}' is not a number"):
        CALCULATOR.grade(sample)


def test_it_offers_its_tool_to_the_policy() -> None:
    assert is_multi_turn(CALCULATOR)
    assert [tool["function"]["name"] for tool in describe_tools(CALCULATOR)] == ["calculator"]
