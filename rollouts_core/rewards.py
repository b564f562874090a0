"""Grade finished samples: built-in reward functions, weighted sums of rewards, and `grade_sample`, which calls the
function.

`reward_services.py` has rewards from services and models. `environments/` has environments with conversations.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from numbers import Real
from typing import Any

from rollouts_core.config import name_of_function
from rollouts_core.config.messages import first_line
from rollouts_core.environments import Environment
from rollouts_core.environments.grading_limit import GradingLimit
from rollouts_core.errors import EnvironmentUnavailableError, RewardError, RolloutsError
from rollouts_core.plugins import Registry, find_fault_of_callable
from rollouts_core.system.concurrency import gather
from rollouts_core.system.time_limits import OutOfTimeError, call_within
from rollouts_core.types import Sample, Status, trajectory_places
from rollouts_core.user_code.failures import describe_raised

RewardFn = Callable[[Sample], float | Awaitable[float | None] | None]
"""Returns the reward of a finished sample, or None if no reward could be computed. May be a coroutine function."""

NUMBER = re.compile(r"(?:(?<!\d)[-−])?(?:\d[\d,]*+(?:\.\d+)?|(?<!\d)\.\d+)")
"""A number with an optional minus sign, ASCII or Unicode. A dash directly after a digit is not a minus sign."""
THOUSANDS = re.compile(r"[-−]?\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?")
"""A number with commas as thousands separators. A comma at another place separates two numbers."""
TERMS = "reward_terms"
"""Key of a sample's metadata with the terms of its reward, before their weights are applied."""


def exact_match(sample: Sample) -> float:
    """1 if the response equals the answer, apart from spaces around them; otherwise 0."""
    return float(sample.response.strip() == str(sample.metadata.get("answer", "")).strip())


def last_number(sample: Sample) -> float:
    """1 if the last number of the response equals the last number of the answer; otherwise 0."""
    found, expected = _last_number(sample.response), _last_number(str(sample.metadata.get("answer", "")))
    return float(found is not None and found == expected)


VoteFn = Callable[[Sample], str | None]
"""For majority@k: returns the final answer of a completion in a form that is equal for equal answers; None without a
final answer."""
VOTES: dict[str, VoteFn] = {
    "exact_match": lambda sample: sample.response.strip() or None,
    "last_number": lambda sample: _last_number_text(sample.response),
}
"""For each built-in reward, the function that returns a completion's vote for majority@k."""
REWARDS: dict[str, RewardFn] = {"exact_match": exact_match, "last_number": last_number}
ALL_REWARDS = Registry[RewardFn]("rollouts.rewards", REWARDS, find_fault_of_callable)
"""The built-in rewards and the rewards of installed packages."""


def check_reward_row(name: str, row: Mapping[str, Any]) -> None:  # Any: JSON
    """Raise ValueError for a row to which this reward could never give more than 0."""
    if name == "last_number" and not NUMBER.search(row["answer"]):
        raise ValueError(f"last_number compares numbers, and the answer {row['answer']!r} has none")


def compute_reward(sample: Sample, environment: Environment | None = None) -> float:
    """The environment's grade of the sample; without an environment, the reward that the sample already has.

    Raises:
        RewardError: the sample has no reward and there is no environment, or the environment's `grade` is a coroutine
            function.
    """
    if environment is not None:
        grade = environment.grade(sample)
        if not isinstance(grade, Real):
            raise RewardError(f"{type(environment).__name__} grades later: use grade_sample(sample, environment.grade)")
        return float(grade)
    if sample.reward is None:
        raise RewardError("the sample has no reward and no environment to grade it: give a reward_fn")
    return sample.reward


async def grade_sample(sample: Sample, reward_fn: RewardFn, *, timeout_s: float | None = None) -> Sample:
    """Return the sample with its reward. The reward is None if the function returned None or the sample is invalid.

    Args:
        timeout_s: time limit of the function, seconds; None sets no limit.

    Raises:
        RewardError: the function raised an error, took too long, or did not return a finite number. The error names the
            prompt.
        EnvironmentUnavailableError: the generation of the sample failed, or a service that the function needs failed.
            The error names the prompt.
    """
    if sample.status is Status.FAILED:
        raise EnvironmentUnavailableError(
            f"prompt {sample.metadata.get('prompt_id', '?')!r} got no usable completion: "
            f"{sample.metadata.get('error') or sample.finish_reason or 'its metadata has no `error`'}"
        )
    if sample.status is Status.INVALID:
        return replace(sample, reward=None)
    if isinstance(reward_fn, WeightedRewards):  # a WeightedRewards adds the term's name and the prompt to its errors
        reward, terms = await reward_fn.grade(sample, timeout_s=timeout_s)
        return replace(sample, reward=reward, metadata={**sample.metadata, TERMS: terms} if terms else sample.metadata)
    where = f"reward function {name_of_function(reward_fn)} on prompt {sample.metadata.get('prompt_id', '?')!r}"
    try:
        reward = await call_within(timeout_s, reward_fn, sample)
    except EnvironmentUnavailableError as error:
        raise type(error)(f"{where}: {first_line(error)}") from error
    except OutOfTimeError as error:
        raise RewardError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        raise RewardError(f"{where} {describe_raised(error)}{_say_what_it_takes(reward_fn, error)}") from error
    if reward is None:
        return replace(sample, reward=None)
    if not isinstance(reward, Real) or not _is_finite(reward):
        is_array = hasattr(reward, "item") and not isinstance(reward, Real)
        remedy = " (convert it with float(...))" if is_array else ""
        raise RewardError(
            f"{where} returned {_shortened(reward)}: return a finite number{remedy}, or None if there is no score"
        )
    return replace(sample, reward=float(reward))


def _is_finite(reward: Real) -> bool:
    """True if the number is finite as a float. Python's integers can be too large for a float."""
    try:
        return math.isfinite(reward)
    except OverflowError:
        return False


def _shortened(reward: object) -> str:
    """A short repr of a value. Python raises ValueError for integers of more than 4,300 digits."""
    try:
        return textwrap.shorten(repr(reward), 200)
    except ValueError:
        return "a number too large for a float"


def _say_what_it_takes(reward_fn: RewardFn, error: BaseException) -> str:
    """A hint if the reward function failed because it does not take exactly one `Sample`; otherwise ""."""
    try:
        inspect.signature(reward_fn).bind(None)
        is_mistaken = isinstance(error, TypeError | AttributeError) and "'Sample'" in str(error)
    except TypeError:
        is_mistaken = True
    except ValueError:  # Python cannot find the function's signature
        is_mistaken = False
    said = ": a reward function takes one Sample; the completion is in `response`, the row in `metadata`"
    return said if is_mistaken else ""


async def grade_group(
    samples: Sequence[Sample], reward_fn: RewardFn, *, timeout_s: float | None = None
) -> list[Sample]:
    """Grade samples concurrently. All samples of a trajectory get the grade of the trajectory's last sample."""
    trajectories = trajectory_places(samples)
    lasts = await gather(
        [partial(grade_sample, samples[places[-1]], reward_fn, timeout_s=timeout_s) for places in trajectories]
    )
    graded = list(samples)
    for places, last in zip(trajectories, lasts, strict=True):
        graded[places[-1]] = last
        for place in places[:-1]:
            graded[place] = replace(samples[place], reward=last.reward, metadata=last.metadata)
    return graded


class WeightedRewards:
    """A reward function that adds up the weighted results of other reward functions and counts their failures.

    Args:
        terms: for each reward function: its name, its weight and the function.
    """

    def __init__(self, terms: Sequence[tuple[str, float, RewardFn]]) -> None:
        self.terms = tuple(terms)
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._num_scored = self._num_unscored = self._num_failed = 0

    async def __call__(self, sample: Sample, *, timeout_s: float | None = None) -> float | None:
        """The weighted sum of the terms; None if a term is None. If a term raises an error, the error is raised."""
        return (await self.grade(sample, timeout_s=timeout_s))[0]

    async def grade(self, sample: Sample, *, timeout_s: float | None = None) -> tuple[float | None, dict[str, float]]:
        """The weighted sum of the terms, and each term before its weight is applied.

        If a term is None, the method returns None and an empty dict.
        """
        calls = [partial(grade_sample, sample, reward_fn, timeout_s=timeout_s) for _, _, reward_fn in self.terms]
        try:
            graded = await gather(calls)
        except RolloutsError:
            self._num_failed += 1
            raise
        rewards = [result.reward for result in graded if result.reward is not None]
        if len(rewards) < len(graded):
            self._num_unscored += 1
            return None, {}
        self._num_scored += 1
        for (name, _, _), reward in zip(self.terms, rewards, strict=True):
            self._sums[name] += reward
        total = sum(weight * reward for (_, weight, _), reward in zip(self.terms, rewards, strict=True))
        return total, {name: reward for (name, _, _), reward in zip(self.terms, rewards, strict=True)}

    def take_metrics(self) -> dict[str, float]:
        """The means of the terms over the scored samples, and the share of samples whose grading failed, since the last
        call.
        """
        num_asked = self._num_scored + self._num_unscored + self._num_failed
        if not num_asked:
            return {}
        means = {f"reward/{name}": self._sums[name] / self._num_scored for name, _, _ in self.terms if self._num_scored}
        metrics = {**means, "reward_error_share": self._num_failed / num_asked}
        self._sums.clear()
        self._num_scored = self._num_unscored = self._num_failed = 0
        return metrics


def take_reward_metrics(reward_fn: RewardFn) -> dict[str, float]:
    """The metrics of a reward function since the last call.

    If environments grade, the metrics also say how many gradings exceeded their time limit.
    """
    own, graders = dict[str, float](), [reward_fn]
    if isinstance(reward_fn, WeightedRewards):
        own, graders = reward_fn.take_metrics(), [term for _, _, term in reward_fn.terms]
    limits = [getattr(getattr(grader, "__self__", None), "grading_limit", None) for grader in graders]
    counts = [limit.take_count() for limit in limits if isinstance(limit, GradingLimit)]
    return {**own, "num_over_grading_limit": float(sum(counts))} if counts else own


def _last_number_text(text: str) -> str | None:
    """The last number in a text, as text. Equal numbers give equal texts."""
    found = _last_number(text)
    if found is None:
        return None
    written = f"{found or abs(found):f}"  # turns -0 into 0
    return written.rstrip("0").rstrip(".") if "." in written else written


def _last_number(text: str) -> Decimal | None:
    """The last number in a text as a Decimal. As floats, long numbers that differ only after 16 digits would be
    equal."""
    found = NUMBER.findall(text)
    if not found:
        return None
    last: str = found[-1].rstrip(",")
    digits = last.replace(",", "") if THOUSANDS.fullmatch(last) else last.rpartition(",")[2]
    return Decimal(digits.replace("−", "-"))
