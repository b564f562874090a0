"""Finish one group of samples: generate its completions, grade them, and decide whether to train on the group.

pending group -> generate_fn, again if interrupted -> reward_fn -> filter_fn -> kept or dropped, with a reason
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rollouts_core.config import RolloutConfig
from rollouts_core.errors import EngineError, EnvironmentUnavailableError, RolloutsError
from rollouts_core.filters import FilterDecision
from rollouts_core.rewards import RewardFn, grade_group
from rollouts_core.rollout.generate import UNFINISHED, Group, generate_whole
from rollouts_core.rollout.resolve import GenerateFn
from rollouts_core.rollout.schedule_replay import FinishedGroup
from rollouts_core.rollout.validity import mark_foreign_tokens
from rollouts_core.system.time_limits import call_within, interrupt_after
from rollouts_core.types import Sample, VersionSpan
from rollouts_core.user_code.failures import check_generated, failed_function_error

logger = logging.getLogger(__name__)

UNAVAILABLE = "environment_unavailable"
"""Drop reason of a group whose environment or reward was unavailable."""


class GroupFinisher:
    """Generates, grades and filters groups with the functions that the rollout settings name.

    Args:
        filter_fn: returns whether to train on a group, as a bool or a `FilterDecision`. None keeps all groups.
        num_tokens: a sample is invalid if the policy sampled a token id of at least this number.
    """

    def __init__(
        self,
        config: RolloutConfig,
        generate_fn: GenerateFn,
        filter_fn: Callable[[Group], Any] | None,  # Any: result of a user's function
        *,
        num_tokens: int | None = None,
    ) -> None:
        self.config = config
        self.generate_fn = generate_fn
        self.filter_fn = filter_fn
        self.num_tokens = num_tokens

    async def finish(
        self, group: Group, grade: RewardFn, *, version: int | None, note: Callable[[Group], None]
    ) -> FinishedGroup:
        """Generate, grade and filter one group. An error is returned in the result instead of being raised.

        Reason: an exception raised in a task would reach the manager's caller wrapped in an ExceptionGroup.

        Args:
            version: weight version that the engines serve now; None if unknown.
            note: called with the group's samples after each call of the generate function.
        """
        try:
            generated = await self._generate(group, version, note)
            generated = [mark_foreign_tokens(sample, self.num_tokens) for sample in generated]
            graded = await grade_group(generated, grade, timeout_s=self.config.reward_timeout_s)
            return FinishedGroup(group=graded, decision=self._decide(graded))
        except EnvironmentUnavailableError as error:
            return dropped_for_outage(group, str(error))
        except RolloutsError as error:
            return FinishedGroup(group=group, decision=FilterDecision(False), error=error)

    async def _generate(self, group: Group, version: int | None, note: Callable[[Group], None]) -> Group:
        """Generate the completions of a group. Interrupted completions are continued from their tokens."""
        if all(sample.status not in UNFINISHED for sample in group):
            return group  # an earlier call generated the group, and was cancelled while grading it

        async def generate(group: Group) -> Group:
            return [_claim_version(sample, version) for sample in await self._call_generate_fn(group)]

        return await generate_whole(generate, group, note=note)

    async def _call_generate_fn(self, group: Group) -> Group:
        try:
            # The built-in generate function needs no time limit: each of its engine requests has a time limit.
            timeout_s = self.config.generate_timeout_s if self.config.generate_fn else None
            generated: object = await call_within(timeout_s, self.generate_fn, group)
            return check_generated(generated, self.generate_fn, group)
        except EngineError as error:
            raise type(error)(f"prompt {group[0].metadata.get('prompt_id', '?')!r}: {error}") from error
        except RolloutsError:
            raise
        except Exception as error:
            raise failed_function_error("generation", self.generate_fn, group, error) from error

    def _decide(self, group: Group) -> FilterDecision:
        if self.filter_fn is None:
            return FilterDecision(True)
        try:
            with interrupt_after(self.config.reward_timeout_s):
                outcome = self.filter_fn(group)
        except Exception as error:
            raise failed_function_error("filter", self.filter_fn, group, error) from error
        return outcome if isinstance(outcome, FilterDecision) else FilterDecision(bool(outcome), "filtered")


def dropped_for_outage(group: Group, reason: str) -> FinishedGroup:
    """Result for a group that is dropped because an environment or a reward was unavailable."""
    logger.warning("dropped group %d: %s", group[0].group_index, reason)
    return FinishedGroup(group=group, decision=FilterDecision(False, UNAVAILABLE), unavailable=reason)


def _claim_version(sample: Sample, version: int | None) -> Sample:
    """If a sample has no weight versions, tag its sampled tokens with `version`. Newer weights may have sampled
    them."""
    if version is None or sample.policy_versions or not any(sample.loss_mask):
        return sample  # a request interrupted before its first token has no sampled token to tag
    first = next(place for place, weight in enumerate(sample.loss_mask) if weight)
    return replace(sample, policy_versions=(VersionSpan(version, first, len(sample.tokens)),))
