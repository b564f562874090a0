"""NeMo-RL: advantage estimators, ClippedPGLossFn, value loss, KL estimators, overlong penalty."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.rollouts_core.algorithms.peers.recording import (
    INPUTS,
    Case,
    advantages_per_token,
    as_groups,
    defaults_case,
    field_defaults,
    flat_groups,
    loss_and_gradient,
    prepare_imports,
    tensor,
)

STAND_INS = (
    "ray",
    "vllm",
    "megatron",
    "nemo_rl.distributed",
    "nemo_rl.models",
    "nemo_rl.data",
    "nemo_rl.utils",
    "nemo_rl.algorithms.x_token",
)
ADVANTAGE = "nemo_rl/algorithms/advantage_estimator.py"
LOSS = "nemo_rl/algorithms/loss/loss_functions.py"
LOSS_INPUTS = ["policy_logprobs_BT", "old_logprobs_BT", "rollout_logprobs_BT", "advantages_B", "loss_mask_BT"]


def _advantage_cases() -> list[Case]:
    from nemo_rl.algorithms import advantage_estimator as module

    variants: list[tuple[str, str, dict[str, Any]]] = [
        ("default", "GRPOAdvantageEstimator", {}),
        ("leave_one_out_mean_only", "GRPOAdvantageEstimator", {"normalize_rewards": False}),
        ("group_std", "GRPOAdvantageEstimator", {"use_leave_one_out_baseline": False}),
        (
            "group_mean_only",
            "GRPOAdvantageEstimator",
            {"use_leave_one_out_baseline": False, "normalize_rewards": False},
        ),
        ("reinforce_plus_plus", "ReinforcePlusPlusAdvantageEstimator", {}),
    ]
    loss_config = module.ClippedPGLossConfig()
    cases = []
    for name, kind, changed in variants:
        for source in ("rewards_groups", "rewards_singleton_groups", "rewards_ragged_groups"):
            if kind == "ReinforcePlusPlusAdvantageEstimator" and source != "rewards_groups":
                continue
            settings = {"normalize_rewards": True, "use_leave_one_out_baseline": True, **changed}
            estimator = getattr(module, kind)(module.AdvEstimatorConfig(**settings), loss_config)
            rewards, groups = flat_groups(source)
            prompts = torch.tensor(groups).unsqueeze(1)
            # NeMo-RL multiplies with a float32 matrix, so the rewards are float32 too
            rewards_B = torch.tensor(rewards, dtype=torch.float32)
            result = estimator.compute_advantage(prompts, rewards_B, torch.ones(len(rewards), 1))
            suffix = source.removeprefix("rewards").removesuffix("groups").strip("_")
            cases.append(
                Case(
                    name="_".join(filter(None, ["advantage", name, suffix])),
                    function=f"{kind}.compute_advantage",
                    file=ADVANTAGE,
                    settings=settings,
                    inputs=[source],
                    outputs={"advantages_groups": as_groups(result[:, 0].tolist(), source)},
                    note="computed in float32",
                )
            )
    return cases


def _gae_cases() -> list[Case]:
    from nemo_rl.algorithms import advantage_estimator as module

    cases = []
    for name, gamma, gae_lambda, whiten in (("default", 1.0, 1.0, True), ("discounted", 0.97, 0.9, False)):
        settings = {
            "gae_gamma": gamma,
            "gae_lambda": gae_lambda,
            "normalize_advantages": whiten,
            "gae_lambda_value": None,
            "gae_lambda_policy": None,
            "length_adaptive_alpha": 0,
        }
        estimator = module.GeneralizedAdvantageEstimator(settings, module.ClippedPGLossConfig())
        advantages, returns = estimator.compute_advantage(
            None, tensor("rewards_B"), tensor("loss_mask_BT"), tensor("values_BT")
        )
        cases.append(
            Case(
                name=f"gae_{name}",
                function="GeneralizedAdvantageEstimator.compute_advantage",
                file=ADVANTAGE,
                settings=settings,
                inputs=["rewards_B", "values_BT", "loss_mask_BT"],
                outputs={"advantages_BT": advantages, "returns_BT": returns},
                note="the reward sits at the last trained token",
            )
        )
    return cases


def _shifted(values_BT: torch.Tensor) -> torch.Tensor:
    """NeMo-RL drops the first position of everything but the policy's logprobs."""
    return torch.nn.functional.pad(values_BT, (1, 0))


def _policy_loss(settings: dict[str, Any]) -> dict[str, Any]:
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    function = ClippedPGLossFn(ClippedPGLossConfig(**settings))
    mask_BT = tensor("loss_mask_BT")
    batch = {
        "advantages": _shifted(advantages_per_token()),
        "prev_logprobs": _shifted(tensor("old_logprobs_BT")),
        "generation_logprobs": _shifted(tensor("rollout_logprobs_BT")),
        "reference_policy_logprobs": _shifted(tensor("ref_logprobs_BT")),
        "token_mask": _shifted(mask_BT),
        "sample_mask": torch.ones(len(mask_BT), dtype=torch.float64),
    }
    num_rows = torch.tensor(float(len(mask_BT)), dtype=torch.float64)
    return loss_and_gradient(lambda values: function(values, batch, num_rows, mask_BT.sum())[0])


DEFAULTS: dict[str, Any] = {
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.0,
    "reference_policy_kl_type": "k3",
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_cispo": False,
    "disable_ppo_ratio": False,
    "force_on_policy_ratio": False,
    "use_on_policy_kl_approximation": False,
}


def _truncated(kind: str, high: float, low: float | None) -> dict[str, Any]:
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }


def _policy_loss_cases() -> list[Case]:
    gspo = {"token_level_loss": False, "sequence_level_importance_ratios": True}
    variants: list[tuple[str, dict[str, Any]]] = [
        ("policy_loss_no_kl", {}),
        ("policy_loss_default", {"reference_policy_kl_penalty": 0.01}),
        (
            "policy_loss_on_policy_kl",
            {"reference_policy_kl_penalty": 0.01, "use_on_policy_kl_approximation": True},
        ),
        ("policy_loss_sequence_level", {"token_level_loss": False}),
        ("policy_loss_dual_clip", {"ratio_clip_c": 3.0}),
        ("policy_loss_clip_higher", {"ratio_clip_max": 0.28}),
        ("policy_loss_gspo", {**gspo, "ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4}),
        ("policy_loss_gspo_wide", {**gspo, "ratio_clip_min": 0.1, "ratio_clip_max": 0.05}),
        ("policy_loss_cispo", {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 4.0}),
        ("policy_loss_reinforce", {"disable_ppo_ratio": True}),
        ("policy_loss_on_policy", {"force_on_policy_ratio": True}),
        ("mismatch_untruncated", {"use_importance_sampling_correction": True}),
        ("mismatch_tis", _truncated("tis", 2.0, None)),
        ("mismatch_icepop", _truncated("icepop", 5.0, 0.5)),
        ("mismatch_seq_mask_tis", _truncated("seq-mask-tis", 1.002, 0.999)),
        ("mismatch_seq_mask_tis_wide", _truncated("seq-mask-tis", 1.1, 0.9)),
    ]
    return [
        Case(
            name=name,
            function="ClippedPGLossFn.__call__",
            file=LOSS,
            settings=DEFAULTS | changed,
            inputs=[*LOSS_INPUTS, *(["ref_logprobs_BT"] if "reference_policy_kl_penalty" in changed else [])],
            outputs=_policy_loss(DEFAULTS | changed),
            note="global_valid_seqs is 6, global_valid_toks is the sum of the mask",
        )
        for name, changed in variants
    ]


def _kl_and_value_cases() -> list[Case]:
    from nemo_rl.algorithms.loss.loss_functions import MseValueLossConfig, MseValueLossFn
    from nemo_rl.algorithms.utils import calculate_kl

    cases = [
        Case(
            name=f"kl_{kind}",
            function="calculate_kl",
            file="nemo_rl/algorithms/utils.py",
            settings={"kl_type": kind, "input_clamp_value": 20.0, "output_clamp_value": 10.0},
            inputs=["policy_logprobs_BT", "ref_logprobs_BT"],
            outputs={"kl_BT": calculate_kl(tensor("policy_logprobs_BT"), tensor("ref_logprobs_BT"), kind)},
        )
        for kind in ("k1", "k2", "k3")
    ]
    mask_BT = tensor("loss_mask_BT")
    batch = {
        "token_mask": mask_BT,
        "sample_mask": torch.ones(len(mask_BT), dtype=torch.float64),
        "returns": tensor("returns_BT"),
        "values": tensor("values_BT"),
    }
    for name, cliprange in (("default", None), ("clipped", 0.2)):
        function = MseValueLossFn(MseValueLossConfig(cliprange=cliprange))

        def loss_of(new_values_BT: torch.Tensor, function: Any = function) -> torch.Tensor:
            return function(new_values_BT, batch, torch.tensor(6.0), mask_BT.sum())[0]

        cases.append(
            Case(
                name=f"value_loss_{name}",
                function="MseValueLossFn.__call__",
                file=LOSS,
                settings={"scale": 1.0, "cliprange": cliprange},
                inputs=["new_values_BT", "values_BT", "returns_BT", "loss_mask_BT"],
                outputs=loss_and_gradient(loss_of, "new_values_BT"),
            )
        )
    return cases


def _overlong_case() -> list[Case]:
    from nemo_rl.algorithms.reward_functions import apply_reward_shaping

    overlong = INPUTS["overlong"]
    settings = {
        "enabled": True,
        "max_response_length": overlong["max_tokens"],
        "overlong_buffer_length": overlong["buffer"],
        "overlong_buffer_penalty": overlong["penalty_factor"],
        "stop_properly_penalty_coef": None,
    }
    logs = [
        [{"role": "user", "token_ids": torch.ones(2)}, {"role": "assistant", "token_ids": torch.ones(length)}]
        for length in overlong["lengths"]
    ]
    batch = {"total_reward": torch.tensor(overlong["rewards"], dtype=torch.float64), "message_log": logs}
    shaped = apply_reward_shaping(batch, SimpleNamespace(**settings))
    return [
        Case(
            name="reward_overlong",
            function="apply_reward_shaping",
            file="nemo_rl/algorithms/reward_functions.py",
            settings=settings,
            inputs=["overlong"],
            outputs={"rewards": shaped["total_reward"]},
        )
    ]


def _defaults_cases() -> list[Case]:
    from nemo_rl.algorithms.advantage_estimator import AdvEstimatorConfig
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, MseValueLossConfig

    owners = ((ClippedPGLossConfig, LOSS), (MseValueLossConfig, LOSS), (AdvEstimatorConfig, ADVANTAGE))
    return [
        defaults_case(owner.__name__, file, field_defaults(owner), tuple(field_defaults(owner)))
        for owner, file in owners
    ]


def record(checkout: Path) -> list[Case]:
    """Every case of NeMo-RL."""
    prepare_imports(checkout, stand_ins=STAND_INS)
    return [
        *_advantage_cases(),
        *_gae_cases(),
        *_policy_loss_cases(),
        *_kl_and_value_cases(),
        *_overlong_case(),
        *_defaults_cases(),
    ]
