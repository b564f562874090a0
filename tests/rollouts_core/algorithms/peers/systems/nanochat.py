"""nanochat: the advantages and the loss of its RL script, which has no functions for them: statements cut out of it."""

from pathlib import Path
from typing import Any

import torch

from tests.rollouts_core.algorithms.peers.recording import INPUTS, Case, loss_and_gradient, run_statements, tensor

SCRIPT = "scripts/chat_rl.py"


def _advantage_case(checkout: Path) -> Case:
    groups = []
    for rewards in INPUTS["rewards_groups"]:
        namespace: dict[str, Any] = {"torch": torch, "device": torch.device("cpu"), "rewards": rewards}
        run_statements(checkout / SCRIPT, "get_batch", "rewards = torch.tensor", "advantages = ", namespace)
        groups.append(namespace["advantages"])
    return Case(
        name="advantage_default",
        function="get_batch (part)",
        file=SCRIPT,
        settings={},
        inputs=["rewards_groups"],
        outputs={"advantages_groups": groups},
        note="computed in float32",
    )


def _loss_case(checkout: Path) -> Case:
    """A step of three prompts with two completions each, one after the other, as the script adds up their gradients."""
    mask_BT = tensor("loss_mask_BT")

    def loss_of_example(policy_logprobs_BT: torch.Tensor, rows: slice) -> torch.Tensor:
        namespace: dict[str, Any] = {
            "torch": torch,
            "logp": (policy_logprobs_BT * mask_BT)[rows],
            "advantages": tensor("advantages_B")[rows],
            "targets": mask_BT.long()[rows] - 1,
            "num_passes": 1,
            "examples_per_rank": 3,
        }
        run_statements(checkout / SCRIPT, "", "pg_obj = (logp", "loss = -pg_obj", namespace)
        loss: torch.Tensor = namespace["loss"]
        return loss

    def loss_of(policy_logprobs_BT: torch.Tensor) -> torch.Tensor:
        examples = [slice(start, start + 2) for start in (0, 2, 4)]
        return torch.stack([loss_of_example(policy_logprobs_BT, rows) for rows in examples]).sum()

    return Case(
        name="policy_loss_default",
        function="the script's loop (part)",
        file=SCRIPT,
        settings={"num_passes": 1, "examples_per_rank": 3},
        inputs=["policy_logprobs_BT", "advantages_B", "loss_mask_BT"],
        outputs=loss_and_gradient(loss_of),
        note="its model returns 0 for ignored tokens, so the logprobs are multiplied with the mask before the call; "
        "three examples of two completions",
    )


def record(checkout: Path) -> list[Case]:
    """Every case of nanochat."""
    return [_advantage_case(checkout), _loss_case(checkout)]
