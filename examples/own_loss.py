"""A loss of your own for RL: SAPO, whose soft gate takes the place of PPO's clip. Copy this file to begin with.

Put the file beside the configuration and name the function in it:

    [training.rl]
    loss_fn = "own_loss:sapo_loss"

`rollouts validate` calls it once on a small batch. A run sends the file to its machines, and an edited file is another
stage. docs/algorithms.md has the contract.

B rows of a micro-batch, T token positions.
"""

import torch
from torch import Tensor

from rollouts_core import TokenScores, TrainBatch

TAU_RISE, TAU_FALL = 1.0, 1.05
"""How steep the gate is for tokens that are to become likelier, and for the others."""


def sapo_loss(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """-gate(ratio) x advantage, averaged over the trained tokens of the whole update.

    The gate is 4 / tau x sigmoid(tau x (ratio - 1)): its slope is 1 at the ratio 1 and falls on both sides.

    Source: arXiv:2511.20347.
    """
    is_trained_BT = batch.loss_mask_BT > 0
    # Masked positions may hold anything: 0 x inf would be NaN.
    log_ratio_BT = torch.where(is_trained_BT, scores.logprobs_BT - batch.rollout_logprobs_BT, 0.0)
    ratio_BT = log_ratio_BT.clamp(-20, 20).exp()
    tau_BT = torch.where(batch.advantages_BT > 0, TAU_RISE, TAU_FALL)
    gate_BT = 4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1))
    # The divisors count the whole update, so the losses and the metrics of its micro-batches add up.
    loss = -(gate_BT * batch.advantages_BT * batch.loss_mask_BT).sum() / batch.num_loss_tokens
    far = ((ratio_BT - 1).abs() > 0.2).float() * batch.loss_mask_BT / batch.num_scored_tokens
    return loss, {"loss": loss.detach(), "far_share": far.sum()}
