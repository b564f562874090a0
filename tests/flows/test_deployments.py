"""What a deployment keeps of a configuration, and what a trigger may change.

Without these tests a run of the UI could train something else than `rollouts run` with the same file does.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import TypeAdapter

from rollouts.flows.commands.up import up
from rollouts.flows.deployments import (
    EVALUATE_FLOW,
    FLOW,
    PRESETS,
    RETRAIN_FLOW,
    Deployment,
    deployments_of,
    load_deployments,
    overridden,
    parameters_for,
    preset_deployments,
    save_deployments,
    tool_deployments,
)
from rollouts.flows.form import RunOptions, load_pipeline
from rollouts.flows.tools import overridden_tool
from rollouts.infra.node import NodeSettings
from rollouts_core.config import Config, algorithm_preset
from rollouts_core.errors import ConfigError
from tests.kit.small_pipeline import small_settings


def test_every_preset_comes_back_from_its_deployment_as_the_file_says_it(tmp_path: Path) -> None:
    every = preset_deployments(tmp_path / "here", tmp_path / "quickstart")
    deployments = [each for each in every if each.flow == FLOW and not each.is_short]
    assert [each.name for each in deployments] == sorted(path.stem for path in PRESETS.glob("*.toml"))
    for deployment in deployments:
        place = tmp_path / ("quickstart" if deployment.name == "quickstart" else "here")
        place.mkdir(exist_ok=True)
        copy = place / f"{deployment.name}.toml"
        copy.write_text((PRESETS / copy.name).read_text())
        expected = load_pipeline(copy)
        assert Config.model_validate(deployment.parameters["config"]) == expected.config
        assert TypeAdapter(NodeSettings).validate_python(deployment.parameters["node"]) == expected.node
        assert RunOptions.model_validate(deployment.parameters["run"]) == expected.run
        assert "Hardware" in deployment.description or deployment.name == "quickstart"


def test_the_runs_of_a_deployment_keep_everything_in_the_store_that_serves_it(tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"config": {}, "node": {}, "run": {"name": "a", "store": "elsewhere"}}
    assert parameters_for(tmp_path, parameters)["run"] == {"name": "a", "store": str(tmp_path)}
    assert parameters["run"]["store"] == "elsewhere"


@pytest.fixture
def small(folder: Path) -> Deployment:
    [deployment, *_] = deployments_of(folder / "small.toml")
    return deployment


def test_every_pipeline_has_an_evaluation_that_publishes_and_registers_nothing(folder: Path) -> None:
    run = {"publish": "s3://bucket/team", "register_as": "mine", "name": "small"}
    settings = small_settings(run=run, evaluate={"model": "./base_model", "data": "selection.jsonl"})
    config = folder / "small.toml"
    config.write_text(tomli_w.dumps(settings))
    [once, evaluation, _] = deployments_of(config)
    assert (evaluation.name, evaluation.flow) == ("small-evaluate", EVALUATE_FLOW)
    assert evaluation.parameters["config"] == once.parameters["config"]
    options = evaluation.parameters["run"]
    assert (options["name"], options["publish"], options["register_as"]) == ("small-evaluate", "", "")
    expected = {"model": str(folder / "base_model"), "against": "", "data": str(folder / "selection.jsonl")}
    assert evaluation.parameters["evaluate"] == expected
    assert "evaluate" not in once.parameters
    changed = overridden(evaluation.flow, evaluation.parameters, ["evaluate.model=production", "evaluate.against=base"])
    assert changed["evaluate"] == {**expected, "model": "production", "against": "base"}


def test_a_trigger_changes_what_it_names_and_nothing_else(small: Deployment) -> None:
    changed = overridden(
        small.flow, small.parameters, ["training.rl.num_steps=9", "run.name=second", 'run.fresh=["sft"]']
    )
    expected = {**small.parameters, "run": {**small.parameters["run"], "name": "second", "fresh": ["sft"]}}
    assert changed["run"] == expected["run"]
    assert changed["config"]["training"]["rl"].pop("num_steps") == 9
    assert small.parameters["config"]["training"]["rl"].pop("num_steps") == 4
    assert changed["config"] == small.parameters["config"]


def test_another_kind_of_node_begins_with_its_own_defaults(small: Deployment) -> None:
    settings = ["node.kind=ssh", "node.host=me@box", "node.python=/opt/bin/python"]
    node = overridden(small.flow, small.parameters, settings)["node"]
    assert (node["kind"], node["root"], node["min_free_gb"]) == ("ssh", "~/rollouts", 10.0)


def test_a_kind_can_be_named_after_the_whole_table_was_given(small: Deployment) -> None:
    given = ["node={}", "node.kind=ssh", "node.host=me@box", "node.python=/opt/bin/python"]
    node = overridden(small.flow, small.parameters, given)["node"]
    assert (node["kind"], node["host"]) == ("ssh", "me@box")
    with pytest.raises(ConfigError, match=r"node\.kind: node is a value, not a table"):
        overridden(small.flow, small.parameters, ["node=3", "node.kind=ssh"])


def test_another_algorithm_is_that_one_and_no_mixture_with_the_one_before(small: Deployment) -> None:
    """Whoever compares algorithms by runs of one deployment would else compare something else."""
    first = overridden(small.flow, small.parameters, ["training.rl.algorithm=verl-grpo"])
    own = ["training.rl.loss.clip_high=0.3", "training.rl.algorithm=trl-dr-grpo", "training.rl.num_steps=7"]
    found = Config.model_validate(overridden(small.flow, first, own)["config"]).training.rl
    expected = algorithm_preset("trl-dr-grpo", loss={"clip_high": 0.3})
    for name in ("num_minibatches", "advantage", "reward_shaping", "loss"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.num_steps == 7


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("training.rl.num_stepz=9", "unknown key training.rl.num_stepz; did you mean num_steps"),
        ("training.rl.num_steps=0", "command line: training.rl.num_steps"),
        ("mode.deeper=1", "mode is a value, not a table"),
        ("=3", "not of the form key=value"),
        ("node.kind=moon", "expected one of local, ssh"),
        ("schedule.cron=@daily", "this deployment has no schedule, which belongs into the file: change it there"),
        ("retrain.force=true", "this deployment has no retrain, but the deployment whose name ends with -retrain"),
        ("evaluate.model=base", "this deployment has no evaluate, but the deployment whose name ends with -evaluate"),
    ],
)
def test_a_setting_that_does_not_fit_is_one_sentence(small: Deployment, assignment: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        overridden(small.flow, small.parameters, [assignment])


def test_a_configuration_of_the_users_is_not_replaced_by_a_preset_of_its_name(tmp_path: Path) -> None:
    own = Deployment(name="rl_math", description="mine", parameters={})
    save_deployments(tmp_path, [own])
    save_deployments(tmp_path, preset_deployments(tmp_path, tmp_path))
    known = load_deployments(tmp_path)
    assert known["rl_math"] == own
    assert len(known) == 3 * len(list(PRESETS.glob("*.toml")))


def test_a_tool_is_a_deployment_of_the_store_whose_settings_can_be_replaced(tmp_path: Path) -> None:
    [reap] = [each for each in tool_deployments() if each.name == "reap"]
    assert reap.schedule is not None and reap.schedule["cron"] == "17 * * * *"
    assert parameters_for(tmp_path, reap.parameters) == {"reap": {"spare": True, "store": str(tmp_path)}}
    assert overridden_tool("reap", reap.parameters, ["reap.spare=false"])["reap"]["spare"] is False
    for assignment, words in (
        ("spare=false", "'spare=false' is not of the form reap.setting=value"),
        ("reap.spar=false", "unknown key reap.spar; did you mean spare"),
        ("reap.spare=perhaps", "command line: reap.spare"),
    ):
        with pytest.raises(ConfigError, match=words):
            overridden_tool("reap", reap.parameters, [assignment])


def test_a_configuration_with_the_name_of_a_tool_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="reap is the name of a built-in deployment: rename the file"):
        deployments_of((folder / "small.toml").rename(folder / "reap.toml"))


@pytest.mark.parametrize("name", ["small", "small-evaluate"])
def test_two_configurations_of_one_name_are_refused_before_anything_is_started(folder: Path, name: str) -> None:
    """Only the last would be offered, and nobody be told."""
    other = folder / "other"
    other.mkdir()
    config = Path(shutil.copy(folder / "small.toml", other / f"{name}.toml"))
    with pytest.raises(ConfigError, match=f"two configurations are named {name}: .* rename one"):
        up([folder / "small.toml", config], store=folder / "store")
    assert not (folder / "store").exists()


def test_a_configuration_with_the_name_of_anothers_retraining_is_refused(small: Deployment, tmp_path: Path) -> None:
    """It would take the place of the retraining, whose schedule ended without a word."""
    again = dataclasses.replace(small, name="small-retrain", flow=RETRAIN_FLOW)
    save_deployments(tmp_path, [small, again])
    with pytest.raises(
        ConfigError, match=r"small-retrain is the name of an existing deployment .* \(retrain\): rename"
    ):
        save_deployments(tmp_path, [dataclasses.replace(small, name="small-retrain")])
    assert load_deployments(tmp_path)["small-retrain"] == again


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "deployments").mkdir()
    (tmp_path / "deployments/torn.json").write_text('{"name": "to')
    with pytest.raises(ConfigError, match=r"torn\.json is not a deployment .*: delete it"):
        load_deployments(tmp_path)
