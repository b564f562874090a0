"""Measure and correct the difference between the log-probs of engine and trainer (engine-trainer mismatch).

Engine and trainer compute different log-probs for the same token, because the engine uses another number format, other
kernels, and sometimes older weights. The weight w of a sampled token is its probability by the trainer before the
update, divided by its probability by the engine when it was sampled.

B rows of a micro-batch, T token positions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollouts_core.batch import TrainBatch

if TYPE_CHECKING:
    from rollouts_core.config import MismatchConfig

MAX_LOG_WEIGHT = 20.0
"""Limit of |log w| before exp, so that outliers do not become infinite."""
LARGE_GAP_NATS = 0.1
"""A |log w| above this counts as a large gap, nats. Different number formats cause only a tenth of this gap."""
HIGH_QUANTILE = 0.99

MISMATCH_METRICS = ("mismatch_kl", "mismatch_ratio_max", "mismatch_mean", "mismatch_p99_max", "mismatch_beyond_share")
"""Metrics that compare the engine's log-probs with the trainer's. Every update has them.

In the second and later updates of a step, these metrics are valid only if the trainer's log-probs before the first
update are known."""
ENGINE_METRICS = ("kl_rollout_policy", *MISMATCH_METRICS)
"""Metrics that need the engine's log-probs."""


@torch.no_grad()
def mismatch_weights(log_weight_BT: Tensor, batch: TrainBatch, config: MismatchConfig) -> Tensor:
    """(B, T) factors for the tokens' policy loss: 1 if no correction is configured, 0 for masked tokens.

    Args:
        log_weight_BT: log w of each token, or 0 at untrained tokens.

    Source: truncated importance sampling fengyao.notion.site/off-policy-rl; IcePop arXiv:2510.18855; sequence masks
    yingru.notion.site (When Speed Kills Stability).
    """
    weights_BT = torch.ones_like(log_weight_BT)
    if config.weight != "none":
        raw_BT = _weight_of(log_weight_BT, batch, config.weight)
        high = config.weight_high or math.inf
        if config.outside == "clamp":
            weights_BT = raw_BT.clamp(config.weight_low, high)
        else:
            weights_BT = torch.where((raw_BT >= config.weight_low) & (raw_BT <= high), raw_BT, 0.0)
    if config.mask != "none":
        judged_BT = _weight_of(log_weight_BT, batch, config.mask)
        stays_BT = (judged_BT >= config.mask_low) & (judged_BT <= (config.mask_high or math.inf))
        weights_BT = torch.where(stays_BT, weights_BT, 0.0)
    return weights_BT


@torch.no_grad()
def describe_mismatch(
    log_weight_BT: Tensor, weights_BT: Tensor, batch: TrainBatch, config: MismatchConfig
) -> dict[str, Tensor]:
    """Metrics of the difference between trainer and engine: (B, T) tensors to average over tokens, and scalars.

    mismatch_kl: k3 estimate of KL(engine || trainer). mismatch_ratio_max: maximum of w and 1/w over all tokens.
    mismatch_mean, mismatch_p99_max: mean and 99th percentile of |log w|. mismatch_beyond_share: share of tokens with
    |log w| above `LARGE_GAP_NATS`. mismatch_masked_share: share of tokens with factor 0. mismatch_clamped_share: share
    of tokens whose factor was moved to a limit.

    Args:
        log_weight_BT: log w of each token, or 0 at untrained tokens.
        weights_BT: the result of `mismatch_weights`.
    """
    limited_BT = log_weight_BT.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    described = {
        "mismatch_kl": torch.expm1(limited_BT) - limited_BT,
        "mismatch_ratio_max": limited_BT.abs().max().exp(),
        "mismatch_mean": limited_BT.abs(),
        "mismatch_p99_max": _high_quantile(limited_BT.abs(), batch),
        "mismatch_beyond_share": (limited_BT.abs() > LARGE_GAP_NATS).float(),
    }
    if config.weight != "none" or config.mask != "none":
        described["mismatch_masked_share"] = (weights_BT == 0).float()
    if config.weight != "none":
        raw_BT = _weight_of(log_weight_BT, batch, config.weight)
        described["mismatch_clamped_share"] = ((weights_BT != raw_BT) & (weights_BT != 0)).float()
    return described


def _high_quantile(values_BT: Tensor, batch: TrainBatch) -> Tensor:
    """Scalar: the `HIGH_QUANTILE` quantile of the values at trained tokens. The computation does not wait for the
    GPU."""
    is_trained_BT = batch.loss_mask_BT > 0
    rising = torch.where(is_trained_BT, values_BT, -1.0).flatten().sort().values
    num_above = (is_trained_BT.sum() * (1 - HIGH_QUANTILE)).long()
    return rising.gather(0, (len(rising) - 1 - num_above)[None])[0].clamp(min=0.0)


def sum_per_sample(values_BT: Tensor, batch: TrainBatch) -> Tensor:
    """(B, T) at each position, the sum of `values_BT` over the sample to which the position belongs."""
    if not batch.is_packed:
        return values_BT.sum(dim=1, keepdim=True).expand_as(values_BT)
    num_segments = batch.layout.num_segments
    sums_BS = torch.zeros(len(values_BT), num_segments, device=values_BT.device, dtype=values_BT.dtype)
    return sums_BS.scatter_add(1, batch.segment_ids_BT, values_BT).gather(1, batch.segment_ids_BT)


def mean_per_sample(values_BT: Tensor, batch: TrainBatch) -> Tensor:
    """(B, T) at each position, the mean of `values_BT` over its sample, weighted by the loss mask."""
    sums_BT = sum_per_sample(values_BT * batch.loss_mask_BT, batch)
    return sums_BT / sum_per_sample(batch.loss_mask_BT, batch).clamp(min=1e-9)


def _weight_of(log_weight_BT: Tensor, batch: TrainBatch, level: str) -> Tensor:
    """(B, T) w at the configured level: of the token, or of its sample as product or geometric mean over the
    sample's tokens."""
    if level == "geometric":
        log_weight_BT = mean_per_sample(log_weight_BT, batch)
    elif level in ("sequence", "product"):
        log_weight_BT = sum_per_sample(log_weight_BT, batch)
    return log_weight_BT.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
