"""Pins when steps of RL that teach nothing are told, and when they end the training.

Without it a reward that is 0 for everything samples on rented machines to the last step; with a count that is too eager
an honest run ends that has a hard beginning, or that has solved its prompts.
"""

import json

import pytest

from rollouts_core.algorithms.loss import Metrics
from rollouts_core.errors import NoSignalError
from rollouts_core.signal_watch import SignalWatch


def dead(reward: float | None = 0.0, std: float = 0.0, signal_share: float = 0.0) -> Metrics:
    """A step without an update."""
    rewards = {} if reward is None else {"reward": reward, "reward_std": std}
    return {"skipped": 1.0, "num_nonfinite": 0.0, "signal_share": signal_share, **rewards}


def live(reward: float = 0.5) -> Metrics:
    """A step with an update."""
    return {"skipped": 0.0, "num_nonfinite": 0.0, "signal_share": 0.5, "reward": reward, "reward_std": 0.4}


def regularized(reward: float = 0.0) -> Metrics:
    """A step with an update by KL or entropy alone."""
    return {**dead(reward), "skipped": 0.0, "without_signal": 1.0}


NONFINITE: Metrics = {**live(), "skipped": 1.0, "num_nonfinite": 1.0}


def watch_steps(steps: list[Metrics], *, limit: int = 3) -> SignalWatch:
    watch = SignalWatch(limit)
    for step, metrics in enumerate(steps, start=1):
        watch.after_step(step, metrics)
    return watch


@pytest.mark.parametrize(
    ("steps", "is_over"),
    [
        ([dead()] * 2, False),
        ([dead()] * 3, True),
        ([dead(1.0)] * 3, True),  # before anything was learned nothing is solved
        ([live(), *[dead()] * 3], True),  # a policy that has collapsed
        ([dead(), dead(), live(), dead(), dead()], False),  # a hard task, solved once in a while
        ([live(), *[dead(1.0)] * 9], False),  # solved
        ([live(), dead(), dead(), dead(1.0), dead(), dead()], False),  # a curriculum whose first prompts are solved
        ([live(), *[dead(0.5, std=0.5)] * 3], True),  # always the same answer, right for some prompts
        ([live(1.0), *[dead(0.9)] * 3], True),
        ([dead(), dead(), NONFINITE, dead()], False),  # these have a limit of their own
        ([dead(None)] * 3, True),
        ([dead(signal_share=0.5)] * 3, True),  # masked away
        ([regularized()] * 3, True),
        ([regularized(1.0)] * 3, True),  # such updates have solved nothing
        ([regularized(), dead(), live(), regularized(), dead()], False),
        ([live(), *[regularized(1.0)] * 9], False),  # solved
    ],
)
def test_only_steps_in_a_row_that_teach_nothing_end_a_training(steps: list[Metrics], is_over: bool) -> None:
    assert watch_steps(steps).is_over == is_over


def test_without_a_limit_nothing_ends() -> None:
    watch = watch_steps([dead()] * 1000, limit=0)
    assert not watch.is_over
    watch.check()


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([dead()] * 3, "step 3: 3 steps in a row made no update, all rewards were 0 (completions of each prompt had"),
        ([dead(1.0)] * 3, "all rewards were 1 ("),
        ([dead(), regularized(), dead()], "made no update by rewards, only by the other terms of the loss, all"),
        ([regularized(), live(), *[dead()] * 3], "step 5: 3 steps in a row made no update, all rewards were 0 ("),
        ([dead(0.0), dead(0.25, std=0.4), dead()], "mean rewards were 0 to 0.25 ("),
        ([dead(0.5, std=0.5)] * 3, "mean rewards were 0.5 ("),
        ([dead(None)] * 3, "no completion had a reward ("),
        ([dead()] * 3, "use prompts that the model solves sometimes, more completions per prompt, or a reward that"),
        ([dead(signal_share=0.5)] * 3, "check reward_shaping.mask_truncated"),
        ([dead()] * 3, "To resume, raise training.rl.max_steps_without_signal (3; 0 sets no limit)"),
    ],
)
def test_the_end_says_what_was_seen_and_what_to_do(steps: list[Metrics], words: str) -> None:
    with pytest.raises(NoSignalError) as caught:
        watch_steps(steps).check()
    assert words in str(caught.value)


def test_a_run_that_goes_on_counts_on_and_ends_at_once_where_it_was_over() -> None:
    """Else each start would sample for another so many steps before it says the same."""
    steps = [live(), *[dead()] * 2, regularized(), dead(0.25, std=0.4)]
    whole = watch_steps(steps, limit=5)
    for cut in range(len(steps) + 1):
        resumed = SignalWatch(5, json.loads(json.dumps(watch_steps(steps[:cut], limit=5).state_dict())))
        for step, metrics in enumerate(steps[cut:], start=cut + 1):
            resumed.after_step(step, metrics)
        assert resumed.state_dict() == whole.state_dict()
    with pytest.raises(NoSignalError, match="step 5: 4 steps in a row"):
        SignalWatch(4, whole.state_dict()).check()
    SignalWatch(5, whole.state_dict()).check()


def test_it_is_told_while_training_goes_on_and_ever_more_rarely() -> None:
    watch = SignalWatch(0)
    told = {step: said for step in range(1, 46) if (said := watch.after_step(step, dead()))}
    assert list(told) == [10, 20, 40]
    assert told[10].startswith("step 10: 10 steps in a row made no update, all rewards were 0")
