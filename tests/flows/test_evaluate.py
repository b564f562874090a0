"""`rollouts evaluate`, and the deployment that does the same: real models, a real Prefect server.

Without these tests an evaluation by hand could score on other rows, or with another reward, than the run it is compared
with, or do again what was done.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.registry import promote, register_model
from rollouts_core.checkpoint import load_manifest
from rollouts_core.quickstart import write_quickstart_files
from tests.flows.refusals import write_config
from tests.infra.stores.s3_server import S3Server
from tests.kit.commands import Rollouts
from tests.kit.serving import api, trigger, up, wait_for_state
from tests.rollouts_core.make import TINY_SIZE


def records(rollouts: Rollouts) -> list[dict[str, Any]]:  # Any: JSON
    paths = sorted(rollouts.store.glob("runs/*/evaluation.json"), key=lambda path: path.stat().st_mtime)
    return [json.loads(path.read_text()) for path in paths]


def num_scorings(rollouts: Rollouts) -> int:
    return len(list(rollouts.store.glob("stages/evaluate-*/exit-*.json")))


@pytest.mark.matrix
@pytest.mark.slow
def test_models_are_scored_as_their_run_scored_them_once_and_from_everywhere(
    served: Rollouts,
    tmp_path: Path,
    bucket: str,
    s3_server: S3Server,
) -> None:
    folder = tmp_path / "small"
    write_quickstart_files(folder, size=TINY_SIZE)
    settings = {"mode": "sft", "training__sft__num_steps": 10, "training__sft__checkpoint_every": 5}
    config = write_config(folder, run__publish=f"s3://{bucket}/team", run__register_as="mine", **settings)
    up(served, str(config))  # the commands below join its server
    code, output = served.run("run", str(config))
    assert code == 0, output
    [run] = (served.store / "runs").iterdir()
    assert "In the registry: mine-1 (candidate)" in (run / "report.html").read_text()
    code, output = served.run("status")
    assert (code, "made mine-1 (candidate)" in output) == (0, True), output
    [stage] = (served.store / "stages").glob("evaluate-*")
    of_run = {entry["name"]: entry for entry in json.loads((stage / "result.json").read_text())["checkpoints"]}

    code, output = served.run("evaluate", str(config), "candidate", "--against", "base")
    assert code == 0, output
    assert "model is candidate (mine-1): " in output and "baseline is base: " in output
    assert "| candidate (mine-1) |" in output and "| base |" in output
    assert "of candidate (mine-1) is" in output and "that of base" in output
    [record] = records(served)
    assert record["models"]["model"]["named"] == "candidate (mine-1)"
    for name, of in (("baseline", "base"), ("model", "sft")):
        assert {key: record["models"][name][key] for key in ("mean", "low", "high", "num_rows")} == {
            key: of_run[of][key] for key in ("mean", "low", "high", "num_rows")
        }
    assert record["comparison"]["difference"] == of_run["sft"]["mean"] - of_run["base"]["mean"]
    # What the run has scored is not scored again, nor are the same weights by other names: the run, the URL of what it
    # published.
    assert (record["stage"]["how"], record["reused_from"]) == ("reused", [run.name])
    assert f"reused from run {run.name}, which scored the same" in output
    for name in (run.name, f"s3://{bucket}/team/small"):
        code, output = served.run("evaluate", str(config), name, "--against", str(folder / "base_model"))
        assert code == 0, output
        assert records(served)[-1]["stage"]["how"] == "reused"
    assert num_scorings(served) == 1
    code, output = served.run("evaluate", str(config), run.name, "--data", str(folder / "selection.jsonl"))
    assert code == 0, output
    assert (records(served)[-1]["comparison"], num_scorings(served)) == (None, 2)

    code, output = served.run("run", "--deployment", "small-evaluate")
    assert (code, "small-evaluate needs a model: evaluate.model=production" in output) == (2, True), output
    with Ledger(served.store / LEDGER_FILE) as ledger:
        known = record["models"]["model"]["digest"]
        each_step = served.store.glob("stages/sft-*/checkpoints/step_*")
        checkpoint = next(path for path in each_step if load_manifest(path).digest != known)
        model = register_model(
            ledger,
            "mine",
            checkpoint=str(checkpoint.relative_to(served.store)),
            digest=load_manifest(checkpoint).digest,
            run_id="",
            stages=[],
            data={},
            by="a test",
        )
        promote(ledger, model, by="a test", reason="none")
    run_id = trigger(served, "small-evaluate", "evaluate.model=mine-1", "evaluate.against=production")
    wait_for_state(served, run_id, "COMPLETED")
    assert [each["named"] for each in records(served)[-1]["models"].values()] == ["production (mine-2)", "mine-1"]
    question = {"artifacts": {"flow_run_id": {"any_": [run_id]}, "type": {"any_": ["table"]}}}
    [table] = api(served, "POST", "/artifacts/filter", question)
    rows = json.loads(table["data"])
    assert [row["model"] for row in rows] == ["production (mine-2)", "mine-1", "difference"]
    said = api(served, "GET", f"/flow_runs/{run_id}")["state"]["message"]
    assert "of mine-1 is" in said and re.search(r"; the scores are at http://127\.0\.0\.1:\d+/runs/\S+$", said), said
    failed = trigger(served, "small-evaluate", "evaluate.model=gone")
    wait_for_state(served, failed, "FAILED")
    assert "there is no model gone" in api(served, "GET", f"/flow_runs/{failed}")["state"]["message"]
    # Code that nobody here has named.
    failed = trigger(served, "small-evaluate", "evaluate.model=production", "rollout.reward_fn=antigravity:fly")
    wait_for_state(served, failed, "FAILED")
    message = api(served, "GET", f"/flow_runs/{failed}")["state"]["message"]
    assert "rollout.reward_fn names code of antigravity, which is not trusted in a run that was requested" in message
    # Made by a version that had another setting.
    older = api(served, "GET", "/deployments/name/evaluate/small-evaluate")
    parameters = {**older["parameters"], "config": {**older["parameters"]["config"], "gone": 1}}
    changes = {"parameters": parameters, "enforce_parameter_schema": False}
    api(served, "PATCH", f"/deployments/{older['id']}", changes)
    asked = {"parameters": {"evaluate": {"model": "production"}}}
    failed = api(served, "POST", f"/deployments/{older['id']}/create_flow_run", asked)["id"]
    wait_for_state(served, failed, "FAILED")
    message = api(served, "GET", f"/flow_runs/{failed}")["state"]["message"]
    assert "unknown key gone; known are" in message and "if another version made the deployment, make it" in message
    # A parameter that the flow does not have.
    asked = {"parameters": {**asked["parameters"], "colour": {}}}
    failed = api(served, "POST", f"/deployments/{older['id']}/create_flow_run", asked)["id"]
    wait_for_state(served, failed, "FAILED")
    message = api(served, "GET", f"/flow_runs/{failed}")["state"]["message"]
    assert "the form: unknown key colour; known are config, evaluate, node, run" in message


def refused(config: Path, *arguments: str) -> str:
    """The one sentence with which the command refuses."""
    store = config.parent / "store"
    outcome = CliRunner().invoke(app, ["evaluate", str(config), *arguments, "--store", str(store)])
    assert outcome.exit_code == 2, outcome.output
    assert not (store / "stages").exists()
    [sentence] = [line for line in outcome.stderr.splitlines() if line.strip()]
    return sentence


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "evaluate.model is missing: name a model: rollouts evaluate"),
        (("production",), "no model has the alias production: `rollouts models`"),
        (("base", "--data", "/nowhere/rows.jsonl"), "evaluate.data: /nowhere/rows.jsonl does not exist"),
        (("base", "--against", "./nowhere"), "there is no model /"),
    ],
)
def test_what_cannot_be_scored_is_one_sentence(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(write_config(folder), *arguments)


def test_rows_that_the_reward_cannot_grade_are_refused(folder: Path) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n')
    assert "has no `answer`" in refused(write_config(folder), "base", "--data", str(rows))


def test_a_wrong_name_of_a_model_hides_no_mistake_of_the_rows(folder: Path) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n')
    arguments = ["evaluate", str(write_config(folder)), "production", "--data", str(rows)]
    outcome = CliRunner().invoke(app, [*arguments, "--store", str(folder / "store")])
    assert outcome.exit_code == 2, outcome.output
    assert "no model has the alias production" in outcome.stderr and "has no `answer`" in outcome.stderr


def test_a_table_in_the_configuration_names_the_models(folder: Path) -> None:
    config = write_config(folder, evaluate__model="./nowhere", evaluate__data="heldout.jsonl")
    assert f"there is no model {folder}/nowhere" in refused(config)
