"""Parameters of a run over Prefect's HTTP API that do not fit its flow: the run is Failed, with a sentence per mistake.

Without these tests such a run could become Crashed, and its only message would be an exit code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.exceptions import ParameterTypeError

from rollouts.flows.finish_flow import finish_run
from rollouts.flows.pipeline import sft_rl
from rollouts.flows.reap import reap_machines
from rollouts.flows.retrain import retrain_model
from rollouts.flows.short_form_flow import sft_rl_short
from rollouts_core.errors import ConfigError
from tests.kit.commands import Rollouts
from tests.kit.serving import api, up, wait_for_state
from tests.kit.small_pipeline import write_small_pipeline

EVERY: dict[str, Any] = {"config": {}, "node": {}, "run": {}}


@pytest.mark.parametrize(
    ("flow", "parameters", "words"),
    [
        (sft_rl, {**EVERY, "colour": 1}, "the form: unknown key colour; known are config, node, run"),
        (sft_rl, {**EVERY, "nodes": {}}, "the form: unknown key nodes; did you mean node?"),
        (sft_rl, {"config": {}, "node": {}}, "the form: run is missing"),
        (sft_rl_short, {"rl_step": 1}, "the form: unknown key rl_step; did you mean rl_steps?"),
        (retrain_model, EVERY, "the form: retrain is missing"),
        (reap_machines, {"reap": {}, "colour": 1}, "the form: unknown key colour; known are reap"),
        (finish_run, {}, "the form: finish is missing"),
    ],
)
def test_a_parameter_that_does_not_fit_is_named(
    flow: Flow[..., Any],  # Any: the result of the flow
    parameters: dict[str, Any],  # Any: JSON
    words: str,
) -> None:
    with pytest.raises(ConfigError) as refused:
        flow.validate_parameters(parameters)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize("name", ["config", "node", "run"])
def test_a_parameter_of_a_wrong_type_is_named(name: str) -> None:
    with pytest.raises(ParameterTypeError) as refused:
        sft_rl.validate_parameters({**EVERY, name: 3})
    assert f"- {name}: " in str(refused.value) and "expected a table of settings, found 3" in str(refused.value)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_a_run_whose_parameters_do_not_fit_is_failed_with_a_sentence(served: Rollouts, tmp_path: Path) -> None:
    up(served, str(write_small_pipeline(tmp_path / "small", mode="sft", retrain={"margin": 0.0})))
    deployments = {
        name.partition("/")[2]: api(served, "GET", f"/deployments/name/{name}")
        for name in ("sft-rl/small", "sft-rl/small-form", "retrain/small-retrain")
    }
    without_run = {name: table for name, table in deployments["small"]["parameters"].items() if name != "run"}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("small", {"colour": 1}, "the form: unknown key colour; known are config, node, run"),
        ("small", {"config": 3}, "the form: expected a table of settings, found 3"),
        ("small-form", {"colour": 1}, "the form: unknown key colour; known are algorithm, budget, "),
        ("small-form", {"sft_steps": "x"}, "the form: training.sft.num_steps: input should be a valid integer"),
        ("small-retrain", {"colour": 1}, "the form: unknown key colour; known are config, node, retrain, run"),
    ]

    def started(name: str, parameters: dict[str, Any]) -> str:  # Any: JSON
        asked = {"parameters": parameters, "enforce_parameter_schema": False}
        return str(api(served, "POST", f"/deployments/{deployments[name]['id']}/create_flow_run", asked)["id"])

    runs = [(started(name, parameters), words) for name, parameters, words in cases]
    changes = {"parameters": without_run, "enforce_parameter_schema": False}
    api(served, "PATCH", f"/deployments/{deployments['small']['id']}", changes)
    for run_id, words in [*runs, (started("small", {}), "the form: run is missing")]:
        wait_for_state(served, run_id, "FAILED")
        assert words in api(served, "GET", f"/flow_runs/{run_id}")["state"]["message"]
