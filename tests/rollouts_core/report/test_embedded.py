"""Pins which rollouts a report holds, in which form, and how large it gets.

Without it a report could pass its limit, drop the rare rewards when it drops samples, show the text of another token,
or need memory for all samples of a long run.
"""

import base64
import gzip
import itertools
import json
import random
import re
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.config import ReportConfig
from rollouts_core.report import ReportInput, render_report
from rollouts_core.report.curve_data import MAX_POINTS, describe_curves
from rollouts_core.report.embedded import embed_samples, spread_order
from rollouts_core.report.packed import pack_json
from rollouts_core.report.provenance import describe_provenance, describe_reused_time
from rollouts_core.report.rollout_codec import encode_group, join_columns, logprob_level, numbers_text
from rollouts_core.report.vocabulary import Vocabulary, join_bytes, load_vocabulary
from rollouts_core.run_directory import RunDirectory
from tests.rollouts_core.checks.test_resource_needs import config_of
from tests.rollouts_core.report.made_run import WORDS, rollout, write_rollouts, write_tokenizer
from tests.rollouts_core.report.test_report import full_report  # noqa: F401

FULL = ReportConfig()


def unpacked(packed: bytes) -> Any:  # Any: JSON
    return json.loads(gzip.decompress(packed))


def numbers_of(text: str) -> list[int]:
    """The inverse of `numbers_text`, written independently."""
    codes = [ord(each) - (0x800 if ord(each) >= 0xD800 else 0) for each in text]
    return [code - 35 - (code > ord("\\")) for code in codes]


def test_numbers_survive_as_characters_that_json_does_not_escape() -> None:
    numbers = [*range(300), 0xD800 - 40, 0xD800, 200_000]
    text = numbers_text(numbers)
    assert numbers_of(text) == numbers
    assert json.dumps(text, ensure_ascii=False) == f'"{text}"' and text.encode()


@pytest.mark.parametrize(("logprob", "level"), [(0, 0), (-0.004, 0), (-0.99, 99), (-1.04, 100), (-9.9, 189),
                                                (-12.4, 192), (None, 0), (float("-inf"), 0), (0.1, 0)])  # fmt: skip
def test_log_probs_keep_two_digits(logprob: float | None, level: int) -> None:
    assert logprob_level(logprob) == level


def test_a_group_has_its_prompt_once_and_no_text_that_its_tokens_say(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    vocabulary = load_vocabulary(tmp_path)
    records = [rollout(3, 7, i, prompt="one two").to_json() for i in range(4)]
    records[3]["response"] = "said otherwise"
    group = encode_group(records, [{"advantage": 0.5}] * 4, vocabulary)
    encoded = json.loads(group.text)
    assert numbers_of(encoded["prefix"]) == [0, 3, 4, 2, 1] and "turns" not in encoded
    assert ["text" in sample for sample in encoded["samples"]] == [False, False, False, True]
    assert [numbers_of(sample["t"]) for sample in encoded["samples"]] == [record["tokens"][5:] for record in records]
    assert [sample["v"] for sample in encoded["samples"]] == [2] * 4
    assert [row.reward for row in group.rows] == [1, 0, 1, 0] and group.rows[0].advantage == 0.5
    assert join_columns([encoded])["sizes"] == [4]


def test_a_vocabulary_has_the_text_of_each_token_also_of_parts_of_characters(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    vocabulary = load_vocabulary(tmp_path)
    assert [vocabulary.texts[i] for i in range(len(WORDS))] == list(WORDS)
    assert vocabulary.decode([0, 3, 4, len(WORDS), len(WORDS) + 1, 2]) == "one twoé"
    assert vocabulary.decode([len(WORDS), 3]) == "�one" and join_bytes("\udcc3\udca9") == "é"
    assert unpacked(pack_json(vocabulary.only([len(WORDS), 3])))["texts"] == {"3": "one", str(len(WORDS)): "\udcc3"}
    assert load_vocabulary(tmp_path / "none") == Vocabulary()
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": [["\\u2581a", 0], ["<0x0A>", 0]]}}')
    assert load_vocabulary(tmp_path).texts == {0: " a", 1: "\n"}


def write_many(report: ReportInput, *, num_steps: int, num_groups: int) -> ReportInput:
    """Steps whose groups have mean rewards from 0 to 1, with random tokens that do not compress."""
    draw = random.Random(0)
    run = RunDirectory(report.trainings[1].run_dir)
    for step in range(1, num_steps + 1):
        samples = [
            replace(
                rollout(step, step * num_groups + group, i, prompt=f"{group}"),
                tokens=[0, 1, *(draw.randrange(3, 30_000) for _ in range(200))],
                loss_mask=[0.0] * 2 + [1.0] * 200,
                rollout_log_probs=[0.0] * 2 + [-draw.random() for _ in range(200)],
                policy_versions=(),
                reward=float(i < group),
            )
            for group in range(num_groups)
            for i in range(4)
        ]
        run.write_samples(f"step_{step:06d}", samples, temperature=1.0)
    return report


def test_a_report_over_its_limit_holds_whole_groups_spread_over_steps_and_rewards(full_report: ReportInput) -> None:  # noqa: F811
    report = write_many(full_report, num_steps=40, num_groups=5)
    whole = embed_samples(report, room=10_000_000)
    assert sum(unpacked(whole.blocks["index"])["groups"]["size"]) == 800 + 120 and whole.notes == []
    room = 150_000
    held = embed_samples(report, room=room)
    assert sum(len(packed) * 4 / 3 for packed in held.blocks.values()) < room * 1.1
    index = unpacked(held.blocks["index"])
    steps = sorted(
        step for step, place in zip(index["groups"]["step"], index["groups"]["set"], strict=True) if place == 0
    )
    assert set(index["groups"]["size"]) <= {4, 1}, "groups are whole"
    assert steps[0] == 1 and steps[-1] == 40 and max(b - a for a, b in itertools.pairwise(steps)) <= 10
    counts = Counter(steps)
    assert min(counts.values()) >= 2, "a step has its worst and its best group"
    assert re.fullmatch(r"RL training: \d+ of 800 samples, from \d+ of 40 steps\. .*", held.notes[-1])
    best = {max(index["reward"][4 * i : 4 * i + 4]) for i in range(len(steps))}
    assert best == {0, 1}, "groups without any reward are there, and groups with some"


def test_held_out_prompts_are_the_same_for_all_models(full_report: ReportInput) -> None:  # noqa: F811
    report = write_rollouts(full_report)
    held = embed_samples(replace(report, contents=ReportConfig(samples="held-out")), room=1_200)
    groups = unpacked(held.blocks["index"])["groups"]
    of_model = [[g for g, place in zip(groups["group"], groups["set"], strict=True) if place == i] for i in range(3)]
    assert of_model[0] == of_model[1] == of_model[2] and 1 <= len(of_model[0]) < 40
    assert "of 40 prompts" in held.notes[0]


def test_a_page_is_at_most_as_large_as_the_settings_say(full_report: ReportInput) -> None:  # noqa: F811
    report = write_many(full_report, num_steps=30, num_groups=5)
    page = render_report(replace(report, contents=ReportConfig(max_mb=0.3)))
    assert 200_000 < len(page.encode()) < 300_000
    assert render_report(replace(report, contents=ReportConfig(max_mb=0.1))), "smaller than the page without samples"


def test_memory_is_bounded_by_a_step_and_the_room(full_report: ReportInput) -> None:  # noqa: F811
    few, many = 8, 64
    peaks = []
    for num_steps in (few, many):
        report = write_many(full_report, num_steps=num_steps, num_groups=5)
        tracemalloc.start()
        embed_samples(report, room=60_000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0], peaks


@pytest.mark.parametrize("count", [1, 2, 3, 10, 97])
def test_every_start_of_the_order_of_steps_is_spread(count: int) -> None:
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    for taken in (5, 9, 17):
        places = sorted(order[:taken])
        if count > 2 * taken:
            assert max(b - a for a, b in itertools.pairwise(places)) <= 2.1 * count / (taken - 1)


def test_damaged_samples_and_credit_are_passed_over(full_report: ReportInput) -> None:  # noqa: F811
    report = write_rollouts(full_report)
    run = RunDirectory(report.trainings[1].run_dir)
    path = run.samples / "step_000002.jsonl"
    path.write_text("{broken\n" + '{"group_index": 1}\n' + path.read_text())
    (run.credit / "step_000003.jsonl").write_text("no json\n")
    RunDirectory(report.trainings[0].run_dir).rows.write_text("[]")
    held = embed_samples(report, room=10_000_000)
    assert sum(unpacked(held.blocks["index"])["groups"]["size"]) == 128 + 120 and "rows" not in held.blocks


def test_long_curves_are_thinned_and_a_step_without_a_number_is_a_gap(full_report: ReportInput) -> None:  # noqa: F811
    [sft, rl] = describe_curves(full_report)
    loss = next(metric for metric in rl["metrics"] if metric["name"] == "loss")
    assert rl["steps"][6] == 7 and loss["values"][6] is None and loss["values"][5] == -0.1
    assert sft["constant"] == {"grad_norm": 1} and sft["mark"] == 400
    metrics = RunDirectory(full_report.trainings[0].run_dir).metrics
    metrics.write_text("".join(json.dumps({"step": i, "loss": float(i % 2)}) + "\n" for i in range(1, 5_001)))
    [sft, _] = describe_curves(full_report)
    assert len(sft["steps"]) <= MAX_POINTS and set(sft["metrics"][0]["values"]) <= {0.4, 0.6, 0.5}


def test_provenance_says_what_was_recorded_and_leaves_out_the_rest(full_report: ReportInput) -> None:  # noqa: F811
    assert describe_provenance(full_report) == [("Tokens of RL", "30 sampled per completion, 30 steps")]
    started = {
        "event": "started",
        "host": "node-7",
        "gpus": ["H200", "H200"],
        "versions": {"torch": "2.13"},
        "time": 1.0,
    }
    for training in full_report.trainings:
        RunDirectory(training.run_dir).events.write_text(json.dumps(started) + "\n")
    facts = dict(describe_provenance(replace(full_report, run_id="r1", began_at=100.0, written_at=190.0)))
    assert facts["Host"] == "node-7" and facts["GPUs"] == "2 × H200" and facts["Versions"] == "torch 2.13"
    assert facts["Whole wall time"] == "1 min 30 s" and "Host of RL" not in facts, "the same machine is said once"


def test_the_placement_of_a_training_on_gpus_is_that_of_its_job(full_report: ReportInput) -> None:  # noqa: F811
    config = config_of("sft+rl", rollout={"engine": {"kind": "sglang"}})
    report, rl = replace(full_report, config=config), RunDirectory(full_report.trainings[1].run_dir)
    deployment = {"trainer_gpu_ranks": [0], "engine_gpu_ranks": [1, 2], "num_engines": 2}
    rl.job.write_text(json.dumps({"deployment": deployment}))
    assert "Placement" not in dict(describe_provenance(report)), "no GPU was recorded"
    rl.events.write_text(json.dumps({"event": "started", "gpus": ["H200"] * 3, "time": 1.0}) + "\n")
    placement = dict(describe_provenance(report))["Placement"]
    assert placement == "GPU 0: trainer; GPU 1 to 2: 2 engines", "the sizes are unknown without the checkpoint"
    rl.job.write_text('{"deployment": {"trainer_gpu_ranks": "all"}}')
    assert "Placement" not in dict(describe_provenance(report))


def test_the_time_of_a_reused_stage_is_that_of_its_attempts(full_report: ReportInput, tmp_path: Path) -> None:  # noqa: F811
    for attempt, seconds in ((1, 50.0), (2, 40.0)):
        (tmp_path / f"exit-{attempt}.json").write_text(json.dumps({"seconds": seconds}))
    reused = replace(full_report.stages[0], run_dir=str(tmp_path))
    assert describe_reused_time(reused) == "ran 1 min 30 s"
    assert describe_reused_time(replace(reused, how="ran")) == ""


def test_an_index_is_small(full_report: ReportInput) -> None:  # noqa: F811
    page = render_report(write_rollouts(full_report))
    [packed] = re.findall(r'id="data-index">([^<]*)', page)
    assert len(base64.b64decode(packed)) < 12 * 248
