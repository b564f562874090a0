"""Pins what the pipeline asks of its machines before the first stage, and with which sentence one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.bootstrap import modules_called, wants_gpu
from tests.tasks.test_plan import config_at


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, True),
        ({"deployment": {"trainer_gpu_ranks": [0, 1], "trainer_processes": 2}}, True),
        ({"deployment": {"trainer_processes": 1}}, False),
        ({"deployment": {"trainer_processes": 2}}, False),
        ({"training": {"sft": {"policy": {"backend": "jax"}}}, "mode": "sft"}, False),
        ({"training": {"sft": {"policy": {"backend": "jax"}}}}, True),
    ],
)
def test_a_gpu_is_wanted_unless_the_settings_say_that_the_cpu_will_do(
    settings: dict[str, Any], wanted: bool, tmp_path: Path
) -> None:
    assert wants_gpu(config_at(tmp_path, **settings)) is wanted


@pytest.mark.parametrize(
    ("settings", "trains", "called"),
    [
        ({}, True, {"rollout.reward_fn": "graders", "rollout.filter_fn": "filters"}),
        ({}, False, {"rollout.reward_fn": "graders"}),
        ({"mode": "sft", "evaluation": {"metric": "loss"}}, True, {}),
    ],
)
def test_modules_of_the_users_are_tried_where_a_stage_imports_them(
    settings: dict[str, Any], trains: bool, called: dict[str, str], tmp_path: Path
) -> None:
    own = {"reward_fn": "graders:score", "filter_fn": "filters:keep"}
    assert modules_called(config_at(tmp_path, rollout=own, **settings), trains=trains) == called
