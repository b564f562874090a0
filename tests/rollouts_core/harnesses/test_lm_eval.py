"""Pins how results of lm-evaluation-harness are read, from files that version 0.4.13 wrote about a tiny model.

Without it a group would be paired on other rows than it averages, or a perplexity get the interval of a mean.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rollouts_core.harnesses.lm_eval import LM_EVAL, explain, read
from rollouts_core.harnesses.spec import HarnessTask, MetricResult, ServedModel

RECORDED = Path(__file__).parents[1] / "recorded/lm_eval"
"""`rollouts evaluate small/other --lm-eval sums,sums_text --include-path tasks --limit 4`, with the tasks of
tests/flows/test_harness.py."""


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], MetricResult]:
    return {(each.task, each.metric): each for each in read(RECORDED)}


def test_every_metric_of_every_task_and_group_is_read(results: dict[tuple[str, str], MetricResult]) -> None:
    assert set(results) == {
        ("sums_choice", "acc"),
        ("sums_choice", "acc_norm"),
        ("sums_answer", "exact_match (strict)"),
        ("sums_answer", "exact_match (digits)"),
        ("sums_text", "word_perplexity"),
        ("sums_text", "byte_perplexity"),
        ("sums_text", "bits_per_byte"),
        ("sums", "acc"),
    }
    assert {each.num_rows for each in results.values()} == {4}


def test_the_mean_of_the_scores_is_the_value(results: dict[tuple[str, str], MetricResult]) -> None:
    for each in results.values():
        if each.scores:
            assert sum(each.scores) / 4 == pytest.approx(each.value)
    assert results["sums", "acc"].scores == results["sums_choice", "acc"].scores


def test_a_perplexity_has_no_scores_and_is_better_if_lower(results: dict[tuple[str, str], MetricResult]) -> None:
    perplexity = results["sums_text", "byte_perplexity"]
    assert (perplexity.scores, perplexity.stderr, perplexity.is_lower_better) == ((), None, True)
    assert not results["sums", "acc"].is_lower_better


def test_a_value_that_is_not_the_mean_of_its_rows_has_no_scores(tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path / "output")
    [path] = tmp_path.glob("output/*/results_*.json")
    found = json.loads(path.read_text())
    found["results"]["sums"]["acc,none"] += 0.01  # as a group whose tasks count alike whatever their size
    path.write_text(json.dumps(found))
    by_task = {each.task: each for each in read(tmp_path / "output") if each.metric == "acc"}
    assert by_task["sums"].scores == () and by_task["sums_choice"].scores


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected one results_"):
        read(tmp_path)


def test_the_users_mistakes_are_named() -> None:
    assert "does not know the task sums_choise:" in explain("Traceback\nValueError: Tasks not found: sums_choise\n")
    refused = '1/80 WARNING [api] API request failed! Status code: 400, Response text: {"error": "long"}. Retrying...'
    assert explain(f"{refused}\nERROR\n").endswith('refused a request of lm-eval: {"error": "long"}')
    assert explain("MemoryError") == ""


def test_only_the_options_that_the_user_gave_are_passed() -> None:
    served = ServedModel(url="http://here", name="model", folder=Path("/m"), max_length=511, max_requests=8)
    bare = LM_EVAL.render(HarnessTask(tasks="a,b"), served, Path("/out"))
    assert bare[bare.index("--tasks") + 1] == "a,b" and "--limit" not in bare and "--include_path" not in bare
    assert json.loads(bare[bare.index("--model_args") + 1])["base_url"] == "http://here/v1/completions"
    task = HarnessTask(tasks="a", limit=3, include_path="own", arguments=("--num_fewshot", "2"))
    assert LM_EVAL.render(task, served, Path("/out"))[-6:] == [
        *("--limit", "3", "--include_path", "own", "--num_fewshot", "2")
    ]
