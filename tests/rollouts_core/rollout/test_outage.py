"""What becomes of groups for which something was not available: dropped one by one, waited for together.

Without it an outage of a sandbox ends a run that cost days, or is trained on as rewards of 0.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollouts_core.errors import EnvironmentOutageError, EnvironmentUnavailableError
from rollouts_core.rl import describe_rollouts
from rollouts_core.rollout import outage
from rollouts_core.types import Sample, Status
from tests.rollouts_core.rollout.test_rollout import CONFIG, answer_with, generate


async def fail_the_first_group(group: Sequence[Sample]) -> list[Sample]:
    if group[0].group_index == 0:
        first = replace(group[0], status=Status.FAILED, metadata={**group[0].metadata, "error": "no GPU left"})
        return [first, *(answer_with(sample) for sample in group[1:])]
    return [answer_with(sample) for sample in group]


def test_a_group_with_a_sample_that_failed_is_dropped_as_an_outage_and_never_graded() -> None:
    graded: list[Status] = []

    def note_status(sample: Sample) -> float:
        graded.append(sample.status)
        return 0.0

    changes = {"generate_fn": fail_the_first_group, "reward_fn": note_status}
    _, batch = generate(CONFIG.model_copy(update=changes))
    assert [group[0].group_index for group in batch.groups] == [1, 2, 3]
    assert batch.metadata["drops"] == {"environment_unavailable": 1}
    assert set(graded) == {Status.COMPLETED}


def test_too_many_samples_that_failed_end_the_batch_and_say_why() -> None:
    changes = {"generate_fn": fail_the_first_group, "max_environment_failure_share": 0.0, "max_outage_minutes": 0.0}
    with pytest.raises(EnvironmentOutageError, match="got no usable completion: no GPU left"):
        generate(CONFIG.model_copy(update=changes))


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_an_outage_pauses_the_run_which_asks_for_the_same_groups_again(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """With a share of 0.05 two groups are dropped before it is one; no other is lost."""
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.01)
    asked: list[int] = []

    async def is_back_after_nine_calls(group: Sequence[Sample]) -> list[Sample]:
        asked.append(group[0].group_index)
        if len(asked) <= 9:
            raise EnvironmentUnavailableError("the sandboxes are away")
        return [answer_with(sample) for sample in group]

    changes = {"generate_fn": is_back_after_nine_calls, "max_environment_failure_share": share, "max_refills": 1}
    manager, batch = generate(CONFIG.model_copy(update=changes))
    num_dropped = round(share * 50)
    assert batch.metadata["num_dropped_groups"] == num_dropped
    kept = {sample.group_index for sample in (*batch.samples, *manager.partial_samples)}
    assert kept == set(range(manager.data_buffer.num_drawn)) - set(batch.metadata.get("unavailable", ()))
    assert len(batch.groups) == 3 and len(batch.metadata.get("unavailable", ())) == num_dropped
    assert describe_rollouts(batch)["paused_s"] >= 0.02, "a second pause is longer"


def test_an_outage_that_lasts_ends_the_run_and_says_for_how_long_it_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.02)

    async def fail(group: Sequence[Sample]) -> list[Sample]:
        raise EnvironmentUnavailableError("the sandboxes are away")

    changes = {"generate_fn": fail, "max_environment_failure_share": 0.0, "max_outage_minutes": 0.001}
    began = time.monotonic()
    with pytest.raises(EnvironmentOutageError, match=r"also after pauses of 0\.0 minutes; they .*sandboxes are away"):
        generate(CONFIG.model_copy(update=changes))
    assert time.monotonic() - began >= 0.06


def test_an_outage_may_last_for_days() -> None:
    settings = {"max_environment_failure_share": 0.0, "max_outage_minutes": 7 * 24 * 60.0}
    watch = outage.OutageWatch(CONFIG.model_copy(update=settings))
    pauses = []
    while pause_s := watch.begin_pause("the sandboxes are away"):
        watch.end_pause(pause_s)
        pauses.append(pause_s)
    assert pauses[:6] == [15, 30, 60, 120, 240, 300]
    assert max(pauses) == 300 and sum(pauses) == 7 * 24 * 3600
