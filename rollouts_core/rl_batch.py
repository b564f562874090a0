"""Turn the graded samples of a step into the micro-batches of its updates.

    rewards -> shaped rewards -> advantages -> minibatches of whole groups -> rows -> micro-batches, with the totals
                                                                                      of their update

An update is one optimizer step. A mean in the loss is divided by a count over all samples of the update, including
samples without a gradient, which are in no row. The split into micro-batches therefore does not change the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollouts_core.algorithms.credit import Credit, RolloutScores, assign_credit, trained_samples
from rollouts_core.batch import (
    TrainBatch,
    build_batch,
    group_sharers,
    place_samples,
    spread_over_rows,
    with_step_totals,
)
from rollouts_core.config import RLTrainingConfig
from rollouts_core.data.packing import pack_lengths
from rollouts_core.model.attention_choice import MAX_SHARERS
from rollouts_core.types import RolloutBatch, Sample

Rows = list[list[int]]
"""The rows of a micro-batch: for each row, the indices of its samples in the rollout batch."""


def prepare_grpo_batch(
    batch: RolloutBatch,
    rewards: Sequence[float],
    config: RLTrainingConfig,
    *,
    pad_id: int = 0,
    scores: RolloutScores | None = None,
) -> list[TrainBatch]:
    """Return the micro-batches of one update on all samples, with their advantages.

    Samples without a gradient are left out, but their tokens count in the means.

    Args:
        scores: log-probs and values that the settings need, computed by `rl.score_rollouts`.
    """
    return prepare_updates(batch, rewards, config, num_updates=1, pad_id=pad_id, scores=scores)[0]


def prepare_updates(
    batch: RolloutBatch,
    rewards: Sequence[float],
    config: RLTrainingConfig,
    *,
    num_updates: int,
    pad_id: int = 0,
    scores: RolloutScores | None = None,
    num_ranks: int = 1,
) -> list[list[TrainBatch]]:
    """Return the micro-batches of each update.

    Advantages are computed over the whole batch. Totals are computed over each update.

    Updates contain whole groups, in order. An update in which no sample has a gradient has no micro-batches.

    Args:
        num_ranks: number of devices that share the rows of each micro-batch.
    """
    known = scores or RolloutScores()
    samples = trained_samples(batch.samples, config.reward_shaping)
    credit = assign_credit(batch.samples, rewards, config, known)
    return [
        _build_update(places, samples, credit, known, config, pad_id=pad_id, num_ranks=num_ranks)
        for places in split_groups(samples, num_updates)
    ]


def group_places(samples: Sequence[Sample]) -> dict[int, list[int]]:
    """The indices of the samples of each group. Groups are in the order of their first sample."""
    places: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample.group_index, []).append(place)
    return places


def split_groups(samples: Sequence[Sample], num_parts: int) -> list[list[int]]:
    """Split samples into parts that contain whole groups, in order, as equal as possible.

    Returns the indices of each part.
    """
    groups = list(group_places(samples).values())
    bounds = [len(groups) * part // num_parts for part in range(num_parts + 1)]
    return [[place for group in groups[start:end] for place in group] for start, end in itertools.pairwise(bounds)]


def has_gradient(sample: Sample, advantage: Tensor | float, config: RLTrainingConfig) -> bool:
    """Return True if training on the sample changes the weights, through its advantage or through another term of the
    loss.
    """
    loss = config.loss
    others = loss.kl_coef > 0 or loss.entropy_coef > 0 or loss.ratio_penalty > 0 or config.with_values
    others = others or not config.objective_spec.follows_advantage
    return any(sample.loss_mask[1:]) and (others or is_advantage(advantage))


def is_advantage(advantage: Tensor | float) -> bool:
    """True if the advantage, or any token's advantage, is not 0."""
    return bool(advantage.any()) if isinstance(advantage, Tensor) else advantage != 0.0


def is_reinforced(samples: Sequence[Sample], rewards: Sequence[float], config: RLTrainingConfig) -> bool:
    """Return True if rewards contribute to the step's updates.

    If the result is False, only other terms of the loss contribute, such as KL or entropy.

    With a value head the result is always True, because a value head also learns from equal rewards.
    """
    if config.with_values:
        return True
    without_kl = config.model_copy(update={"reward_shaping": config.reward_shaping.model_copy(update={"kl_coef": 0.0})})
    advantages = assign_credit(samples, rewards, without_kl, RolloutScores()).advantages
    trained = trained_samples(samples, config.reward_shaping)
    return any(
        is_advantage(advantage) and any(sample.loss_mask[1:])
        for sample, advantage in zip(trained, advantages, strict=True)
    )


def places_to_score(samples: Sequence[Sample], rewards: Sequence[float], config: RLTrainingConfig) -> list[int]:
    """The indices of the samples to score before the first update: usually the samples with a gradient.

    If the advantages depend on the scores, every trained sample is scored. If no setting needs scores, the list is
    empty.
    """
    if not (config.needs_old_scores or config.with_reference):
        return []
    trained = trained_samples(samples, config.reward_shaping)
    if config.with_values or config.reward_shaping.kl_coef:
        return [place for place, sample in enumerate(trained) if any(sample.loss_mask[1:])]
    advantages = assign_credit(samples, rewards, config, RolloutScores()).advantages
    return [place for place, sample in enumerate(trained) if has_gradient(sample, advantages[place], config)]


def plan_rows(
    places: Sequence[int], samples: Sequence[Sample], config: RLTrainingConfig, *, num_ranks: int = 1
) -> list[Rows]:
    """Plan micro-batches.

    A micro-batch has at most `config.max_micro_batch_tokens` tokens per rank, including padding, or a single longer
    row.

    Rows of similar length share a micro-batch, so there is little padding. A packed row is at most as long as the
    longest unit (one sample, or samples that share a prompt). Longer packed rows would only add attention that the mask
    discards.
    """
    if not places:
        return []
    shares, max_tokens = config.shares_prompts, config.max_micro_batch_tokens
    units = share_groups(places, samples, max_tokens=max_tokens) if shares else [[place] for place in places]
    lengths = [_row_length([samples[place] for place in unit], share_prompts=shares) for unit in units]
    packed = pack_lengths(lengths, max(lengths)) if config.packing else [[i] for i in range(len(units))]
    packed.sort(key=lambda row: -sum(lengths[i] for i in row))
    micro_batches: list[Rows] = []
    num_rows = 0
    for row in packed:
        if not micro_batches or len(micro_batches[-1]) == num_rows:
            micro_batches.append([])
            num_rows = num_ranks * max(1, max_tokens // sum(lengths[i] for i in row))
        micro_batches[-1].append([place for i in row for place in units[i]])
    return micro_batches


def share_groups(places: Sequence[int], samples: Sequence[Sample], *, max_tokens: int) -> list[list[int]]:
    """Split each group into units. A unit has at most `MAX_SHARERS` samples of similar length that share their prompt.

    A sample that shares no prompt is its own unit. A unit longer than `max_tokens` is split into single samples.
    """
    units: list[list[int]] = []
    for _, members in itertools.groupby(places, key=lambda place: samples[place].group_index):
        for unit in _deal_out(list(members), samples):
            in_unit = [samples[place] for place in unit]
            is_sharing = len(group_sharers(in_unit)) == 1
            fits = is_sharing and _row_length(in_unit, share_prompts=True) <= max_tokens
            units += [unit] if fits else [[place] for place in unit]
    return units


def _deal_out(members: Sequence[int], samples: Sequence[Sample]) -> list[list[int]]:
    """Split a group into parts of at most `MAX_SHARERS` samples, so that each part gets some of the long samples."""
    num_parts = math.ceil(len(members) / MAX_SHARERS)
    turns = itertools.cycle([*range(num_parts), *reversed(range(num_parts))])
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for place, part in zip(sorted(members, key=lambda place: -len(samples[place].tokens)), turns, strict=False):
        parts[part].append(place)
    return [sorted(part) for part in parts]


def _row_length(row: Sequence[Sample], *, share_prompts: bool) -> int:
    """Number of tokens of a row after its samples are laid end to end."""
    return int(place_samples(row, share_prompts=share_prompts)[-1].own.stop) + len(row)


def _build_update(
    places: Sequence[int],
    samples: Sequence[Sample],
    credit: Credit,
    scores: RolloutScores,
    config: RLTrainingConfig,
    *,
    pad_id: int,
    num_ranks: int,
) -> list[TrainBatch]:
    useful = [place for place in places if has_gradient(samples[place], credit.advantages[place], config)]
    columns: dict[str, Mapping[int, Tensor]] = {
        "old_logprobs_BT": scores.old_logprobs,
        "ref_logprobs_BT": scores.ref_logprobs,
        "old_values_BT": scores.values,
        "returns_BT": credit.returns,
    }
    if config.loss.aggregation == "prompt_mean":
        columns["group_tokens_BT"] = _count_group_tokens(places, samples)
    batches = []
    for rows in plan_rows(useful, samples, config, num_ranks=num_ranks):
        in_rows = [[samples[place] for place in row] for row in rows]
        batch = build_batch(
            in_rows,
            pad_id=pad_id,
            advantages=[[credit.advantages[place] for place in row] for row in rows],
            share_prompts=config.shares_prompts,
        )
        layouts = [place_samples(row, share_prompts=config.shares_prompts) for row in in_rows]
        width = batch.inputs_BT.shape[1]
        filled: dict[str, Any] = {
            name: spread_over_rows([[column[place] for place in row] for row in rows], layouts, num_positions=width)
            for name, column in columns.items()
            if column
        }
        batches.append(replace(batch, **filled))
    in_update = [samples[place] for place in places]
    return with_step_totals(batches, in_update, count_untrained=config.loss.count_untrained)


def _count_group_tokens(places: Sequence[int], samples: Sequence[Sample]) -> dict[int, Tensor]:
    """For each index in `places`, the sum of the loss mask over all samples of the sample's group."""
    totals: dict[int, float] = {}
    for place in places:
        group = samples[place].group_index
        totals[group] = totals.get(group, 0.0) + sum(samples[place].loss_mask[1:])
    return {place: torch.tensor(totals[samples[place].group_index]) for place in places}
