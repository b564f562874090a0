"""Grade a finished sample: the reward functions that ship, and the one call that grades.

Not here: advantages (algorithms/advantages.py), environments that hold a conversation (environments/).
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

from rollouts_core.concurrency import gather
from rollouts_core.config import name_of_function
from rollouts_core.environments import Environment
from rollouts_core.errors import EnvironmentUnavailableError, RewardError
from rollouts_core.messages import first_line
from rollouts_core.types import Sample, trajectory_places

RewardFn = Callable[[Sample], float | Awaitable[float]]
"""Takes a finished sample and returns its reward; may be a coroutine function."""

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact_match(sample: Sample) -> float:
    """1 when the response, without surrounding space, is the answer."""
    return float(sample.response.strip() == str(sample.metadata.get("answer", "")).strip())


def last_number(sample: Sample) -> float:
    """1 when the last number of the response equals the answer's last number."""
    found = NUMBER.findall(sample.response)
    expected = NUMBER.findall(str(sample.metadata.get("answer", "")))
    return float(bool(found and expected) and _to_number(found[-1]) == _to_number(expected[-1]))


REWARDS: dict[str, RewardFn] = {"exact_match": exact_match, "last_number": last_number}


def compute_reward(sample: Sample, environment: Environment | None = None) -> float:
    """The environment's grade of the sample, or without one the reward that it already has.

    Raises:
        RewardError: neither exists.
    """
    if environment is not None:
        grade = environment.grade(sample)
        if not isinstance(grade, Real):
            raise RewardError(f"{type(environment).__name__} grades later: use grade_sample(sample, environment.grade)")
        return float(grade)
    if sample.reward is None:
        raise RewardError("the sample has no reward and no environment to grade it: give a reward_fn")
    return sample.reward


async def grade_sample(sample: Sample, reward_fn: RewardFn) -> Sample:
    """The sample with its reward.

    Raises:
        RewardError: the function raised, or returned something that is no finite number; names the prompt.
        EnvironmentUnavailableError: the function says that something it stands on failed; names the prompt.
    """
    where = f"reward function {name_of_function(reward_fn)} on prompt {sample.metadata.get('prompt_id', '?')!r}"
    try:
        outcome = reward_fn(sample)
        reward: Any = await outcome if inspect.isawaitable(outcome) else outcome  # Any: a user's function made it
    except EnvironmentUnavailableError as error:
        raise type(error)(f"{where}: {first_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise RewardError(f"{where} raised {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise RewardError(f"{where} returned {reward!r}: expected a finite number")
    return replace(sample, reward=float(reward))


async def grade_group(samples: Sequence[Sample], reward_fn: RewardFn) -> list[Sample]:
    """The samples with their rewards, graded at the same time; those of one trajectory share the grade of its last."""
    trajectories = trajectory_places(samples)
    lasts = await gather([partial(grade_sample, samples[places[-1]], reward_fn) for places in trajectories])
    graded = list(samples)
    for places, last in zip(trajectories, lasts, strict=True):
        for place in places:
            graded[place] = replace(samples[place], reward=last.reward, metadata=last.metadata)
    return graded


def _to_number(text: str) -> float:
    return float(text.replace(",", ""))
