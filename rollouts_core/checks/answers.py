"""Find rows of prompts that cannot be graded, for example because they have no `answer`.

Not here: trial calls of the functions that grade (function_checks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollouts_core.config import Config
from rollouts_core.config.messages import first_line
from rollouts_core.data.bad_rows import BadRows, noted_rows
from rollouts_core.data.conversations import find_answer_elsewhere
from rollouts_core.environments import ENVIRONMENTS
from rollouts_core.errors import ConfigError, DataError, RolloutsError
from rollouts_core.rewards import REWARDS, check_reward_row
from rollouts_core.rollout.resolve import resolve_environment
from rollouts_core.types import Prompt
from rollouts_core.user_code.failures import describe_raised

RowCheck = Callable[[Mapping[str, Any]], None]  # Any: JSON
COMPARE_BY_LOSS = 'set evaluation.metric = "loss"'
"""Remedy in error messages about rows that are demonstrations instead of prompts. The remedy works only in the mode
sft."""


def check_answers(prompts: Sequence[Prompt], config: Config, *, source: str, bad: BadRows | None = None) -> None:
    """Check that each prompt has the fields and the usable `answer` that its graders need, as far as these needs are
    known.

    Args:
        bad: collects the errors of rows. If None, they are raised after all prompts were checked.

    Raises:
        DataError: a prompt cannot be graded.
        ConfigError: the `check_row` of a user's environment failed.
    """
    needed: dict[str, str] = {}
    of_text: list[str] = []
    checks: dict[str, RowCheck] = {}
    for grader in config.rollout.reward_names:
        if grader == config.rollout.environment_name:
            environment = resolve_environment(config.rollout)
            row_fields = getattr(environment, "row_fields", ())
            needed |= dict.fromkeys(row_fields, grader)
            of_text += [grader] if grader in ENVIRONMENTS and "answer" in row_fields else []
            if hasattr(environment, "check_row"):
                checks[f"rollout.environment: check_row of {grader}"] = environment.check_row
        elif grader in REWARDS:
            needed["answer"] = grader
            of_text.append(grader)
            checks[grader] = partial(check_reward_row, grader)
    with noted_rows(source, bad) as noted:
        for prompt in prompts:
            with noted.at(prompt.row):
                _check_answer(prompt, config, needed, of_text, checks, source=source)


def _check_answer(
    prompt: Prompt,
    config: Config,
    needed: Mapping[str, str],
    of_text: Sequence[str],
    checks: Mapping[str, RowCheck],
    *,
    source: str,
) -> None:
    """Raise DataError for a prompt that cannot be graded.

    Args:
        needed: names of the required fields, each with the name of a grader that requires it.
        of_text: names of graders that compare the completion with a single text.
        checks: functions of the graders that check a row, by name.
    """
    where = f"{source}, row {prompt.row}: prompt {prompt.id!r}"
    for name, grader in needed.items():
        if not (prompt.answer if name == "answer" else name in prompt.metadata):
            remedy = f": give it one, or {COMPARE_BY_LOSS}" if not config.is_graded else ""
            elsewhere = find_answer_elsewhere(prompt.metadata) if name == "answer" else ""
            remedy = elsewhere or remedy
            raise DataError(f"{where} has no `{name}`, which {grader} needs for grading{remedy}")
    try:
        if prompt.has_json_answer and of_text:
            raise ValueError(_describe_json_answer(prompt.answer, of_text[0]))
        for name, check in checks.items():
            _run_check(name, check, {**prompt.metadata, "answer": prompt.answer}, where)
    except ValueError as error:
        raise DataError(f"{where} cannot be graded: {first_line(error)}") from error


def _run_check(name: str, check: RowCheck, row: Mapping[str, Any], where: str) -> None:  # Any: JSON
    """Call a grader's check of a row. ValueError (a mistake in the row) and RolloutsError are raised unchanged. All
    other exceptions become ConfigError."""
    try:
        check(row)
    except (ValueError, RolloutsError):
        raise
    except Exception as error:
        raise ConfigError(f"{name} {describe_raised(error)}; it was given {where}") from error


def _describe_json_answer(answer: str, grader: str) -> str:
    """The end of an error message about an answer that is JSON although the grader compares with a single text."""
    kind = "list" if answer.startswith("[") else "object"
    return (
        f"its `answer` is a JSON {kind}, and {grader} compares completions with one text: write that text "
        '("37", not ["37"]), or use your own grader that reads JSON'
    )
