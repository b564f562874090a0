"""Pins what the commands say that read the files of a store: runs, show, samples, logs, report, and their JSON.

Without it a program that reads the JSON breaks unseen, and a filter shows samples that were not asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollouts.flows.cli import app
from rollouts.flows.commands.runs import read_growing
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts_core.metrics import JSONLLogger
from rollouts_core.run_directory import RunDirectory
from rollouts_core.types import Sample
from tests.kit.small_pipeline import write_small_pipeline
from tests.tasks.stored_run import write_stored_run

FIRST, SECOND = "small-11111111", "small-22222222"


def sample(reward: float, text: str, group: int = 0) -> Sample:
    """A graded completion of three tokens."""
    return Sample(
        prompt=({"role": "user", "content": f"question {group}"},),
        response=text,
        tokens=[1, 2, 3, 4],
        loss_mask=[0.0, 1.0, 1.0, 1.0],
        reward=reward,
        group_index=group,
        finish_reason="stop",
        metadata={"prompt_id": f"p{group}", "answer": "42"},
    )


def write_stage(store: Path, stage: str) -> RunDirectory:
    directory = RunDirectory(store / "stages" / stage)
    directory.root.mkdir(parents=True)
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a finished run, and a later one of the same name that was stopped in RL."""
    with Ledger(tmp_path / LEDGER_FILE) as ledger:
        ledger.note_use("rl-aaaa", "1" * 32, run=FIRST, num_steps=2)
        ledger.note_use("evaluate-bbbb", "1" * 32, run=FIRST)
        ledger.note_use("rl-cccc", "2" * 32, run=SECOND, num_steps=9)
    rl = write_stage(tmp_path, "rl-aaaa")
    with JSONLLogger(rl.metrics) as metrics:
        metrics.log({"reward": 0.5}, 1)
        metrics.log({"reward": 1.0}, 2)
    rl.write_samples("step_000001", [sample(0.0, "41")], temperature=1.0)
    rl.write_samples("step_000002", [sample(1.0, "it is 42"), sample(0.5, "perhaps 42", 1)], temperature=1.0)
    rl.log.write_text("first line\n\x1b[31mred\x1b[0m\n")
    rl.write_result({})
    write_stage(tmp_path, "engine-aaaa-0").log.write_text("the engine answers\n")
    evaluation = write_stage(tmp_path, "evaluate-bbbb")
    evaluation.write_samples("base", [sample(0.0, "no")], temperature=0.0)
    evaluation.write_samples("rl", [sample(1.0, "42")], temperature=0.0)
    scored = [
        {"name": "base", "mean": 0.25, "low": 0.2, "high": 0.3},
        {"name": "rl", "mean": 0.75, "low": 0.7, "high": 0.8},
    ]
    evaluation.write_result({"checkpoints": scored, "best": "rl", "metric": "accuracy"})
    folder = tmp_path / "runs" / FIRST
    folder.mkdir(parents=True)
    (folder / "report.html").write_text("<html></html>")
    (folder / "run.json").write_text(json.dumps({"verdict": "RL improved"}))
    write_stage(tmp_path, "rl-cccc")
    return tmp_path


def call(store: Path, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [*arguments, "--store", str(store)])
    assert result.exit_code == code, result.output
    return result


def records(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_runs_are_listed_latest_first_with_score_interval_and_change(store: Path) -> None:
    lines = call(store, "runs").stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["RUN", "STATE", "STEP"],
        [SECOND, "stopped", "rl"],
        [FIRST, "done", "rl"],
    ]
    assert lines[2].split()[3:] == ["2/2", "0.750", "(0.700-0.800)", "+0.500", "yes"]
    assert all(len(line) <= 80 for line in lines)
    assert "COST" not in lines[0]


def test_runs_for_programs_have_a_kind_and_numbers(store: Path) -> None:
    second, first = records(call(store, "runs", "--json"))
    assert (second["kind"], second["run"], second["state"], second["score"]) == ("run", SECOND, "stopped", None)
    assert first["score"] == {"model": "rl", "mean": 0.75, "low": 0.7, "high": 0.8}
    assert (first["change"], first["step"], first["num_steps"], first["verdict"]) == (0.5, 2, 2, "RL improved")
    assert records(call(store, "runs", "--json", "--limit", "1")) == [second]


def test_a_run_that_lives_is_running(store: Path) -> None:
    with Ledger(store / LEDGER_FILE) as ledger, ledger.living_run("2" * 32):
        second, _ = records(call(store, "runs", "--json"))
    assert second["state"] == "running"


def test_an_empty_store_is_said_and_is_no_error(tmp_path: Path) -> None:
    result = call(tmp_path, "runs")
    assert result.stdout == "" and f"the store {tmp_path} has no runs yet" in result.stderr
    assert call(tmp_path, "runs", "--json").stdout == ""
    assert "has no runs yet: --store names another store" in call(tmp_path, "samples", "x", code=2).stderr


def test_samples_of_the_newest_step_of_the_named_run(store: Path) -> None:
    shown = call(store, "samples", FIRST).stdout
    assert shown.startswith("step 2, prompt p0, reward 1, 3 tokens, stop\n  user       question 0\n")
    assert "  assistant  it is 42\n  reference  42\n\nstep 2, prompt p1, reward 0.5," in shown


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (["--reward", "<1"], ["perhaps 42"]),
        (["--reward", ">=0.5"], ["it is 42", "perhaps 42"]),
        (["--reward", "1"], ["it is 42"]),
        (["--grep", "^perhaps"], ["perhaps 42"]),
        (["--prompt", "p1"], ["perhaps 42"]),
        (["--limit", "1"], ["it is 42"]),
        (["--step", "1"], ["41"]),
        (["--model", "base"], ["no"]),
    ],
)
def test_samples_that_fit(store: Path, options: list[str], texts: list[str]) -> None:
    found = records(call(store, "samples", FIRST, "--json", *options))
    assert [each["response"] for each in found] == texts
    assert {each["kind"] for each in found} == {"sample"} and all(each["tokens"] for each in found)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((FIRST, "--step", "9"), f"{FIRST} has no samples of step 9: it has steps 1 to 2"),
        ((FIRST, "--model", "sft"), f"{FIRST} has no held-out answers of sft: it has those of base, rl"),
        ((FIRST, "--step", "1", "--model", "rl"), "give one of them"),
        ((FIRST, "--reward", "good"), "is not a comparison: give one such as '<1'"),
        ((FIRST, "--grep", "("), "is not a regular expression"),
        ((FIRST, "--grep", "nothing"), "has no matching sample: leave out --reward, --grep or --prompt"),
        (("small-1111111",), f"has no run small-1111111; did you mean {FIRST}?"),
        (("small",), f"{SECOND} has no samples yet"),  # the latest run of the name
    ],
)
def test_samples_that_cannot_be_shown_are_a_sentence(store: Path, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in " ".join(call(store, "samples", *arguments, code=2).stderr.split())


def test_a_failure_is_an_object_too_for_programs(store: Path) -> None:
    (error,) = records(call(store, "samples", FIRST, "--step", "9", "--json", code=2))
    assert (error["kind"], error["code"]) == ("error", "user_error")
    assert str(error["message"]).endswith("it has steps 1 to 2")


def test_logs_of_a_stage_or_an_engine_without_what_a_terminal_obeys(store: Path) -> None:
    assert call(store, "logs", FIRST, "rl").stdout == "first line\nred\n"
    assert call(store, "logs", FIRST, "engine").stdout == "the engine answers\n"
    assert "has not reached a stage rll; did you mean rl?" in call(store, "logs", FIRST, "rll", code=2).stderr


def test_logs_and_the_report_for_programs_are_objects_with_a_kind(store: Path) -> None:
    lines = records(call(store, "logs", FIRST, "rl", "--json"))
    assert lines == [{"kind": "log_line", "stage": "rl-aaaa", "text": text} for text in ("first line", "red")]
    (report,) = records(call(store, "report", FIRST, "--json"))
    assert report == {"kind": "report", "run": FIRST, "path": str(store / "runs" / FIRST / "report.html")}
    (error,) = records(call(store, "logs", FIRST, "rll", "--json", code=2))
    assert (error["kind"], error["code"]) == ("error", "user_error")


def test_an_empty_log_and_an_evaluation_without_a_report_are_said(store: Path) -> None:
    assert "log.txt is empty: the processes of the stage printed nothing" in call(store, "logs", FIRST).stderr
    (store / "runs" / SECOND).mkdir()
    (store / "runs" / SECOND / "evaluation.json").write_text("{}")
    said = " ".join(call(store, "report", SECOND, code=2).stderr.split())
    assert f"{SECOND} is a run of `rollouts evaluate` and has no report: its scores are in " in said


def test_a_growing_log_is_read_to_its_end_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    parts = iter([b"one\ntw", b"o\n", b"\xe2\x82", b"\xac end"])

    def grow() -> bool:
        part = next(parts, None)
        if part is not None:
            with path.open("ab") as file:
                file.write(part)
        return part is None

    read: Iterator[str] = read_growing(path, is_over=grow)
    assert [text for text in read if text] == ["one\n", "two\n", "€ end"]


def test_the_report_is_a_path_on_stdout(store: Path) -> None:
    result = call(store, "report", FIRST)
    assert result.stdout == f"{store / 'runs' / FIRST / 'report.html'}\n"
    assert result.stderr.endswith("The earlier report is kept.\n"), "its run.json has a verdict alone"
    assert f"{SECOND} ended before its report" in call(store, "report", SECOND, code=2).stderr


def test_settings_show_default_and_origin(tmp_path: Path) -> None:
    config = write_small_pipeline(
        tmp_path / "small", mode="rl", training__rl__algorithm="verl-dapo", training__rl__num_minibatches=1
    )
    found = {str(each["name"]): each for each in records(call(tmp_path, "show", str(config), "--all", "--json"))}
    assert found["mode"]["origin"] == "file" and found["mode"]["value"] == "rl"
    assert found["training.rl.loss.clip_high"]["origin"] == "training.rl.algorithm"
    assert found["training.rl.optim.lr"]["default"] == 1e-06
    assert found["node.kind"] == {
        "kind": "setting",
        "name": "node.kind",
        "value": "local",
        "default": "local",
        "is_default": True,
        "is_required": False,
        "origin": "default",
    }
    result = call(tmp_path, "show", str(config))
    assert "node.kind" not in result.stdout and "--all shows them" in result.stderr
    assert "(default 0.2, set by training.rl.algorithm)" in result.stdout


def test_a_run_that_an_earlier_version_ended_shows_its_settings(store: Path) -> None:
    config = write_small_pipeline(store / "small", mode="sft")
    (folder,) = (store / "runs").iterdir()
    former = config.read_text().replace("[node]", '[node]\nprovider = "local"')
    assert "provider" in former
    (folder / "config.toml").write_text(former)
    assert records(call(store, "show", FIRST, "--json"))
    assert f"{SECOND} has not come to its end" in call(store, "show", SECOND, code=2).stderr


@pytest.mark.parametrize("command", [("models",), ("models", "history"), ("nodes",), ("status",)])
def test_other_lists_for_programs_are_objects_with_a_kind(store: Path, command: tuple[str, ...]) -> None:
    os.environ.pop("PREFECT_API_URL", None)
    assert all(each["kind"] for each in records(call(store, *command, "--json")))


def test_the_report_is_rendered_again(tmp_path: Path) -> None:
    folder = write_stored_run(tmp_path, FIRST)
    result = call(tmp_path, "report", FIRST)
    assert (result.stdout, result.stderr) == (f"{folder / 'report.html'}\n", "")
    assert f"the verdict of {FIRST}" in (folder / "report.html").read_text()
