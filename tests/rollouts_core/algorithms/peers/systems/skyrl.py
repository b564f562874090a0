"""SkyRL: advantage estimators, loss reductions (which it applies to the advantages), policy losses, corrections, KL."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.rollouts_core.algorithms.peers.recording import (
    INPUTS,
    Case,
    advantages_per_token,
    as_groups,
    bare_package,
    defaults_case,
    field_defaults,
    flat_groups,
    loss_and_gradient,
    prepare_imports,
    tensor,
)

STAND_INS = ("ray", "vllm", "flash_attn", "wandb", "megatron", "peft", "aiohttp", "skyrl_gym", "tinker")
PPO = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
CORRECTION = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
LOSS_INPUTS = ["policy_logprobs_BT", "old_logprobs_BT", "advantages_B", "loss_mask_BT"]
PROMPTS = [(0, 2), (2, 4), (4, 6)]


def _advantage_cases() -> list[Case]:
    from skyrl.backends.skyrl_train.utils import ppo_utils

    variants: list[tuple[str, Any, dict[str, Any]]] = [
        ("grpo", ppo_utils.compute_grpo_outcome_advantage, {"grpo_norm_by_std": True}),
        ("grpo_mean_only", ppo_utils.compute_grpo_outcome_advantage, {"grpo_norm_by_std": False}),
        ("rloo", ppo_utils.compute_rloo_outcome_advantage, {}),
        ("maxrl", ppo_utils.compute_maxrl_advantage, {}),
    ]
    cases = []
    for name, function, settings in variants:
        for source in ("rewards_groups", "rewards_singleton_groups", "rewards_ragged_groups"):
            rewards, groups = flat_groups(source)
            per_token = torch.tensor(rewards, dtype=torch.float64).unsqueeze(1)
            result, _ = function(per_token, torch.ones_like(per_token), index=np.array(groups), **settings)
            suffix = source.removeprefix("rewards").removesuffix("groups").strip("_")
            cases.append(
                Case(
                    name="_".join(filter(None, ["advantage", name, suffix])),
                    function=function.__name__,
                    file=PPO,
                    settings=settings,
                    inputs=[source],
                    outputs={"advantages_groups": as_groups(result[:, 0].tolist(), source)},
                )
            )
    return cases


def _token_advantage_cases() -> list[Case]:
    from skyrl.backends.skyrl_train.utils.ppo_utils import (
        compute_gae_advantage_return,
        compute_reinforce_plus_plus_outcome_advantage,
    )

    plus, plus_returns = compute_reinforce_plus_plus_outcome_advantage(
        tensor("token_rewards_BT"), tensor("loss_mask_BT"), gamma=0.97
    )
    cases = [
        Case(
            name="advantage_reinforce_plus_plus",
            function="compute_reinforce_plus_plus_outcome_advantage",
            file=PPO,
            settings={"gamma": 0.97},
            inputs=["token_rewards_BT", "loss_mask_BT"],
            outputs={"advantages_BT": plus, "returns_BT": plus_returns},
        )
    ]
    for name, gamma, lambd in (("default", 1.0, 1.0), ("discounted", 0.97, 0.9)):
        advantages, returns = compute_gae_advantage_return(
            tensor("token_rewards_BT"), tensor("values_BT"), tensor("loss_mask_BT"), gamma=gamma, lambd=lambd
        )
        cases.append(
            Case(
                name=f"gae_{name}",
                function="compute_gae_advantage_return",
                file=PPO,
                settings={"gamma": gamma, "lambd": lambd},
                inputs=["token_rewards_BT", "values_BT", "loss_mask_BT"],
                outputs={"advantages_BT": advantages, "returns_BT": returns},
                note="whitened over the mask; observation tokens are not skipped",
            )
        )
    return cases


def _policy_loss(settings: dict[str, Any]) -> dict[str, Any]:
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.config import AlgorithmConfig, CISPOConfig, OffPolicyCorrectionConfig

    parts = {"cispo": CISPOConfig, "off_policy_correction": OffPolicyCorrectionConfig}
    chosen = {name: parts[name](**value) if name in parts else value for name, value in settings.items()}
    reduction = chosen.pop("loss_reduction")
    config = AlgorithmConfig(loss_reduction=reduction, **chosen)
    function = ppo_utils.PolicyLossRegistry.get(config.policy_loss_type)
    advantages = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        advantages_per_token(),
        tensor("loss_mask_BT"),
        reduction,
        micro_batch_size=2,
        max_seq_len=config.max_seq_len,
        prompt_boundaries=PROMPTS,
    )

    def loss_of(policy_logprobs_BT: torch.Tensor) -> torch.Tensor:
        return function(
            policy_logprobs_BT,
            tensor("old_logprobs_BT"),
            advantages,
            config,
            tensor("loss_mask_BT"),
            tensor("rollout_logprobs_BT"),
        )[0]

    return loss_and_gradient(loss_of)


DEFAULTS: dict[str, Any] = {
    "policy_loss_type": "regular",
    "loss_reduction": "token_mean",
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.2,
    "clip_ratio_c": 3.0,
    "max_seq_len": 7,
}
GSPO = {"policy_loss_type": "gspo", "loss_reduction": "sequence_mean", "eps_clip_low": 3e-4, "eps_clip_high": 4e-4}
REDUCTIONS = ("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")


def _policy_variants() -> list[tuple[str, dict[str, Any]]]:
    corrections: list[tuple[str, dict[str, Any]]] = [
        ("token_tis", {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0}),
        ("seq_tis", {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 5.0}),
        ("geo_mask", {"sequence_mask_metric": "geometric", "geo_mask_low": 0.99, "geo_mask_high": 1.01}),
        ("geo_mask_wide", {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1}),
        ("product_mask", {"sequence_mask_metric": "product", "product_mask_low": 0.5, "product_mask_high": 2.0}),
        ("outlier_mask", {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100.0}),
        ("token_mask", {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 5.0}),
        (
            "token_mask_and_tis",
            {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 5.0, "tis_ratio_type": "token"},
        ),
    ]
    return [
        *((f"policy_loss_{name}", {"loss_reduction": name}) for name in REDUCTIONS),
        ("policy_loss_dual_clip", {"policy_loss_type": "dual_clip"}),
        ("policy_loss_clip_higher", {"eps_clip_high": 0.28}),
        ("policy_loss_gspo", GSPO),
        ("policy_loss_gspo_wide", {**GSPO, "eps_clip_low": 0.1, "eps_clip_high": 0.05}),
        ("policy_loss_cispo", {"policy_loss_type": "cispo"}),
        (
            "policy_loss_cispo_narrow",
            {"policy_loss_type": "cispo", "cispo": {"cispo_eps_clip_low": 0.2, "cispo_eps_clip_high": 0.2}},
        ),
        ("policy_loss_cispo_rollout", {"policy_loss_type": "cispo", "cispo": {"cispo_anchor": "rollout"}}),
        ("policy_loss_sapo", {"policy_loss_type": "sapo", "loss_reduction": "sequence_mean"}),
        ("policy_loss_dppo", {"policy_loss_type": "dppo"}),
        ("policy_loss_rollout_is", {"policy_loss_type": "rollout_is"}),
        ("policy_loss_importance_sampling", {"policy_loss_type": "importance_sampling"}),
        *((f"mismatch_{name}", {"off_policy_correction": values}) for name, values in corrections),
    ]


def _policy_loss_cases() -> list[Case]:
    cases = []
    for name, changed in _policy_variants():
        settings = DEFAULTS | changed
        uses_engine = name.startswith("mismatch") or "rollout" in name or "dppo" in name
        cases.append(
            Case(
                name=name,
                function=f"apply_loss_reduction_to_advantages_minibatch, then loss {settings['policy_loss_type']!r}",
                file=CORRECTION if name.startswith("mismatch") else PPO,
                settings=settings,
                inputs=[*LOSS_INPUTS, *(["rollout_logprobs_BT"] if uses_engine else [])],
                outputs=_policy_loss(settings),
                note="micro-batches of 2 rows; prompts are rows 0-1, 2-3, 4-5",
            )
        )
    return cases


def _kl_and_value_cases() -> list[Case]:
    from skyrl.backends.skyrl_train.utils.ppo_utils import compute_approx_kl, ppo_critic_loss
    from skyrl.train.config import AlgorithmConfig

    cases = [
        Case(
            name=f"kl_{kind}",
            function="compute_approx_kl",
            file=PPO,
            settings={"kl_estimator_type": kind},
            inputs=["policy_logprobs_BT", "ref_logprobs_BT"],
            outputs={
                "kl_BT": compute_approx_kl(
                    tensor("policy_logprobs_BT"), tensor("ref_logprobs_BT"), kl_estimator_type=kind
                )
            },
        )
        for kind in ("k1", "abs", "k2", "k3")
    ]
    config = AlgorithmConfig(value_clip=0.2)

    def loss_of(new_values_BT: torch.Tensor) -> torch.Tensor:
        arguments = (tensor("values_BT"), tensor("returns_BT"), config, tensor("loss_mask_BT"))
        return ppo_critic_loss(new_values_BT, *arguments)[0]

    value = Case(
        name="value_loss_default",
        function="ppo_critic_loss",
        file=PPO,
        settings={"value_clip": 0.2},
        inputs=["new_values_BT", "values_BT", "returns_BT", "loss_mask_BT"],
        outputs=loss_and_gradient(loss_of, "new_values_BT"),
    )
    return [*cases, value]


def _defaults_cases() -> list[Case]:
    from skyrl.train import config

    algorithm = (
        "advantage_estimator",
        "policy_loss_type",
        "loss_reduction",
        "grpo_norm_by_std",
        "advantage_batch_normalize",
        "eps_clip_low",
        "eps_clip_high",
        "clip_ratio_c",
        "value_clip",
        "gamma",
        "lambd",
        "use_kl_loss",
        "use_kl_in_reward",
        "kl_loss_coef",
        "kl_estimator_type",
        "use_entropy_loss",
        "entropy_loss_coef",
        "zero_variance_filter",
    )
    file = "skyrl/train/config/config.py"
    parts = ("OffPolicyCorrectionConfig", "CISPOConfig", "SAPOConfig", "DPPOConfig", "DynamicSamplingConfig")
    values = {name: field_defaults(getattr(config, name)) for name in parts}
    updates = ("train_batch_size", "policy_mini_batch_size", "update_epochs_per_batch")
    return [
        defaults_case("AlgorithmConfig", file, field_defaults(config.AlgorithmConfig), algorithm),
        defaults_case("TrainerConfig", file, field_defaults(config.TrainerConfig), updates),
        *(defaults_case(name, file, values[name], tuple(values[name])) for name in parts),
    ]


def record(checkout: Path) -> list[Case]:
    """Every case of SkyRL."""
    if INPUTS["group_index_B"] != [row for row, (start, end) in enumerate(PROMPTS) for _ in range(start, end)]:
        raise ValueError("The prompts of the rows must be those of group_index_B.")
    prepare_imports(checkout, stand_ins=STAND_INS)
    ray: Any = importlib.import_module("ray")
    ray.is_initialized = lambda: False
    for package in ("skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils"):
        bare_package(package, checkout / package.replace(".", "/"))
    return [
        *_advantage_cases(),
        *_token_advantage_cases(),
        *_policy_loss_cases(),
        *_kl_and_value_cases(),
        *_defaults_cases(),
    ]
