"""Pins the sentences for validation errors that need more than one field to see (test_config.py has the common ones).

Without it a long or nested value would flood the message, and a misspelt name would get no hint.
"""

import pytest
from pydantic import BaseModel, Field, ValidationError

from rollouts_core.config.algorithm import AdvantageConfig, LossConfig
from rollouts_core.config.engine import EngineConfig
from rollouts_core.config.messages import (
    MAX_LINE_CHARS,
    MAX_SHOWN_CHARS,
    closest_choice,
    closest_name,
    explain_validation_error,
    find_misfits,
    first_line,
)
from rollouts_core.config.policy import PolicyConfig
from rollouts_core.config.report import ReportConfig
from rollouts_core.config.reward import RewardConfig
from rollouts_core.config.rl import RLTrainingConfig
from rollouts_core.mistakes import MAX_SHOWN_MISTAKES


class Inner(BaseModel, extra="forbid"):
    """A section that may be absent."""

    colour: str = "red"


class Outer(BaseModel, extra="forbid"):
    """A record with an optional section."""

    size: int = 1
    gpus: tuple[int, ...] = ()
    names: tuple[str, ...] = Field(default=("a",), min_length=1)
    inner: Inner | None = None


def explain(settings: dict[str, object]) -> str:
    """The sentence for settings that do not fit."""
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(settings)
    return explain_validation_error(caught.value, Outer, source="form", settings=settings)


def test_a_long_value_is_cut() -> None:
    sentence = explain({"size": "x" * 1000})
    assert sentence.endswith("...")
    assert len(sentence) < MAX_SHOWN_CHARS + 120


def test_of_what_somebody_elses_code_says_no_more_is_repeated_than_may_be_read() -> None:
    """Graders repeat the answer or the test of a row, which may have megabytes."""
    said = first_line(ValueError(f"expected a number, found {'q' * 200_000}\nand more"))
    assert said.startswith("expected a number, found qqq") and said.endswith("q...")
    assert len(said) == MAX_LINE_CHARS + 3
    assert first_line(ValueError("short")) == "short"


def test_a_list_that_must_not_be_empty_says_how_many_entries_it_needs() -> None:
    assert explain({"names": []}) == "form: names: expected at least 1 entry, found []"


@pytest.mark.parametrize("given", [0, "0,1", {"first": 0}])
def test_what_must_be_a_list_is_called_so_and_not_by_its_name_in_python(given: object) -> None:
    assert explain({"gpus": given}) == f"form: gpus: expected a list, [...], found {given!r}"


def test_of_many_mistakes_the_first_are_shown_and_the_others_counted() -> None:
    said = explain({f"k{number}": 0 for number in range(MAX_SHOWN_MISTAKES + 2)}).splitlines()
    known = "known are gpus, inner, names, size"
    assert said[:-1] == [f"form: unknown key k{number}; {known}" for number in range(MAX_SHOWN_MISTAKES)]
    assert said[-1] == "form: further settings that do not fit: 2"


def test_a_key_of_an_optional_section_gets_a_hint() -> None:
    assert explain({"inner": {"color": "red"}}) == "form: unknown key inner.color; did you mean colour?"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("tempo", "; did you mean temp?"), ("zzz", "; known are size, temp"), ("", "; known are size, temp")],
)
def test_a_near_name_is_proposed_and_otherwise_all_are_listed(name: str, expected: str) -> None:
    assert closest_name(name, ["temp", "size"]) == expected


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("SGLang", "; did you mean sglang?"),
        ("vlm", "; did you mean vllm?"),
        ("slime_grpo", "; did you mean slime-grpo?"),
        ("grpo", "; did you mean slime-grpo or trl-grpo?"),
        ("nothing like it", ""),
        ("", ""),
        (3, ""),
    ],
)
def test_the_closest_choices_of_a_value_are_named(given: object, hint: str) -> None:
    assert closest_choice(given, ["", "sglang", "vllm", "slime-grpo", "trl-grpo"]) == hint


def choices_of(schema: object) -> list[str]:
    """The fixed choices of a setting's JSON schema."""
    parts = [schema, *schema.get("anyOf", ())] if isinstance(schema, dict) else []
    return [each for part in parts for each in part.get("enum", ()) if len(each) > 2]


SETTINGS_WITH_CHOICES = {
    f"{record.__name__}.{name}": (record, name, choices)
    for record in (
        LossConfig,
        AdvantageConfig,
        EngineConfig,
        PolicyConfig,
        RewardConfig,
        RLTrainingConfig,
        ReportConfig,
    )
    for name, schema in record.model_json_schema()["properties"].items()
    if (choices := choices_of(schema))
}


@pytest.mark.parametrize("setting", SETTINGS_WITH_CHOICES)
def test_every_setting_with_fixed_choices_names_the_closest(setting: str) -> None:
    record, name, choices = SETTINGS_WITH_CHOICES[setting]
    for choice in choices:
        with pytest.raises(ValidationError) as caught:
            record.model_validate({name: f"{choice}x"})
        [(path, sentence)] = find_misfits(caught.value, record, {name: f"{choice}x"}, "table")
        assert path == (name,)
        assert sentence.startswith(f"table.{name}: input should be ") and "; did you mean " in sentence
        assert choice in sentence.partition("did you mean")[2]
