"""Pins what the records of stages name, and the stages of each mode.

A dotted name that leads nowhere would be found when a machine is rented already, and a stage with another name would
not be found by runs that are retried.
"""

from __future__ import annotations

import runpy
from dataclasses import fields, replace
from typing import Any

import pytest

from rollouts_core import stages
from rollouts_core.config import Config, SFTTrainingConfig
from rollouts_core.stages import (
    PIPELINES,
    SELECT,
    STAGE_NAMES,
    STAGES,
    TRAININGS,
    describe_mode,
    is_training,
    kind_of,
    label_checkpoint,
    label_of,
    stages_of,
)
from rollouts_core.stages.kind import load
from rollouts_core.stages.sft import SFT
from tests.kit.small_pipeline import small_settings


def config_of(mode: str) -> Config:
    settings = small_settings(mode=mode)
    return Config.model_validate({name: settings[name] for name in ("mode", "model", "data")})


@pytest.mark.parametrize("name", STAGES)
def test_every_dotted_name_of_a_stage_leads_to_a_function_or_class(name: str) -> None:
    values = [getattr(STAGES[name], field.name) for field in fields(STAGES[name])]
    dotted = [value for value in values if isinstance(value, str) and value.startswith("rollouts_core.")]
    assert len(dotted) >= 9 * STAGES[name].trains
    assert all(callable(load(value)) for value in dotted)


@pytest.mark.parametrize("name", ["settings", "job", "plan", "run"])
def test_a_training_needs_its_settings_and_its_job(name: str) -> None:
    without: dict[str, Any] = {name: ""}
    with pytest.raises(AssertionError, match=f"^the training sft lacks {name}$"):
        replace(SFT, **without)


def test_each_stage_is_found_by_its_name() -> None:
    assert all(kind.name == name for name, kind in STAGES.items())
    assert {name: kind_of(name).name for name in ("sft", "select-sft", "evaluate")} == {
        "sft": "sft",
        "select-sft": "select",
        "evaluate": "evaluate",
    }
    assert is_training("rl") and not is_training("select-rl") and not is_training("of-another-version")


def test_another_graded_stage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks and planning would read the settings of RL for it."""
    monkeypatch.setattr("rollouts_core.stages.sft.SFT", replace(SFT, is_graded=True))
    with pytest.raises(AssertionError, match="only RL may be graded so far"):
        runpy.run_path(str(stages.__file__))


def test_a_run_selects_after_each_training_and_evaluates_at_its_end() -> None:
    names = {mode: [name for name, _ in stages_of(mode)] for mode in PIPELINES}
    assert names["sft"] == ["sft", "select-sft", "evaluate"]
    assert names["rl"] == ["rl", "select-rl", "evaluate"]
    assert names["sft+rl"] == ["sft", "select-sft", "rl", "select-rl", "evaluate"] == list(STAGE_NAMES)
    assert [name for name, _ in stages_of("")] == ["evaluate"]


def test_a_mode_cannot_have_a_training_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PIPELINES, "sft+sft", (SFT, SELECT, SFT, SELECT))
    with pytest.raises(AssertionError, match=r"a stage occurs twice in the mode sft\+sft"):
        stages_of("sft+sft")


def test_a_model_has_the_label_of_the_training_that_left_it() -> None:
    assert [label_of(name) for name in ("base", "sft", "rl", "production")] == ["Base", "SFT", "RL", "production"]
    assert describe_mode("sft+rl") == "supervised fine-tuning, then reinforcement learning"
    assert describe_mode("of another version") == "of another version"


@pytest.mark.parametrize(
    ("name", "step", "stage", "label"),
    [
        ("base", 0, "evaluate", "Base"),
        ("rl", 40, "evaluate", "RL step 40"),
        ("step_001000", 1000, "select-sft", "SFT step 1000"),
        ("step_000000", 0, "select-rl", "step_000000"),
        ("production", 40, "evaluate", "production"),
        ("step_000004", 4, "select-later", "step_000004"),
    ],
)
def test_a_scored_model_is_called_by_its_training_and_step(name: str, step: int, stage: str, label: str) -> None:
    assert label_checkpoint(name, step, stage) == label


@pytest.mark.parametrize(
    ("mode", "reads", "is_graded"),
    [("sft", {"sft", "sft_eval"}, False), ("rl", {"prompts", "rollouts"}, True), ("sft+rl", None, True)],
)
def test_a_mode_reads_what_its_trainings_read(mode: str, reads: set[str] | None, is_graded: bool) -> None:
    config = config_of(mode)
    every = {name for kind in TRAININGS.values() for name in kind.reads}
    assert {name for name in every if config.reads(name)} == (reads or every)
    assert config.is_graded == config.samples_for_training == is_graded
    assert list(config.trainings) == mode.split("+")


def test_the_settings_of_a_training_are_a_section_of_its_name() -> None:
    config = config_of("sft+rl")
    assert all(type(getattr(config.training, name)) is load(kind.settings) for name, kind in TRAININGS.items())
    assert isinstance(config.trainings["sft"], SFTTrainingConfig)
