"""Pins `rollouts init`: by options and at a terminal it writes a configuration that the checks accept.

Without it the first file of a user could name rows that training does not read, or replace a file that was there.
"""

from __future__ import annotations

import csv
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rollouts.flows.cli import app
from rollouts.flows.form import load_pipeline
from tests.kit.commands import clean_environment
from tests.kit.small_pipeline import write_small_pipeline

IMITATE = ["--goal", "imitate"]
REWARD = ["--goal", "reward", "--reward", "arithmetic"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_pipeline(tmp_path_factory.mktemp("small")).parent


def rows_of(path: Path) -> list[dict[str, Any]]:  # Any: JSON
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: list[dict[str, Any]]) -> str:  # Any: JSON
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(row: dict[str, Any]) -> list[dict[str, str]]:  # Any: JSON
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]


def init(folder: Path, small: Path, *options: str, code: int = 0) -> Result:
    given = ["init", str(folder / "my.toml"), "--model", str(small / "base_model"), *options]
    result = CliRunner().invoke(app, [*given, "--store", str(folder / "store")])
    assert result.exit_code == code, result.output
    return result


SHAPES = {
    "TRL": lambda row: {"prompt": row["prompt"], "completion": row["completion"]},
    "OpenAI": lambda row: {"messages": said(row)},
    "ShareGPT": lambda row: {
        "conversations": [{"from": "human", "value": row["prompt"]}, {"from": "gpt", "value": row["completion"]}]
    },
}
PROMPT_SHAPES = {
    "verl": lambda row: {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
    },
    "slime": lambda row: {"prompt": row["prompt"], "label": row["answer"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("system", SHAPES)
def test_demonstrations_of_each_system_become_a_configuration_that_is_accepted(
    system: str, small: Path, tmp_path: Path
) -> None:
    given = write(tmp_path / "given.jsonl", [SHAPES[system](row) for row in rows_of(small / "sft.jsonl")])
    output = init(tmp_path, small, *IMITATE, "--sft", given, "--convert").stderr
    assert f"{given}: {system}'s " in output and "rollouts validate accepts" in output
    data = load_pipeline(tmp_path / "my.toml").config.data
    split = [rows_of(Path(str(path))) for path in (data.sft, data.selection, data.heldout)]
    assert sum(map(len, split)) <= len(rows_of(Path(given))) and all(split)
    assert rows_of(Path(given)) == [SHAPES[system](row) for row in rows_of(small / "sft.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("system", PROMPT_SHAPES)
def test_prompts_of_each_system_become_a_configuration_that_is_accepted(
    system: str, small: Path, tmp_path: Path
) -> None:
    given = write(tmp_path / "given.jsonl", [PROMPT_SHAPES[system](row) for row in rows_of(small / "prompts.jsonl")])
    output = init(tmp_path, small, *REWARD, "--prompts", given, "--convert").stderr
    assert f"{given}: {system}'s prompts" in output and "rollouts validate accepts" in output
    config = load_pipeline(tmp_path / "my.toml").config
    answers = {row["prompt"]: row["answer"] for row in rows_of(small / "prompts.jsonl")}
    for row in rows_of(Path(config.data.prompts)):
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]
        assert row["answer"] == answers[prompt]
    assert (config.mode, config.rollout.environment) == ("rl", "arithmetic")


@pytest.mark.slow
def test_rows_that_are_read_as_they_are_are_not_copied_and_csv_gets_its_columns(small: Path, tmp_path: Path) -> None:
    with (tmp_path / "chat.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["messages"])
        writer.writerows([json.dumps(said(row))] for row in rows_of(small / "sft.jsonl")[:80])
    held = [rows_of(small / "sft.jsonl")[start : start + 20] for start in (100, 140)]
    paths = [write(tmp_path / f"held{number}.jsonl", rows) for number, rows in enumerate(held)]
    options = ["--sft", str(tmp_path / "chat.csv"), "--selection", paths[0], "--heldout", paths[1]]
    output = init(tmp_path, small, *IMITATE, *options).stderr
    assert "chat.csv: OpenAI's messages, with columns of JSON (messages), read as they are" in output
    config = load_pipeline(tmp_path / "my.toml").config
    assert config.demonstrations[0].columns == {"messages": "json"}
    assert not (tmp_path / "my-data").exists()


def test_nothing_is_converted_or_overwritten_without_being_asked(small: Path, tmp_path: Path) -> None:
    given = write(tmp_path / "given.jsonl", [SHAPES["ShareGPT"](row) for row in rows_of(small / "sft.jsonl")])
    error = init(tmp_path, small, *IMITATE, "--sft", given, code=2).stderr
    assert "has ShareGPT's conversations; data.selection has no file" in error and "--convert writes" in error
    assert [path.name for path in tmp_path.iterdir()] == ["given.jsonl"]
    (tmp_path / "my.toml").write_text("mine")
    error = init(tmp_path, small, *IMITATE, "--sft", given, "--convert", code=2).stderr
    assert "my.toml exists: give another name, or --force to overwrite it" in error
    (tmp_path / "my.toml").unlink()
    (tmp_path / "my-data").mkdir()
    error = init(tmp_path, small, *IMITATE, "--sft", given, "--convert", code=2).stderr
    assert "my-data exists: give CONFIG another name, or --force" in error
    assert not (tmp_path / "my.toml").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--goal", "imitat"], "--goal: expected one of imitate, reward, both, found 'imitat'; did you mean imitate?"),
        (["--goal", "reward", "--reward", "maths"], "unknown reward 'maths'; did you mean math?"),
        ([*IMITATE], "--sft is missing (File of demonstrations"),
        ([*IMITATE, "--sft", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        ([*IMITATE, "--sft", "PROMPTS"], "expected demonstrations to imitate, found prompts with answers"),
        ([*REWARD, "--prompts", "SFT"], "expected prompts for rewards, found TRL's prompts and completions"),
        ([*IMITATE, "--sft", "SFT", "--machine", "rented"], "--max-usd is missing"),
        ([*IMITATE, "--sft", "SFT", "--machine", "box"], "--machine: expected one of this, rented, user@host"),
    ],
)
def test_a_wrong_or_missing_answer_is_one_sentence(
    options: list[str], sentence: str, small: Path, tmp_path: Path
) -> None:
    files = {"PROMPTS": str(small / "prompts.jsonl"), "SFT": str(small / "sft.jsonl")}
    error = init(tmp_path, small, *(files.get(each, each) for each in options), code=2).stderr
    assert sentence in " ".join(error.split())
    assert not (tmp_path / "my.toml").exists()


@pytest.mark.slow
def test_at_a_terminal_it_asks_and_asks_again_after_a_wrong_answer(small: Path, tmp_path: Path) -> None:
    script = [
        ("Goal", "bth"),
        ("did you mean both?", "both"),
        ("start model", "nowhere"),
        ("neither a folder", str(small / "base_model")),
        ("Environment or reward", "arithmetic"),
        ("demonstrations", str(small / "sft.jsonl")),
        ("prompts for RL", str(small / "prompts.jsonl")),
        ("choose the best checkpoint", str(small / "selection.jsonl")),
        ("in the report", str(small / "heldout.jsonl")),
        ("Machine", ""),
    ]
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "rollouts.flows.cli", "init", "first.toml", "--store", str(tmp_path / "store")]
    environment = {**clean_environment(), "TERM": "dumb"}
    shown = ""
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=tmp_path, env=environment
    ) as process:
        os.close(terminal)
        for question, answer in script:
            shown += read_until(master, question)
            os.write(master, f"{answer}\n".encode())
        shown += read_until(master, "Next:")
        assert process.wait(60) == 0, shown
    os.close(master)
    assert "rollouts validate accepts first.toml" in shown
    pipeline = load_pipeline(tmp_path / "first.toml")
    assert (pipeline.config.mode, pipeline.run.name) == ("sft+rl", "first")


def read_until(terminal: int, words: str, timeout_s: float = 120.0) -> str:
    """Everything that is shown until these words are."""
    shown, ends_at = "", time.monotonic() + timeout_s
    while words not in shown:
        assert time.monotonic() < ends_at, f"{words!r} is not in {shown}"
        try:
            shown += os.read(terminal, 4096).decode()
        except OSError as error:  # the other side was closed
            raise AssertionError(f"{words!r} is not in {shown}") from error
    return shown
