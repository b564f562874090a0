"""Completions that are hard to grade: they get no reward within seconds, and are counted.

The limits count processor time, so the load of the machine does not matter. Without these tests a policy could hold RL
up until `rollout.reward_timeout_s`, which then ends the run.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from rollouts_core.environments import Tool
from rollouts_core.environments.code import CodeEnvironment
from rollouts_core.environments.grading_limit import GradingLimit
from rollouts_core.environments.json_schema import JSONSchemaEnvironment
from rollouts_core.environments.math import MathVerifyEnvironment
from rollouts_core.environments.protocol import Outcome
from rollouts_core.environments.sandbox import SandboxLimits
from rollouts_core.environments.tools import answer_tool_calls
from rollouts_core.rewards import WeightedRewards, grade_sample, take_reward_metrics
from rollouts_core.types import Sample, Status

TRAP = "a" * 60 + "!"
TWO_WAYS: dict[str, Any] = {
    "anyOf": [
        {"properties": {"next": {"$ref": "#"}}, "required": ["next", "left"]},
        {"properties": {"next": {"$ref": "#"}}, "required": ["next", "right"]},
    ]
}


def nested(depth: int) -> Any:
    return {"next": nested(depth - 1)} if depth else {}


ATTACKS: dict[str, tuple[Any, Any]] = {
    "nested repeats": ({"type": "string", "pattern": "^(a+)+$"}, TRAP),
    "alternatives": ({"type": "string", "pattern": "^(a|aa)+$"}, TRAP),
    "a name of a property": ({"patternProperties": {"^(a+)+$": {"type": "string"}}}, {TRAP: 1}),
    "names of properties": ({"propertyNames": {"pattern": "^(a+)+$"}}, {TRAP: 1}),
    "words": ({"type": "string", "pattern": "^(\\w+\\s?)*$"}, "word" * 15 + "!"),
    "a pattern in a list": ({"items": {"pattern": "(x+x+)+y"}}, ["x" * 60] * 10),
    "references in two ways": (TWO_WAYS, nested(60)),
}


def sample_of(response: str, **metadata: Any) -> Sample:
    return Sample(prompt="", response=response, metadata=metadata, status=Status.COMPLETED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_json_that_is_hard_to_check_gets_no_reward_within_seconds(name: str) -> None:
    schema, value = ATTACKS[name]
    environment, began = JSONSchemaEnvironment(), time.process_time()
    graded = asyncio.run(grade_sample(sample_of(json.dumps(value), schema=schema), environment.grade, timeout_s=1800))
    assert graded.reward == 0.0
    assert time.process_time() - began < 10
    assert take_reward_metrics(environment.grade) == {"num_over_grading_limit": 1.0}
    assert take_reward_metrics(environment.grade) == {"num_over_grading_limit": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "(1+" * 300 + "1" + ")" * 300], ids=["power", "brackets"])
def test_mathematics_that_is_hard_to_compute_gets_no_reward_and_is_counted(answer: str) -> None:
    environment, began = MathVerifyEnvironment(), time.process_time()
    assert environment.grade(sample_of(f"\\boxed{{{answer}}}", answer="x+1")) == 0.0
    assert time.process_time() - began < 20
    assert take_reward_metrics(environment.grade) == {"num_over_grading_limit": 1.0}


def test_an_endless_answer_is_not_read_as_mathematics() -> None:
    environment, began = MathVerifyEnvironment(), time.process_time()
    assert environment.grade(sample_of("\\boxed{" + "(" * 200_000, answer="x+1")) == 0.0
    assert environment.grade(sample_of("\\boxed{" + "(" * 200_000 + "}", answer="x+1")) == 0.0
    assert time.process_time() - began < 2
    assert take_reward_metrics(environment.grade) == {"num_over_grading_limit": 0.0}


def test_thousands_of_objects_are_compared_at_once() -> None:
    environment, began = JSONSchemaEnvironment(), time.process_time()
    schema = {"type": "array", "uniqueItems": True}
    items = [{"number": number, "name": f"x{number}"} for number in range(5000)]
    assert environment.grade(sample_of(json.dumps(items), schema=schema)) == 1.0
    assert environment.grade(sample_of(json.dumps([*items, items[7]]), schema=schema)) == 0.0
    assert time.process_time() - began < 5
    assert take_reward_metrics(environment.grade) == {"num_over_grading_limit": 0.0}


@pytest.mark.parametrize(
    ("items", "is_unique"),
    [
        ([1, 1.0], False),
        ([1, True], True),
        ([0, False], True),
        ([[1], [1.0]], False),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1.0}], False),
        ([{"a": 1}, {"a": "1"}], True),
        ([None, "null"], True),
        ([1e16, 10**16], False),
        (["\ud800", "\ud801"], True),
        ([], True),
    ],
)
def test_items_are_equal_as_json_says(items: list[Any], is_unique: bool) -> None:
    schema = {"uniqueItems": True}
    assert JSONSchemaEnvironment().grade(sample_of(json.dumps(items), schema=schema)) == float(is_unique)


def test_the_count_is_found_in_a_sum_of_rewards() -> None:
    environment = JSONSchemaEnvironment()
    environment.grading_limit.note(sample_of(""))
    rewards = WeightedRewards([("", 1.0, environment.grade)])
    assert take_reward_metrics(rewards) == {"num_over_grading_limit": 1.0}


@pytest.mark.slow
def test_a_row_whose_answer_is_hard_to_check_is_refused() -> None:
    schema = {"type": "string", "pattern": "^(a+)+$"}
    with pytest.raises(ValueError, match="cannot be checked within 2 s: give `schema` simpler patterns"):
        JSONSchemaEnvironment().check_row({"schema": schema, "answer": json.dumps(TRAP)})


@pytest.mark.slow
def test_arguments_of_a_tool_that_are_hard_to_check_are_refused_within_seconds() -> None:
    parameters = {"type": "object", "properties": {"name": {"type": "string", "pattern": "^(a+)+$"}}}
    tool = Tool(name="greet", description="", parameters=parameters, function=lambda name: name)
    call = json.dumps({"name": "greet", "arguments": {"name": TRAP}})
    began = time.process_time()
    reply = asyncio.run(answer_tool_calls(f"<tool_call>{call}</tool_call>", [tool]))
    assert reply.outcome is Outcome.TOOL_ERROR
    assert "cannot be checked within 2 s" in reply.messages[0]["content"]
    assert time.process_time() - began < 10


@pytest.mark.slow
def test_a_program_that_is_slow_in_each_of_many_tests_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = CodeEnvironment(SandboxLimits(wall_s=5))
    environment.grading_limit = GradingLimit(2.0)
    tests = [{"stdin": "", "stdout": "1"}] * 100
    sample = sample_of("import time\ntime.sleep(0.9)\nprint(1)", tests=tests)
    began = time.monotonic()
    graded = asyncio.run(grade_sample(sample, environment.grade, timeout_s=1.5))  # of which nothing passes
    assert graded.reward == 0.0
    assert time.monotonic() - began < 60
    assert take_reward_metrics(environment.grade) == {"num_over_grading_limit": 1.0}
