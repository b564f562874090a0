"""Pins what `rollouts models` and `rollouts prune` print, and that they do what they print.

Without it somebody serves another model than the registry says, or loses a stage to a command that was to show it only.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rollouts.flows.cli import app
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.registry import Alias, Model, current, models, note_evaluation, promote, register_model, reject
from rollouts.tasks.model_aliases import models_of_runs
from rollouts_core.checkpoint import load_manifest, new_checkpoint

FIGURES = {
    "mean": 0.625,
    "against": "small-1",
    "difference": 0.125,
    "difference_low": 0.0625,
    "difference_high": 0.1875,
}


def call(store: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--store", str(store)], catch_exceptions=False)


def register(store: Path, number: int, line: str = "small") -> Model:
    """A model with a checkpoint of its own."""
    folder = store / f"runs/{line}-{number}/checkpoint"
    with new_checkpoint(folder, step=number) as partial:
        (partial / "model.safetensors").write_text(f"weights of {line} {number}")
    with Ledger(store / LEDGER_FILE) as ledger:
        return register_model(
            ledger,
            line,
            checkpoint=str(folder.relative_to(store)),
            digest=load_manifest(folder).digest,
            run_id=f"run-{number}",
            stages=[f"sft-{number:016x}"],
            data={},
            by="run small",
        )


def production(store: Path) -> str:
    with Ledger(store / LEDGER_FILE) as ledger:
        model = current(ledger, "small", Alias.PRODUCTION)
    return model.name if model else ""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two models, the first in production."""
    store = tmp_path / "store"
    first, second = register(store, 1), register(store, 2)
    with Ledger(store / LEDGER_FILE) as ledger:
        promote(ledger, first, by="run small", reason="first training")
        note_evaluation(ledger, second, FIGURES)
    return store


def test_models_are_listed_with_their_aliases_and_their_last_comparison(store: Path) -> None:
    head, first, second = call(store, "models").stdout.splitlines()
    assert head.split()[:3] == ["NAME", "ID", "ALIASES"]
    assert first.split()[:3] == ["small-1", "1", "production"]
    assert second.split()[:3] == ["small-2", "2", "candidate"]
    assert "0.625  small-1 +0.125 (+0.062 to +0.188)" in second
    assert second.endswith("runs/small-2/checkpoint")


def test_a_promotion_and_a_rollback_by_hand_are_in_the_history(store: Path) -> None:
    result = call(store, "models", "promote", "2", "--reason", "Ada likes it")
    assert result.stdout == f"small-2 is in production: {store}/runs/small-2/checkpoint\n"
    assert call(store, "models", "path").stdout == f"{store}/runs/small-2/checkpoint\n"
    result = call(store, "models", "rollback")
    assert result.stdout == f"small-1 is in production again: {store}/runs/small-1/checkpoint\n"
    lines = call(store, "models", "history", "small").stdout.splitlines()
    productions = [line for line in lines if " production " in line]
    assert [line.split()[4] for line in productions] == ["small-1", "small-2", "small-1"]
    assert productions[1].endswith("Ada likes it")


def test_what_somebody_wrote_into_a_form_is_a_line_of_the_history(store: Path) -> None:
    with Ledger(store / LEDGER_FILE) as ledger:
        promote(ledger, models(ledger)[1], by="Ada \x1b[31mLovelace", reason="better:\n\n- longer\n- nicer")
    *_, last, _ = call(store, "models", "history").stdout.splitlines()
    assert last.endswith("Ada Lovelace  better: - longer - nicer")


def test_a_user_without_a_name_is_known_by_the_number(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_name(uid: int) -> str:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", without_name)
    assert call(store, "models", "promote", "small-2").exit_code == 0
    assert f"user {os.getuid()}" in call(store, "models", "history").stdout
    assert call(store, "models", "rollback").exit_code == 0


def test_a_damaged_checkpoint_does_not_get_into_production(store: Path) -> None:
    (store / "runs/small-2/checkpoint/model.safetensors").write_text("other weights")
    result = call(store, "models", "promote", "small-2")
    assert result.exit_code == 2
    assert "small-2 cannot be used: " in result.stderr
    assert production(store) == "small-1"
    call(store, "models", "promote", str(register(store, 3).id))
    (store / "runs/small-1/checkpoint/manifest.json").unlink()
    result = call(store, "models", "rollback")
    assert (result.exit_code, production(store)) == (2, "small-3")
    assert "small-1 cannot be used: " in result.stderr


def test_a_rollback_does_not_put_back_what_was_replaced_while_it_looked(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = register(store, 3)
    call(store, "models", "promote", "small-2")

    def look_while_another_is_promoted(model: Model, _: Path) -> None:
        with Ledger(store / LEDGER_FILE) as ledger:
            promote(ledger, third, by="run small", reason="better")

    monkeypatch.setattr("rollouts.flows.commands.models.check_whole", look_while_another_is_promoted)
    result = call(store, "models", "rollback")
    assert (result.exit_code, production(store)) == (2, "small-3"), "small-2 is what was to go"
    assert result.stderr == "rollouts: production of small changed meanwhile: check it, then roll back again\n"


def test_a_store_without_models_says_what_registers_them(tmp_path: Path) -> None:
    with Ledger(tmp_path / LEDGER_FILE):
        listed, path = call(tmp_path, "models"), call(tmp_path, "models", "path")
    assert (listed.exit_code, path.exit_code) == (0, 2)
    for output in (listed.output, path.output):
        assert "retrainings and runs with run.register_as register models" in " ".join(output.split())


def test_what_cannot_be_is_one_sentence(store: Path, tmp_path: Path) -> None:
    register(store, 1, line="large")
    for arguments, words in (
        (["models", "promote", "small-7"], "there is no model small-7: the registry has small-1, small-2, large-1"),
        (["models", "rollback", "small"], "small has no earlier production model"),
        (["models", "rollback"], "the store has several lines of models: name one of large, small"),
        (["models", "history", "tiny"], "there is no line tiny: name one of large, small"),
        (["models", "path", "tiny"], "there is no line tiny: name one of large, small"),
        (["models", "path", "large"], "no model of large has the alias production"),
    ):
        result = call(store, *arguments)
        assert result.exit_code == 2
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
    result = call(tmp_path / "empty", "models")
    assert (result.exit_code, result.stderr.startswith(f"rollouts: {tmp_path}/empty has no ledger")) == (2, True)


def test_pruning_shows_first_and_removes_only_when_told_and_never_a_lineage(store: Path) -> None:
    of_model, old = store / f"stages/sft-{1:016x}", store / f"stages/sft-{9:016x}"
    for path in (of_model, old):
        path.mkdir(parents=True)
        (path / "weights").write_bytes(bytes(2_000_000))
        os.utime(path, (time.time() - 100 * 86_400,) * 2)
    shown = call(store, "prune").stdout
    assert old.name in shown
    assert of_model.name not in shown
    assert "would remove 1 folders of 0.002 GB with --yes; 1 folders of 0.002 GB stay" in shown
    assert old.is_dir()
    assert "nothing to remove" in call(store, "prune", "--days", "200").stdout
    assert "removed 1 folders of 0.002 GB; 1 folders" in call(store, "prune", "--yes").stdout
    assert (of_model.is_dir(), old.exists()) == (True, False)


def test_reports_and_runs_say_what_their_model_is_called_now(store: Path) -> None:
    pages = [store / f"runs/small-{number}/report.html" for number in (1, 2)]
    for page in pages:
        page.write_text("<p><!-- registered as --><!-- that was it --></p>")

    def said() -> list[str]:
        return [re.sub("<.*?>", "", page.read_text()).removeprefix("In the registry: ") for page in pages]

    assert call(store, "models", "promote", "small-2").exit_code == 0
    assert said() == ["small-1", "small-2 (production)"]
    assert models_of_runs(store) == {"run-1": ["small-1"], "run-2": ["small-2 (production)"]}
    pages[1].unlink()  # what somebody removed is no obstacle
    assert call(store, "models", "rollback").exit_code == 0
    assert re.sub("<.*?>", "", pages[0].read_text()) == "In the registry: small-1 (production)"
    assert models_of_runs(store) == {"run-1": ["small-1 (production)"], "run-2": ["small-2"]}
    assert models_of_runs(store / "nowhere") == {}
    pages[1].write_text("<p><!-- registered as -->In the registry: small-2<!-- that was it --></p>")
    register(store, 3)  # takes the candidacy
    with Ledger(store / LEDGER_FILE) as ledger:
        made = register_model(
            ledger, "small", checkpoint="runs/x/checkpoint", digest="d", run_id="r", stages=[], data={}, by="me"
        )
        reject(ledger, made, by="me", reason="worse")
    (store / "runs/x").mkdir()
    (store / "runs/x/report.html").write_text(
        "<p><!-- registered as -->In the registry: small-4<!-- that was it --></p>"
    )
    assert call(store, "models", "forget", "small-4").exit_code == 0
    assert (store / "runs/x/report.html").read_text() == "<p><!-- registered as --><!-- that was it --></p>"


def test_a_run_of_two_models_is_called_after_the_later_one_also_when_the_first_is_forgotten(store: Path) -> None:
    """It was tried again with other data after it had registered the first one."""
    with Ledger(store / LEDGER_FILE) as ledger:
        for digest in "ab":
            folder = f"runs/twice/checkpoint{digest}"
            model = register_model(
                ledger, "twice", checkpoint=folder, digest=digest, run_id="r", stages=[], data={}, by="me"
            )
            reject(ledger, model, by="me", reason="worse")
    report = store / "runs/twice/report.html"
    report.parent.mkdir()
    report.write_text("<p><!-- registered as --><!-- that was it --></p>")
    assert call(store, "models", "forget", "twice-1").exit_code == 0
    assert "In the registry: twice-2<" in report.read_text()


def test_the_run_that_made_the_same_model_again_shows_it_too(store: Path) -> None:
    with Ledger(store / LEDGER_FILE) as ledger:
        [first, _] = models(ledger)
        again = "runs/small-89abcdef/checkpoint"
        register_model(
            ledger,
            "small",
            checkpoint=again,
            digest=first.digest,
            run_id="89abcdef-0123",
            stages=[],
            data={},
            by="run small",
        )
    assert models_of_runs(store)["89abcdef"] == models_of_runs(store)["run-1"] == ["small-1 (production)"]


def test_the_folders_of_runs_are_listed_once_for_the_names_of_all_models(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of models in a store of thousands of runs are half a minute otherwise, at every promotion."""
    listed: list[Path] = []
    glob = Path.glob

    def noted(path: Path, pattern: str, **options: Any) -> Iterator[Path]:  # Any: Python 3.13 gives more of them
        listed.append(path)
        return glob(path, pattern, **options)

    monkeypatch.setattr(Path, "glob", noted)
    assert call(store, "models", "promote", "small-2").exit_code == 0
    assert listed.count(store / "runs") == 1
