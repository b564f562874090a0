"""Pins which errors of several checks are told, and which settings have a mistake.

Without it a mistake would be told twice or not at all, or a check would read what is known to be broken.
"""

from __future__ import annotations

import pytest

from rollouts_core.errors import ConfigError, DataError
from rollouts_core.mistakes import Mistakes


def test_the_same_error_at_two_settings_is_told_once_and_marks_both() -> None:
    mistakes = Mistakes()
    for place in ("data.selection", "data.heldout"):
        mistakes.note(place, DataError("rows.jsonl, row 1: expected a table"), names_place=True)
    assert mistakes.describe() == "rows.jsonl, row 1: expected a table"
    assert mistakes.has("data.selection") and mistakes.has("data.heldout") and not mistakes.has("data.sft")


def test_an_error_about_a_setting_that_was_left_out_marks_no_place() -> None:
    mistakes = Mistakes()
    mistakes.leave_out("training.sft.batch_size")
    mistakes.note("training.rl", ConfigError("training.sft.batch_size 3 is odd"))
    assert not mistakes and not mistakes.has("training.rl")


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("12 prompts of /a are also in /b", True),
        ("/rows/sft_eval.jsonl, row 1: expected a table", True),
        ("sft has 12 rows that heldout has, too", False),
        ("run.toml: data: rollouts and more do not go together", False),
        ("12 rows are also in `prompts`", False),
        ("12 rows are also in sft_eval: remove them", False),
    ],
)
def test_an_error_of_a_section_is_left_out_if_it_names_a_setting_that_was(text: str, is_told: bool) -> None:
    mistakes = Mistakes()
    for name in ("prompts", "rollouts", "sft", "sft_eval"):
        mistakes.leave_out(f"data.{name}")
    mistakes.note("data", DataError(text), names_place=True)
    assert bool(mistakes) is is_told
