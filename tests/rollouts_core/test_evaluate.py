"""Pins that a score is the mean reward of all completions of a prompt.

Without it completions that could not be scored would leave the mean, and checkpoints be compared on different rows.
"""

from dataclasses import replace

import pytest

from rollouts_core.errors import RewardError
from rollouts_core.evaluate import scores_by_prompt
from tests.rollouts_core.make import make_group


def test_a_score_is_the_mean_reward_of_a_prompt() -> None:
    second = [replace(sample, group_index=1) for sample in make_group([1.0])]
    assert scores_by_prompt([*make_group([0.0, 0.5]), *second]) == [0.25, 1.0]


def test_an_evaluation_needs_every_reward() -> None:
    group = [replace(sample, metadata={"prompt_id": "p7"}) for sample in make_group([1.0, None])]
    with pytest.raises(RewardError, match="a completion of prompt 'p7' has no reward"):
        scores_by_prompt(group)
