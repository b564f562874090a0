"""Pins the records of training data: arrays of one length, and a JSON form that loses nothing.

Without it a mask that is one token short would shift the loss silently, and rollouts read back from disk could differ.
"""

import json
import math
import random
import struct
from array import array
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace

import pytest

from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.types import Message, RolloutBatch, Sample, Status, VersionSpan, group_samples, sample_from_json
from tests.rollouts_core.make import make_groups

FULL_SAMPLE = Sample(
    prompt=(Message(role="user", content="1+1=?"),),
    response="2",
    tokens=[3, 14, 15],
    loss_mask=[0.0, 0.0, 1.0],
    rollout_log_probs=[0.0, 0.0, -0.25],
    reward=1.0,
    group_index=7,
    index=3,
    status=Status.TRUNCATED,
    finish_reason="length",
    policy_versions=(VersionSpan(4, 2, 3),),
    metadata={"answer": "2", "nested": {"a": [1, 2]}},
)


def test_a_loss_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_mask has 2 entries for 3 tokens"):
        Sample(tokens=[1, 2, 3], loss_mask=[0, 1])


def test_rollout_log_probs_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="rollout_log_probs has 1 entries for 3 tokens"):
        Sample(tokens=[1, 2, 3], loss_mask=[0, 1, 1], rollout_log_probs=[0.0])


def test_a_changed_copy_is_checked_as_well() -> None:
    with pytest.raises(ValueError, match="loss_mask has 3 entries for 1 tokens"):
        replace(FULL_SAMPLE, tokens=[1])


def test_a_sample_cannot_be_changed_in_place() -> None:
    with pytest.raises(FrozenInstanceError):
        FULL_SAMPLE.reward = 0.0  # type: ignore[misc]


@pytest.mark.parametrize("sample", [FULL_SAMPLE, Sample(), Sample(prompt="text", tokens=[1], loss_mask=[1.0])])
def test_a_sample_comes_back_unchanged_from_json(sample: Sample) -> None:
    assert sample_from_json(json.loads(json.dumps(sample.to_json()))) == sample


@pytest.mark.parametrize("status", list(Status))
def test_every_status_comes_back_as_a_status(status: Status) -> None:
    restored = sample_from_json(json.loads(json.dumps(Sample(status=status).to_json())))
    assert restored.status is status


def test_a_record_of_a_later_version_is_read_without_its_unknown_fields() -> None:
    assert sample_from_json({**FULL_SAMPLE.to_json(), "unknown": 1}) == FULL_SAMPLE


def test_a_batch_as_json_holds_its_samples_and_counters() -> None:
    batch = RolloutBatch(
        tokens=[FULL_SAMPLE.tokens],
        loss_masks=[FULL_SAMPLE.loss_mask],
        rewards=[1.0],
        response_lengths=[1],
        metadata={"step": 3},
        samples=(FULL_SAMPLE,),
    )
    record = json.loads(json.dumps(batch.to_json()))
    assert [sample_from_json(sample) for sample in record["samples"]] == [FULL_SAMPLE]
    assert record["metadata"] == {"step": 3}


def read_back(batch: RolloutBatch) -> RolloutBatch:
    return RolloutBatch.from_json(json.loads(json.dumps(batch.to_json())))


def bits(values: Sequence[float]) -> bytes:
    """What tells -0.0 from 0.0, and floats that print alike."""
    return array("d", values).tobytes()


def test_a_batch_comes_back_unchanged_from_json() -> None:
    drawn = [replace(sample, metadata={"answer": "7"}, status=Status.COMPLETED) for sample in make_groups(3, 2)]
    samples = [*drawn, replace(FULL_SAMPLE, group_index=9, reward=-0.0)]
    batch = convert_to_batch(samples, metadata={"epoch_id": 2, "drops": {"zero_std_0": 1}, "staleness": {"mean": 0.1}})
    assert read_back(batch) == batch
    assert read_back(batch).groups == batch.groups and len(batch.groups) == 4
    assert bits(read_back(batch).rewards) == bits(batch.rewards)


def test_floats_of_a_batch_come_back_bit_for_bit() -> None:
    rng = random.Random(0)
    floats = [struct.unpack("d", rng.randbytes(8))[0] for _ in range(1000)]
    finite = [0.1 + 0.2, -0.0, 5e-324, 1.7976931348623157e308, *filter(math.isfinite, floats)]
    sample = Sample(tokens=[0] * len(finite), loss_mask=finite, rollout_log_probs=finite, reward=finite[0])
    [restored] = read_back(convert_to_batch([sample])).samples
    assert restored.rollout_log_probs and restored.reward
    assert bits(restored.loss_mask) == bits(restored.rollout_log_probs) == bits(finite)
    assert bits([restored.reward]) == bits(finite[:1])


def test_a_sample_without_a_reward_comes_back_without_one() -> None:
    batch = read_back(convert_to_batch([replace(FULL_SAMPLE, reward=None), FULL_SAMPLE]))
    assert [sample.reward for sample in batch.samples] == [None, 1.0]
    assert math.isnan(batch.rewards[0]) and batch.rewards[1] == 1.0


def test_columns_that_are_not_those_of_the_samples_come_back_as_well() -> None:
    shaped = replace(convert_to_batch([FULL_SAMPLE]), rewards=[0.25])
    bare = RolloutBatch(tokens=[[1, 2]], loss_masks=[[0.0, 1.0]], rewards=[1.0], response_lengths=[1])
    assert read_back(shaped) == shaped
    assert read_back(bare) == bare


def test_groups_keep_the_order_of_first_appearance() -> None:
    samples = [Sample(group_index=g, index=i) for g, i in [(5, 0), (2, 0), (5, 1), (2, 1)]]
    groups = group_samples(samples)
    assert [[(s.group_index, s.index) for s in group] for group in groups] == [[(5, 0), (5, 1)], [(2, 0), (2, 1)]]
