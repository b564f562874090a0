"""torchtitan: the RL experiment's advantage estimator and its GRPO and DAPO losses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.rollouts_core.algorithms.peers.recording import (
    INPUTS,
    Case,
    advantages_per_token,
    bare_package,
    loss_and_gradient,
    prepare_imports,
    tensor,
)

ADVANTAGE = "torchtitan/experiments/rl/rollout/advantage.py"
LOSS = "torchtitan/experiments/rl/losses/dapo.py"
PACKAGES = ("torchtitan", "torchtitan.experiments", "torchtitan.experiments.rl", "torchtitan.experiments.rl.rollout")
STAND_INS = (
    "torchtitan.experiments.rl.rollout.types",
    "tyro",
    "torchtitan.distributed",
    "torchtitan.models",
    "spmd_types",
)


def _advantage_cases() -> list[Case]:
    from torchtitan.experiments.rl.rollout.advantage import AdvantageEstimator

    cases = []
    for name, normalize in (("default", False), ("std", True)):
        estimator = AdvantageEstimator(AdvantageEstimator.Config(should_std_normalize=normalize))
        for source in ("rewards_groups", "rewards_singleton_groups", "rewards_ragged_groups"):
            suffix = source.removeprefix("rewards").removesuffix("groups").strip("_")
            groups = [
                estimator(SimpleNamespace(rollouts=[SimpleNamespace(reward=reward) for reward in group]))
                for group in INPUTS[source]
            ]
            cases.append(
                Case(
                    name="_".join(filter(None, ["advantage", name, suffix])),
                    function="AdvantageEstimator.__call__",
                    file=ADVANTAGE,
                    settings={"should_std_normalize": normalize},
                    inputs=[source],
                    outputs={"advantages_groups": groups},
                )
            )
    return cases


def _loss(loss: Any) -> dict[str, Any]:
    from torchtitan.experiments.rl.losses import dapo

    mask_BT = tensor("loss_mask_BT").bool()

    def loss_of(policy_logprobs_BT: torch.Tensor) -> torch.Tensor:
        flat = policy_logprobs_BT.flatten()
        dapo.compute_logprobs = lambda *_logits, **_options: (flat, torch.zeros_like(flat))
        return loss(
            flat,
            flat,
            float(mask_BT.sum()),
            generator_logprobs=tensor("rollout_logprobs_BT").flatten(),
            advantages=advantages_per_token().flatten(),
            loss_mask=mask_BT.flatten(),
        )[0]

    return loss_and_gradient(loss_of)


def _loss_cases() -> list[Case]:
    from torchtitan.experiments.rl.losses.dapo import DAPOLoss
    from torchtitan.experiments.rl.losses.grpo import GRPOLoss

    variants: list[tuple[str, Any, dict[str, Any]]] = [
        ("grpo", GRPOLoss, {"clip_eps": 0.2}),
        ("dapo", DAPOLoss, {"ratio_clip_low": 0.2, "ratio_clip_high": 0.28}),
    ]
    return [
        Case(
            name=f"policy_loss_{name}",
            function=f"{kind.__name__}.__call__",
            file=LOSS,
            settings=settings,
            inputs=["policy_logprobs_BT", "rollout_logprobs_BT", "advantages_B", "loss_mask_BT"],
            outputs=_loss(kind(kind.Config(**settings))),
            note="global_valid_tokens is the sum of the mask; the ratio is policy over engine, old_logprobs_BT are not "
            "used",
        )
        for name, kind, settings in variants
    ]


def record(checkout: Path) -> list[Case]:
    """Every case of torchtitan."""
    prepare_imports(checkout, stand_ins=STAND_INS)
    for package in PACKAGES:
        bare_package(package, checkout / package.replace(".", "/"))
    return [*_advantage_cases(), *_loss_cases()]
