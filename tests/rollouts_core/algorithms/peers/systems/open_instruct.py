"""open-instruct: advantages of the data preparation actor, rho correction, the DAPO and CISPO losses.

The advantages have no function of their own: their statements are cut out of the actor's method.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.rollouts_core.algorithms.peers.recording import (
    Case,
    advantages_per_token,
    as_groups,
    defaults_case,
    field_defaults,
    flat_groups,
    loss_and_gradient,
    prepare_imports,
    run_statements,
    tensor,
)

STAND_INS = (
    "ray",
    "wandb",
    "vllm",
    "deepspeed",
    "olmo_core",
    "open_instruct.data_loader",
    "open_instruct.data_types",
    "open_instruct.olmo_core_utils",
    "open_instruct.utils",
    "open_instruct.ground_truth_utils",
    "open_instruct.logger_utils",
)
GRPO = "open_instruct/grpo_utils.py"
LOADER = "open_instruct/data_loader.py"
LOSS_INPUTS = ["policy_logprobs_BT", "old_logprobs_BT", "rollout_logprobs_BT", "advantages_B", "loss_mask_BT"]
SHOWN = (
    "loss_fn",
    "clip_lower",
    "clip_higher",
    "beta",
    "kl_estimator",
    "loss_denominator",
    "use_rho_correction",
    "rho_clamp_lower_bound",
    "rho_clamp_upper_bound",
    "rho_mask_lower_bound",
    "rho_mask_upper_bound",
    "rho_mask_sequence_level",
    "rho_mask_tv_divergence",
)


def _advantage_cases(checkout: Path) -> list[Case]:
    rewards, _ = flat_groups("rewards_groups")
    cases = []
    for kind in ("centered", "standard"):
        settings = {"advantage_normalization_type": kind, "num_samples_per_prompt_rollout": 4}
        namespace: dict[str, Any] = {
            "np": np,
            "self": SimpleNamespace(config=SimpleNamespace(**settings)),
            "batch": SimpleNamespace(scores=rewards),
        }
        first, last = "scores = np.array", "if self.config.advantage_normalization_type"
        run_statements(checkout / LOADER, "_data_preparation_loop", first, last, namespace)
        cases.append(
            Case(
                name=f"advantage_{kind}",
                function="DataPreparationActor._data_preparation_loop (part)",
                file=LOADER,
                settings=settings,
                inputs=["rewards_groups"],
                outputs={"advantages_groups": as_groups(namespace["advantages"].tolist(), "rewards_groups")},
            )
        )
    return cases


def _defaults() -> dict[str, Any]:
    from open_instruct.grpo_utils import GRPOExperimentConfig

    values = field_defaults(GRPOExperimentConfig)
    return {name: values[name] for name in SHOWN}


def _loss(settings: dict[str, Any]) -> dict[str, Any]:
    from open_instruct import grpo_utils
    from open_instruct.rl_utils import masked_mean

    config = SimpleNamespace(**{**settings, "loss_fn": grpo_utils.GRPOLossType(settings["loss_fn"])})
    mask_BT = tensor("loss_mask_BT").bool()
    advantages_BT = advantages_per_token()
    old_BT = tensor("old_logprobs_BT")
    rho = grpo_utils.compute_rho_correction(old_BT, tensor("rollout_logprobs_BT"), mask_BT, advantages_BT, config)

    def loss_of(policy_logprobs_BT: torch.Tensor) -> torch.Tensor:
        pg_loss_BT, _, kl_BT = grpo_utils.compute_grpo_loss(
            new_logprobs=policy_logprobs_BT,
            ratio=torch.exp(policy_logprobs_BT - old_BT),
            advantages=advantages_BT,
            ref_logprobs=tensor("ref_logprobs_BT") if config.beta else None,
            config=config,
            rho_weights=rho.weights,
        )
        denominator = mask_BT.sum() if config.loss_denominator == "token" else float(config.loss_denominator)
        return masked_mean(pg_loss_BT + config.beta * kl_BT, mask_BT, None, denominator)

    return {"weights_BT": rho.weights, **loss_and_gradient(loss_of)}


def _loss_cases() -> list[Case]:
    icepop = {"beta": 0.0, "rho_mask_lower_bound": 0.5, "rho_mask_upper_bound": 5.0, "rho_clamp_upper_bound": 0.0}
    variants: list[tuple[str, dict[str, Any]]] = [
        ("policy_loss_default", {}),
        ("policy_loss_no_kl", {"beta": 0.0}),
        ("policy_loss_no_rho", {"beta": 0.0, "use_rho_correction": False}),
        ("policy_loss_cispo", {"beta": 0.0, "loss_fn": "cispo"}),
        ("policy_loss_constant_denominator", {"beta": 0.0, "loss_denominator": "42"}),
        *((f"policy_loss_kl_{kind}", {"kl_estimator": kind}) for kind in (0, 1, 3)),
        ("mismatch_icepop", icepop),
        ("mismatch_icepop_sequence", {**icepop, "rho_mask_sequence_level": True, "rho_mask_upper_bound": 1.1}),
        ("mismatch_tv", {**icepop, "rho_mask_tv_divergence": True}),
    ]
    cases = []
    for name, changed in variants:
        settings = _defaults() | changed
        cases.append(
            Case(
                name=name,
                function="compute_rho_correction, then compute_grpo_loss and masked_mean",
                file=GRPO,
                settings=settings,
                inputs=[*LOSS_INPUTS, *(["ref_logprobs_BT"] if settings["beta"] else [])],
                outputs=_loss(settings),
                note="denominator 'token' is the sum of the mask",
            )
        )
    return cases


def record(checkout: Path) -> list[Case]:
    """Every case of open-instruct."""
    prepare_imports(checkout, stand_ins=STAND_INS)
    return [
        *_advantage_cases(checkout),
        *_loss_cases(),
        defaults_case("GRPOExperimentConfig", GRPO, _defaults(), SHOWN),
    ]
