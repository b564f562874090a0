"""Pins what the environments that ship call right.

Without it RL would be paid for answers that were cut off, or demonstrations would teach wrong sums.
"""

import asyncio
import random
import re
import socket
import sys
from collections.abc import Callable
from time import perf_counter

import pytest

from rollouts_core.config import RolloutConfig
from rollouts_core.environments import (
    ENVIRONMENTS,
    ArithmeticEnvironment,
    CountdownEnvironment,
    JSONSchemaEnvironment,
    MathEnvironment,
    MathVerifyEnvironment,
    MultipleChoiceEnvironment,
    TextTransformationEnvironment,
)
from rollouts_core.environments.arithmetic import (
    Addition,
    draw_addition,
    write_blurted_answer,
    write_worked_answer,
)
from rollouts_core.environments.math import final_answer
from rollouts_core.environments.text_transformation import OPERATIONS, draw_row
from rollouts_core.errors import ConfigError, RewardError
from rollouts_core.rewards import grade_sample
from rollouts_core.rollout.resolve import resolve_environment
from rollouts_core.types import Sample, Status


def grade_arithmetic(response: str, answer: str = "713", status: Status = Status.COMPLETED) -> float:
    """The grade of a response."""
    return ArithmeticEnvironment().grade(Sample(response=response, metadata={"answer": answer}, status=status))


def grade_math(response: str, answer: str) -> float:
    """The grade of a response."""
    return MathEnvironment().grade(Sample(response=response, metadata={"answer": answer}, status=Status.COMPLETED))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (":713", 1.0),
        ("5+8+0=13,1+9+1=11,4+2+1=07:713", 1.0),
        ("anything:99:713", 1.0),
        (": 713 ", 1.0),
        (":712", 0.0),
        (":0713", 0.0),
        (":713:", 0.0),
        (":713 ok", 0.0),
        ("713", 0.0),
        (":", 0.0),
        ("", 0.0),
    ],
)
def test_the_number_after_the_last_colon_decides(response: str, reward: float) -> None:
    assert grade_arithmetic(response) == reward


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.COMPLETED])
def test_a_completion_that_did_not_end_by_itself_earns_nothing(status: Status) -> None:
    assert grade_arithmetic(":713", status=status) == 0.0


def test_a_sample_without_an_answer_earns_nothing() -> None:
    assert ArithmeticEnvironment().grade(Sample(response=":", status=Status.COMPLETED)) == 0.0


@pytest.mark.parametrize("num_digits", [1, 2, 3, 6])
def test_every_column_of_a_worked_answer_is_right(num_digits: int) -> None:
    rng = random.Random(num_digits)
    for _ in range(100):
        problem = draw_addition(rng, num_digits=num_digits)
        worked, _, _ = write_worked_answer(problem).partition(":")
        carry, digits = 0, ""
        for column in worked.split(","):
            matched = re.fullmatch(r"(\d)\+(\d)\+(\d)=(\d)(\d)", column)
            assert matched is not None
            a, b, given_carry, tens, ones = matched.groups()
            assert (int(given_carry), int(a) + int(b) + carry) == (carry, int(tens + ones))
            carry, digits = int(tens), ones + digits
        assert int(str(carry) + digits) == problem.first + problem.second


@pytest.mark.parametrize("write", [write_worked_answer, write_blurted_answer])
def test_both_styles_of_answer_are_graded_right(write: Callable[[Addition], str]) -> None:
    rng = random.Random(0)
    for _ in range(100):
        problem = draw_addition(rng, num_digits=3)
        assert grade_arithmetic(write(problem), problem.answer) == 1.0


def test_the_worked_example_of_the_module() -> None:
    problem = Addition(415, 298)
    assert (problem.question, problem.answer) == ("415+298=?", "713")
    assert write_worked_answer(problem) == "5+8+0=13,1+9+1=11,4+2+1=07:713"


@pytest.mark.parametrize("num_digits", [1, 4])
def test_drawn_numbers_have_the_asked_number_of_digits(num_digits: int) -> None:
    rng = random.Random(0)
    drawn = [draw_addition(rng, num_digits=num_digits) for _ in range(200)]
    assert {len(str(n)) for problem in drawn for n in (problem.first, problem.second)} == {num_digits}


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("She has 9 * 2 = 18 left.\n#### 18", "18", 1.0),
        ("#### 18", "9 * 2 = <<9*2=18>>18\n#### 18", 1.0),
        ("#### $1,234", "1234", 1.0),
        ("#### 18.0", "18", 1.0),
        ("#### 18.", "18", 1.0),
        ("#### 0.5", ".5", 1.0),
        ("#### -0.0", "0", 1.0),
        (r"so \boxed{18}.", "18", 1.0),
        (r"\boxed{1} or rather \boxed{18}", "18", 1.0),
        (r"\boxed{X}", "x", 1.0),
        (r"\boxed{50\%}", "50\\%", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{50}", "50\\%", 1.0),
        (r"\boxed{18.90}", "\\$18.90", 1.0),
        (r"\boxed{10080}", "10,\\!080", 1.0),
        (r"\boxed{10,080}", "10,\\!080", 1.0),
        (r"\boxed{10{,}080}", "10080", 1.0),
        (r"\boxed{1, 200}", "1200", 0.0),
        (r"\boxed{1267650600228229401496703205376}", "1267650600228229401496703205376.0", 1.0),
        (r"\boxed{1267650600228229401496703205111}", "1267650600228229401496703205376", 0.0),
        (r"\boxed{19}", "18", 0.0),
        (r"\boxed{18} or rather \boxed{19}", "18", 0.0),
        ("18", "18", 0.0),
        ("", "18", 0.0),
        ("#### eighteen", "18", 0.0),
        ("#### **18**", "18", 1.0),
        ("**#### 18**", "18", 1.0),
        ("#### **18**.\n\n#### Explanation\nTwice nine.", "18", 1.0),
        ("#### **x + 1**", "x+1", 1.0),
        ("#### **19**", "18", 0.0),
        ("#### 2**3", "23", 0.0),
        ("#### -18", "18", 0.0),
        ("#### −18", "-18", 1.0),
        (r"\boxed{−18}", "-18", 1.0),
        (r"\boxed{-18}", "−18", 1.0),
        (r"\boxed{x−1}", "x-1", 1.0),
        ("#### 1e9999999", "18", 0.0),
        ("#### 1e999999", "18", 0.0),
        ("#### -1e-9999999", "18", 0.0),
        ("#### 1e3", "1000", 1.0),
        ("#### Step 1: double\n9 * 2 = 18, so \\boxed{18}", "18", 1.0),
        ("\\boxed{18}\n\n#### Explanation\nTwice nine.", "18", 1.0),
        ("#### 18\n\n#### Explanation\nTwice nine.", "18", 1.0),
        ("#### 18\nNo, it is \\boxed{19}", "18", 0.0),
        ("\\boxed{19}\nNo, it is\n#### 18", "18", 1.0),
        ("#### \\boxed{18}", "18", 1.0),
        ("#### x + 1", "x+1", 1.0),
    ],
)
def test_the_last_marked_answer_decides(response: str, answer: str, reward: float) -> None:
    assert grade_math(response, answer) == reward


def test_a_number_is_not_written_out_with_a_million_digits() -> None:
    assert final_answer("#### 1e999999") == "1e999999"


def test_a_text_without_a_marked_answer_has_none() -> None:
    assert final_answer("the answer is 18") is None


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{1+x}", "x+1", 1.0),
        ("#### 0.5", r"\frac{1}{2}", 1.0),
        ("#### 18", "9 * 2 = 18\n#### 18", 1.0),
        (r"\boxed{(1,2)}", "(1, 2)", 1.0),
        (r"\boxed{\frac{1}{3}}", "0.5", 0.0),
        ("it is 0.5", "0.5", 0.0),
        ("", "0.5", 0.0),
        (r"\boxed{9^{9^{9^9}}}", "1", 0.0),
    ],
)
def test_equal_mathematics_is_right_where_math_verify_compares(response: str, answer: str, reward: float) -> None:
    pytest.importorskip("math_verify")
    sample = Sample(response=response, metadata={"answer": answer}, status=Status.COMPLETED)
    assert MathVerifyEnvironment().grade(sample) == reward


def test_math_verify_that_is_not_installed_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install \"rollouts\[math\]\".*compares answers as text"):
        resolve_environment(RolloutConfig(environment="math_verify"))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>(3+7)*5-4</answer>", 1.0),
        ("<answer>(3+7)*5-4 = 46</answer>", 1.0),
        ("<answer>1</answer> no: <answer>5*(7+3)-4</answer>", 1.0),
        ("I write it behind <answer>.\n<answer>(3+7)*5-4</answer>", 1.0),
        ("<answer>46</answer>", 0.0),
        ("<answer>50-4</answer>", 0.0),
        ("<answer>(3+7)*5-4-4+4</answer>", 0.0),
        ("<answer>(3+7)*5</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("(3+7)*5-4", 0.0),
    ],
)
def test_countdown_pays_for_every_number_used_once(response: str, reward: float) -> None:
    sample = Sample(response=response, metadata={"numbers": [3, 4, 5, 7], "target": 46})
    assert CountdownEnvironment().grade(sample) == reward


def test_every_drawn_transformation_is_solved_by_its_own_answer() -> None:
    rng = random.Random(0)
    for row in (draw_row(rng) for _ in range(50)):
        for response, reward in ((row["answer"], 1.0), (row["answer"] + "!", 0.0)):
            assert TextTransformationEnvironment().grade(Sample(response=response, metadata=row)) == reward


@pytest.mark.parametrize(
    ("operation", "text", "result"),
    [
        ("reverse", "ab cd", "dc ba"),
        ("uppercase", "ab", "AB"),
        ("reverse words", "ab cd", "cd ab"),
        ("sort words", "b a c", "a b c"),
        ("remove vowels", "Audio tape", "d tp"),
        ("double letters", "a b1", "aa bb1"),
    ],
)
def test_a_transformation_by_hand(operation: str, text: str, result: str) -> None:
    assert OPERATIONS[operation](text) == result


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("C", 1.0),
        ("(c).", 1.0),
        ("The answer is C.", 1.0),
        ("Answer: **C**", 1.0),
        ("Answer: `C`", 1.0),
        (r"The answer is $\mathbf{C}$.", 1.0),
        (r"**Answer:** $\text{(C)}$", 1.0),
        ("It looks as if the answer is A.\n<answer>C</answer>", 1.0),
        ("It looks as if the answer is C.\n<answer>A</answer>", 0.0),
        ("<answer>A cat</answer>", 0.0),
        (r"A is wrong. \boxed{C}", 1.0),
        (r"\boxed{\text{C}}", 1.0),
        (r"\boxed{\textbf{(C)}}", 1.0),
        (r"\boxed{\mathrm{C}}", 1.0),
        (r"\boxed{C. Paris}", 1.0),
        (r"\boxed{(C) Paris}", 1.0),
        (r"\boxed{\text{C: Paris}}", 1.0),
        (r"\boxed{\textbf{C.} Paris}", 1.0),
        (r"\boxed{C Paris}", 0.0),
        ("The answer is A at first sight.\n\n**Answer:** C", 1.0),
        ("**Answer**: C", 1.0),
        ("The answer is $C$.", 1.0),
        ("The answer is: $C = 3$", 0.0),
        ("The answer is A. No, the answer is (C)", 1.0),
        ("Answer: C, as the answer is a cat", 1.0),
        ("The answer is C because of the cat", 1.0),
        ("Answer: C\nA cat it is", 1.0),
        ("Answer: C or D", 0.0),
        ("Answer: C it may be", 0.0),
        ("Answer: C, D", 0.0),
        ("Answer: C/D", 0.0),
        ("Answer: C & (D)", 0.0),
        ("Answer: C, D and A", 0.0),
        ("Answer: C, A is wrong", 1.0),
        ("Answer: C, I am sure", 1.0),
        ("Answer: C, I'm sure", 1.0),
        ("answer: c", 1.0),
        ("<answer>c</answer>", 1.0),
        ("The answer is c.", 1.0),
        ("The answer is c minor", 0.0),
        ('The answer is "C".', 1.0),
        (r"The answer is \(C\).", 1.0),
        ("Answer: [C]", 1.0),
        ("The correct answer is option C.", 1.0),
        (r"\boxed{C.}", 1.0),
        (r"\boxed{\text{C)}}", 1.0),
        ("**C**", 1.0),
        ("C. Paris", 1.0),
        ("**(C) Paris**", 1.0),
        ("C. Paris\nD. London", 0.0),
        ("A: C", 0.0),
        ("A", 0.0),
        ("Cats", 0.0),
        ("C or D", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_marked_letter_decides(response: str, reward: float) -> None:
    assert MultipleChoiceEnvironment().grade(Sample(response=response, metadata={"answer": "C"})) == reward


@pytest.mark.parametrize(
    "response", ["Answer: I think it is B", "Answer: I'd say B", "Answer: I’d say B", "The answer is A kind of B"]
)
def test_a_word_of_one_letter_is_no_choice(response: str) -> None:
    for letter in "AI":
        assert MultipleChoiceEnvironment().grade(Sample(response=response, metadata={"answer": letter})) == 0.0


def test_a_policy_that_writes_thousands_of_marks_is_graded_at_once() -> None:
    began = perf_counter()
    for mark in ("\n", "*", " *", "$", "`", ">", "\\text{", '"', "[", "option ", "c"):
        assert MultipleChoiceEnvironment().grade(Sample(response="answer" + mark * 20_000)) == 0.0
    for mark in (" ", "C. ", "\\boxed{C. "):
        assert MultipleChoiceEnvironment().grade(Sample(response="\\boxed{C. " + mark * 20_000)) == 0.0
    for mark in (" ", "*", ") ", ", ", ", C", "C. "):
        assert MultipleChoiceEnvironment().grade(Sample(response="C" + mark * 20_000 + "\n.")) == 0.0
        assert MultipleChoiceEnvironment().grade(Sample(response="Answer: C" + mark * 20_000 + "\n.")) == 0.0
    assert perf_counter() - began < 5.0, "each mark was tried in several places of the pattern"


def test_a_policy_that_begins_thousands_of_answers_is_graded_at_once() -> None:
    began = perf_counter()
    sample = Sample(response="<answer>" * 20_000, metadata={"numbers": [1, 2], "target": 3})
    assert CountdownEnvironment().grade(sample) == 0.0
    assert perf_counter() - began < 5.0, "behind each it was looked for the end"


PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ('{"age": 7}', "", 1.0),
        ('Sure:\n```json\n{"age": 7}\n```', "", 1.0),
        ('Sure:\n```\n{"age": 7}\n```', "", 1.0),
        ('Sure: ```json\n{"age": 7}```', "", 1.0),
        ('Sure:```\n{"age": 7} ```', "", 1.0),
        ('```JSON\n{"age": 7}\n```', "", 1.0),
        ('```json\n{"age": 7}', "", 1.0),
        ('```json\n{"name": "```x```", "age": 7}\n```', "", 1.0),
        ('By:\n```python\nage = 7\n```\nSo:\n```json\n{"age": 7}\n```', "", 1.0),
        ('So:\n```json\n{"age": 7}\n```\nBy:\n```python\nage = 7\n```', "", 1.0),
        ('No:\n```json\n{"age": 7}\n```\nBut:\n```json\n{"age": "7"}\n```', "", 0.0),
        ('{"age": 7}', '{"age": 7}', 1.0),
        ('{"age": 7}', '{"age": 8}', 0.0),
        ('{"age": "7"}', "", 0.0),
        ('{"age": NaN}', "", 0.0),
        ("{}", "", 0.0),
        ('{"age": 7} and more', "", 0.0),
        ("[" * 100_000, "", 0.0),
        ("", "", 0.0),
    ],
)
def test_json_is_paid_for_where_it_keeps_to_the_schema(response: str, answer: str, reward: float) -> None:
    sample = Sample(response=response, metadata={"schema": PERSON, "answer": answer})
    assert JSONSchemaEnvironment().grade(sample) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [('{"ok": [true]}', 1.0), ('{"ok": [1]}', 0.0), ('{"ok": [true], "x": 0}', 0.0), ('{"ok": true}', 0.0)],
)
def test_true_is_not_1(response: str, reward: float) -> None:
    sample = Sample(response=response, metadata={"schema": {"type": "object"}, "answer": '{"ok": [true]}'})
    assert JSONSchemaEnvironment().grade(sample) == reward


def test_1_is_1_0() -> None:
    sample = Sample(response="[1.0, 2]", metadata={"schema": {"type": "array"}, "answer": "[1, 2.0]"})
    assert JSONSchemaEnvironment().grade(sample) == 1.0


@pytest.mark.parametrize(
    ("number", "reward"),
    [("19.99", 1.0), ("0.07", 1.0), ("19.995", 0.0), ("1" * 400, 1.0), ("1e300", 1.0), ("1e999", 0.0), ("-1e999", 0.0)],
)
def test_a_price_is_a_multiple_of_a_cent(number: str, reward: float) -> None:
    """Also where floats do not divide evenly; and a policy that repeats a digit must not end the run."""
    sample = Sample(response=number, metadata={"schema": {"type": "number", "multipleOf": 0.01}})
    assert JSONSchemaEnvironment().grade(sample) == reward


def test_a_response_deeper_than_can_be_checked_earns_nothing_under_a_schema_that_refers_to_itself() -> None:
    schema = {"type": "array", "items": {"$ref": "#"}}
    for depth, reward in ((3, 1.0), (400, 0.0)):
        sample = Sample(response="[" * depth + "]" * depth, metadata={"schema": schema})
        assert JSONSchemaEnvironment().grade(sample) == reward


def test_a_schema_that_cannot_be_used_is_an_error_and_nothing_is_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        elsewhere = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        for schema in ({"type": "objekt"}, {"$ref": "#/nowhere"}, {"$ref": elsewhere}):
            sample = Sample(response="{}", metadata={"schema": schema, "prompt_id": "p7"})
            with pytest.raises(RewardError, match="on prompt 'p7' raised"):
                asyncio.run(grade_sample(sample, JSONSchemaEnvironment().grade, timeout_s=2.0))
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()


def test_environments_are_known_by_name() -> None:
    assert ENVIRONMENTS["arithmetic"] is ArithmeticEnvironment
    assert ENVIRONMENTS["math"] is MathEnvironment
