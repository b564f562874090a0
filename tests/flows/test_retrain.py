"""Retraining as a store serves it: a real Prefect server, real trainings, data that changes.

Without these tests the parts could each be right and the flow not: a night's training on unchanged data, a candidate
that nobody compares, a form that nobody can answer, a schedule that never fires.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import tomli_w

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.registry import Alias, Model, current, history, models
from rollouts_core.checkpoint import verify_checkpoint
from tests.kit.commands import Rollouts
from tests.kit.runs import LONG, exits_of, paused, program_of
from tests.kit.serving import ASK_S, api, set_state, state_of, trigger, up, wait_for_checkpoint, wait_for_state
from tests.kit.small_pipeline import small_settings, write_small_pipeline
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow


def write_config(folder: Path, **overrides: Any) -> Path:  # Any: settings of every type
    """The small pipeline with SFT alone, retrained; any candidate counts as better."""
    settings = small_settings(mode="sft", training__sft__num_steps=20, **{"retrain__max_p_value": 1.0, **overrides})
    config = folder / "small.toml"
    config.write_text(tomli_w.dumps(settings))
    return config


def run_of(rollouts: Rollouts, run_id: str) -> dict[str, Any]:  # Any: JSON
    run: dict[str, Any] = api(rollouts, "GET", f"/flow_runs/{run_id}")
    return run


def message_of(rollouts: Rollouts, run_id: str) -> str:
    return str(run_of(rollouts, run_id)["state"]["message"])


def retrain(rollouts: Rollouts, *assignments: str) -> tuple[str, str]:
    """The name and the message of the state in which a retraining ends."""
    run_id = trigger(rollouts, "small-retrain", *assignments)
    wait_for_state(rollouts, run_id, "COMPLETED")
    state = run_of(rollouts, run_id)["state"]
    return state["name"], state["message"]


def looks(rollouts: Rollouts) -> list[dict[str, Any]]:  # Any: JSON
    """The retrainings that trained nothing, or are not over."""
    runs = api(rollouts, "POST", "/flow_runs/filter", {"flows": {"name": {"any_": ["retrain"]}}})
    return [run for run in runs if run["state_name"] not in ("Promoted", "Rejected")]


def say_updated(rollouts: Rollouts, resource: str) -> None:
    """What a program sends that has written data."""
    event = {
        "event": "data.updated",
        "id": str(uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "resource": {"prefect.resource.id": resource},
    }
    api(rollouts, "POST", "/events", [event])


def question_of(rollouts: Rollouts, run_id: str) -> str:
    """What tells the question from others that a suspended run asks; empty while it asks none."""
    state: dict[str, Any] = run_of(rollouts, run_id)["state"]  # Any: JSON
    return str((state["state_details"].get("run_input_keyset") or {}).get("description", ""))


def registered(rollouts: Rollouts) -> list[Model]:
    with Ledger(rollouts.store / LEDGER_FILE) as ledger:
        return models(ledger)


def production(rollouts: Rollouts) -> Model | None:
    with Ledger(rollouts.store / LEDGER_FILE) as ledger:
        return current(ledger, "small", Alias.PRODUCTION)


def change_data(folder: Path) -> None:
    """Demonstrations as if others had come: the last ones are gone."""
    path = folder / "sft.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-20]))


def num_jobs(rollouts: Rollouts, stage: str) -> int:
    return len(list((rollouts.store / "stages").glob(f"{stage}-*/exit-1.json")))


def test_data_is_trained_on_once_and_new_data_is_trained_on_and_compared_with_production(
    served: Rollouts,
    folder: Path,
) -> None:
    up(served, str(write_config(folder)))
    name, message = retrain(served)
    assert name == "Promoted", message
    assert message.startswith("promoted small-1: small-1 counts without a test against the start model")
    [first] = registered(served)
    assert production(served) == first
    assert verify_checkpoint(served.store / first.checkpoint).digest == first.digest
    assert {stage.rpartition("-")[0] for stage in first.stages} == {"sft", "select-sft", "evaluate"}

    name, message = retrain(served)
    assert name == "Skipped"
    assert message.startswith("skipped, data unchanged since the retraining of ")
    assert num_jobs(served, "sft") == 1

    for resource in ("rollouts.data.other", "rollouts.data.small"):
        say_updated(served, resource)
    wait_until(
        lambda: [run["state_name"] for run in looks(served)] == ["Skipped"] * 2,
        what="one look, at an event",
        every_s=ASK_S,
    )

    change_data(folder)
    name, message = retrain(served, "retrain.max_p_value=0.0002")
    assert name == "Rejected", message
    assert message.startswith("rejected small-2: small-2 did not improve on small-1 beyond noise")
    assert production(served) == first
    assert num_jobs(served, "sft") == 2
    [_, second] = registered(served)
    assert second.evaluation["against"] == "small-1"
    assert second.evaluation["difference_low"] <= second.evaluation["difference"]

    code, output = served.run("prune", "--days", "0", "--max-gb", "0", "--yes")
    assert (code, output[:17]) == (0, "nothing to remove"), output
    for model in (first, second):
        for stage in model.stages:
            assert json.loads((served.store / "stages" / stage / "result.json").read_text())["checkpoints"]


@pytest.mark.matrix
def test_a_person_is_asked_and_the_question_outlives_everything_until_it_is_answered(
    served: Rollouts,
    folder: Path,
) -> None:
    config = write_config(folder, retrain__approval=True)
    up(served, str(config))
    run_id = trigger(served, "small-retrain")
    wait_until(lambda: state_of(served, run_id) == "PAUSED", what="the question", timeout_s=480, every_s=ASK_S)
    assert production(served) is None
    waits = f"run +small-{run_id[:8]} +Suspended since .* on local\n +a decision is waiting: Resume in the menu"
    assert re.search(waits, served.run("status")[1]), served.said()
    name, message = retrain(served)
    assert (name, "which waits for approval: Resume" in message) == ("Skipped", True), message
    assert served.run("down")[0] == 0
    up(served)

    keys = run_of(served, run_id)["state"]["state_details"]["run_input_keyset"]
    form = api(served, "GET", f"/flow_runs/{run_id}/input/{keys['description']}")
    assert "Put small-1 into production?" in form
    assert "| difference |" in form
    answer = api(served, "POST", f"/flow_runs/{run_id}/resume", {"run_input": {"promote": "perhaps"}})
    assert answer["status"] == "REJECT"
    api(served, "POST", f"/flow_runs/{run_id}/resume", {"run_input": {"promote": True, "decided_by": "Ada"}})
    wait_for_state(served, run_id, "COMPLETED")
    assert message_of(served, run_id).startswith("promoted small-1: ")
    assert num_jobs(served, "sft") == num_jobs(served, "evaluate") == 1
    with Ledger(served.store / LEDGER_FILE) as ledger:
        assert history(ledger, "small")[-2].changed_by == "Ada"
    [promoted] = registered(served)
    assert production(served) == promoted

    change_data(folder)
    run_id = trigger(served, "small-retrain")
    wait_until(lambda: state_of(served, run_id) == "PAUSED", what="the second question", timeout_s=480, every_s=ASK_S)
    set_state(served, run_id, "CANCELLING")
    wait_until(lambda: state_of(served, run_id) == "CANCELLED", what="the end of the question")
    assert production(served) == promoted
    assert served.run("models", "promote", "small-2")[0] == 0
    assert production(served) == registered(served)[1]


@pytest.mark.matrix
def test_an_approval_that_comes_late_is_of_its_own_candidate_whatever_the_data_is_by_then(
    served: Rollouts,
    folder: Path,
) -> None:
    up(served, str(write_config(folder, retrain__approval=True)))
    asked: list[str] = []
    for _ in range(2):
        asked.append(trigger(served, "small-retrain"))
        wait_until(lambda: state_of(served, asked[-1]) == "PAUSED", what="a question", timeout_s=480, every_s=ASK_S)
        change_data(folder)
    first, second = registered(served)

    def answer(run_id: str) -> None:
        api(served, "POST", f"/flow_runs/{run_id}/resume", {"run_input": {"promote": True, "decided_by": "Ada"}})

    answer(asked[1])
    wait_for_state(served, asked[1], "COMPLETED")
    before = question_of(served, asked[0])
    answer(asked[0])
    wait_until(lambda: question_of(served, asked[0]) not in ("", before), what="a new question", every_s=ASK_S)
    wait_until(lambda: state_of(served, asked[0]) == "PAUSED", what="the wait for an answer", every_s=ASK_S)
    answer(asked[0])
    wait_for_state(served, asked[0], "COMPLETED")
    assert message_of(served, asked[0]).startswith("promoted small-1: small-1 counts without a test against small-2")
    assert registered(served)[1:] == [second]
    assert num_jobs(served, "sft") == 2
    for model in (first, second):
        assert verify_checkpoint(served.store / model.checkpoint).digest == model.digest


@pytest.mark.matrix
def test_a_retry_of_a_retraining_attaches_to_its_job_and_another_one_waits_for_it(
    served: Rollouts,
    tmp_path: Path,
) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="rl", retrain__max_p_value=1.0, **LONG)
    up(served, str(config))
    run_id = trigger(served, "small-retrain")
    rl = wait_for_checkpoint(served, "rl")
    with paused(program_of(rl)):
        assert served.run("down")[0] == 0
        up(served)
        assert state_of(served, run_id) == "CRASHED"
        set_state(served, run_id, "SCHEDULED", name="AwaitingRetry")
        wait_until(
            lambda: "rl             attached to the running job" in (served.store / "prefect/serving.log").read_text(),
            what="the retry to attach",
        )
        second = trigger(served, "small-retrain")
        wait_until(
            lambda: run_of(served, second)["state"]["name"] == "AwaitingConcurrencySlot",
            what="the second one to wait for the first",
        )
    wait_for_state(served, run_id, "COMPLETED")
    assert message_of(served, run_id).startswith("promoted small-1: ")
    assert exits_of(rl) == ["exit-1.json"]
    wait_for_state(served, second, "COMPLETED")
    assert run_of(served, second)["state"]["name"] == "Skipped"
    [model] = registered(served)
    assert {stage.rpartition("-")[0] for stage in model.stages} == {"rl", "select-rl", "evaluate"}


@pytest.mark.matrix
def test_a_schedule_fires_by_itself_and_ends_with_its_table(served: Rollouts, folder: Path) -> None:
    config = write_config(folder, schedule__interval_minutes=1, schedule__overlap="skip")
    up(served, str(config))
    deployment = api(served, "GET", "/deployments/name/retrain/small-retrain")
    [schedule] = deployment["schedules"]
    assert (schedule["active"], schedule["schedule"]["interval"]) == (True, 60.0)
    assert deployment["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    assert deployment["global_concurrency_limit"]["limit"] == 1
    of_deployment = {"deployments": {"id": {"any_": [deployment["id"]]}}}
    completed = {**of_deployment, "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    wait_until(
        lambda: (
            {"Promoted", "Skipped"}
            <= {run["state_name"] for run in api(served, "POST", "/flow_runs/filter", completed)}
        ),
        what="a training and a look at unchanged data",
        timeout_s=300,
        every_s=ASK_S,
    )
    code, output = served.run("status")
    assert (code, output.count("Scheduled")) == (0, 1), output

    assert served.run("down")[0] == 0
    up(served)
    restarted = api(served, "GET", "/deployments/name/retrain/small-retrain")
    assert (restarted["paused"], [each["active"] for each in restarted["schedules"]]) == (False, [True])

    [schedule] = restarted["schedules"]
    api(served, "PATCH", f"/deployments/{restarted['id']}/schedules/{schedule['id']}", {"active": False})
    assert served.run("down")[0] == 0
    up(served)
    paused = api(served, "GET", "/deployments/name/retrain/small-retrain")
    assert [each["active"] for each in paused["schedules"]] == [False], "what a person paused begins again by itself"

    write_config(folder)
    up(served, str(config))
    assert api(served, "GET", "/deployments/name/retrain/small-retrain")["schedules"] == []


@pytest.mark.matrix
def test_what_people_gave_deployments_in_prefect_outlives_a_restart_and_a_changed_file(
    served: Rollouts,
    folder: Path,
) -> None:
    """A weekly training that somebody made by the form would end without a word."""
    config = write_config(folder, schedule__cron="17 4 1 1 *")
    up(served, str(config))
    own = {"schedule": {"cron": "0 3 * * 1", "timezone": "Europe/Berlin"}, "active": True, "parameters": {"name": "x"}}
    of_small = {each["name"]: each["id"] for each in small_deployments(served)}
    assert of_small.keys() == {"small", "small-form", "small-retrain", "small-evaluate"}
    for deployment_id in of_small.values():
        api(served, "POST", f"/deployments/{deployment_id}/schedules", [own])
    given = {"tags": ["ours"], "concurrency_limit": 2, "concurrency_options": {"collision_strategy": "CANCEL_NEW"}}
    api(served, "PATCH", f"/deployments/{of_small['small']}", given)
    before = {name: ["0 3 * * 1"] for name in of_small}
    before["small-retrain"].append("17 4 1 1 *")
    assert crons(served) == before
    assert served.run("down")[0] == 0
    up(served)
    assert crons(served) == before
    assert not any(each["paused"] for each in small_deployments(served))
    kept = [schedule for each in small_deployments(served) for schedule in each["schedules"] if not schedule["slug"]]
    assert [(each["schedule"]["timezone"], each["parameters"]["name"]) for each in kept] == [("Europe/Berlin", "x")] * 3
    small = api(served, "GET", "/deployments/name/sft-rl/small")
    assert (small["tags"], small["global_concurrency_limit"]["limit"]) == (["train", "every-setting", "ours"], 2)
    assert small["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"

    write_config(folder)
    up(served, str(config))
    assert crons(served) == {name: ["0 3 * * 1"] for name in of_small}


def small_deployments(rollouts: Rollouts) -> list[dict[str, Any]]:  # Any: JSON
    """What is made of the configuration."""
    return list(api(rollouts, "POST", "/deployments/filter", {"deployments": {"name": {"like_": "small"}}}))


def crons(rollouts: Rollouts) -> dict[str, list[str]]:
    """When each of them runs, by its name."""
    return {
        each["name"]: sorted(schedule["schedule"]["cron"] for schedule in each["schedules"])
        for each in small_deployments(rollouts)
    }


@pytest.mark.matrix
def test_a_run_of_a_person_registers_its_checkpoint_where_it_is_asked_to(rollouts: Rollouts, folder: Path) -> None:
    code, output = rollouts.run("run", str(write_config(folder, run__register_as="mine")))
    assert code == 0, output
    [model] = registered(rollouts)
    assert (model.name, set(model.data)) == ("mine-1", {str(folder / "sft.jsonl")})
    (run,) = (rollouts.store / "runs").iterdir()
    assert model.checkpoint == f"runs/{run.name}/checkpoint"
    with Ledger(rollouts.store / LEDGER_FILE) as ledger:
        assert current(ledger, "mine", Alias.CANDIDATE) == model
        assert current(ledger, "mine", Alias.PRODUCTION) is None
