"""Pins that rows which their graders cannot compare a completion with are named before a run, whatever ships.

Without it every completion of such a row is a failure, and RL learns that nothing helps.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.checks.answers import check_answers
from rollouts_core.config import RewardConfig
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.environments import ENVIRONMENTS
from rollouts_core.errors import DataError
from rollouts_core.rewards import REWARDS
from rollouts_core.types import Sample
from tests.rollouts_core.checks.configurations import with_rollout, write_rows
from tests.rollouts_core.make import make_prompts

GOOD_ROWS: dict[str, dict[str, Any]] = {
    "arithmetic": {"answer": "-713"},
    "calculator": {"answer": "#### 1,234.5"},
    "code": {"tests": [{"stdin": "", "stdout": "1"}]},
    "countdown": {"numbers": [1, "2"], "target": 3},
    "json_schema": {"schema": {"type": "object"}, "answer": {"a": 1}},
    "math": {"answer": "x+1"},
    "multiple_choice": {"answer": "(b)"},
    "text_transformation": {"operation": "reverse", "text": "abc"},
}
"""A row that each environment accepts; the other two have no row of their own, or the same check."""


@pytest.mark.parametrize(
    ("rollout", "metadata", "sentence"),
    [
        ({"environment": "countdown"}, {"numbers": [1]}, "p0' has no `target`, which countdown needs"),
        ({"environment": "calculator"}, {}, "p0' has no `answer`, which calculator needs"),
        ({"rewards": (RewardConfig(name="last_number"),)}, {}, "p0' has no `answer`, which last_number needs"),
        ({"environment": "math"}, {"solution": "7"}, r"for grading; did you mean solution\? rename it to answer$"),
        ({"environment": "math"}, {"reward_model": {"ground_truth": "7"}}, "did you mean ground_truth of reward_model"),
        ({"environment": "code", "reward_fn": "rollouts_core.rewards:exact_match"}, {}, ""),
        ({"environment": "countdown"}, {"numbers": [1], "target": 1}, ""),
    ],
)
def test_a_prompt_without_what_its_grader_needs_is_named(
    rollout: dict[str, Any], metadata: dict[str, Any], sentence: str
) -> None:
    prompts = [replace(make_prompts(1)[0], metadata=metadata)]
    if not sentence:
        check_answers(prompts, with_rollout(**rollout), source="p.jsonl")
        return
    with pytest.raises(DataError, match=sentence):
        check_answers(prompts, with_rollout(**rollout), source="p.jsonl")


@pytest.mark.parametrize(
    ("environment", "row", "sentence"),
    [
        ("arithmetic", {"answer": "seven"}, "expected a number as `answer`, like 713, found 'seven'"),
        ("calculator", {"answer": "about 7"}, "the row's answer 'about 7' is not a number"),
        ("code", {"tests": []}, "the row has no tests: every program would pass"),
        ("code", {"tests": "  "}, "the row has no tests: every program would pass"),
        ("code", {"tests": 3}, "expected `tests` to be a list or Python code, found int"),
        ("code", {"tests": "assert f(1) =="}, "`tests` is not valid Python .*: no program would pass"),
        (
            "code",
            {"tests": "from __future__ import annotations\nassert f(1) == 2"},
            "not valid Python .*beginning of the file, line 1.: no program would pass",
        ),
        ("code", {"tests": "assert f(1) == 2\nreturn"}, "not valid Python .*outside function.*: no program would pass"),
        (
            "code",
            {"tests": [{"stdin": "1" * (17 << 20), "stdout": ""}]},
            "test 1 has 17,825,792 bytes of stdin, but a program",
        ),
        (
            "code",
            {"tests": [{"stdin": "", "stdout": "1" * (2 << 20)}]},
            "test 1 has 2,097,152 bytes of stdout, but a program",
        ),
        ("code", {"tests": [{"stdin": "1"}]}, 'test 1 must be {"stdin": ..., "stdout": ...}, found'),
        ("countdown", {"numbers": "1 2", "target": 3}, "expected `numbers` to be a list of numbers, found '1 2'"),
        ("countdown", {"numbers": [1, "two"], "target": 3}, "expected a number, found 'two'"),
        ("json_schema", {"schema": {"type": "objekt"}}, "`schema` is not a JSON Schema: 'objekt'"),
        ("json_schema", {"schema": {"$ref": "#/$defs/x"}}, r"`schema` refers to '#/\$defs/x', but does not contain it"),
        ("json_schema", {"schema": {"$dynamicRef": "#x"}}, "`schema` refers to '#x', but does not contain it"),
        ("json_schema", {"schema": {"$ref": "#"}, "answer": "1"}, "`schema` refers to itself without end"),
        ("json_schema", {"schema": {"items": {"$ref": "x.json"}}}, "`schema` refers to 'x.json'"),
        ("json_schema", {"schema": {"type": "object"}, "answer": "{"}, "the answer '{' is not JSON"),
        ("json_schema", {"schema": {"type": "string"}, "answer": "Rome"}, r'its own quotes, "\\"Rome\\""'),
        ("json_schema", {"schema": {"type": "object"}, "answer": True}, "schema: True is not of type 'object'"),
        ("json_schema", {"schema": {"type": "object"}, "answer": [1]}, "does not match the row's own schema"),
        ("math", {"answer": "$ "}, "the row's answer .* has nothing but spaces, units and marks"),
        ("multiple_choice", {"answer": "42"}, "expected a letter from A to J as `answer`, found '42'"),
        (
            "text_transformation",
            {"operation": "revers", "text": "x"},
            "unknown operation 'revers'; did you mean reverse",
        ),
    ],
)
def test_a_later_row_that_cannot_be_graded_is_named(
    tmp_path: Path, environment: str, row: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    good = {"prompt": "x", **GOOD_ROWS[environment]}
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps({**good, **row})}\n")
    prompts = load_prompts_from_jsonl(path)
    check_answers(prompts[:1], with_rollout(environment=environment), source=str(path))
    with pytest.raises(DataError, match=f"prompts.jsonl, row 3: prompt 'prompts-3' cannot be graded: .*{sentence}"):
        check_answers(prompts, with_rollout(environment=environment), source=str(path))


def test_every_environment_that_ships_checks_its_rows_and_accepts_good_ones(tmp_path: Path) -> None:
    assert {*GOOD_ROWS, "verifiers", "math_verify"} == {*ENVIRONMENTS}
    for environment in GOOD_ROWS:
        assert hasattr(ENVIRONMENTS[environment](), "check_row")


def test_an_answer_without_a_number_is_named_where_numbers_are_compared(tmp_path: Path) -> None:
    prompts = load_prompts_from_jsonl(write_rows(tmp_path / "p.jsonl", [{"prompt": "x", "answer": "none"}]))
    with pytest.raises(DataError, match=r"row 1: .* last_number compares numbers, and the answer 'none' has none"):
        check_answers(prompts, with_rollout(reward_fn="last_number"), source="p.jsonl")


@pytest.mark.parametrize(
    "rollout",
    [
        *({"environment": name} for name in ("arithmetic", "calculator", "math", "math_verify", "multiple_choice")),
        *({"reward_fn": name} for name in REWARDS),
        {"rewards": (RewardConfig(name="my_rewards:right"), RewardConfig(name="exact_match"))},
    ],
)
@pytest.mark.parametrize(("answer", "kind"), [(["37"], "list"), ({"value": 37}, "object"), ([], "list")])
def test_an_answer_that_is_json_is_refused_where_texts_are_compared(
    tmp_path: Path, rollout: dict[str, Any], answer: object, kind: str
) -> None:
    """It would be the text `["37"]`, which no completion that is right equals."""
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "x", "answer": "37"}, {"prompt": "y", "answer": answer}])
    grader = rollout.get("environment") or rollout.get("reward_fn") or "exact_match"
    sentence = f"p.jsonl, row 2: prompt 'p-2' cannot be graded: its `answer` is a JSON {kind}, and {grader} compares"
    with pytest.raises(DataError, match=sentence):
        check_answers(load_prompts_from_jsonl(path)[1:], with_rollout(**rollout), source=path)


def test_an_answer_that_looks_like_json_is_a_text_to_compare_with(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "x", "answer": "[1, 2]"}])
    check_answers(load_prompts_from_jsonl(path), with_rollout(environment="math"), source=path)


@pytest.mark.parametrize("rollout", [{"reward_fn": "my_rewards:right"}, {"environment": "code"}])
def test_an_answer_that_is_json_is_left_to_who_reads_it_or_ignores_it(tmp_path: Path, rollout: dict[str, Any]) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "x", "answer": ["37"], **GOOD_ROWS["code"]}])
    check_answers(load_prompts_from_jsonl(path), with_rollout(**rollout), source=path)


@pytest.mark.parametrize(
    ("schema", "answer", "right", "wrong"),
    [
        ("object", {"a": [1, None]}, '{"a": [1, null]}', '{"a": [1, 0]}'),
        ("boolean", True, "true", "false"),
        ("boolean", False, "false", "true"),
        ("number", 2.5, "2.50", "2"),
    ],
)
def test_an_answer_that_is_json_is_graded_as_json(
    tmp_path: Path, schema: str, answer: Any, right: str, wrong: str
) -> None:
    row = {"prompt": "x", "schema": {"type": schema}, "answer": answer}
    [prompt] = load_prompts_from_jsonl(write_rows(tmp_path / "p.jsonl", [row]))
    check_answers([prompt], with_rollout(environment="json_schema"), source="p.jsonl")
    for response, reward in ((right, 1.0), (wrong, 0.0)):
        sample = Sample(response=response, metadata={**prompt.metadata, "answer": prompt.answer})
        assert ENVIRONMENTS["json_schema"]().grade(sample) == reward
