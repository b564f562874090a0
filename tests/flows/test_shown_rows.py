"""Pins that `validate --show` prints rows as they are trained on. Without it a wrong mask is found after hours."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from rollouts.flows.cli import app
from tests.flows.refusals import GOOD_ROW, write_config, write_rows


def show(config: Path, *arguments: str) -> str:
    outcome = CliRunner().invoke(app, ["validate", str(config), "--store", str(config.parent / "store"), *arguments])
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def test_rows_are_shown_with_their_trained_part_and_what_becomes_of_them(folder: Path) -> None:
    rows = [
        GOOD_ROW,
        {"prompt": "1+1=?", "completion": "2" * 300},
        {"no": "row"},
        {"prompt": "1" * 300, "completion": "2"},
    ]
    write_rows(folder / "sft.jsonl", rows)
    config = write_config(folder, training__sft__on_overlong="cut_or_drop")
    shown = [json.loads(line) for line in show(config, "--show", "4", "--json").splitlines()]
    of_sft = [each for each in shown if each["source"].endswith("sft.jsonl")]
    assert [each["outcome"] for each in of_sft] == ["trained", "cut", "error", "dropped"]
    assert of_sft[0]["text"].count("[[") == of_sft[0]["text"].count("]]") == 1
    assert sum(of_sft[0]["loss_mask"]) == of_sft[0]["num_trained"] < of_sft[0]["num_tokens"] == len(of_sft[0]["tokens"])
    assert "tokens after the first 128 are cut" in of_sft[1]["reason"]
    assert "expected `messages`" in of_sft[2]["reason"]
    assert {each["outcome"] for each in shown if each["source"].endswith("heldout.jsonl")} == {"prompt"}


def test_the_checks_follow_the_rows_that_are_shown(folder: Path) -> None:
    said = show(write_config(folder), "--show", "1")
    assert "sft.jsonl, row 1: trained" in said and "[[" in said
