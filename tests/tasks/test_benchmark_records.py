"""Pins where the results of benchmarks are kept: once per model and settings, in the run's report, in the registry.

Without it a changed task would show old results, or a comparison at a retraining delete the results of benchmarks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.registry import find_model, models, note_evaluation
from rollouts.tasks.benchmark_records import (
    describe_comparison,
    load_comparisons,
    load_result,
    note_in_registry,
    note_in_run,
    place_of_result,
    save_result,
)
from rollouts.tasks.earlier_report import render_again
from rollouts_core.benchmarks import compare_benchmarks
from rollouts_core.harnesses import LM_EVAL
from rollouts_core.harnesses.spec import HarnessTask
from tests.flows.test_models_cli import register
from tests.rollouts_core.test_benchmarks import BAD, GOOD, result_of
from tests.tasks.stored_run import write_stored_run

RUN = "small-11111111"
TASK = HarnessTask(tasks="sums", limit=20, arguments=("--num_fewshot", "2"))


def entry_of(task: HarnessTask = TASK, version: str = "0.4.13") -> dict[str, Any]:  # Any: JSON
    found = compare_benchmarks([result_of(GOOD)], [result_of(BAD)])
    return describe_comparison(LM_EVAL, task, found, version=version, engine="embedded", against="base")


def test_results_are_found_again(tmp_path: Path) -> None:
    assert load_result(tmp_path) is None
    save_result(tmp_path, [result_of(GOOD), result_of((), stderr=1.0)])
    assert load_result(tmp_path) == [result_of(GOOD), result_of((), stderr=1.0)]
    (tmp_path / "result.json").write_text('{"metrics": [{"task": "sums"}]}')
    assert load_result(tmp_path) is None


def test_a_change_of_what_can_change_results_has_a_folder_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sums.yaml").write_text("task: sums")
    task = replace(TASK, include_path=str(own))
    given: dict[str, Any] = {"version": "1", "engine": ["embedded"], "model_digest": "a"}  # Any: of each argument

    def place(task: HarnessTask = task, **changed: object) -> Path:
        return place_of_result(tmp_path, LM_EVAL, task, **(given | changed))

    places = [place(), place(version="2"), place(engine=["vllm"]), place(model_digest="b")]
    places += [place(replace(task, tasks="a")), place(replace(task, limit=3)), place(replace(task, arguments=()))]
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/sums.yaml").write_text("task: sums")
    assert place(replace(task, include_path=str(tmp_path / "moved"))) == places[0]
    (own / "sums.yaml").write_text("task: other")
    assert len({*places, place()}) == len(places) + 1


def test_the_report_shows_the_last_results_of_each_setting(tmp_path: Path) -> None:
    folder = write_stored_run(tmp_path, RUN)
    assert "Benchmarks" not in render_again(tmp_path, RUN).read_text()
    for entry in (entry_of(version="0.4.12"), entry_of(replace(TASK, limit=0)), entry_of()):
        note_in_run(tmp_path, RUN, entry)
    assert [each["limit"] for each in load_comparisons(folder)] == [0, 20]
    page = render_again(tmp_path, RUN).read_text()
    assert "<h3>lm-eval 0.4.13: sums, first 20 rows, --num_fewshot 2</h3>" in page
    assert "0.4.12" not in page and "75.0 % (" in page and "+50.0 points (" in page


@pytest.mark.parametrize("is_compared_later", [True, False])
def test_the_registry_keeps_benchmarks_and_comparison(tmp_path: Path, is_compared_later: bool) -> None:
    compared = {"mean": 0.5, "against": "start"}
    model = register(tmp_path, 1)
    entry = json.loads(json.dumps(entry_of()))
    with Ledger(tmp_path / LEDGER_FILE) as ledger:
        if not is_compared_later:
            note_evaluation(ledger, model, compared)
        assert note_in_registry(tmp_path, "unknown", entry) == []
        assert note_in_registry(tmp_path, model.digest, entry) == [model.name]
        if is_compared_later:
            note_evaluation(ledger, find_model(ledger, model.name), compared)
        assert models(ledger)[0].evaluation == {**compared, "benchmarks": [entry]}
