"""The form of a run in Prefect: what it shows of every setting, and what it may post.

Without these tests a setting could lose its help text or its bounds in the form, and a run could be refused, or go to
the wrong folder, because somebody looked at another tab of the form first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prefect.exceptions import ParameterTypeError
from prefect.utilities.callables import parameter_schema
from pydantic import TypeAdapter, ValidationError

from rollouts.flows.evaluate import evaluate_model
from rollouts.flows.finish_flow import finish_run
from rollouts.flows.form import FormNode, RunOptions
from rollouts.flows.pipeline import sft_rl
from rollouts.flows.reap import reap_machines
from rollouts.flows.retrain import retrain_model
from rollouts.flows.store import STORE_VARIABLE
from rollouts.flows.tools import ReapConfig
from rollouts.infra.node import LocalNode, NodeSettings, RentedNode, SSHNode

FORMS = (sft_rl, evaluate_model, retrain_model, reap_machines, finish_run)
NODE: TypeAdapter[NodeSettings] = TypeAdapter(FormNode)
SSH = {"kind": "ssh", "host": "me@box", "python": "/opt/bin/python"}


def fields() -> Iterator[tuple[str, dict[str, Any]]]:  # Any: JSON schema
    """Every field of the forms, by record and name."""
    for form in FORMS:
        for record, definition in parameter_schema(form).definitions.items():
            for name, field in definition["properties"].items():
                yield f"{record}.{name}", field


def test_every_setting_has_a_help_text() -> None:
    # A record that stands alone shows the text of the record itself.
    assert [name for name, field in fields() if not ("$ref" in field or field.get("description"))] == []
    records = [record for form in FORMS for record in parameter_schema(form).definitions.items()]
    assert [name for name, definition in records if not definition.get("description")] == []


def test_every_bound_has_the_name_that_a_form_understands() -> None:
    assert [name for name, field in fields() if {"ge", "gt", "le", "lt"} & field.keys()] == []


@pytest.mark.parametrize("name", ["SFTTrainingConfig.num_steps", "RLTrainingConfig.num_steps", "OptimConfig.lr"])
def test_a_number_has_its_bounds(name: str) -> None:
    field = dict(fields())[name]
    assert {"minimum", "exclusiveMinimum"} & field.keys(), field


def test_what_the_form_keeps_of_the_local_tab_does_not_hinder_ssh() -> None:
    stale = {**LocalNode().model_dump(), **SSH}
    assert NODE.validate_python(stale) == SSHNode.model_validate(SSH)


def test_what_the_form_keeps_of_the_ssh_tab_does_not_move_local_runs() -> None:
    stale = {**SSHNode.model_validate({**SSH, "python": "/opt/bin/python"}).model_dump(), "kind": "local"}
    node = NODE.validate_python(stale)
    assert (node.kind, node.root) == ("local", "")


def test_machines_for_engines_are_kept_with_ssh_and_dropped_with_other_providers() -> None:
    engines = {"host": "me@10.0.0.2", "python": "/opt/bin/python"}
    posted = SSHNode.model_validate({**SSH, "engine_nodes": [engines]}).model_dump(mode="json")
    node = NODE.validate_python(posted)
    assert isinstance(node, SSHNode) and node.engine_nodes[0].host == "me@10.0.0.2"
    assert isinstance(NODE.validate_python({**posted, "kind": "local"}), LocalNode)


def test_machines_that_train_together_are_kept_with_ssh() -> None:
    second = {"host": "me@10.0.0.3", "python": "/opt/bin/python"}
    posted = SSHNode.model_validate({**SSH, "trainer_nodes": [second]}).model_dump(mode="json")
    node = NODE.validate_python(posted)
    assert isinstance(node, SSHNode) and node.trainer_nodes[0].host == "me@10.0.0.3"


def test_what_somebody_wrote_stays() -> None:
    own = {**SSH, "root": "/scratch/me"}
    assert NODE.validate_python(own) == SSHNode.model_validate(own)
    assert NODE.validate_python({"kind": "local", "root": "/scratch"}).root == "/scratch"
    assert NODE.validate_python(LocalNode(root="/scratch")).root == "/scratch"


def test_what_is_the_default_of_another_provider_may_be_meant_for_this_one() -> None:
    image = {"kind": "rented", "max_usd": 5.0, "install": "nothing"}
    assert NODE.validate_python(image) == RentedNode.model_validate(image)
    system = {**SSH, "python": RentedNode(max_usd=5.0).python}
    assert NODE.validate_python(system) == SSHNode.model_validate(system)


def test_what_the_form_keeps_of_the_ssh_tab_does_not_keep_packages_from_a_rented_machine() -> None:
    stale = {**SSHNode.model_validate(SSH).model_dump(), "kind": "rented", "max_usd": 5.0}
    node = NODE.validate_python(stale)
    assert isinstance(node, RentedNode)
    assert (node.install, node.key_file) == ("uv", "~/.ssh/id_ed25519")


@pytest.mark.parametrize(
    ("former", "node"),
    [
        ({"provider": "local", "root": "/scratch"}, LocalNode(root="/scratch")),
        ({"provider": "provision", "max_usd": 5.0}, RentedNode(max_usd=5.0)),
    ],
)
def test_a_run_that_an_earlier_version_began_keeps_its_node(
    former: dict[str, Any],  # Any: settings of every type
    node: LocalNode | RentedNode,
) -> None:
    assert NODE.validate_python(former) == node


def sentences(**changed: Any) -> list[str]:  # Any: what somebody posts
    """What is said of what the form posts, by lines."""
    base = {"mode": "sft", "model": {"path": "/m"}, "data": {"sft": "a", "selection": "b", "heldout": "c"}}
    posted = {"config": base, "node": {"kind": "local"}, "run": {}, **changed}
    with pytest.raises(ParameterTypeError) as refused:
        sft_rl.validate_parameters(posted)
    return str(refused.value).splitlines()[1:]


def test_what_another_version_posts_is_a_sentence_each_with_what_to_do() -> None:
    [said] = sentences(run={"nane": "x", "store": "/s"})
    assert "unknown key run.nane; did you mean name? (if another version made the deployment, make it again" in said
    model, data, what_to_do = sentences(config={"mode": "sft"})
    assert model.endswith("the form: model is missing")
    assert data == "the form: data is missing"
    assert what_to_do.startswith("(if another version made the deployment, make it again")


def test_a_node_that_is_asked_for_without_the_form_is_read_as_in_a_file() -> None:
    assert NODE.validate_python({"min_free_gb": 5}) == LocalNode(min_free_gb=5)
    [said] = sentences(node={"min_fre_gb": 5})
    assert "unknown key node.min_fre_gb; did you mean min_free_gb? (if another version" in said


@pytest.mark.parametrize(
    "settings",
    [
        {"max_usd": True},
        {"max_usd": "25"},
        {"max_usd": 5, "query": {"max_usd_per_gpu_hour": True}},
        {"max_usd": 5, "query": {"gpu_count": "2"}},
        {"max_usd": 5, "query": {"spot": "yes"}},
    ],
)
def test_a_limit_of_money_is_no_text_and_no_truth(settings: dict[str, Any]) -> None:
    assert RentedNode(max_usd=5).max_usd == 5.0
    with pytest.raises(ValidationError, match=r"valid (number|integer|boolean)"):
        RentedNode.model_validate(settings)


def test_a_value_out_of_bounds_is_one_sentence_without_more() -> None:
    [said] = sentences(run={"restarts": 99, "store": "/s"})
    assert said.endswith("the form: run.restarts: input should be less than or equal to 10, found 99")


def test_the_form_names_every_mistake_of_every_table_with_its_place() -> None:
    config = {"mode": "sft", "model": {"path": 3}, "data": {"sft": "a"}, "training": {"sft": {"num_steps": 0}}}
    node = {"kind": "local", "min_free_gb": "ten", "python": 3}
    said = sentences(config=config, node=node, run={"restarts": 99, "store": "/s", "publish": 3})
    expected = [
        "the form: model.path: input should be a valid string, found 3",
        "the form: training.sft.num_steps: input should be greater than or equal to 1, found 0",
        'the form: mode "sft" needs data.selection: ',
        'the form: mode "sft" needs data.heldout: ',
        "the form: node.min_free_gb: input should be a valid number, found 'ten'",
        "the form: node.python: input should be a valid string, found 3",
        "the form: run.restarts: input should be less than or equal to 10, found 99",
        "the form: run.publish: input should be a valid string, found 3",
    ]
    assert [line for line in said if not any(words in line for words in expected)] == []
    assert [words for words in expected if not any(words in line for line in said)] == []


@pytest.mark.parametrize("emptied", [{}, {"store": ""}, {"store": None}])
@pytest.mark.parametrize("served", ["/data/store", ""])
def test_without_a_store_a_run_is_in_that_of_its_process(
    emptied: dict[str, str | None], served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty path is the folder in which the process was started: nobody would look for the run there."""
    monkeypatch.setenv(STORE_VARIABLE, served)
    for record in (RunOptions, ReapConfig):
        assert record.model_validate(emptied).store == (served or ".rollouts")


@pytest.mark.parametrize("given", ["form", "environment"])
def test_a_store_in_the_home_folder_is_there(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is a folder that is called ~, which nobody dares to remove."""
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv(STORE_VARIABLE, "~/runs" if given == "environment" else "/elsewhere")
    for record in (RunOptions, ReapConfig):
        assert record.model_validate({"store": "~/runs"} if given == "form" else {}).store == "/home/ada/runs"
