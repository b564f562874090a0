"""The model being trained: a causal language model that says how likely the tokens of a batch are.

Not here: loading models (model.py), gradients and optimizers (pytorch_backend.py), generation (embedded/, engines/).

    batch -> decoder -> hidden states of the scored positions -> head, a piece at a time -> TokenScores

B rows of a micro-batch, T token positions, N scored tokens, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rollouts_core.batch import TrainBatch, block_causal_mask
from rollouts_core.logprobs import linear_logprobs
from rollouts_core.loss import TokenScores

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Policy(nn.Module):
    """A Hugging Face causal language model with what training needs on top of it.

    Args:
        temperature: logits are divided by it before the softmax: the rollouts' temperature in RL, 1 in SFT.
        with_entropies: also give the entropy of every scored position.
        with_values: add a value head, which predicts the return from the hidden state; its prediction starts at 0.
    """

    def __init__(
        self,
        hf_model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        with_entropies: bool = False,
        with_values: bool = False,
    ) -> None:
        super().__init__()
        self.hf_model = hf_model
        self.temperature = temperature
        self.with_entropies = with_entropies
        self.value_head = _create_value_head(hf_model) if with_values else None

    def forward(self, batch: TrainBatch) -> TokenScores:
        """What the policy says about the batch."""
        return score_targets(
            self.hf_model,
            batch,
            temperature=self.temperature,
            with_entropies=self.with_entropies,
            value_head=self.value_head,
        )


def score_targets(
    hf_model: PreTrainedModel,
    batch: TrainBatch,
    *,
    temperature: float = 1.0,
    with_entropies: bool = False,
    value_head: nn.Linear | None = None,
) -> TokenScores:
    """Score the targets in the batch's loss mask; other positions are 0."""
    is_scored_BT = batch.loss_mask_BT != 0
    hidden_NH = compute_hidden_states(hf_model, batch)[is_scored_BT]
    head = hf_model.get_output_embeddings()
    logprobs_N, entropies_N = linear_logprobs(
        hidden_NH,
        head.weight,
        batch.targets_BT[is_scored_BT],
        bias_V=head.bias,
        temperature=temperature,
        with_entropies=with_entropies,
    )
    values_N = None if value_head is None else value_head(hidden_NH.float()).squeeze(-1)
    return TokenScores(
        logprobs_BT=_scatter(logprobs_N, is_scored_BT),
        entropies_BT=None if entropies_N is None else _scatter(entropies_N, is_scored_BT),
        values_BT=None if values_N is None else _scatter(values_N, is_scored_BT),
    )


def compute_logprobs(hf_model: PreTrainedModel, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
    """(B, T) log p(target | what precedes it in its own sample), nats; 0 outside the loss mask."""
    return score_targets(hf_model, batch, temperature=temperature).logprobs_BT


def compute_hidden_states(hf_model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """(B, T, H) what the decoder makes of a batch, each sample seeing only itself."""
    # Right-padded rows of one sample need no mask: causal attention never reaches the padding.
    attention_mask = block_causal_mask(batch.segment_ids_BT, hf_model.dtype) if batch.is_packed else None
    hidden_BTH: Tensor = hf_model.base_model(
        input_ids=batch.inputs_BT,
        position_ids=batch.position_ids_BT,
        attention_mask=attention_mask,
        use_cache=False,
    ).last_hidden_state
    return hidden_BTH


def _scatter(values_N: Tensor, at_BT: Tensor) -> Tensor:
    return torch.zeros(at_BT.shape, device=values_N.device).masked_scatter(at_BT, values_N)


def _create_value_head(hf_model: PreTrainedModel) -> nn.Linear:
    head = nn.Linear(hf_model.get_output_embeddings().weight.shape[1], 1, device=hf_model.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
