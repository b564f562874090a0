"""prime-rl: group advantages (`grpo`, `max_rl`) and the losses over trainer and inference logprobs."""

import asyncio
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic
import torch

from tests.rollouts_core.algorithms.peers.recording import (
    INPUTS,
    Case,
    advantages_per_token,
    bare_package,
    defaults_case,
    field_defaults,
    loss_and_gradient,
    prepare_imports,
    rows,
    tensor,
)

STAND_INS = (
    "verifiers",
    "renderers",
    "pydantic_config",
    "prime_rl.configs.algorithm",
    "prime_rl.transports",
    "prime_rl.utils.client",
    "prime_rl.utils.logger",
    "prime_rl.utils.utils",
)
LOSS = "src/prime_rl/trainer/rl/loss.py"
ALGORITHMS = "src/prime_rl/orchestrator/algo"
LOSS_INPUTS = ["policy_logprobs_BT", "rollout_logprobs_BT", "advantages_B", "loss_mask_BT", "lengths_B"]


def _trace(reward: float) -> SimpleNamespace:
    node = SimpleNamespace(mask=[True], token_ids=[1], advantages=None)
    agent = SimpleNamespace(trainable=True)
    return SimpleNamespace(id="made", reward=reward, has_error=False, agent=agent, nodes=[node])


def _group_advantages(algorithm: type[Any], settings: dict[str, Any], rewards: list[float]) -> list[float]:
    traces = [_trace(reward) for reward in rewards]
    episodes = [SimpleNamespace(traces=[trace]) for trace in traces]
    asyncio.run(algorithm.score_group(SimpleNamespace(**settings), episodes))
    return [trace.nodes[0].advantages[0] for trace in traces]


def _advantage_cases() -> list[Case]:
    from prime_rl.orchestrator.algo.grpo import GRPOAlgorithm
    from prime_rl.orchestrator.algo.max_rl import MaxRLAlgorithm

    variants: list[tuple[str, type, dict[str, Any]]] = [
        ("grpo", GRPOAlgorithm, {"length_penalty": None}),
        ("max_rl", MaxRLAlgorithm, {}),
    ]
    cases = []
    for name, algorithm, settings in variants:
        for source in ("rewards_groups", "rewards_singleton_groups", "rewards_ragged_groups"):
            suffix = source.removeprefix("rewards").removesuffix("groups").strip("_")
            cases.append(
                Case(
                    name="_".join(filter(None, ["advantage", name, suffix])),
                    function=f"{algorithm.__name__}.score_group",
                    file=f"{ALGORITHMS}/{name}.py",
                    settings=settings,
                    inputs=[source],
                    outputs={
                        "advantages_groups": [_group_advantages(algorithm, settings, group) for group in INPUTS[source]]
                    },
                    note="computed in float32",
                )
            )
    return cases


def _loss(config: Any, ref_kl: bool) -> dict[str, Any]:
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

    masks = [mask.bool() for mask in rows("loss_mask_BT")]
    advantages = [row[:length] for row, length in zip(advantages_per_token(), INPUTS["lengths_B"], strict=True)]
    scale = int(tensor("loss_mask_BT").sum())

    def loss_of(policy_logprobs_BT: torch.Tensor) -> torch.Tensor:
        pieces = [row[:length] for row, length in zip(policy_logprobs_BT, INPUTS["lengths_B"], strict=True)]
        return compute_loss(
            trainer_logprobs=pieces,
            inference_logprobs=rows("rollout_logprobs_BT"),
            ref_logprobs=rows("ref_logprobs_BT") if ref_kl else None,
            advantages=advantages,
            loss_mask=masks,
            rl_weights=[torch.zeros_like(mask, dtype=torch.float64) for mask in masks] if ref_kl else None,
            ce_weights=None,
            ref_kl_weights=[mask.to(torch.float64) for mask in masks] if ref_kl else None,
            rl_loss_fn=setup_rl_loss_fn(config),
            rl_scale=scale,
            ce_scale=1,
            ref_kl_scale=scale,
        )[0]

    return loss_and_gradient(loss_of)


def _loss_cases() -> list[Case]:
    from prime_rl.configs.trainer import DefaultLossConfig, IPOLossConfig

    variants: list[tuple[str, Any, bool]] = [
        ("default", DefaultLossConfig(), False),
        ("no_kl", DefaultLossConfig(kl_tau=0.0), False),
        ("wide", DefaultLossConfig(dppo_mask_low=0.6, dppo_mask_high=0.6), False),
        ("ipo", IPOLossConfig(), False),
        ("ref_kl", DefaultLossConfig(), True),
    ]
    return [
        Case(
            name=f"policy_loss_{name}",
            function="compute_loss (ref_kl_loss_fn)" if ref_kl else "compute_loss (setup_rl_loss_fn)",
            file=LOSS,
            settings={} if ref_kl else config.model_dump(),
            inputs=[*LOSS_INPUTS, *(["ref_logprobs_BT"] if ref_kl else [])],
            outputs=_loss(config, ref_kl),
            note="the scale is the sum of the mask; the ratio is policy over engine, old_logprobs_BT are not used",
        )
        for name, config, ref_kl in variants
    ]


def _defaults_cases() -> list[Case]:
    from prime_rl.configs.trainer import DefaultLossConfig, IPOLossConfig

    file = "packages/prime-rl-configs/src/prime_rl/configs/trainer.py"
    return [
        defaults_case(owner.__name__, file, field_defaults(owner), tuple(field_defaults(owner)))
        for owner in (DefaultLossConfig, IPOLossConfig)
    ]


def record(checkout: Path) -> list[Case]:
    """Every case of prime-rl."""
    folders = ("src", "packages/prime-rl-configs/src")
    prepare_imports(checkout, stand_ins=STAND_INS, folders=folders)
    # its configuration records are pydantic models with a way to read files, which nothing here uses
    pydantic_config: Any = importlib.import_module("pydantic_config")
    pydantic_config.BaseConfig = pydantic.BaseModel
    for package in ("prime_rl.orchestrator", "prime_rl.orchestrator.algo"):
        bare_package(package, checkout / "src" / package.replace(".", "/"))
    return [*_advantage_cases(), *_loss_cases(), *_defaults_cases()]
