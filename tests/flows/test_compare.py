"""Pins the command `rollouts compare`: the file that it writes, its JSON, and a sentence for each wrong request.

Without it a typing mistake in a run's name could end in a traceback, or in a comparison of a run with itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner, Result

from rollouts.flows.cli import app
from rollouts.flows.commands.compare import page_name
from rollouts.flows.live import live_app
from rollouts.flows.own_server.password import own_password
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from tests.tasks.stored_run import write_stored_run

FIRST, SECOND, RUNNING = "small-11111111", "small-22222222", "other-33333333"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two finished runs, and one that has only begun."""
    write_stored_run(tmp_path, FIRST)
    write_stored_run(tmp_path, SECOND, rollout__seed=7)
    with Ledger(tmp_path / LEDGER_FILE) as ledger:
        ledger.note_use("sft-cccc", "3" * 32, run=RUNNING, num_steps=9)
    return tmp_path


def call(store: Path, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["compare", *arguments, "--store", str(store)])
    assert result.exit_code == code, result.output
    return result


def test_one_file_is_written_and_its_path_is_the_output(store: Path) -> None:
    path = store / "comparisons" / f"{FIRST}_{SECOND}.html"
    assert call(store, FIRST, "22222222").stdout == f"{path}\n"
    page = path.read_text()
    assert "rollout.seed" in page and "training.rl.num_steps" not in page


def test_the_same_facts_come_as_objects(store: Path) -> None:
    records = [json.loads(line) for line in call(store, FIRST, SECOND, "--json").stdout.splitlines()]
    assert [record["run"] for record in records if record["kind"] == "compared_run"] == [FIRST, SECOND]
    assert not (store / "comparisons").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((FIRST,), f"a comparison needs two runs or more, not only {FIRST}: rollouts runs lists others"),
        ((FIRST, "small-1111111"), f"has no run small-1111111; did you mean {FIRST}?"),
        ((FIRST, "11111111"), f"{FIRST} and 11111111 are the same run, {FIRST}: name another one"),
        ((FIRST, "other"), f"{RUNNING} ended before its report, so it has no scores to compare"),
        (
            (FIRST, SECOND, "--open", "--json"),
            "--open shows a page, but --json prints objects: give only one",
        ),
        ((FIRST, SECOND) * 5, "10 runs are too many for one comparison: name at most 8"),
    ],
)
def test_a_wrong_request_is_a_sentence(store: Path, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in " ".join(call(store, *arguments, code=2).stderr.split())


def test_runs_that_are_ticked_in_the_served_list_are_compared(store: Path) -> None:
    (store / "prefect").mkdir()
    user, _, password = own_password(store / "prefect").partition(":")
    with TestClient(live_app(store)) as client:
        assert client.get(f"/compare?run={FIRST}&run={SECOND}").status_code == 401
        client.auth = (user, password)
        listed = client.get("/").text
        assert listed.count('type="checkbox"') == 2 and f'value="{RUNNING}"' not in listed
        page = client.get("/compare", params={"run": [FIRST, SECOND]})
        assert page.status_code == 200 and "rollout.seed" in page.text and "training.rl.num_steps" not in page.text
        assert "'sha256-" in page.headers["content-security-policy"]
        wrong = {"": "no run is ticked", f"run={FIRST}": "needs two runs or more", "run=no&run=such": "has no run no"}
        for query, sentence in wrong.items():
            answer = client.get(f"/compare?{query}")
            assert answer.status_code == 400 and sentence in answer.text
        assert not (store / "comparisons").exists()


def test_the_file_of_many_long_names_has_a_short_one() -> None:
    names = [f"{'a' * 60}-{i:08d}" for i in range(8)]
    assert len(page_name(names)) < 200
    assert page_name(names) != page_name([*names[:7], names[0]])
