"""The short form: its schema, and how its fields and its TOML become the configuration that the full form describes.

Without these tests a run by the short form could train something else than the same configuration by the full form, a
value could be ignored because it stands in two places, and Quick run could stop at a form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from uuid import uuid4

import pytest
import tomli_w
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema

from rollouts.flows.deployments import (
    PRESETS,
    deployments_of,
    load_deployments,
    parameters_for,
    save_deployments,
    tool_deployments,
)
from rollouts.flows.form import Pipeline, load_pipeline, parse_pipeline
from rollouts.flows.pipeline import sft_rl
from rollouts.flows.short_form import FIELDS, MORE, check_doubled, form_values, held_tables
from rollouts.flows.short_form_flow import _offered_values, read_values, run_name, sft_rl_short
from rollouts.infra.providers import provision_node
from rollouts.tasks.plan import plan_training
from rollouts.tasks.records import RunScope
from rollouts_core.algorithms.presets import ALGORITHMS
from rollouts_core.errors import ConfigError
from rollouts_core.stages.planning import base_model
from tests.kit.small_pipeline import small_settings

SCHEMA = parameter_schema(sft_rl_short.fn)


def test_quick_run_needs_no_form_and_every_title_is_a_noun_beside_a_help_text() -> None:
    assert SCHEMA.required == []
    shown = sorted(SCHEMA.properties.values(), key=lambda field: int(field["position"]))
    assert [field["title"] for field in shown] == [*(field.title for field in FIELDS.values()), "More settings"]
    assert list(SCHEMA.properties) == [*FIELDS, MORE]
    assert [field["title"] for field in shown if not field["description"]] == []
    assert {field["type"] for field in shown} == {"string", "integer", "number"}, "nested fields need clicks"


def test_the_form_knows_bounds_and_choices() -> None:
    shown = SCHEMA.properties
    assert [name for name, field in shown.items() if field["type"] != "string" and "minimum" not in field] == []
    assert shown["mode"]["enum"] == ["sft", "rl", "sft+rl"]
    assert shown["node"]["enum"] == ["local", "ssh", "instance", "rented"]
    assert {"embedded", "sglang", "vllm", "auto"} <= set(shown["engine"]["enum"])
    assert set(shown["algorithm"]["enum"]) == {"", *ALGORITHMS}


def same(pipeline: Pipeline) -> bool:
    """Whether the short form gives the pipeline back as it is."""
    again = read_values(form_values(pipeline))
    return (again.config, again.node, again.run) == (pipeline.config, pipeline.node, pipeline.run)


@pytest.mark.parametrize("preset", [path.stem for path in PRESETS.glob("*.toml")])
def test_a_preset_by_the_short_form_is_the_preset(preset: str) -> None:
    assert same(load_pipeline(PRESETS / f"{preset}.toml"))


RENTED = {"kind": "rented", "max_usd": 12.5, "query": {"gpu_types": ["H100"]}, "setup": ["echo 'a'\n", "b,"]}
SSH = {"kind": "ssh", "host": "me@box", "python": "/opt/bin/python", "key_file": "~/.ssh/key"}


@pytest.mark.parametrize(
    "changed",
    [
        {"mode": "sft"},
        {"mode": "rl", "training__rl__algorithm": "verl-dapo", "rollout__batch_size": 64},
        {"node": RENTED},
        {"node": SSH},
        {"data__sft": [{"path": "sft.jsonl", "repeat": 0.5}, {"path": "selection.jsonl", "columns": {"a": "int"}}]},
        {"data": {"prepare": {"name": "gsm8k", "settings": {"num_selection": 3, "nested": {"a": [[1, 2], [3]]}}}}},
        {"rollout__environment": "", "rollout__rewards": [{"name": "exact_match", "weight": 0.5}]},
        {"rollout__reward_fn": "my_rewards:score", "rollout__engine": {"kind": "sglang", "extra_args": ["--a", "0.5"]}},
        {"training__sft__optim": {"lr": 5e-7, "betas": [0.8, 0.9]}, "evaluation__temperature": 0.0},
        {"run": {"name": "b", "fresh": ["sft"], "report_to": ["tensorboard"], "restarts": 5}},
    ],
    ids=str,
)
def test_a_configuration_by_the_short_form_is_the_configuration(
    changed: dict[str, Any],  # Any: settings of every type
    folder: Path,
) -> None:
    pipeline = parse_pipeline(small_settings(**changed), folder / "small.toml")
    assert same(pipeline)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_is_named_and_its_settings_are_not_repeated(algorithm: str, folder: Path) -> None:
    fitting = {
        "training__rl__reward_shaping": {},
        "rollout__batch_size": 512,
        "rollout__sampling__max_new_tokens": 20480,
    }
    settings = small_settings(training__rl__algorithm=algorithm, **fitting)
    pipeline = parse_pipeline(settings, folder / "small.toml")
    values = form_values(pipeline)
    assert values["algorithm"] == algorithm
    assert "[training.rl.loss" not in values[MORE] and "[training.rl.advantage" not in values[MORE]
    assert same(pipeline)


def test_a_default_that_a_file_sets_against_its_algorithm_stays(folder: Path) -> None:
    """Without it the algorithm's value would come back."""
    own = {"training__rl__algorithm": "verl-dapo", "training__rl__loss": {"clip_high": 0.2}, "rollout__batch_size": 64}
    pipeline = parse_pipeline(small_settings(**own), folder / "small.toml")
    assert ALGORITHMS["verl-dapo"].settings["loss"]["clip_high"] != 0.2
    assert pipeline.config.training.rl.loss.clip_high == 0.2
    assert same(pipeline)


def test_null_has_no_short_form(folder: Path) -> None:
    settings = small_settings(data__prepare={"name": "gsm8k", "settings": {"a": None}})
    (folder / "small.json").write_text(json.dumps(settings))
    assert [each.name for each in deployments_of(folder / "small.json")] == ["small", "small-evaluate"]


def test_the_fingerprints_of_both_forms_are_equal(folder: Path, tmp_path: Path) -> None:
    full, _, short = deployments_of(folder / "small.toml")
    store = tmp_path / "store"
    by_full = sft_rl.validate_parameters(parameters_for(store, full.parameters))
    by_short = read_values(parameters_for(store, short.parameters))
    assert by_short.run == by_full["run"]
    planned = []
    for config, node in ((by_full["config"], by_full["node"]), (by_short.config, by_short.node)):
        scope = RunScope(run_id="1" * 32, run_name="r", store=str(store))
        place = provision_node(node, store)
        planned.append([plan_training(name, base_model(config), config, scope, place) for name in ("sft", "rl")])
    assert planned[0] == planned[1]
    other = read_values({**parameters_for(store, short.parameters), "sft_batch": 4})
    scope = RunScope(run_id="1" * 32, run_name="r", store=str(store))
    changed = plan_training("sft", base_model(other.config), other.config, scope, provision_node(other.node, store))
    assert changed.fingerprint != planned[0][0].fingerprint


@pytest.fixture
def values(folder: Path) -> dict[str, Any]:  # Any: JSON
    """The values of the small pipeline."""
    return form_values(load_pipeline(folder / "small.toml"))


def test_a_changed_field_is_read(values: dict[str, Any]) -> None:  # Any: JSON
    values |= {"name": "other", "rl_steps": 9, "sft_learning_rate": 1, "environment": "", "reward": "exact_match"}
    read = read_values(values)
    assert (read.run.name, read.config.training.rl.num_steps, read.config.training.sft.optim.lr) == ("other", 9, 1.0)
    assert (read.config.rollout.environment, read.config.rollout.reward_fn) == ("", "exact_match")


@pytest.mark.parametrize(
    ("posted", "expected"),
    [({"name": ""}, "pipeline"), ({MORE: "[run]\nname = 'other'"}, "other"), ({MORE: "[["}, "small"), ({}, "small")],
)
def test_prefect_and_the_store_have_one_name_for_a_run(
    values: dict[str, Any],  # Any: JSON
    posted: dict[str, Any],  # Any: JSON
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`rollouts cancel` and `rollouts samples` take the name that Prefect shows."""
    posted = {**values, **posted}
    monkeypatch.setattr("rollouts.flows.short_form_flow.flow_run", SimpleNamespace(parameters=posted))
    monkeypatch.setattr("rollouts.flows.short_form_flow._offered_values", lambda: values)
    assert run_name() == expected
    if posted[MORE] != "[[":
        assert read_values(posted).run.name == expected


def test_the_budget_is_read_for_rented_nodes_alone(values: dict[str, Any]) -> None:  # Any: JSON
    values |= {"budget": 12.5}
    assert read_values(values).node.kind == "local"
    values |= {"node": "rented"}
    node = read_values(values).node
    assert (node.kind, getattr(node, "max_usd", None)) == ("rented", 12.5)


def more(values: Mapping[str, Any], **tables: Any) -> dict[str, Any]:  # Any: JSON
    """The values with these tables as TOML."""
    return {**values, MORE: tomli_w.dumps(tables)}


def test_a_key_in_a_changed_field_and_in_the_toml_is_an_error_that_names_both(values: dict[str, Any]) -> None:
    posted = more({**values, "rl_steps": 9, "data": 'sft = "a"'}, training={"rl": {"num_steps": 7}}, data={"sft": "b"})
    with pytest.raises(ConfigError) as error:
        check_doubled(posted, lambda: values)
    assert str(error.value).splitlines() == [
        'the form: data.sft is "a" in the field Data and "b" in More settings: remove it from More settings, or '
        "restore the field's former value",
        "the form: training.rl.num_steps is 9 in the field RL steps and 7 in More settings: remove it from More "
        "settings, or restore the field's former value",
    ]


def test_the_toml_wins_over_a_field_that_was_left_as_it_was(values: dict[str, Any]) -> None:  # Any: JSON
    posted = more(values, training={"rl": {"num_steps": 7}})
    check_doubled(posted, lambda: values)
    assert held_tables(posted)["training"]["rl"]["num_steps"] == 7


def test_without_its_deployment_a_run_has_no_offered_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user can delete the deployment while the run waits."""
    client = MagicMock()
    client.__exit__.return_value = False
    client.__enter__.return_value.read_deployment.side_effect = ObjectNotFound(Exception("404"))
    monkeypatch.setattr("rollouts.flows.short_form_flow.get_client", lambda sync_client: client)
    monkeypatch.setattr("rollouts.flows.short_form_flow.deployment", SimpleNamespace(id=uuid4()))
    assert _offered_values() == {}


def test_equal_values_in_both_are_no_contradiction(values: dict[str, Any]) -> None:  # Any: JSON
    check_doubled(more({**values, "rl_steps": 9}, training={"rl": {"num_steps": 9}}), lambda: values)


@pytest.mark.parametrize(
    ("posted", "words"),
    [
        ({MORE: "[training"}, "the form: More settings is not valid TOML: "),
        ({"data": "sft: a"}, "the form: Data is not valid TOML: "),
        ({"data": "[data]\nsft = 'a'"}, "the form: Data begins with [data]: remove the heading, keep its keys"),
        ({"data": "sft = 'a'\n'sft.b' = 1"}, "the form: unknown key data.sft.b"),
        ({"rl_steps": 0}, "the form: training.rl.num_steps: input should be greater than or equal to 1, found 0"),
        ({"rl_steps": "x"}, "the form: training.rl.num_steps: input should be a valid integer"),
        ({"name": 3}, "the form: run.name: input should be a valid string, found 3"),
        ({"data": 3}, "the form: Data is 3: expected a text in TOML"),
        ({MORE: [3]}, "the form: More settings is [3]: expected a text in TOML"),
        ({"mode": "dpo"}, "the form: mode: input should be 'sft', 'rl' or 'sft+rl', found 'dpo'"),
        ({"model": ""}, "the form: model is missing"),
        ({"node": "ssh"}, "the form: node.host is missing"),
        ({"node": "rented"}, "the form: node.max_usd is missing"),
        ({MORE: "[node]\nmin_fre_gb = 3"}, "the form: unknown key node.min_fre_gb; did you mean min_free_gb?"),
        ({MORE: "training = 3"}, "the form: training: "),
        (
            {MORE: "[retrain]\nmargin = 1"},
            "the form: retrain: this deployment has no retrain, but the deployment whose",
        ),
        ({MORE: "[schedule]\ncron = '@daily'"}, "the form: schedule: this deployment has no schedule"),
    ],
)
def test_a_mistake_has_the_words_of_validate(
    values: dict[str, Any],  # Any: JSON
    posted: dict[str, Any],  # Any: JSON
    words: str,
) -> None:
    with pytest.raises(ConfigError) as error:
        read_values(sft_rl_short.validate_parameters({**values, **posted}))
    assert words in str(error.value)


def test_every_mistake_is_told_at_once(values: dict[str, Any]) -> None:  # Any: JSON
    with pytest.raises(ConfigError) as error:
        read_values(more({**values, "rl_steps": 0, "engine": "SGLang"}, node={"min_free_gb": "ten"}))
    assert [line.split(": ")[1] for line in str(error.value).splitlines()] == [
        "training.rl.num_steps",
        "rollout.engine.kind",
        "node.min_free_gb",
    ]


def test_the_end_of_a_run_finds_its_machine_and_options(values: dict[str, Any]) -> None:  # Any: JSON
    tables = held_tables(
        more({**values, "name": "mine"}, node={"root": "/scratch"}, run={"store": "/s", "restarts": 1})
    )
    assert tables["node"] == {"kind": "local", "root": "/scratch"}
    assert tables["run"] == {"name": "mine", "store": "/s", "restarts": 1}
    assert held_tables({**values, MORE: "[["}) == {}
    mistaken = held_tables({**values, MORE: "run = 3\nnode = [1]"})
    assert (mistaken["run"], mistaken.get("node")) == ({}, None)
    wrong = {"restarts": "two", "stop_timeout_s": [1], "store": 3, "credentials": {}}
    assert held_tables(more(values, run=wrong))["run"] == {"name": "small"}
    assert held_tables({**values, "data": "sft = 'a'\n'sft.b' = 1"})["run"]["name"] == "small"
    assert held_tables({"run": {"name": "full"}}) == {"run": {"name": "full"}}
    # Prefect accepts every JSON as parameters of a run, and one run must not end the upkeep of all others
    assert held_tables({"run": {"name": "full", "store": 5}}) == {"run": {"name": "full"}}
    assert held_tables({**values, MORE: 5}) == held_tables({**values, "data": [1]}) == {}


def test_a_deployment_of_the_short_form_is_kept_with_the_store_that_serves_it(folder: Path, tmp_path: Path) -> None:
    deployments = deployments_of(folder / "small.toml")
    save_deployments(tmp_path, deployments)
    short = load_deployments(tmp_path)["small-form"]
    assert short == deployments[2]
    assert held_tables(parameters_for(tmp_path, short.parameters))["run"]["store"] == str(tmp_path)
    assert short.code_folders == deployments[0].code_folders


def test_tags_tell_forms_and_upkeep_apart(folder: Path) -> None:
    tags = {each.name: each.tags for each in [*deployments_of(folder / "small.toml"), *tool_deployments()]}
    assert tags == {
        "small": ["train", "every-setting"],
        "small-form": ["train", "short-form"],
        "small-evaluate": ["evaluate"],
        "reap": ["upkeep"],
        "finish": ["upkeep"],
    }


def test_a_configuration_with_the_name_of_anothers_short_form_is_refused(folder: Path, tmp_path: Path) -> None:
    save_deployments(tmp_path, deployments_of(folder / "small.toml"))
    other = (folder / "small.toml").rename(folder / "small-form.toml")
    with pytest.raises(ConfigError, match=r"small-form is the name of an existing .* rename the configuration"):
        save_deployments(tmp_path, deployments_of(other))
