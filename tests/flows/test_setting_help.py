"""Pins `rollouts explain`: every setting has its help, default and place, and a word finds the settings it is about.

Without it the help could show a default that the code does not have, or no setting for its name in TRL.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollouts.flows.cli import app
from rollouts.flows.form import parse_pipeline
from rollouts.flows.setting_help import SettingHelp, find_settings, setting_helps
from rollouts.flows.shown_settings import settings_of
from rollouts_core.environments import ENVIRONMENTS
from tests.flows.test_foreign_names import all_keys
from tests.kit.small_pipeline import small_settings


@cache
def helps() -> dict[str, SettingHelp]:
    return {each.name: each for each in setting_helps()}


def explain(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_every_setting_of_a_configuration_is_explained_with_its_default() -> None:
    for each in settings_of(parse_pipeline(small_settings(), Path("small.toml"))):
        found = helps()[each.name]
        assert (found.default, found.is_required) == (each.default, each.is_required), each.name


def test_every_setting_has_a_help_a_type_and_a_place() -> None:
    for name, each in helps().items():
        assert name in all_keys() or name.partition(".")[0] in ("retrain", "schedule", "evaluate"), name
        assert each.help and each.type and each.acts, name


def test_one_setting_in_full() -> None:
    clip = helps()["training.rl.loss.clip_low"]
    assert (clip.type, clip.range, clip.default, clip.acts) == (
        "number",
        "at least 0",
        0.2,
        "stage rl: reinforcement learning",
    )
    assert {"eps_clip", "clip_ratio_low"} <= set(clip.other_names)
    assert helps()["rollout.rewards.kind"].choices[:2] == ("function", "http")
    assert set(helps()["rollout.environment"].names) == set(ENVIRONMENTS)
    assert helps()["deployment.engine_port"].range == "at least 0, at most 65535"
    assert helps()["node.host"].effects[0] == 'Only for node.kind = "ssh".'
    assert helps()["training.rl.optim.lr"].default != helps()["training.sft.optim.lr"].default


@pytest.mark.parametrize(
    ("asked", "first", "others"),
    [
        ("training.rl.loss.clip_low", "training.rl.loss.clip_low", 0),
        ("rollout.rewards.0.kind", "rollout.rewards.kind", 0),
        ("num_generations", "rollout.n_samples_per_prompt", 0),
        ("training.sft.optim", "training.sft.optim.lr", 7),
        ("num_steps", "training.sft.num_steps", None),
        ("staleness", "rollout.max_staleness", None),
    ],
)
def test_a_question_finds_a_setting_a_section_or_all_with_the_word(asked: str, first: str, others: int | None) -> None:
    found = find_settings(asked, list(helps().values()))
    assert found[0].name == first
    assert others is None or len(found) == others + 1


def test_the_command_prints_one_setting_in_full_and_several_a_line_each() -> None:
    one = " ".join(explain("training.rl.loss.clip_low").stdout.split())
    for words in ("range at least 0", "default 0.2", "acts stage rl", "elsewhere epsilon, eps_clip"):
        assert words in one
    lines = explain("training.rl.loss").stdout.splitlines()
    assert all(line.startswith("training.rl.loss.") for line in lines) and len(lines) > 20
    names = [json.loads(line)["name"] for line in explain("--json").stdout.splitlines()]
    assert names == list(helps())


def test_a_word_without_a_setting_is_one_sentence() -> None:
    assert "no setting has num_stepz in its name or help; did you mean num_steps?" in " ".join(
        explain("num_stepz", code=2).stderr.split()
    )
