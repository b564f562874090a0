"""What the functions of well-known systems returned at a recorded commit, and the inputs they were given.

peers/<system>.json holds the cases of a system, peers/inputs.json what went into them. UNSUPPORTED names what we do
not offer, so that a case can be left out only on purpose.

Not here: how the cases are recorded (peers/recording.py), comparing with them (test_peer_losses.py,
test_peer_advantages.py, test_presets.py).
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollouts_core.batch import TrainBatch

Case = dict[str, Any]  # Any: a recorded case

PEERS = Path(__file__).parent / "peers"
INPUTS: Case = json.loads((PEERS / "inputs.json").read_text())
SYSTEMS = sorted(path.stem for path in PEERS.glob("*.json") if path.stem != "inputs")
NO_LIMIT = {"kl_input_clamp": 0.0, "kl_output_clamp": 0.0}
TOLERANCE = 2e-6
"""Relative and absolute: some systems compute in float32."""


def cases(system: str) -> list[Case]:
    return list(json.loads((PEERS / f"{system}.json").read_text())["cases"])


ALL_CASES = {f"{system}-{case['name']}": case for system in SYSTEMS for case in cases(system)}
LOSSES = [name for name, case in ALL_CASES.items() if "gradient_policy_logprobs_BT" in case["outputs"]]


def tensor(name: str) -> Tensor:
    return torch.tensor(INPUTS[name], dtype=torch.float64)


def close(found: Any, expected: Any) -> bool:  # Any: nested lists of numbers
    return bool(
        torch.allclose(
            torch.as_tensor(found, dtype=torch.float64),
            torch.as_tensor(expected, dtype=torch.float64),
            rtol=TOLERANCE,
            atol=TOLERANCE,
        )
    )


def make_batch(case: Case, *, count_untrained: bool) -> TrainBatch:
    """The recorded inputs as a batch in float64."""
    mask_BT, inputs = tensor("loss_mask_BT"), case["inputs"]
    rows = case["settings"].get("rows", list(range(len(mask_BT))))
    per_token = "advantages_BT" in inputs
    advantages_BT = tensor("advantages_BT") if per_token else tensor("advantages_B")[:, None].expand_as(mask_BT)
    mask_BT = mask_BT[rows]
    zeros = torch.zeros(mask_BT.shape, dtype=torch.long)
    num_samples = len(rows) if count_untrained else int((mask_BT.sum(dim=1) > 0).sum())
    return TrainBatch(
        inputs_BT=zeros,
        targets_BT=zeros,
        position_ids_BT=zeros,
        segment_ids_BT=torch.ones_like(zeros),
        prompt_ids_BT=torch.ones_like(zeros),
        loss_mask_BT=mask_BT,
        advantages_BT=advantages_BT[rows],
        rollout_logprobs_BT=tensor("rollout_logprobs_BT")[rows],
        old_logprobs_BT=tensor("old_logprobs_BT")[rows],
        ref_logprobs_BT=tensor("ref_logprobs_BT")[rows],
        group_tokens_BT=mask_BT.unflatten(0, (-1, 2)).sum(dim=(1, 2)).repeat_interleave(2)[:, None].expand_as(mask_BT)
        if len(rows) == 6
        else None,
        num_loss_tokens=float(mask_BT.sum()),
        num_scored_tokens=float(mask_BT.sum()),
        num_samples=num_samples,
        num_groups=3,
        is_packed=False,
    )


def tensor_of(case: Case, output: str) -> Tensor:
    return torch.tensor(case["outputs"][output], dtype=torch.float64)


UNSUPPORTED = {
    "trl-policy_loss_sapo": "the soft gate of SAPO",
    "trl-policy_loss_vespo": "the gamma weights of VESPO",
    "trl-policy_loss_luspo": "a sum over tokens of a ratio of the sequence",
    "trl-policy_loss_rloo": "a ratio of whole completions that is not the geometric mean",
    "trl-policy_loss_opsm": "judges the drift from the engine's log-probs, the ratio from the trainer's",
    "verl-mismatch_token_tis_normalized": "weights divided by their mean over the batch",
    "verl-mismatch_k3_rs": "a mask by the k3 estimate",
    "verl-advantage_passk": "the best of a group against its second",
    "verl-advantage_opo": "a baseline weighted by length",
    "verl-advantage_reinforce_plus_plus": "discounted rewards per token without a value head",
    "openrlhf-advantage_reinforce_plus_plus": "no baseline, whitened",
    "openrlhf-advantage_reinforce_plus_plus_discounted": "discounted rewards per token without a value head",
    "trl-advantage_rloo_normalized": "RLOO divided by the deviation of the batch's advantages",
    "nemo_rl-policy_loss_on_policy_kl": "the KL term weighted by the ratio to the engine",
    "nemo_rl-policy_loss_on_policy": "a ratio that is 1 by decree",
    "open_instruct-policy_loss_constant_denominator": "a divisor that counts nothing",
    "open_instruct-mismatch_tv": "a mask by total variation",
    "prime_rl-policy_loss_ipo": "a symmetric limit on how far a probability moves",
    "prime_rl-policy_loss_ref_kl": "distillation",
    "skyrl-policy_loss_token_mean_legacy": "a mean of micro-batches' means",
    "skyrl-policy_loss_sapo": "the soft gate of SAPO",
    "skyrl-policy_loss_dppo": "its trust region with a truncated ratio",
    "skyrl-policy_loss_rollout_is": "IcePop on the ratio to the engine",
    "skyrl-advantage_maxrl_ragged": "an advantage of a million where the mean is 0; ours has no signal there",
    "skyrl-mismatch_outlier_mask": "a completion masked for one of its tokens",
    "skyrl-gae_discounted": "discounts over observations, too",
    "openrlhf-gae_discounted": "discounts over observations, too",
    "nemo_rl-gae_discounted": "discounts over observations, too",
    "skyrl-advantage_reinforce_plus_plus": "discounted rewards per token without a value head",
    "slime-advantage_grpo_ragged": "one row for all groups where their sizes differ",
    "areal-policy_loss_sapo": "the soft gate of SAPO",
    "areal-mismatch_sequence_kl_k3": "a mask by the k3 estimate",
    "areal-advantage_tokens_group": "whitening within groups",
    "areal-advantage_tokens_batch": "whitening with 1e-5 added to the deviation",
    "areal-advantage_group_mean_batch_std": "the deviation of the centred rewards",
    "areal-gae_no_norm": "the reward at the last position of a row, trained or not",
    "areal-gae_default": "the reward at the last position of a row, trained or not",
    "areal-gae_discounted": "the reward at the last position of a row, trained or not",
    "slime-advantage_ppo": "values and divergences of observations, too",
    "slime-advantage_ppo_whitened": "values and divergences of observations, too",
    "slime-advantage_reinforce_plus_plus_baseline_tokens": "the divergence of a token charged to itself alone",
    "tinker_cookbook-kl_in_advantage": "the divergence in the advantage, centred over the batch",
    "tinker_cookbook-kl_in_advantage_discounted": "the divergence in the advantage, centred over the batch",
    "slime-advantage_reinforce_plus_plus": "discounted rewards per token without a value head",
}
"""What the systems have and we do not; for a release of a system as for its commit."""


def is_unsupported(name: str) -> bool:
    return name.replace("verl_release-", "verl-") in UNSUPPORTED


def select(kind: str) -> list[str]:
    """The names of the cases of a kind that we have."""
    return [name for name in ALL_CASES if name.partition("-")[2].startswith(kind) and not is_unsupported(name)]
