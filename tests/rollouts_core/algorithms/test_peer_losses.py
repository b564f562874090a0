"""Pins our losses, masks and their gradients to what well-known systems return for the same inputs.

The settings of each case, in the system's own names, are translated to ours here, and ours must give the same numbers.
Without it a loss that bears a system's name would be our reading of it.

Not here: advantages (test_peer_advantages.py), whole presets (test_presets.py).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollouts_core.algorithms.loss import TokenScores, clipped_value_loss, estimate_kl, policy_loss, token_weights
from rollouts_core.config import (
    LossConfig,
)
from tests.rollouts_core.algorithms.recorded import (
    ALL_CASES,
    NO_LIMIT,
    Case,
    close,
    make_batch,
    select,
    tensor,
    tensor_of,
)


def slime_loss(case: Case) -> dict[str, Any]:
    s = case["settings"]
    objective = {"grpo": "ppo"}.get(s["advantage_estimator"], s["advantage_estimator"])
    mismatch: dict[str, Any] = {}
    if s["use_tis"]:
        mismatch = {"weight": "token", "weight_low": s["tis_clip_low"], "weight_high": s["tis_clip"]}
        if str(s["custom_tis_function_path"]).endswith("icepop_function"):
            mismatch["outside"] = "zero"
    kl = {"kl_coef": s["kl_loss_coef"] if s["use_kl_loss"] else 0.0, "kl_estimator": "k3"}
    return {
        "objective": objective,
        "drift_mask": s["opsm_delta"] if s["use_opsm"] else 0.0,
        "ratio_base": "rollout" if s["use_rollout_logprobs"] else "old",
        "clip_low": s["eps_clip"],
        "clip_high": s["eps_clip_high"],
        "dual_clip": s["eps_clip_c"] or 0.0,
        "aggregation": "token_mean" if s["calculate_per_token_loss"] else "sequence_mean",
        "count_untrained": True,
        "mismatch": mismatch,
        "entropy_coef": s["entropy_coef"],
        "kl_weight": "ratio" if s["use_unbiased_kl"] else "none",
        **kl,
        "kl_input_clamp": 0.0,
        "kl_output_clamp": 10.0 if s["kl_loss_type"] == "low_var_kl" else 0.0,
    }


VERL_AGGREGATION: dict[str, dict[str, Any]] = {
    "token-mean": {"aggregation": "token_mean"},
    "seq-mean-token-mean": {"aggregation": "sequence_mean"},
    "seq-mean-token-sum": {"aggregation": "constant_length", "constant_length": 1},
    "seq-mean-token-sum-norm": {"aggregation": "constant_length", "constant_length": 7},
}


def verl_loss(case: Case) -> dict[str, Any]:
    s = case["settings"]
    objective = {"vanilla": "ppo"}.get(s.get("loss_mode", "vanilla"), s.get("loss_mode", "ppo"))
    mismatch: dict[str, Any] = {}
    if "rollout_is" in s:
        threshold = str(s["rollout_is_threshold"]).split("_")
        mismatch = {"weight": s["rollout_is"], "weight_high": float(threshold[-1])}
        if len(threshold) == 2:
            mismatch |= {"weight_low": float(threshold[0]), "outside": "zero"}
    if "rollout_rs" in s:
        low, high = map(float, s["rollout_rs_threshold"].split("_"))
        level = {"token_k1": "token", "seq_sum_k1": "product", "seq_mean_k1": "geometric"}[s["rollout_rs"]]
        # The limits there are for the engine's probability divided by the trainer's, ours for its inverse.
        mismatch |= {"mask": level, "mask_low": 1 / high, "mask_high": 1 / low}
    return {
        "objective": objective,
        "ratio_base": "old",
        "clip_low": s["clip_ratio_low"],
        "clip_high": s["clip_ratio_high"],
        "dual_clip": s["clip_ratio_c"] if objective == "ppo" else 0.0,
        "mismatch": mismatch,
        **VERL_AGGREGATION[s["loss_agg_mode"]],
    }


TRL_AGGREGATION: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "sequence_mean"},
    "bnpo": {"aggregation": "token_mean"},
    "dapo": {"aggregation": "token_mean"},
    "cispo": {"aggregation": "token_mean"},
    "dr_grpo": {"aggregation": "constant_length", "constant_length": 7},
}


def trl_loss(case: Case) -> dict[str, Any]:
    s = case["settings"]
    mismatch: dict[str, Any] = {}
    if mode := s.get("vllm_importance_sampling_mode"):
        level, what = mode.split("_")
        mismatch = {
            "weight": level,
            "weight_low": s["vllm_importance_sampling_clip_min"] or 0.0,
            "weight_high": s["vllm_importance_sampling_clip_max"],
            "outside": "clamp" if what == "truncate" else "zero",
        }
    is_cispo = s["loss_type"] == "cispo"
    objective = "cispo" if is_cispo else "gspo" if s["importance_sampling_level"] == "sequence" else "ppo"
    return {
        "objective": objective,
        "ratio_base": "old",
        "clip_low": 1.0 if is_cispo else s["epsilon_low"],
        "clip_high": s["epsilon_high"] - 1 if is_cispo else s["epsilon_high"],
        "dual_clip": s["delta"] or 0.0,
        "count_untrained": True,
        "kl_coef": s["beta"],
        "kl_weight": "ratio" if s["use_bias_correction_kl"] else "none",
        **NO_LIMIT,
        "mismatch": mismatch,
        **TRL_AGGREGATION[s["loss_type"]],
    }


def openrlhf_loss(case: Case) -> dict[str, Any]:
    s = case["settings"]
    mismatch: dict[str, Any] = {}
    if s["enable_vllm_is_correction"]:
        low, high = s["vllm_is_truncated_threshold"]
        mismatch = {
            "tis": {"weight": "token", "weight_low": low, "weight_high": high},
            "icepop": {"weight": "token", "weight_low": low, "weight_high": high, "outside": "zero"},
            "seq-mask-tis": {
                "weight": "token",
                "weight_high": 0.0,
                "mask": "geometric",
                "mask_low": low,
                "mask_high": high,
            },
        }[s["vllm_is_correction_type"]]
    by_token = s["token_level_loss"] and s["policy_loss_type"] == "ppo"
    return {
        "objective": s["policy_loss_type"],
        "ratio_base": "old",
        "clip_low": s["clip_eps_low"],
        "clip_high": s["clip_eps_high"],
        "dual_clip": s["dual_clip"] or 0.0,
        "aggregation": "token_mean" if by_token else "sequence_mean",
        "mismatch": mismatch,
    }


def nemo_loss(case: Case) -> dict[str, Any]:
    s = case["settings"]
    mismatch: dict[str, Any] = {}
    low, high = s["truncated_importance_sampling_ratio_min"] or 0.0, s["truncated_importance_sampling_ratio"] or 0.0
    if s["use_importance_sampling_correction"]:
        limits = {"weight": "token", "weight_low": low, "weight_high": high}
        mismatch = {
            None: limits,
            "tis": limits,
            "icepop": {**limits, "outside": "zero"},
            "seq-mask-tis": {
                "weight": "token",
                "weight_high": 0.0,
                "mask": "geometric",
                "mask_low": low,
                "mask_high": high,
            },
        }[s["truncated_importance_sampling_type"]]
    objective = "gspo" if s["sequence_level_importance_ratios"] else "cispo" if s["use_cispo"] else "ppo"
    return {
        "objective": "reinforce" if s["disable_ppo_ratio"] else objective,
        "ratio_base": "old",
        "clip_low": s["ratio_clip_min"],
        "clip_high": s["ratio_clip_max"],
        "dual_clip": s["ratio_clip_c"] or 0.0,
        "aggregation": "token_mean" if s["token_level_loss"] else "sequence_mean",
        "count_untrained": True,
        "kl_coef": s["reference_policy_kl_penalty"],
        "kl_estimator": s["reference_policy_kl_type"],
        "kl_weight": "on_policy",
        "mismatch": mismatch,
    }


def open_instruct_loss(case: Case) -> dict[str, Any]:
    s = case["settings"]
    mismatch: dict[str, Any] = {}
    if s["use_rho_correction"]:
        mismatch = {
            "weight": "token",
            "weight_low": s["rho_clamp_lower_bound"],
            "weight_high": s["rho_clamp_upper_bound"],
        }
        if s["rho_mask_upper_bound"]:
            mismatch |= {"mask": "token", "mask_low": s["rho_mask_lower_bound"], "mask_high": s["rho_mask_upper_bound"]}
        if s["rho_mask_sequence_level"]:
            mismatch |= {"weight": "geometric", "mask": "geometric"}
    return {
        "objective": "cispo" if s["loss_fn"] == "cispo" else "ppo",
        "ratio_base": "old",
        "clip_low": 1.0 if s["loss_fn"] == "cispo" else s["clip_lower"],
        "clip_high": s["clip_higher"],
        "kl_coef": s["beta"],
        "kl_estimator": ["k1", "k2", "k3", "k1"][s["kl_estimator"]],
        "kl_weight": "ratio" if s["kl_estimator"] == 3 else "none",
        "kl_input_clamp": 40.0,
        "kl_output_clamp": 0.0,
        "mismatch": mismatch,
    }


def prime_rl_loss(case: Case) -> dict[str, Any]:
    s = case["settings"]
    return {
        "objective": "dppo",
        "ratio_base": "rollout",
        "clip_low": s["dppo_mask_low"],
        "clip_high": s["dppo_mask_high"],
        "ratio_penalty": s["kl_tau"],
    }


SKYRL_AGGREGATION: dict[str, dict[str, Any]] = {
    "token_mean": {"aggregation": "token_mean"},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "seq_mean_token_sum_norm": {"aggregation": "constant_length", "constant_length": 7},
    "prompt_mean": {"aggregation": "prompt_mean"},
}


def skyrl_loss(case: Case) -> dict[str, Any]:
    s = case["settings"]
    correction, kind = s.get("off_policy_correction", {}), s["policy_loss_type"]
    mismatch: dict[str, Any] = {}
    if level := correction.get("tis_ratio_type"):
        mismatch = {"weight": level, "weight_high": correction.get(f"{level}_tis_ratio_clip_high", 2.0)}
    for name, level in (("geo_mask", "geometric"), ("product_mask", "product"), ("token_mask_is_threshold", "token")):
        if f"{name}_low" in correction:
            low, high = correction[f"{name}_low"], correction[f"{name}_high"]
            mismatch |= {"mask": level, "mask_low": low, "mask_high": high}
    clip = {"clip_low": s["eps_clip_low"], "clip_high": s["eps_clip_high"]}
    if kind == "importance_sampling":
        clip = {"clip_low": 1.0, "clip_high": 1e9}
    if kind == "cispo":
        bounds = s.get("cispo", {})
        clip = {
            "clip_low": bounds.get("cispo_eps_clip_low", 1.0),
            "clip_high": bounds.get("cispo_eps_clip_high", 4.0),
        }
    return {
        "objective": kind if kind in ("gspo", "cispo") else "ppo",
        "ratio_base": s.get("cispo", {}).get("cispo_anchor", "old"),
        "dual_clip": s["clip_ratio_c"] if kind == "dual_clip" else 0.0,
        "count_untrained": True,
        "mismatch": mismatch,
        **clip,
        **SKYRL_AGGREGATION[s["loss_reduction"]],
    }


def areal_loss(case: Case) -> dict[str, Any]:
    s = case["settings"]
    rejection = s["rejection_sampling"] or {}
    mismatch: dict[str, Any] = {}
    if "rollout_logprobs_BT" in case["inputs"]:
        mismatch = {
            "weight": {"token": "token", "sequence": "geometric"}[rejection["level"]],
            "weight_high": rejection["upper"],
            "weight_low": rejection.get("lower") or 0.0,
            "outside": {"mask": "zero", "clamp": "clamp"}[rejection["action"]],
        }
    by_sequence = s["importance_sampling_level"] == "sequence"
    return {
        "objective": "gspo" if by_sequence else "ppo",
        "ratio_base": "old",
        "clip_low": s["eps_clip"],
        "clip_high": s["eps_clip_higher"] or s["eps_clip"],
        "dual_clip": s["c_clip"] or 0.0,
        "mismatch": mismatch,
    }


def nanochat_loss(case: Case) -> dict[str, Any]:
    return {"objective": "reinforce", "aggregation": "prompt_mean", "count_untrained": True}


def torchtitan_loss(case: Case) -> dict[str, Any]:
    s = case["settings"]
    return {
        "ratio_base": "rollout",
        "clip_low": s.get("ratio_clip_low", s.get("clip_eps")),
        "clip_high": s.get("ratio_clip_high", s.get("clip_eps")),
    }


TRANSLATIONS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "slime": slime_loss,
    "verl": verl_loss,
    "verl_release": verl_loss,
    "trl": trl_loss,
    "openrlhf": openrlhf_loss,
    "nemo_rl": nemo_loss,
    "open_instruct": open_instruct_loss,
    "prime_rl": prime_rl_loss,
    "skyrl": skyrl_loss,
    "areal": areal_loss,
    "nanochat": nanochat_loss,
    "torchtitan": torchtitan_loss,
}
SCALES = {
    "slime-policy_loss_per_token": (23, 24, "a completion without a trained token counts as one token"),
    "slime-policy_loss_tis_per_token": (23, 24, "a completion without a trained token counts as one token"),
    "verl-policy_loss_vanilla_seq_mean_token_sum_norm": (5, 1, "no mean over completions before release 0.9"),
}
"""Where ours times the first number is theirs times the second, and why."""


@pytest.mark.parametrize("name", [*select("policy_loss"), *select("mismatch")])
def test_a_loss_and_its_gradient_are_those_of_the_system(name: str) -> None:
    case = ALL_CASES[name]
    config = LossConfig.model_validate(TRANSLATIONS[name.partition("-")[0]](case))
    batch = make_batch(case, count_untrained=config.count_untrained)
    rows = case["settings"].get("rows", list(range(6)))
    logprobs_BT = tensor("policy_logprobs_BT").requires_grad_()
    loss, _ = policy_loss(TokenScores(logprobs_BT=logprobs_BT[rows]), batch, config)
    loss.backward()
    ours, theirs, _ = SCALES.get(name, (1, 1, ""))
    if "rollout_rs" in case["settings"]:  # what is rejected counts in our divisor, not in theirs
        ours, theirs = int(batch.loss_mask_BT.sum()), int(sum(map(sum, case["outputs"]["loss_mask_BT"])))
    assert close(ours * loss.detach(), theirs * case["outputs"]["loss"])
    expected = torch.tensor(case["outputs"]["gradient_policy_logprobs_BT"], dtype=torch.float64)
    assert logprobs_BT.grad is not None
    assert close(ours * logprobs_BT.grad, theirs * expected)


@pytest.mark.parametrize("name", select("kl"))
def test_an_estimate_of_the_kl_divergence_is_that_of_the_system(name: str) -> None:
    case = ALL_CASES[name]
    keys = ("kl_loss_type", "kl_penalty", "kl_estimator", "kl_estimator_type", "kl_type")
    [estimator] = [value for key, value in case["settings"].items() if key in keys]
    difference_BT = tensor("policy_logprobs_BT") - tensor("ref_logprobs_BT")
    found_BT = estimate_kl(difference_BT, estimator.replace("low_var_kl", "k3"))
    limited = estimator in ("low_var_kl", "k3") and not (name.startswith("slime") and estimator == "k3")
    assert close(found_BT.clamp(max=10.0) if limited else found_BT, case["outputs"]["kl_BT"])


VALUE_LOSSES: dict[str, tuple[float, float, dict[str, Any]]] = {
    "openrlhf-value_loss_default": (1.0, 0.5, {}),
    "openrlhf-value_loss_no_clip": (1.0, 0.0, {}),
    "openrlhf-value_loss_per_sample": (1.0, 0.5, {"aggregation": "sequence_mean"}),
    "verl-value_loss_token_mean": (1.0, 0.5, {}),
    "verl-value_loss_seq_mean_token_mean": (1.0, 0.5, {"aggregation": "sequence_mean"}),
    "verl_release-value_loss_token_mean": (1.0, 0.5, {}),
    "verl_release-value_loss_seq_mean_token_mean": (1.0, 0.5, {"aggregation": "sequence_mean"}),
    "skyrl-value_loss_default": (1.0, 0.2, {"aggregation": "sequence_mean", "count_untrained": True}),
    "areal-value_loss_default": (1.0, 0.2, {}),
    "slime-value_loss_per_token": (2 * 23 / 24, 0.2, {}),
    "slime-value_loss_default": (2.0, 0.2, {"aggregation": "sequence_mean", "count_untrained": True}),
    "nemo_rl-value_loss_default": (1.0, 0.0, {}),
    "nemo_rl-value_loss_clipped": (1.0, 0.2, {}),
}
"""Case: how much larger theirs is, the limit of a value's move, and the average."""


@pytest.mark.parametrize("name", list(VALUE_LOSSES))
def test_a_value_loss_and_its_gradient_are_those_of_the_system(name: str) -> None:
    case = ALL_CASES[name]
    scale, value_clip, settings = VALUE_LOSSES[name]
    config = LossConfig.model_validate(settings)
    batch = replace(
        make_batch(case, count_untrained=config.count_untrained),
        old_values_BT=tensor("values_BT"),
        returns_BT=tensor("returns_BT"),
    )
    values_BT = tensor("new_values_BT").requires_grad_()
    scores = TokenScores(logprobs_BT=tensor("policy_logprobs_BT"), values_BT=values_BT)
    loss = scale * (clipped_value_loss(scores, batch, value_clip) * token_weights(batch, config)).sum()
    loss.backward()
    assert close(loss.detach(), case["outputs"]["loss"])
    # At the limit itself, where both errors are equal, the systems split the gradient in different ways.
    elsewhere_BT = (tensor("new_values_BT") - tensor("values_BT")).abs().sub(value_clip).abs() > 1e-9
    assert values_BT.grad is not None
    assert close(values_BT.grad[elsewhere_BT], tensor_of(case, "gradient_new_values_BT")[elsewhere_BT])
