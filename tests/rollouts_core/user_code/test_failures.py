"""Pins that the error of a user's function says where in the user's own files it was raised.

Without it a KeyError in a reward of three hundred lines would be one word, and the search for it a run on rented GPUs.
"""

import asyncio
import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rollouts_core.errors import RewardError
from rollouts_core.rewards import grade_sample
from rollouts_core.run_directory import RunDirectory
from rollouts_core.types import Sample
from rollouts_core.user_code.failures import describe_raised, find_user_place, is_raised_by_user_code

SAMPLE = Sample(response="x", metadata={"prompt_id": "p7", "answer": "2"})


def look_up(sample: Sample) -> float:
    """A user's reward whose mistake lies in another function of the user's."""
    rubrics: dict[str, float] = {}
    return find(rubrics)


def find(rubrics: dict[str, float]) -> float:
    """Where the mistake is."""
    return rubrics["rubric"]


async def read_judgement(sample: Sample) -> float:
    """A user's coroutine that raises within the standard library."""
    return float(json.loads(sample.response))


def raised_by(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def line_of(text: str) -> int:
    """The first line of this file with some text."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    ("reward_fn", "line", "kind"),
    [(look_up, 'return rubrics["rubric"]', "KeyError"), (read_judgement, "json.loads(sample", "JSONDecodeError")],
)
@pytest.mark.parametrize("timeout_s", [None, 10.0])
def test_the_innermost_line_of_the_users_own_file_is_named(
    reward_fn: Callable[[Sample], float], line: str, kind: str, timeout_s: float | None
) -> None:
    place = rf"raised {kind}: .* \(test_failures\.py, line {line_of(line)}\)$"
    with pytest.raises(RewardError, match=place) as caught:
        asyncio.run(grade_sample(SAMPLE, reward_fn, timeout_s=timeout_s))
    assert is_raised_by_user_code(caught.value)


def test_an_error_within_an_installed_package_alone_has_no_place(tmp_path: Path) -> None:
    file = tmp_path / "site-packages" / "their_rewards.py"
    file.parent.mkdir()
    file.write_text("def fail(sample):\n    raise OSError('gone')\n")
    spec = importlib.util.spec_from_file_location("their_rewards", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(RewardError, match=r"raised OSError: gone$"):
        asyncio.run(grade_sample(SAMPLE, module.fail))


def test_an_error_that_was_raised_nowhere_has_no_place() -> None:
    error = ValueError("no\nway")
    assert describe_raised(error) == "raised ValueError: no"
    assert not is_raised_by_user_code(error)


def test_a_syntax_error_names_its_own_place_alone() -> None:
    assert find_user_place(raised_by(partial(compile, "def (", "a.py", "exec"))) == ""


@pytest.mark.parametrize("noted", [{"solved": np.bool_(True)}, {"seen": {1, 2}}, {"by": {(1, 2): 3}}])
def test_a_note_in_a_sample_that_cannot_be_written_down_names_the_prompt(
    noted: dict[str, object], tmp_path: Path
) -> None:
    samples = [SAMPLE, replace(SAMPLE, metadata={**SAMPLE.metadata, **noted})]
    with pytest.raises(RewardError, match=r"prompt 'p7': a reward, environment or generate_fn .* is not JSON \("):
        RunDirectory(tmp_path).write_samples("step_000001", samples, temperature=1.0)
    assert list(tmp_path.glob("samples/*")) == []
