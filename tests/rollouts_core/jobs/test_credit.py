"""Pins credit/, what RL made of each sample. Without it a report could show advantages beside the wrong tokens."""

import json
from pathlib import Path

import torch

from rollouts_core.algorithms.credit import Credit, RolloutScores
from rollouts_core.jobs.rl_job import write_credit, write_rollouts
from rollouts_core.run_directory import RunDirectory
from rollouts_core.types import RolloutBatch


def test_numbers_of_positions_stand_at_the_tokens_that_they_are_about(tmp_path: Path) -> None:
    """Position t predicts token t + 1, so the number of the first token is missing, and stands as 0."""
    credit = Credit(advantages=[0.5, torch.tensor([0.25, -1.0])])
    scores = RolloutScores(old_logprobs={1: torch.tensor([-0.125, -2.0])})
    write_credit(RunDirectory(tmp_path), 3, credit, scores)
    lines = (tmp_path / "credit/step_000003.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"advantage": 0.5},
        {"advantage": [0.0, 0.25, -1.0], "logprobs": [0.0, -0.125, -2.0]},
    ]


def test_credit_of_an_attempt_that_was_rolled_back_is_removed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for step in (1, 2, 3):
        write_credit(directory, step, Credit(advantages=[1.0]), RolloutScores())
    empty = RolloutBatch(tokens=[], loss_masks=[], rewards=[], response_lengths=[])
    write_rollouts(directory, 2, empty, temperature=1.0)
    assert sorted(path.name for path in directory.credit.iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
