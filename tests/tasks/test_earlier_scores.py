"""Pins when an evaluation takes the scores of an earlier one: for the same models, rows and settings, by any name.

Without it an evaluation by hand does again what the run that made the model did, or shows the scores of other rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rollouts.infra.ledger import Ledger
from rollouts.infra.node import LocalNode, Node
from rollouts.infra.providers import provision_node
from rollouts.tasks.earlier_scores import take_earlier_scores
from rollouts.tasks.plan import plan_evaluation
from rollouts.tasks.records import RunScope, Stage
from rollouts.tasks.stage import run_stage
from rollouts_core.comparison import estimate_mean
from rollouts_core.config import Config
from rollouts_core.job import InputModel
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages.planning import base_model
from rollouts_core.system.files import link_or_copy, write_json
from tests.tasks.finished_stages import checkpoint, config_at

SCORES = {"base": [0.0, 0.0, 1.0], "sft": [1.0, 0.0, 1.0]}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_at(tmp_path / "inputs")


@pytest.fixture
def models(config: Config, tmp_path: Path) -> dict[str, InputModel]:
    """What the run evaluates."""
    return {"base": base_model(config), "sft": checkpoint(tmp_path / "step_000020", b"weights")}


def planned(
    models: dict[str, InputModel], config: Config, run: str, fresh: Sequence[str] = ()
) -> tuple[Stage, RunScope]:
    store = Path(config.model.path).parent.parent / "store"
    scope = RunScope(run_id=f"{run}-0123456789", run_name=run, store=str(store), fresh=tuple(fresh))
    stage = plan_evaluation(models, config, scope, here(store))
    with Ledger(scope.ledger_path) as ledger:
        ledger.note_use(Path(stage.run_dir).name, scope.run_id, run=scope.output_dir.name)
    return stage, scope


def here(store: Path) -> Node:
    return provision_node(LocalNode(), store)


def finish(stage: Stage, scores: dict[str, list[float]]) -> RunDirectory:
    """Leave what the job of an evaluation leaves."""
    directory = RunDirectory(Path(stage.run_dir))
    directory.samples.mkdir(parents=True)
    entries: list[dict[str, Any]] = []  # Any: JSON
    for model in stage.job["checkpoints"]:
        values = scores[model["name"]]
        estimate = estimate_mean(values)
        figures = {"mean": estimate.mean, "low": estimate.low, "high": estimate.high, "num_rows": len(values)}
        entries.append({"name": model["name"], "step": model["step"], "scores": values, **figures})
        (directory.samples / f"{model['name']}.jsonl").write_text(f"what {model['name']} said")
    write_json(directory.job, stage.job)
    directory.write_result({"metric": "accuracy", "checkpoints": entries, "best": "sft"})
    return directory


def test_what_the_run_scored_is_taken_under_other_names_and_order(
    config: Config, models: dict[str, InputModel]
) -> None:
    finish(planned(models, config, "trained")[0], SCORES)
    stage, scope = planned({"model": models["sft"], "baseline": models["base"]}, config, "by-hand")
    record = run_stage(stage, scope, here(Path(scope.store)))  # starts no job: its model could not be loaded
    assert (record.how, record.why) == ("reused", "run trained-trained- scored the same models")
    assert [(each["name"], each["scores"]) for each in record.result["checkpoints"]] == [
        ("model", SCORES["sft"]),
        ("baseline", SCORES["base"]),
    ]
    assert (record.result["best"], record.result["metric"]) == ("model", "accuracy")
    assert record.result["reused_from"] == ["trained-trained-"]
    assert (Path(stage.run_dir) / "samples/model.jsonl").read_text() == "what sft said"
    assert take_earlier_scores(stage, scope) == "", "it has its record now"
    assert run_stage(stage, scope, here(Path(scope.store))).why == record.why


def test_what_need_not_be_done_is_not_told_in_what_it_differs(
    config: Config, models: dict[str, InputModel], capsys: pytest.CaptureFixture[str]
) -> None:
    finish(planned(models, config, "trained")[0], SCORES)
    stage, scope = planned({"model": models["sft"]}, config, "by-hand")
    run_stage(stage, scope, here(Path(scope.store)))
    said = capsys.readouterr().err
    assert "reused from run trained-trained-, which scored the same models" in " ".join(said.split())
    assert "unlike" not in said


def test_it_says_which_run_scored_it(config: Config, models: dict[str, InputModel]) -> None:
    finish(planned(models, config, "trained")[0], SCORES)
    stage, scope = planned({"model": models["sft"]}, config, "by-hand")
    assert take_earlier_scores(stage, scope) == "reused from run trained-trained-, which scored the same models"


def test_of_two_runs_that_take_the_same_at_once_both_have_it(
    config: Config, models: dict[str, InputModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(planned(models, config, "trained")[0], SCORES)
    stage, scope = planned({"model": models["sft"]}, config, "by-hand")
    said: list[str] = []
    other = Thread(target=lambda: said.append(take_earlier_scores(stage, scope)))

    def link_while_another_begins(source: Path, destination: Path) -> None:
        if not other.ident:
            other.start()
            other.join(1.0)
        link_or_copy(source, destination)

    monkeypatch.setattr("rollouts.tasks.earlier_scores.link_or_copy", link_while_another_begins)
    sentence = take_earlier_scores(stage, scope)
    other.join(60)
    assert said == [sentence] == ["reused from run trained-trained-, which scored the same models"]
    assert (Path(stage.run_dir) / "samples/model.jsonl").read_text() == "what sft said"


def test_models_of_several_runs_are_put_together(config: Config, models: dict[str, InputModel], tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "other", b"other weights")
    finish(planned(models, config, "first")[0], SCORES)
    finish(planned({"sft": other}, config, "second")[0], {"sft": [1.0, 1.0, 1.0]})
    stage, scope = planned({"baseline": models["sft"], "model": other}, config, "by-hand")
    assert take_earlier_scores(stage, scope).startswith("reused from run first-first-01 and second-second-0")
    result = json.loads(Path(stage.run_dir, "result.json").read_text())
    assert [each["scores"] for each in result["checkpoints"]] == [SCORES["sft"], [1.0, 1.0, 1.0]]


def test_only_the_records_that_have_something_of_it_are_read_and_the_first_are_enough(
    config: Config, models: dict[str, InputModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may have a thousand evaluations, each with a number for ten thousand rows and three models."""
    others = {name: checkpoint(tmp_path / f"step_{n:06d}", bytes([n])) for n, name in enumerate(("base", "sft"), 1)}
    finish(planned(others, config, "others")[0], SCORES)
    for run in range(3):
        evaluated = {**models, "rl": checkpoint(tmp_path / f"rl/step_{run:06d}", bytes([run]))}
        finish(planned(evaluated, config, f"run-{run}")[0], {**SCORES, "rl": [1.0, 1.0, 1.0]})
    read: list[Path] = []
    read_result = RunDirectory.read_result

    def noted(directory: RunDirectory) -> dict[str, Any] | None:
        read.append(directory.root)
        return read_result(directory)

    monkeypatch.setattr(RunDirectory, "read_result", noted)
    stage, scope = planned({"model": models["sft"], "baseline": models["base"]}, config, "by-hand")
    read.clear()
    assert "which scored the same" in take_earlier_scores(stage, scope)
    assert len(read) == 1


def test_losses_are_taken_only_of_models_that_were_scored_together(
    config: Config, models: dict[str, InputModel], tmp_path: Path
) -> None:
    """Their tokenizers may differ: an evaluation of both finds that out, and two of one each do not."""
    evaluation = config.evaluation.model_copy(update={"metric": "loss"})
    config = config.model_copy(update={"mode": "sft", "evaluation": evaluation})
    other = checkpoint(tmp_path / "other", b"other weights")
    finish(planned(models, config, "first")[0], SCORES)
    finish(planned({"sft": other}, config, "second")[0], {"sft": [1.0, 1.0, 1.0]})
    assert take_earlier_scores(*planned({"baseline": models["sft"], "model": other}, config, "by-hand")) == ""
    for wanted in ({"baseline": models["base"], "model": models["sft"]}, {"model": other}):
        assert take_earlier_scores(*planned(wanted, config, "by-hand")).startswith("reused from run ")


def test_other_rows_settings_or_weights_are_scored(
    config: Config, models: dict[str, InputModel], tmp_path: Path
) -> None:
    finish(planned(models, config, "trained")[0], SCORES)
    sampled = config.evaluation.model_copy(update={"samples_per_prompt": 4})
    retrained = checkpoint(tmp_path / "retrained", b"other weights")
    for wanted, settings in (
        ({"model": models["sft"]}, config.model_copy(update={"evaluation": sampled})),
        ({"model": retrained}, config),
        ({"baseline": models["base"], "model": retrained}, config),
    ):
        stage, scope = planned(wanted, settings, "by-hand")
        assert take_earlier_scores(stage, scope) == ""
        assert not Path(stage.run_dir).exists()
    Path(config.data.heldout).write_text('{"rows": "others"}\n')
    stage, scope = planned({"model": models["sft"]}, config, "by-hand")
    assert take_earlier_scores(stage, scope) == ""


def test_a_fresh_start_scores_again(config: Config, models: dict[str, InputModel]) -> None:
    finish(planned(models, config, "trained")[0], SCORES)
    assert take_earlier_scores(*planned({"model": models["sft"]}, config, "by-hand", fresh=["evaluate"])) == ""


@pytest.mark.parametrize("broken", ["result.json", "job.json", "samples/sft.jsonl"])
def test_what_is_not_whole_is_not_taken(config: Config, models: dict[str, InputModel], broken: str) -> None:
    directory = finish(planned(models, config, "trained")[0], SCORES)
    (directory.root / broken).unlink()
    stage, scope = planned({"model": models["sft"]}, config, "by-hand")
    assert take_earlier_scores(stage, scope) == ""
    assert not Path(stage.run_dir, "result.json").exists()


def test_a_record_of_other_rules_is_not_taken(config: Config, models: dict[str, InputModel]) -> None:
    directory = finish(planned(models, config, "trained")[0], SCORES)
    directory.root.rename(directory.root.with_name("evaluate-0123456789abcdef"))  # as an older version named it
    assert take_earlier_scores(*planned({"model": models["sft"]}, config, "by-hand")) == ""


def test_an_evaluation_that_was_begun_goes_on(config: Config, models: dict[str, InputModel]) -> None:
    finish(planned(models, config, "trained")[0], SCORES)
    stage, scope = planned({"model": models["sft"]}, config, "by-hand")
    Path(stage.run_dir).mkdir()
    write_json(Path(stage.run_dir, "job.json"), stage.job)
    assert take_earlier_scores(stage, scope) == ""
