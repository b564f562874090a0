"""Train RL on recorded rollouts of an earlier run, without engines.

    samples/step_000001.jsonl, step_000002.jsonl, ...  ->  one batch each, in order, then again from the first

A recorded sample keeps its tokens, masks, log-probs and reward bit for bit. If training starts from the recorded run's
weights, the first step therefore gives the same weights as the recorded step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts_core.config import RolloutConfig
from rollouts_core.config.messages import first_line
from rollouts_core.errors import DataError
from rollouts_core.rewards import RewardFn
from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.rollout.schedule_replay import Schedule
from rollouts_core.rollout.validity import mark_foreign_tokens
from rollouts_core.types import RolloutBatch, Sample, group_samples, sample_from_json

STEP_FILES = "step_*.jsonl"


class OfflineRollouts:
    """Returns the recorded steps of a folder as batches. The class has the methods of `AsyncRolloutManager`.

    Args:
        folder: the folder `samples` of an RL stage.
        num_tokens: a sample is invalid if the policy sampled a token id of at least this number.

    Raises:
        DataError: the folder has no recorded step.
    """

    def __init__(self, folder: Path, config: RolloutConfig, *, num_tokens: int | None = None) -> None:
        self.config = config
        self.num_tokens = num_tokens
        self.files = sorted(folder.glob(STEP_FILES))
        if not self.files:
            raise DataError(f"{folder} has no {STEP_FILES}: give the folder `samples` of an RL stage")
        self._num_taken = 0

    async def generate_batch(self, reward_fn: RewardFn | None = None) -> RolloutBatch:
        """Return the next recorded step with its recorded rewards. After the last step, the first step follows.

        Raises:
            DataError: the file contains no rollouts, or rollouts that were sampled at another temperature.
        """
        assert reward_fn is None, "recorded rollouts have rewards"
        epoch, place = divmod(self._num_taken, len(self.files))
        self._num_taken += 1
        samples = read_rollouts(self.files[place], temperature=self.config.sampling.temperature)
        valid = [mark_foreign_tokens(sample, self.num_tokens) for sample in samples]
        return convert_to_batch(valid, metadata={"epoch_id": epoch})

    def weights_published(self, version: int) -> None:
        """Do nothing: recorded rollouts do not age."""

    def take_idle_s(self) -> float:
        """Always 0, because no completions are generated."""
        return 0.0

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """The number of steps taken so far."""
        return {"num_taken": self._num_taken}

    def load_state_dict(self, state: Mapping[str, Any], *, is_regraded: bool = False) -> None:  # Any: JSON
        """Restore the number of steps taken. `is_regraded` is ignored, because recorded rewards never change."""
        self._num_taken = state["num_taken"]

    def replay(self, schedules: Sequence[Schedule]) -> None:
        """Do nothing: recorded rollouts have a fixed order."""


def read_rollouts(path: Path, *, temperature: float) -> list[Sample]:
    """Read the samples of a recorded step.

    Args:
        temperature: the temperature by which training divides logits.

    Raises:
        DataError: the file contains no sampled tokens, is not a file of samples, or was sampled at another temperature.
    """
    try:
        # Every line must be valid, because a truncated file must not count as a whole step.
        records = [json.loads(line) for line in path.read_bytes().splitlines()]
        samples = [sample_from_json(record) for record in records]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a complete file of rollouts ({first_line(error)}): give a file recorded by an RL stage"
        ) from error
    if not any(any(sample.loss_mask) for sample in samples):
        raise DataError(f"{path} has no sampled token: give a file recorded by an RL stage")
    for recorded in {record.get("temperature", temperature) for record in records}:
        if recorded != temperature:
            raise DataError(
                f"{path} was sampled at temperature {recorded}, but rollout.sampling.temperature is {temperature}: "
                "recorded and computed log-probs would belong to different distributions. Set it to the temperature "
                "of the recording"
            )
    return samples


def check_rollouts(folder: Path, *, vocab_size: int, config: RolloutConfig, max_tokens: int | None = None) -> str:
    """Check all recorded steps of a folder. Returns a sentence with the number of steps, groups and samples.

    Args:
        vocab_size: number of token ids that the model embeds.
        max_tokens: longest sample that the model can compute, tokens; None for no limit.

    Raises:
        DataError: a file contains no rollouts, rollouts of another temperature, a token id of at least `vocab_size`, or
            a sample longer than `max_tokens`.
    """
    num_groups = num_samples = 0
    files = OfflineRollouts(folder, config).files
    for path in files:
        samples = read_rollouts(path, temperature=config.sampling.temperature)
        largest = max(max(sample.tokens, default=0) for sample in samples)
        if largest >= vocab_size:
            raise DataError(
                f"{path} has the token id {largest}, but the model has only {vocab_size} embeddings: it was recorded "
                "with another tokenizer"
            )
        longest = max(len(sample.tokens) for sample in samples)
        if max_tokens is not None and longest > max_tokens:
            raise DataError(
                f"{path} has a sample of {longest} tokens, but the model supports at most {max_tokens} tokens: it "
                "was recorded with another model"
            )
        num_groups += len(group_samples(samples))
        num_samples += len(samples)
    return f"{folder}: {len(files)} recorded steps, {num_groups} groups, {num_samples} samples"
