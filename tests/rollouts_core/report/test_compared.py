"""Pins what a comparison of runs says: only what differs, tests on shared prompts alone, and what a test cannot say.

Without it runs could be tested on prompts that only one of them had, and a lucky seed could pass for a better recipe.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.flows.commands.compare import load_compared
from rollouts_core.config import ReportConfig
from rollouts_core.errors import InputError
from rollouts_core.report.compared import RunComparison, compare_both_ways, compare_runs, prompt_keys
from rollouts_core.report.compared_answers import embed_answers, find_answers
from rollouts_core.report.compared_curves import describe_same_stages, overlay_curves
from rollouts_core.report.compared_page import comparison_records, render_comparison_page
from rollouts_core.run_directory import RunDirectory
from tests.rollouts_core.report.made_run import ATTACK
from tests.rollouts_core.report.test_report import TagCollector, unpack, with_counts, with_losses, without_data
from tests.tasks.stored_run import PROMPTS, SCORES, write_stored_run

FIRST, SECOND = "small-11111111", "small-22222222"
BETTER = {**SCORES, "rl": [1.0] * 40}


def compared(store: Path, *names: str) -> RunComparison:
    return compare_runs(load_compared(store, names or (FIRST, SECOND)))


def stored(store: Path, **second: Any) -> RunComparison:  # Any: arguments of write_stored_run
    """The comparison of a run and a second one, which is as described."""
    write_stored_run(store, FIRST)
    write_stored_run(store, SECOND, **second)
    return compared(store)


def test_only_settings_that_differ_are_shown(tmp_path: Path) -> None:
    found = stored(tmp_path, training__rl__optim__lr=1e-3, evaluation__temperature=0.5)
    assert [(each.name, each.values) for each in found.settings] == [
        ("training.rl.optim.lr", ("0.0003", "0.001")),
        ("evaluation.temperature", ("0.0", "0.5")),
    ]
    assert found.inputs == ()
    assert any("evaluation.temperature" in note and "may mean different things" in note for note in found.notes)


def test_pass_at_k_of_the_final_models_is_shown_and_tested(tmp_path: Path) -> None:
    found = stored(tmp_path, scores=BETTER)
    assert found.measures == ()
    runs = [replace(run, report=with_counts(run.report)) for run in found.runs]
    counted = compare_runs(runs)
    assert [measure.title for measure in counted.measures] == ["pass@1", "pass@2", "pass@4", "majority@4"]
    [test] = counted.measures[-1].tests
    assert (test.measure, test.num_shared) == ("majority@4", 40) and test.comparison.difference == pytest.approx(0.05)
    assert "Several completions per prompt" in render_comparison_page(counted)
    records = list(comparison_records(counted))
    assert [each["measure"] for each in records if each["kind"] == "paired_test"][-1] == "majority@4"
    assert [each["name"] for each in records if each["kind"] == "measure"] == [
        "pass@1",
        "pass@2",
        "pass@4",
        "majority@4",
    ]


def test_data_differ_by_their_content_and_not_by_their_path(tmp_path: Path) -> None:
    found = stored(tmp_path, digest="ef" * 32, data__heldout="other.jsonl")
    assert [each.name for each in found.inputs] == ["held-out rows"]
    assert found.inputs[0].values == ("data/rows.jsonl (cdcdcdcdcd…)", "data/rows.jsonl (efefefefef…)")


def test_another_share_of_the_same_data_is_a_difference(tmp_path: Path) -> None:
    write_stored_run(tmp_path, FIRST)
    write_stored_run(tmp_path, SECOND)
    path = tmp_path / "stages" / "sft-2222222222222222" / "job.json"
    job = json.loads(path.read_text())
    job["data"][0] |= {"max_samples": 100, "repeat": 2}
    path.write_text(json.dumps(job))
    [data] = compared(tmp_path).inputs
    assert (data.name, data.values[1]) == ("SFT data", "data/rows.jsonl (cdcdcdcdcd…, first 100 rows, × 2)")


def test_equal_runs_have_no_difference_and_no_scores_to_test(tmp_path: Path) -> None:
    found = stored(tmp_path)
    assert found.settings == () and found.inputs == ()
    assert [test.outcome for test in found.tests] == ["equal"] * 3
    assert "both have the same score on every row" in found.tests[0].sentence


def test_the_p_value_is_that_of_a_sign_test_in_both_directions() -> None:
    """8 of 40 rows differ, 7 of them for the candidate: 2 * P(at least 7 of 8 heads) = 2 * 9/256."""
    baseline, candidate = [0.0] * 40, [1.0] * 7 + [0.0] * 33
    baseline[7] = 1.0
    for pair in ((baseline, candidate), (candidate, baseline)):
        assert compare_both_ways(*pair).p_value == pytest.approx(18 / 256, abs=0.01)
    assert compare_both_ways(baseline, baseline).p_value == 1.0


def test_final_models_are_tested_first_and_the_sentence_names_both(tmp_path: Path) -> None:
    found = stored(tmp_path, scores={**SCORES, "rl": [0.0] * 20 + [1.0] * 20})
    first = found.tests[0]
    assert (first.models, first.num_shared, first.outcome) == (("rl", "rl"), 40, "worse")
    assert first.sentence.startswith(
        "On 40 shared prompts, the accuracy of B (RL) is 45.0 points lower than that of A (RL): worse, with"
    )
    assert first.comparison.difference == pytest.approx(-0.45)
    assert "one training with one seed" in found.notes[-1]


def test_runs_of_other_rows_are_tested_on_shared_prompts_whatever_their_order(tmp_path: Path) -> None:
    """20 prompts are shared, in reverse; the second run is right on all of these and wrong on all others."""
    prompts = [*reversed(PROMPTS[:20]), *(f"new {i}" for i in range(10))]
    scores = {"base": [0.0] * 30, "sft": [0.0] * 30, "rl": [1.0] * 20 + [0.0] * 10}
    write_stored_run(tmp_path, FIRST, scores={**SCORES, "rl": [1.0] * 15 + [0.0] * 25})
    write_stored_run(tmp_path, SECOND, scores=scores, prompts=prompts, digest="ef" * 32)
    found = compared(tmp_path)
    assert found.tests[0].num_shared == 20 and found.tests[0].comparison.difference == pytest.approx(5 / 20)
    assert "different held-out rows, 40 and 30. They are tested on the 20 rows that both have" in found.notes[0]


def test_a_prompt_that_stands_twice_is_matched_twice(tmp_path: Path) -> None:
    twice = {name: scores[:3] for name, scores in SCORES.items()}
    folder = write_stored_run(tmp_path, FIRST, scores=twice, prompts=["a", "b", "a"])
    assert len(set(prompt_keys(folder.parents[1] / "stages" / "evaluate-1111111111111111", 3))) == 3
    write_stored_run(tmp_path, SECOND, scores=twice, prompts=["a", "a", "a"], digest="ef" * 32)
    assert compared(tmp_path).tests[0].num_shared == 2


@pytest.mark.parametrize("with_samples", [True, False])
def test_without_shared_prompts_no_test_is_made(tmp_path: Path, with_samples: bool) -> None:
    write_stored_run(tmp_path, FIRST)
    write_stored_run(tmp_path, SECOND, prompts=[f"other {i}" for i in range(40)], digest="ef" * 32)
    if not with_samples:
        for path in tmp_path.glob("stages/evaluate-2*/samples/*"):
            path.unlink()
    found = compared(tmp_path)
    assert found.tests == ()
    assert found.notes == (
        "A and B are not tested: their held-out rows have no prompt in common that the samples show.",
    )
    assert find_answers(found) == [] and 'id="view-held-out"' not in render_comparison_page(found)


def test_runs_of_other_metrics_are_shown_side_by_side_without_a_test(tmp_path: Path) -> None:
    first, second = (load_compared_of(tmp_path, name) for name in (FIRST, SECOND))
    found = compare_runs([first, replace(second, report=with_losses(second.report))])
    assert found.tests == () and found.ticks == ()
    assert "one has the metric accuracy, and the other loss" in found.notes[0]
    assert "1.195" in render_comparison_page(found)


def load_compared_of(store: Path, name: str) -> Any:  # Any: ComparedRun
    write_stored_run(store, name)
    return load_compared(store, [name])[0]


def test_a_run_without_scores_is_a_sentence(tmp_path: Path) -> None:
    write_stored_run(tmp_path, FIRST)
    write_stored_run(tmp_path, SECOND)
    (tmp_path / "stages" / "evaluate-2222222222222222" / "result.json").unlink()
    with pytest.raises(InputError, match=f"{SECOND} has no held-out scores"):
        compared(tmp_path)


def test_three_runs_are_tested_against_the_first_and_the_number_of_tests_is_said(tmp_path: Path) -> None:
    write_stored_run(tmp_path, FIRST)
    write_stored_run(tmp_path, SECOND, scores=BETTER)
    write_stored_run(tmp_path, "small-33333333", scores={**SCORES, "rl": [0.0] * 40}, host="node-3")
    found = compared(tmp_path, FIRST, SECOND, "small-33333333")
    assert {test.runs for test in found.tests} == {(0, 1), (0, 2)}
    assert any(note.startswith("The page has 2 tests.") for note in found.notes)
    facts = {fact.name: fact.values for fact in found.facts}
    assert facts["Host"] == ("node-1", "node-1", "node-3") and facts["Cost"] == ("3.00 USD",) * 3


def test_settings_of_another_version_are_compared_as_far_as_the_files_have_them(tmp_path: Path) -> None:
    write_stored_run(tmp_path, FIRST, training__rl__optim__lr=1e-3)
    folder = write_stored_run(tmp_path, SECOND)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("[rollout]", "[rollout]\na_former_setting = 3"))
    found = {each.name: each.values for each in compared(tmp_path).settings}
    assert found == {"training.rl.optim.lr": ("0.001", "0.0003"), "rollout.a_former_setting": ("default", "3")}


def test_curves_of_all_runs_have_their_own_steps(tmp_path: Path) -> None:
    found = stored(tmp_path)
    rl = RunDirectory(tmp_path / "stages" / "rl-2222222222222222")
    rl.metrics.write_text("".join(json.dumps({"step": step, "reward": 0.5, "own": step}) + "\n" for step in (1, 5)))
    stage = next(each for each in overlay_curves(found.runs) if each["label"] == "RL")
    assert [len(run["steps"]) for run in stage["runs"]] == [30, 2]
    metrics = {metric["name"]: metric["values"] for metric in stage["metrics"]}
    assert metrics["reward"][1] == [0.5, 0.5] and metrics["own"] == [None, [1, 5]]
    assert describe_same_stages(found.runs) == {}
    assert describe_same_stages([found.runs[0], found.runs[0]])["RL"].startswith("A and B share one training")


def test_tokens_are_left_out_where_tokenizers_differ(tmp_path: Path) -> None:
    found = stored(tmp_path, scores=BETTER)
    texts = [each["rest"] for each in (chunk_of(found),)]
    assert all("text" not in (rest or {}) for rest in texts[0]), "one vocabulary tells every text"
    tokenizer = tmp_path / "runs" / SECOND / "checkpoint" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("three", "four"))
    chunk = chunk_of(compared(tmp_path))
    assert set(chunk["t"]) == {""} and all(rest["text"] for rest in chunk["rest"])


def chunk_of(found: RunComparison) -> dict[str, Any]:  # Any: JSON
    page = render_comparison_page(found)
    chunk: dict[str, Any] = json.loads(unpack(page, "chunk-0"))
    return chunk


def test_a_small_room_keeps_the_same_prompts_of_every_run(tmp_path: Path) -> None:
    found = stored(tmp_path, scores=BETTER)
    embedded = embed_answers(found, room=600)
    assert "Held-out answers: " in embedded.notes[0] and "of 40 shared prompts" in embedded.notes[0]


def test_a_run_that_keeps_samples_out_of_its_report_keeps_them_out_of_the_comparison(tmp_path: Path) -> None:
    found = stored(tmp_path, report={"samples": "none"})
    assert found.runs[1].report.contents == ReportConfig(samples="none")
    page = render_comparison_page(found)
    assert (
        find_answers(found) == []
        and "The page has no answers of B: report.samples" in page
        and 'id="data-chunk-0"' not in page
    )
    assert not any(record["kind"] == "answers" for record in comparison_records(found))


def test_the_page_loads_nothing_and_escapes_what_users_and_models_wrote(tmp_path: Path) -> None:
    write_stored_run(tmp_path, FIRST, prompts=[ATTACK, *PROMPTS[1:]], host=ATTACK)
    write_stored_run(tmp_path, SECOND, prompts=[ATTACK, *PROMPTS[1:]], rollout__seed=7)
    page = render_comparison_page(compared(tmp_path))
    tags = TagCollector(without_data(page))
    assert tags.loaded == [] and tags.tags.count("script") == 1 and "img" not in tags.tags


def test_records_have_the_facts_of_the_page(tmp_path: Path) -> None:
    records = list(comparison_records(stored(tmp_path, scores=BETTER, rollout__seed=7, digest="ef" * 32)))
    kinds: Sequence[str] = list(dict.fromkeys(record["kind"] for record in records))
    assert kinds == ["compared_run", "setting_difference", "data_difference", "paired_test", "note", "curve", "answers"]
    by_kind = {kind: [record for record in records if record["kind"] == kind] for kind in kinds}
    assert by_kind["setting_difference"] == [
        {"kind": "setting_difference", "name": "rollout.seed", "values": {FIRST: "0", SECOND: "7"}}
    ]
    test = by_kind["paired_test"][0]
    assert (test["baseline"], test["candidate"]) == ({"run": FIRST, "model": "rl"}, {"run": SECOND, "model": "rl"})
    assert test["difference"] == pytest.approx(0.05) and {"low", "high", "p_value", "num_shared"} <= test.keys()
    assert len(by_kind["answers"]) == 40
    assert [each["model"] for each in by_kind["answers"][0]["answers"]] == ["base", "rl", "rl"]
