"""Call a user's loss function (`training.rl.loss_fn`) or a package's objective on a small batch, before the run starts.

algorithms/loss.py describes what such functions must do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rollouts_core.algorithms.credit import RolloutScores
from rollouts_core.algorithms.loss import LossFn, TokenScores, call_loss, create_policy_loss, read_metrics, takes_config
from rollouts_core.batch import TrainBatch
from rollouts_core.config import LossConfig, RLTrainingConfig, name_of_function
from rollouts_core.errors import ConfigError
from rollouts_core.findings import Caution
from rollouts_core.rl_batch import prepare_grpo_batch
from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.types import Sample, Status
from rollouts_core.user_code.failures import describe_raised
from rollouts_core.user_code.functions import resolve_function

LENGTHS = (2, 5, 3, 7)
"""Numbers of tokens of the four completions in the batch. The lengths differ, so that a loss that wrongly averages over
each micro-batch gives another total than over the whole batch."""
MANY_TOKENS, FEW_TOKENS = 1000, 2
"""Limits of tokens per micro-batch: the first puts all rows into one micro-batch, the second each row into its own."""
TOLERANCE = 1e-3
SHIFTS = (-0.3, -4.0, 4.0)
"""The engine's log-probs are shifted by these amounts, in nats, to test whether the loss depends on them."""
READ_BY_OTHERS = ("aggregation", "count_untrained", "kl_coef", "mismatch", "objective", "ratio_base")
"""Settings of `training.rl.loss` that also apply with a user's loss function. no_effect.py warns of `objective`."""


def check_loss_fn(training: RLTrainingConfig) -> list[Caution]:
    """Call the loss function on a batch of four completions, and on each row of the batch separately.

    Returns warnings if the two results differ, or if the function ignores changed settings.

    Raises:
        ConfigError: the function does not exist, raised, or returned something other than `LossFn` describes.
    """
    loss_fn = create_policy_loss(training.loss, training.loss_fn)
    name = name_of_function(training.loss_fn) or training.objective_spec.loss
    whole = _losses(loss_fn, name, training, _build_batches(training, max_tokens=MANY_TOKENS))
    parts = _losses(loss_fn, name, training, _build_batches(training, max_tokens=FEW_TOKENS))
    total, sum_of_parts = sum(map(float, whole)), sum(map(float, parts))
    found: list[Caution] = []
    if not math.isclose(total, sum_of_parts, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        found.append(
            Caution(
                f"the loss function {name} returned {total:.4g} for a batch, but for its rows one by one a sum of "
                f"{sum_of_parts:.4g}, so training.rl.max_micro_batch_tokens and the number of GPUs would change the "
                "result: divide sums over tokens by batch.num_loss_tokens instead of taking means"
            )
        )
    if training.loss_fn == "":
        return found
    own = resolve_function(training.loss_fn, {}, setting="training.rl.loss_fn")
    usual, given = LossConfig().model_dump(exclude=set(READ_BY_OTHERS)), training.loss.model_dump()
    unused = [f"training.rl.loss.{setting}" for setting, value in usual.items() if given[setting] != value]
    if unused and not takes_config(own):
        found.append(
            Caution(
                f"{', '.join(unused)} has no effect: the loss function {name} has no parameter `config`, by which it "
                "would get these settings"
            )
        )
    return found


def reads_rollout_logprobs(training: RLTrainingConfig) -> bool:
    """True if the gradient of the user's loss depends on the engine's log-probs.

    Only such a loss can correct for stale data. Large shifts of the log-probs are tested, too, because a loss may only
    drop tokens whose log-prob changed much.
    """
    loss_fn, name = create_policy_loss(training.loss, training.loss_fn), name_of_function(training.loss_fn)
    [first, *_] = _build_batches(training, max_tokens=MANY_TOKENS)
    gradients = []
    for shift in (0.0, *SHIFTS):
        scores = _scores_of(first, training)
        shifted = replace(first, rollout_logprobs_BT=first.rollout_logprobs_BT + shift)
        gradients.append(_gradient(_call(loss_fn, name, scores, shifted), scores, name))
    return not all(torch.equal(gradients[0], each) for each in gradients[1:])


def _losses(loss_fn: LossFn, name: str, training: RLTrainingConfig, batches: Sequence[TrainBatch]) -> list[Tensor]:
    """Compute the loss of each micro-batch, and check the losses, their gradients and their metrics."""
    losses, names = [], set[frozenset[str]]()
    for batch in batches:
        scores = _scores_of(batch, training)
        loss = _call(loss_fn, name, scores, batch, names)
        if not torch.isfinite(loss) or not torch.isfinite(_gradient(loss, scores, name)).all():
            raise ConfigError(
                f"the loss function {name} returned {float(loss.detach()):g}, with a gradient that may not be finite: "
                "expected a finite loss and gradient"
            )
        losses.append(loss.detach())
    if len(names) > 1:
        [one, another, *_] = names
        differing = ", ".join(sorted(one ^ another))
        raise ConfigError(
            f"the loss function {name} returned these metrics for some micro-batches only: {differing}; return the "
            "same metrics for all"
        )
    return losses


def _call(
    loss_fn: LossFn, name: str, scores: TokenScores, batch: TrainBatch, names: set[frozenset[str]] | None = None
) -> Tensor:
    try:
        loss, metrics = call_loss(loss_fn, scores, batch)
        [read] = read_metrics([metrics])
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the loss function {name} {describe_raised(error)}") from error
    if names is not None:
        names.add(frozenset(read))
    return loss


def _gradient(loss: Tensor, scores: TokenScores, name: str) -> Tensor:
    """(B, T) gradient of the loss with respect to the log-probs. 0 if the loss does not depend on the log-probs."""
    if not loss.requires_grad:
        raise ConfigError(f"the loss function {name} returned a loss without a gradient: compute the loss from scores")
    try:
        [gradient_BT] = torch.autograd.grad(loss, scores.logprobs_BT, allow_unused=True)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the gradient of the loss function {name} {describe_raised(error)}") from error
    return torch.zeros_like(scores.logprobs_BT) if gradient_BT is None else gradient_BT


def _build_batches(training: RLTrainingConfig, *, max_tokens: int) -> list[TrainBatch]:
    """The micro-batches of an update on four made-up completions, with all scores that the settings need."""
    samples = [
        Sample(
            tokens=[1, 2, *range(3, 3 + length)],
            loss_mask=[0.0, 0.0, *[1.0] * length],
            rollout_log_probs=[0.0, 0.0, *(-0.1 * place for place in range(1, length + 1))],
            reward=float(index % 2),
            group_index=index // 2,
            index=index % 2,
            status=Status.COMPLETED,
        )
        for index, length in enumerate(LENGTHS)
    ]
    scored = {place: torch.full((len(sample.tokens) - 1,), -0.5) for place, sample in enumerate(samples)}
    scores = RolloutScores(
        old_logprobs=scored if training.needs_old_scores else {},
        ref_logprobs=scored if training.with_reference else {},
        values=scored if training.with_values else {},
    )
    batch, limit = convert_to_batch(samples), {"max_micro_batch_tokens": max_tokens}
    return prepare_grpo_batch(batch, batch.rewards, training.model_copy(update=limit), scores=scores)


def _scores_of(batch: TrainBatch, training: RLTrainingConfig) -> TokenScores:
    """Made-up log-probs, as of a policy whose weights changed slightly after the completions were sampled."""
    logprobs_BT = (batch.rollout_logprobs_BT - 0.01 * batch.targets_BT) * (batch.loss_mask_BT > 0)
    values_BT = torch.full_like(logprobs_BT, 0.2).requires_grad_() if training.with_values else None
    return TokenScores(
        logprobs_BT=logprobs_BT.requires_grad_(),
        entropies_BT=torch.full_like(logprobs_BT, 0.7).requires_grad_(),
        values_BT=values_BT,
    )
