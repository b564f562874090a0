"""Pins the report: what it says in every mode, that it escapes what models wrote, and that it is the same every time.

Without it a model's `<script>` could run in a reader's browser, a lower loss could be shown as a setback, and a report
that fails on a missing file would fail a pipeline after all its training is done.
"""

import base64
import gzip
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rollouts_core.comparison import estimate_mean
from rollouts_core.config import (
    EvaluationConfig,
    ModelConfig,
    Record,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
    SFTTrainingConfig,
)
from rollouts_core.errors import DataError
from rollouts_core.job import EvalJob, InputDataset, InputFile, InputModel, RLJob, SFTJob
from rollouts_core.metrics import JSONLLogger
from rollouts_core.report import (
    ReportInput,
    StageSummary,
    TrainedStage,
    render_report,
    render_summary_markdown,
    with_registered_name,
)
from rollouts_core.report.assets import find_policy, hash_source
from rollouts_core.report.charts import Axis, axis_place, axis_ticks, format_number, format_seconds
from rollouts_core.report.curves import draw_gpu_use, load_curves, metric_points, thin_points
from rollouts_core.report.page import usage_code
from rollouts_core.report.results import (
    ShownDifference,
    choose_display,
    describe_difference,
    load_evaluation,
    load_results,
)
from rollouts_core.report.transcripts import completion_text, load_transcripts, pick_different, shorten_text
from rollouts_core.run_directory import RunDirectory
from rollouts_core.types import Message, Sample, Status

REPOSITORY = Path(__file__).parents[3]
MODEL = InputModel(name="base", model=ModelConfig(path="models/tiny"), digest="ab" * 32)
DATASET = InputDataset(path="data/rows.jsonl", digest="cd" * 32)
DATA = InputFile(path="data/rows.jsonl", digest="cd" * 32)
BASE_SCORES = [0.0] * 36 + [1.0] * 4
SFT_SCORES = [0.0] * 20 + [1.0] * 20
RL_SCORES = [0.0] * 2 + [1.0] * 38
ALL_SCORES = {"base": BASE_SCORES, "sft": SFT_SCORES, "rl": RL_SCORES}


class TagCollector(HTMLParser):
    """Counts the tags of a page and keeps the attributes that could load something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "data", "srcset")]


def without_data(page: str) -> str:
    """The page without its compressed blocks."""
    return re.sub(r'<script type="text/plain".*?</script>', "", page)


def unpack(page: str, name: str) -> str:
    """The content of a compressed block."""
    [block] = re.findall(rf'<script type="text/plain" id="data-{name}">([^<]*)</script>', page)
    return gzip.decompress(base64.b64decode(block)).decode()


def write_job(directory: Path, job: Record) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    RunDirectory(directory).job.write_text(job.model_dump_json())


def write_evaluation(directory: Path, scores: Mapping[str, Sequence[float]], *, metric: str = "accuracy") -> Path:
    """A finished evaluation; the step of a checkpoint is the number in its name."""
    checkpoints = tuple(MODEL.model_copy(update={"name": name}) for name in scores)
    evaluation = EvaluationConfig.model_validate({"metric": metric})
    write_job(directory, EvalJob(checkpoints=checkpoints, data=DATA, evaluation=evaluation))
    scored = [
        {"name": name, "step": int(name[-6:]) if "_" in name else 0, "scores": values, **asdict(estimate_mean(values))}
        for name, values in scores.items()
    ]
    best = max(scores, key=lambda name: sum(scores[name]))
    RunDirectory(directory).write_result({"metric": metric, "checkpoints": scored, "best": best})
    return directory


def write_completions(directory: Path, name: str, completions: Sequence[str], rewards: Sequence[float]) -> None:
    samples = RunDirectory(directory).samples
    samples.mkdir(exist_ok=True)
    graded = [
        Sample(
            prompt=(Message(role="user", content=f"{i}+{i}=?"),),
            response=text,
            reward=reward,
            group_index=i,
            status=Status.COMPLETED,
            metadata={"answer": str(2 * i)},
        )
        for i, (text, reward) in enumerate(zip(completions, rewards, strict=True))
    ]
    (samples / f"{name}.jsonl").write_text("".join(json.dumps(sample.to_json()) + "\n" for sample in graded))


def write_sft(directory: Path) -> Path:
    write_job(directory, SFTJob(model=MODEL, data=(DATASET,), training=SFTTrainingConfig(num_steps=400)))
    with JSONLLogger(RunDirectory(directory).metrics) as logger:
        for step in range(1, 401):
            logger.log({"loss": 4.0 / step, "lr": 1e-5, "grad_norm": 1.0}, step)
    RunDirectory(directory).write_result({"checkpoints": [], "num_samples": 12_000})
    return directory


def write_rl(directory: Path) -> Path:
    sampling = SamplingConfig(max_new_tokens=40)
    write_job(
        directory,
        RLJob(model=MODEL, prompts=DATA, training=RLTrainingConfig(), rollout=RolloutConfig(sampling=sampling)),
    )
    with JSONLLogger(RunDirectory(directory).metrics) as logger:
        for step in range(1, 31):
            losses = {"loss": -0.1, "clip_share": 0.01, "kl_rollout_policy": 1e-9} if step != 7 else {}
            rollouts = {"reward": step / 40, "response_tokens": 30.0, "signal_share": 0.5}
            seconds = {"generate_s": 0.5, "train_s": 0.3, "publish_s": 0.2}
            logger.log({"skipped": float(step == 7), **losses, **rollouts, **seconds}, step)
    RunDirectory(directory).write_result({"checkpoints": [], "num_prompts": 2_000, "num_drawn": 3_000})
    return directory


@pytest.fixture
def full_report(tmp_path: Path) -> ReportInput:
    """A finished run of SFT and RL with transcripts."""
    evaluation_dir = write_evaluation(tmp_path / "evaluate", ALL_SCORES)
    for name, scores in ALL_SCORES.items():
        write_completions(evaluation_dir, name, [f"{name} says {i}" for i in range(40)], scores)
    steps = {f"step_{step:06d}": [float(i < step // 20) for i in range(40)] for step in range(100, 500, 100)}
    rl_steps = {f"step_{step:06d}": [float(i < step) for i in range(40)] for step in (10, 20, 30)}
    return ReportInput(
        run_name="tiny run",
        mode="sft+rl",
        stages=(
            StageSummary(name="sft", how="reused", why="run <b> finished | it", seconds=0.25, run_dir="stages/sft-1"),
            StageSummary(name="rl", how="ran", why="", seconds=75, run_dir="stages/rl-1"),
        ),
        evaluation_dir=evaluation_dir,
        trainings=(
            TrainedStage(
                name="sft",
                run_dir=write_sft(tmp_path / "sft"),
                selection_dir=write_evaluation(tmp_path / "select-sft", steps),
                selected="step_000400",
            ),
            TrainedStage(
                name="rl",
                run_dir=write_rl(tmp_path / "rl"),
                selection_dir=write_evaluation(tmp_path / "select-rl", rl_steps),
                selected="step_000030",
            ),
        ),
        checkpoint_path="stages/rl-1/checkpoints/step_000030",
        settings_toml='mode = "sft+rl"\n',
        reproduce_command="rollouts run tiny.toml",
        use_command="rollouts serve stages/rl-1/checkpoints/step_000030",
        verdict="RL beats the selected SFT checkpoint.",
        is_improvement=True,
    )


def only_sft(report: ReportInput) -> ReportInput:
    return replace(
        report, mode="sft", trainings=report.trainings[:1], verdict="", is_improvement=None,
        evaluation_dir=write_evaluation(
            report.evaluation_dir.with_name("evaluate-sft"), {"base": BASE_SCORES, "sft": SFT_SCORES}
        ),
    )  # fmt: skip


def only_rl(report: ReportInput) -> ReportInput:
    return replace(
        report, mode="rl", trainings=report.trainings[1:],
        evaluation_dir=write_evaluation(
            report.evaluation_dir.with_name("evaluate-rl"), {"base": BASE_SCORES, "rl": RL_SCORES}
        ),
    )  # fmt: skip


def with_losses(report: ReportInput) -> ReportInput:
    scores = {"base": [-3.0 - i / 100 for i in range(40)], "sft": [-1.0 - i / 100 for i in range(40)]}
    directory = write_evaluation(report.evaluation_dir.with_name("evaluate-loss"), scores, metric="loss")
    return replace(only_sft(report), evaluation_dir=directory)


def test_the_page_says_what_the_run_found(full_report: ReportInput) -> None:
    page = render_report(full_report)
    for text in ("tiny run", "Improvement", "RL beats the selected SFT checkpoint.", "10.0 %", "50.0 %", "95.0 %"):
        assert text in page
    assert "the accuracy of RL is 45.0 points higher than that of SFT: better" in page


def with_counts(report: ReportInput, *, names: Sequence[str] = ("base", "sft", "rl")) -> ReportInput:
    """The report of an evaluation with 4 completions per prompt: right ones per prompt, and a vote."""
    directory = RunDirectory(report.evaluation_dir)
    result = directory.read_result()
    assert result is not None
    for entry in result["checkpoints"]:
        if entry["name"] in names:
            counts = [4 if score else i % 2 for i, score in enumerate(entry["scores"])]
            entry |= {"samples_per_prompt": 4, "num_right": counts, "majority": entry["scores"]}
    directory.write_result(result)
    return report


def test_pass_at_k_is_shown_with_intervals_over_prompts_and_a_paired_test(full_report: ReportInput) -> None:
    """RL: 38 prompts with 4 of 4 right, 1 with 1 of 4, 1 with none: pass@1 = 38.25/40, pass@2 = 38.5/40."""
    results = load_results(with_counts(full_report))
    assert [measure.title for measure in results.measures] == ["pass@1", "pass@2", "pass@4", "majority@4"]
    assert [measure.values[-1][0] for measure in results.measures] == ["95.6 %", "96.2 %", "97.5 %", "95.0 %"]
    difference = results.measures[-1].difference
    assert difference is not None and difference.title == "SFT → RL" and difference.difference == "+45.0 points"
    assert "the majority@4 of RL is 45.0 points higher than that of SFT" in difference.sentence
    page, summary = render_report(full_report), render_summary_markdown(full_report)
    assert "Several completions per prompt" in page and "97.5 %" in page
    assert "| pass@4 | 55.0 % (" in summary and "the pass@2 of RL is" in summary
    assert "the majority@4 of RL is" not in summary, "as often right as the first completion, so the score says it"


def test_without_counts_of_every_model_no_measure_is_shown(full_report: ReportInput) -> None:
    """One model may have been scored by an older version, whose scores are reused."""
    assert "Several completions" not in render_report(full_report)
    assert load_results(with_counts(full_report, names=("sft", "rl"))).measures == ()


def test_where_machines_were_rented_the_page_and_the_summary_say_what_each_stage_cost(full_report: ReportInput) -> None:
    assert "USD" not in without_data(render_report(full_report)) and "USD" not in render_summary_markdown(full_report)
    stages = tuple(replace(stage, usd=usd) for stage, usd in zip(full_report.stages, (0.0, 1.25), strict=True))
    report = replace(full_report, stages=stages, usd_outside_stages=0.5)
    page = render_report(report)
    assert all(f">{usd} USD<" in page for usd in ("0.00", "1.25", "0.50", "1.75"))
    lines = render_summary_markdown(report).splitlines()
    assert "| rl | ran |  | 1 min 15 s | 1.25 USD | `stages/rl-1` |" in lines
    assert "| All, until this report | | | | 1.75 USD | |" in lines
    table = [
        line for line in lines if line.startswith("|") and ("stages/" in line or "Stage" in line or "All," in line)
    ]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1 and len(table) == 4


def test_the_page_lists_what_a_training_warned_of(full_report: ReportInput) -> None:
    assert "<h2>Warnings</h2>" not in render_report(full_report)
    warnings = [
        {"event": "warning", "attempt": attempt, "time": 1.0, "rule": "staleness", "message": f"<b> of {attempt}"}
        for attempt in (1, 2)
    ]
    events = full_report.trainings[1].run_dir / "events.jsonl"
    events.write_text("".join(json.dumps(line) + "\n" for line in warnings))
    page = render_report(full_report)
    assert '<p class="warning"><b>RL</b> &lt;b&gt; of 2</p>' in page and "of 1</p>" not in page


def test_the_page_shows_every_part(full_report: ReportInput) -> None:
    page = render_report(full_report)
    parts = ("12,000 demonstrations", "2,000 prompts", "Learning rate", "Reward", "Completion length", "Clip share",
             "KL(rollout ‖ policy)", "Signal share", "Seconds per step", "step_000400 ✓", "step_000030 ✓",
             "rl says 5", "reused", "run &lt;b&gt; finished", "1 min 15 s",
             "rollouts run tiny.toml", "rollouts serve")  # fmt: skip
    assert [part for part in parts if part not in page] == []


def test_the_page_says_how_much_was_trained_and_not_what_was_planned(full_report: ReportInput) -> None:
    """A filter has more prompts asked than are trained on, and `rollouts finish` ends a stage before its last step."""
    page = render_report(full_report)
    assert "400 steps of 8 packed rows" in page and "100 steps of 16 prompts" in page
    assert "at temperature 1, about 1.5 epochs of the prompts, constant" in page
    for training, counts in zip(full_report.trainings, ({}, {"num_prompts": 200, "num_drawn": 16}), strict=True):
        early = {"step": 1, "num_steps": 100, "asked_by": "run"}
        RunDirectory(training.run_dir).write_result({"checkpoints": [], **counts, "finished_early": early})
    page = render_report(full_report)
    assert "1 of 400 steps of 8 packed rows" in page and "1 of 100 steps of 16 prompts" in page
    assert "about 0.08 epochs of the prompts" in page
    rolled_back = {"rule": "r", "from_step": 90, "num_steps": 400, "step": 20, "metric": "eval_loss", "value": 1}
    RunDirectory(full_report.trainings[0].run_dir).write_result({"checkpoints": [], "rolled_back": rolled_back})
    assert "90 of 400 steps, rolled back to step 20, of 8 packed rows" in render_report(full_report)


def test_the_loss_on_evaluation_rows_is_drawn_where_it_was_taken(full_report: ReportInput) -> None:
    assert "Evaluation loss" not in render_report(full_report)
    with JSONLLogger(RunDirectory(full_report.trainings[0].run_dir).metrics) as logger:
        for step, eval_loss in ((200, 1.75), (400, 1.25)):
            logger.log({"loss": 4.0 / step, "lr": 1e-5, "grad_norm": 1.0, "eval_loss": eval_loss}, step)
    sft = load_curves(full_report)[0]
    [chart] = [chart for chart in sft.charts if chart.title == "Evaluation loss"]
    assert chart.headline == "1.75 → 1.25"
    assert "Evaluation loss" in render_report(full_report)


def test_the_use_of_gpus_is_shown_where_it_was_sampled(full_report: ReportInput) -> None:
    assert "GPU" not in without_data(render_report(full_report)), "compressed data may hold any three letters"
    reading = {"gpu": 0, "use_percent": 41.0, "memory_gib": 7.0, "total_gib": 24.0}
    line = json.dumps({"time": 1.0, "attempt": 1, "gpus": [reading]})
    RunDirectory(full_report.trainings[1].run_dir).gpu_use.write_text(line + "\n")
    page = render_report(full_report)
    assert page.count("<b>GPU use</b><span>mean 41 %</span>") == 1 and "most 7 of 24 GiB" in page


def test_the_same_input_gives_the_same_bytes(full_report: ReportInput) -> None:
    assert render_report(full_report) == render_report(full_report)


def test_the_page_is_small_and_loads_nothing(full_report: ReportInput) -> None:
    page = render_report(full_report)
    tags = TagCollector(page)
    assert len(without_data(page).encode()) < 100_000
    assert len(page.encode()) < 160_000, "with uPlot and the viewer"
    assert tags.loaded == []
    assert not {"link", "iframe", "img", "object"} & set(tags.tags)
    assert "url(" not in without_data(page) and "@import" not in without_data(page)


def test_a_browser_may_run_the_scripts_of_the_page_and_nothing_else(full_report: ReportInput) -> None:
    page = render_report(full_report)
    policy = find_policy(page)
    [loader] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert hash_source(loader) in policy and hash_source(style) in policy
    unpacked = {name: unpack(page, name) for name in ("viewer", "plot", "style")}
    assert all(hash_source(text) in policy for text in unpacked.values())
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "*" not in policy
    assert find_policy("<html>an older report</html>").endswith("script-src 'none'")


def test_every_drawing_is_well_formed(full_report: ReportInput) -> None:
    drawings = re.findall(r"<svg.*?</svg>", render_report(full_report), re.DOTALL)
    assert len(drawings) == 4 + 2 + 6 + 2
    for drawing in drawings:
        ET.fromstring(drawing)
        assert not re.search(r"nan|inf", drawing.replace("information", ""))


def test_what_a_model_wrote_never_becomes_markup(full_report: ReportInput) -> None:
    attack = '<script>alert(1)</script></pre><img src="x" onerror="alert(1)">'
    write_completions(full_report.evaluation_dir, "rl", [attack] * 40, RL_SCORES)
    page = render_report(replace(full_report, run_name=attack, settings_toml=attack, verdict=attack))
    assert TagCollector(without_data(page)).tags.count("script") == 1, "the loader"
    assert "img" not in TagCollector(page).tags


@pytest.mark.parametrize(
    ("variant", "absent"), [(only_sft, "Seconds per step"), (only_rl, "Learning rate"), (with_losses, "Reward")]
)
def test_a_mode_without_a_stage_leaves_its_parts_out(
    full_report: ReportInput, variant: Callable[[ReportInput], ReportInput], absent: str
) -> None:
    report = variant(full_report)
    page = render_report(report)
    assert absent not in page
    assert "Paired comparisons" in page
    assert render_summary_markdown(report)


def test_a_run_that_was_not_judged_leads_with_its_finding(full_report: ReportInput) -> None:
    page = render_report(only_sft(full_report))
    assert "<b>Result</b>" in page
    assert "the accuracy of SFT is 40.0 points higher than that of Base" in page


def compare(directory: Path) -> ShownDifference:
    """The comparison of the two checkpoints of an evaluation."""
    evaluated = load_evaluation(directory)
    baseline, candidate = evaluated.checkpoints
    return describe_difference(baseline, candidate, choose_display(evaluated))


def test_a_lower_loss_is_shown_as_better(full_report: ReportInput) -> None:
    report = with_losses(full_report)
    difference = compare(report.evaluation_dir)
    assert difference.outcome == "better"
    assert difference.difference == "−2.000 nats per token"
    assert "3.195" in render_report(report)
    assert "lower is better" in render_report(report)


def test_a_worse_checkpoint_is_called_worse(tmp_path: Path) -> None:
    difference = compare(write_evaluation(tmp_path, {"sft": RL_SCORES, "rl": BASE_SCORES}))
    assert difference.outcome == "worse"
    assert "the accuracy of RL is 85.0 points lower than that of SFT: worse" in difference.sentence


def test_equal_checkpoints_are_within_chance(tmp_path: Path) -> None:
    difference = compare(write_evaluation(tmp_path, {"sft": SFT_SCORES, "rl": SFT_SCORES}))
    assert difference.outcome == "unclear"
    assert "is equal to that of SFT: within chance" in difference.sentence


@pytest.mark.parametrize(("more_right", "outcome"), [(4, "unclear"), (7, "better")])
def test_a_few_rows_that_differ_are_within_chance_although_their_interval_leaves_zero_out(
    tmp_path: Path, more_right: int, outcome: str
) -> None:
    """Of four rows, all better, one in sixteen signs is the one that was seen; resamples rarely leave out all four."""
    few_right = [1.0] * more_right + [0.0] * (140 - more_right)
    better = compare(write_evaluation(tmp_path / "better", {"sft": [0.0] * 140, "rl": few_right}))
    worse = compare(write_evaluation(tmp_path / "worse", {"sft": few_right, "rl": [0.0] * 140}))
    assert better.interval.startswith("+") and worse.interval.startswith("−")
    assert (better.outcome, worse.outcome) == (outcome, {"better": "worse"}.get(outcome, outcome))
    for difference in (better, worse):
        assert ("within chance (p = 0.0" in difference.sentence) == (outcome == "unclear")


def test_rewards_beyond_one_are_not_shown_as_percent(tmp_path: Path) -> None:
    evaluated = load_evaluation(write_evaluation(tmp_path, {"base": [0.0, 2.5], "rl": [1.0, 2.5]}))
    assert choose_display(evaluated).title == "mean reward"


def test_a_page_without_samples_says_so(full_report: ReportInput) -> None:
    for path in RunDirectory(full_report.evaluation_dir).samples.iterdir():
        path.unlink()
    assert "has no sample files" in render_report(full_report)


def test_a_checkpoint_without_samples_is_left_out_of_the_transcripts(full_report: ReportInput) -> None:
    (RunDirectory(full_report.evaluation_dir).samples / "base.jsonl").unlink()
    transcripts = load_transcripts(full_report.evaluation_dir, ["base", "sft", "rl"])
    assert [answer.name for answer in transcripts[0].answers] == ["sft", "rl"]


def test_damaged_files_do_not_stop_the_report(full_report: ReportInput) -> None:
    """Each run with the same settings reuses the stages, and would end here for ever."""
    damaged = list(full_report.evaluation_dir.parent.rglob("*.jsonl"))
    assert {path.parent.name for path in damaged} >= {"sft", "rl", "samples"}
    for path in damaged:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] + b"\0" * 10 + content[len(content) // 2 :])
    assert "RL beats the selected SFT checkpoint." in render_report(full_report)


def test_missing_files_of_the_training_stages_do_not_stop_the_report(full_report: ReportInput) -> None:
    sft, rl = full_report.trainings
    assert rl.selection_dir is not None
    RunDirectory(sft.run_dir).metrics.unlink()
    RunDirectory(sft.run_dir).job.write_text("{}")
    RunDirectory(rl.run_dir).result.unlink()
    RunDirectory(rl.selection_dir).result.unlink()
    assert "No metrics were logged." in render_report(full_report)


def test_an_unfinished_evaluation_is_an_error_that_names_it(full_report: ReportInput) -> None:
    RunDirectory(full_report.evaluation_dir).result.unlink()
    with pytest.raises(DataError, match=r"evaluate has no result\.json"):
        render_report(full_report)


def test_many_checkpoints_are_drawn_and_their_table_is_collapsed(full_report: ReportInput, tmp_path: Path) -> None:
    scores = {f"step_{step:06d}": SFT_SCORES for step in range(10, 610, 10)}
    sft, rl = full_report.trainings
    many = replace(sft, selection_dir=write_evaluation(tmp_path / "many", scores))
    page = render_report(replace(full_report, trainings=(many, rl)))
    assert '<details><summary class="note">60 checkpoints' in page
    assert len(page) < 150_000


def test_a_single_checkpoint_after_a_single_step_can_be_drawn(full_report: ReportInput, tmp_path: Path) -> None:
    with JSONLLogger(RunDirectory(tmp_path / "short").metrics) as logger:
        logger.log({"reward": 0.0, "generate_s": 0.1, "train_s": 0.1, "publish_s": 0.1}, 1)
    selection = write_evaluation(tmp_path / "one", {"step_000001": [1.0, 1.0]})
    short = TrainedStage(name="rl", run_dir=tmp_path / "short", selection_dir=selection, selected="")
    page = render_report(replace(full_report, trainings=(full_report.trainings[0], short)))
    assert "1 checkpoint on 2 prompts" in page


def test_the_most_different_answers_are_shown_in_turns_of_their_pattern() -> None:
    rewards = [[1, 1], [0, 1], [0, 1], [0, 1], [1, 0], [0, 0]]
    assert pick_different(rewards, 6) == [1, 4, 2, 3, 0, 5]
    assert pick_different(rewards, 2) == [1, 4]


def test_at_most_eight_prompts_are_shown_with_the_best_answer_marked(full_report: ReportInput) -> None:
    transcripts = load_transcripts(full_report.evaluation_dir, ["base", "sft", "rl"])
    assert len(transcripts) == 8
    assert [answer.outcome for answer in transcripts[0].answers] == ["rest", "rest", "best"]


def test_a_long_text_is_collapsed_and_a_very_long_one_is_cut() -> None:
    assert not shorten_text("short").is_long
    assert shorten_text("x" * 600).start == "x" * 500
    assert shorten_text("\n" * 20).start == "\n" * 9
    very_long = shorten_text("y" * 10_000)
    assert (len(very_long.text), very_long.num_left_out) == (8_000, 2_000)


def test_skipped_steps_and_values_that_are_not_finite_leave_gaps() -> None:
    metrics = [{"step": 1, "loss": 2.0}, {"step": 2, "skipped": 1.0}, {"step": 3, "loss": float("nan")}]
    assert metric_points(metrics, "loss") == [(1, 2.0)]


def test_thinning_keeps_the_mean_and_the_range_of_neighbours() -> None:
    buckets = thin_points([(step, float(step % 2)) for step in range(160)])
    assert len(buckets) == 80
    assert buckets[0] == (0.5, 0.5, 0.0, 1.0)
    assert len(thin_points([(step, 0.0) for step in range(80)])) == 80


def test_a_clock_that_is_set_back_draws_no_line_backwards() -> None:
    times = (1000, 1060, 1120, -2400, -2340)
    [chart] = draw_gpu_use([{"time": float(at), "gpus": [{"gpu": 0, "use_percent": 50.0}]} for at in times])
    assert [tick.label for tick in chart.x_ticks] == ["0", "1", "2", "3"]
    [line] = chart.lines
    places = [float(point.partition(",")[0]) for point in line.path.removeprefix("M").split("L")]
    assert places == sorted(places)


def test_ticks_are_round_values_at_their_places() -> None:
    axis = Axis(0.0, 0.94, 168, 10)
    assert [tick.label for tick in axis_ticks(axis, max_ticks=5)] == ["0.0", "0.2", "0.4", "0.6", "0.8"]
    assert axis_place(axis, 0.47) == 89
    steps = axis_ticks(Axis(1, 3, 0, 100), max_ticks=6, is_whole=True)
    assert [tick.label for tick in steps] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1e-6, "1e−6"),
        (0.35937, "0.359"),
        (1234.5, "1,234"),
        (-1234.5, "−1,234"),
        (3e6, "3e6"),
        (-3e6, "−3e6"),
        (-0.5, "−0.5"),
        (math.nan, "nan"),
        (-math.inf, "−inf"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59.96, "1 min 00 s"), (75, "1 min 15 s"), (7260, "2 h 01 min")]
)
def test_durations_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_the_summary_has_results_verdict_and_stages(full_report: ReportInput) -> None:
    summary = render_summary_markdown(full_report)
    assert "**Improvement.** RL beats the selected SFT checkpoint." in summary
    assert "| RL step_000030 | 95.0 % |" in summary
    assert "| rl | ran |  | 1 min 15 s | `stages/rl-1` |" in summary
    assert len(summary) < 3_000


def test_the_usage_example_is_valid_python(full_report: ReportInput) -> None:
    code = usage_code(replace(full_report, checkpoint_path='odd "path'))
    compile(code, "usage", "exec")
    assert "0+0=?" in code


def test_importing_the_report_does_not_import_torch() -> None:
    code = "import sys, rollouts_core.report; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


def test_of_a_conversation_every_turn_behind_the_prompt_is_shown() -> None:
    called = [("assistant", "<calc>57+83</calc>"), ("tool", "140"), ("assistant", ":140")]
    turns = [("system", "s"), ("user", "57+83"), *called]
    conversation = tuple(Message(role=role, content=content) for role, content in turns)
    sample = Sample(prompt=conversation[:2], response=":140", metadata={"conversation": conversation})
    assert completion_text(sample) == "assistant: <calc>57+83</calc>\ntool: 140\nassistant: :140"
    assert completion_text(Sample(response=":140")) == ":140"


def test_the_name_in_the_registry_is_put_into_a_page_that_is_there_and_replaced(full_report: ReportInput) -> None:
    mark = "<!-- registered as -->"
    page = render_report(replace(full_report, run_name=mark, settings_toml=mark))
    assert "In the registry" not in page
    named = with_registered_name(page, "small-2 (candidate)")
    assert named.count("<p><!-- registered as -->In the registry: small-2 (candidate)<!-- that was it --></p>") == 1
    promoted = with_registered_name(named, "small-2 (production)")
    assert "candidate)" not in promoted and promoted == with_registered_name(page, "small-2 (production)")
    assert "<b>" not in with_registered_name("<!-- registered as --><!-- that was it -->", "<b>")
    assert with_registered_name("<p>an older report</p>", "small-1") == "<p>an older report</p>"
