"""Pins our advantages, losses, masks and their gradients to what well-known systems return for the same inputs.

peers/<system>.json holds what a system's own functions returned at a recorded commit for peers/inputs.json. The
settings of each case, in the system's own names, are translated to ours here, and ours must give the same numbers.
UNSUPPORTED names what we do not offer, so that a case can be left out only on purpose.

Without it a preset named after a system would be our reading of it.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rollouts_core.algorithms.advantages import batch_advantages, gae_advantages, whiten
from rollouts_core.algorithms.loss import TokenScores, clipped_value_loss, estimate_kl, policy_loss, token_weights
from rollouts_core.algorithms.presets import ALGORITHMS, AlgorithmName
from rollouts_core.batch import TrainBatch
from rollouts_core.config import (
    AdvantageConfig,
    LossConfig,
    MismatchConfig,
    RewardShapingConfig,
    RLTrainingConfig,
    RolloutConfig,
    algorithm_preset,
)
from rollouts_core.fingerprint import affecting_settings
from rollouts_core.rl_batch import RolloutScores, assign_credit, shape_reward
from rollouts_core.types import Sample

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


VERL_AGGREGATION = {
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


TRL_AGGREGATION = {
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


SKYRL_AGGREGATION = {
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
    return {"objective": "reinforce"}


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
SCALES = {
    "slime-policy_loss_per_token": (23, 24, "a completion without a trained token counts as one token"),
    "slime-policy_loss_tis_per_token": (23, 24, "a completion without a trained token counts as one token"),
    "verl-policy_loss_vanilla_seq_mean_token_sum_norm": (5, 1, "no mean over completions before release 0.9"),
}
"""Where ours times the first number is theirs times the second, and why."""


def is_unsupported(name: str) -> bool:
    return name.replace("verl_release-", "verl-") in UNSUPPORTED


def select(kind: str) -> list[str]:
    """The names of the cases of a kind that we have."""
    return [name for name in ALL_CASES if name.partition("-")[2].startswith(kind) and not is_unsupported(name)]


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


def advantage_settings(name: str) -> dict[str, Any]:
    """Our settings for a case that records advantages of groups."""
    system, _, case_name = name.partition("-")
    s = ALL_CASES[name]["settings"]
    estimator = "group_mean_std"
    is_mean_only = (
        "mean_only" in case_name
        or s.get("normalize_rewards") is False
        or s.get("scale_rewards") == "none"
        or s.get("estimator") == "dr_grpo"
        or s.get("advantage_normalization_type") == "centered"
        or (system in ("areal", "torchtitan") and not (s.get("std_level") or s.get("should_std_normalize")))
        or system in ("prime_rl", "nanochat", "tinker_cookbook")
    )
    if "max_rl" in case_name or "maxrl" in case_name:
        estimator = "max_rl"
    elif "rloo" in case_name or s.get("mean_leave1out"):
        estimator = "leave_one_out"
    elif s.get("use_leave_one_out_baseline") and "reinforce" not in case_name:
        estimator = "leave_one_out" if is_mean_only else "leave_one_out_std"
    elif s.get("mean_level") == "batch":
        estimator = "batch_mean_std"
    elif s.get("scale_rewards") == "batch" or s.get("std_level") == "batch":
        estimator = "group_mean_batch_std"
    elif s.get("rewards_normalization") is False:
        estimator = "constant"
    elif is_mean_only or "reinforce" in case_name:
        estimator = "group_mean"
    eps = {"trl": 1e-4, "openrlhf": 1e-9, "open_instruct": 1e-8, "prime_rl": 0.0, "areal": 1e-5}.get(system, 1e-6)
    # SkyRL gives a completion without others in its group no advantage in RLOO, and its reward elsewhere.
    keeps = (
        "vectorized" not in case_name if system.startswith("verl") else system == "skyrl" and "rloo" not in case_name
    )
    whitens = "reinforce" in case_name and system in ("openrlhf", "nemo_rl") and not s.get("no_std_norm")
    is_population = system in ("open_instruct", "torchtitan") or s.get("std_unbiased") is False
    return {
        "estimator": estimator,
        "eps": eps,
        "std": "population" if whitens or is_population else "sample",
        "singleton": "reward" if keeps else "zero",
        "whiten": whitens,
    }


@pytest.mark.parametrize(
    "name", [name for name in select("advantage") if "advantages_groups" in ALL_CASES[name]["outputs"]]
)
def test_advantages_of_groups_are_those_of_the_system(name: str) -> None:
    case = ALL_CASES[name]
    [source] = case["inputs"]
    config = AdvantageConfig.model_validate(advantage_settings(name))
    found = list(itertools.chain(*batch_advantages(INPUTS[source], config)))
    if config.whiten:  # each completion has one token in these cases
        found = whiten(found, [1.0] * len(found), config.std)
    assert close(found, list(itertools.chain(*case["outputs"]["advantages_groups"])))


def samples_of_inputs(rows: list[int]) -> list[Sample]:
    """The recorded rows as samples with a prompt of one token."""
    return [
        Sample(
            tokens=list(range(INPUTS["lengths_B"][b] + 1)),
            loss_mask=[0.0, *INPUTS["loss_mask_BT"][b][: INPUTS["lengths_B"][b]]],
            group_index=INPUTS["group_index_B"][b],
            index=b,
        )
        for b in rows
    ]


def scores_of_inputs(rows: list[int]) -> RolloutScores:
    def by_place(name: str) -> dict[int, Tensor]:
        return {place: tensor(name)[b, : INPUTS["lengths_B"][b]].float() for place, b in enumerate(rows)}

    return RolloutScores(
        old_logprobs=by_place("old_logprobs_BT"),
        ref_logprobs=by_place("ref_logprobs_BT"),
        values=by_place("values_BT"),
    )


CREDIT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "verl-advantage_reinforce_plus_plus_baseline": (
        {"estimator": "group_mean", "singleton": "reward", "whiten": True},
        {},
    ),
    "openrlhf-gae_default": (
        {"estimator": "gae", "whiten": True, "std": "population"},
        {"kl_coef": 0.1},
    ),
    "openrlhf-advantage_group_norm_tokens": (
        {"estimator": "group_mean_std", "eps": 1e-9},
        {"kl_coef": 0.1, "kl_credit": "token"},
    ),
    "openrlhf-advantage_reinforce_baseline_tokens": (
        {"estimator": "group_mean", "whiten": True, "std": "population"},
        {"kl_coef": 0.1, "kl_credit": "token"},
    ),
    "verl_release-advantage_reinforce_plus_plus_baseline": (
        {"estimator": "group_mean", "singleton": "reward", "whiten": True},
        {},
    ),
    "slime-advantage_grpo_whitened": ({"estimator": "constant", "whiten": True}, {}),
    "nemo_rl-gae_default": ({"estimator": "gae", "whiten": True}, {}),
}
"""Cases that record the credit of every token, with our settings of advantage and reward_shaping."""


@pytest.mark.parametrize("name", list(CREDIT))
def test_the_credit_of_every_token_is_that_of_the_system(name: str) -> None:
    case = ALL_CASES[name]
    advantage, shaping = CREDIT[name]
    config = RLTrainingConfig.model_validate({"advantage": advantage, "reward_shaping": shaping})
    rows = case["settings"].get("rows", list(range(6)))
    credit = assign_credit(
        samples_of_inputs(rows), [INPUTS["rewards_B"][b] for b in rows], config, scores_of_inputs(rows)
    )
    for place, b in enumerate(rows):
        length = INPUTS["lengths_B"][b]
        is_trained_T = tensor("loss_mask_BT")[b, :length] > 0
        found_T = credit.advantages[place].expand(length)[is_trained_T]
        assert close(found_T, tensor_of(case, "advantages_BT")[place, :length][is_trained_T])
        if credit.returns:
            found_T = credit.returns[place][is_trained_T]
            assert close(found_T, tensor_of(case, "returns_BT")[place, :length][is_trained_T])


def tensor_of(case: Case, output: str) -> Tensor:
    return torch.tensor(case["outputs"][output], dtype=torch.float64)


@pytest.mark.parametrize("name", [name for name in select("gae") if "token_rewards_BT" in ALL_CASES[name]["inputs"]])
def test_gae_from_rewards_per_token_is_that_of_the_system(name: str) -> None:
    case = ALL_CASES[name]
    s = case["settings"]
    masks = tensor("loss_mask_BT") > 0
    # Without a mask among the inputs, the system counts the observations of row 2 as trained.
    rows = [b for b in range(6) if "loss_mask_BT" in case["inputs"] or (b != 2 and masks[b].any())]
    pairs = [
        gae_advantages(
            tensor("token_rewards_BT")[b][masks[b]].tolist(),
            tensor("values_BT")[b][masks[b]].tolist(),
            gamma=s["gamma"],
            gae_lambda=s.get("lam", s.get("lambd")),
        )
        for b in rows
    ]
    advantages = list(itertools.chain(*(pair[0] for pair in pairs)))
    if "whitened" in case["note"] and "no whitening" not in case["note"]:
        advantages = whiten(advantages, [1.0] * len(advantages), "sample")
    assert close(advantages, tensor_of(case, "advantages_BT")[rows][masks[rows]])
    returns = list(itertools.chain(*(pair[1] for pair in pairs)))
    assert close(returns, tensor_of(case, "returns_BT")[rows][masks[rows]])


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
    assert close(values_BT.grad[elsewhere_BT], tensor_of(case, "gradient_new_values_BT")[elsewhere_BT])


@pytest.mark.parametrize("name", select("reward_overlong"))
def test_the_penalty_for_overlong_responses_is_that_of_the_system(name: str) -> None:
    overlong = INPUTS["overlong"]
    shaping = RewardShapingConfig(
        max_response_tokens=overlong["max_tokens"],
        overlong_buffer_tokens=overlong["buffer"],
        overlong_penalty=overlong["penalty_factor"],
        overlong_capped=name.startswith(("openrlhf", "trl")),
    )
    found = [
        shape_reward(reward, num_response_tokens=length, shaping=shaping)
        for reward, length in zip(overlong["rewards"], overlong["lengths"], strict=True)
    ]
    assert close(found, ALL_CASES[name]["outputs"]["rewards"])


PRESETS: dict[AlgorithmName, tuple[str, str]] = {
    "slime-grpo": ("slime-advantage_grpo", "slime-policy_loss_default"),
    "slime-gspo": ("slime-advantage_grpo", "slime-policy_loss_gspo"),
    "verl-grpo": ("verl-advantage_grpo_ragged", "verl-policy_loss_vanilla_token_mean"),
    "verl-dr-grpo": (
        "verl-advantage_grpo_mean_only_ragged",
        "verl_release-policy_loss_vanilla_seq_mean_token_sum_norm",
    ),
    "verl-rloo": ("verl-advantage_rloo_ragged", "verl-policy_loss_vanilla_token_mean"),
    "verl-gspo": ("verl-advantage_grpo_ragged", "verl-policy_loss_gspo"),
    "verl-dapo": ("verl-advantage_grpo_ragged", "verl-policy_loss_dapo"),
    "trl-dapo": ("trl-advantage_group", "trl-mismatch_sequence_mask"),
    "trl-grpo": ("trl-advantage_group", "trl-policy_loss_grpo"),
    "trl-dr-grpo": ("trl-advantage_none", "trl-policy_loss_dr_grpo"),
    "trl-cispo": ("trl-advantage_group", "trl-policy_loss_cispo"),
    "openrlhf-rloo": ("openrlhf-advantage_rloo", "openrlhf-policy_loss_default"),
    "openrlhf-group-norm": ("openrlhf-advantage_group_norm", "openrlhf-policy_loss_default"),
    "openrlhf-reinforce-baseline": ("openrlhf-advantage_reinforce_baseline", "openrlhf-policy_loss_default"),
    "skyrl-grpo": ("skyrl-advantage_grpo_ragged", "skyrl-policy_loss_token_mean"),
    "skyrl-maxrl": ("skyrl-advantage_maxrl", "skyrl-policy_loss_token_mean"),
    "nemo-loo": ("nemo_rl-advantage_default_ragged", "nemo_rl-policy_loss_default"),
    "open-instruct": ("open_instruct-advantage_centered", "open_instruct-policy_loss_default"),
    "nanochat": ("nanochat-advantage_default", "nanochat-policy_loss_default"),
    "torchtitan-grpo": ("torchtitan-advantage_default_ragged", "torchtitan-policy_loss_grpo"),
    "torchtitan-dapo": ("torchtitan-advantage_default_ragged", "torchtitan-policy_loss_dapo"),
    "prime-rl": ("prime_rl-advantage_grpo_ragged", "prime_rl-policy_loss_default"),
}
"""Each preset with the cases that record its advantages and its loss."""
DIFFERENT: dict[AlgorithmName, dict[str, Any]] = {
    "slime-gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "verl-grpo": {"kl_coef": 0.0},
    "verl-dr-grpo": {"constant_length": 7},
    "verl-dapo": {"dual_clip": 3.0},
    "trl-grpo": {"mismatch": {}},
    "trl-dr-grpo": {"mismatch": {}, "constant_length": 7},
    "trl-cispo": {"mismatch": {}},
    "skyrl-grpo": {"kl_coef": 0.0},
    "skyrl-maxrl": {"kl_coef": 0.0},
}
"""What the recorded loss leaves out or sets otherwise than the preset; each piece is recorded by itself."""


def test_every_preset_is_compared() -> None:
    assert set(PRESETS) == set(ALGORITHMS) == set(get_args(AlgorithmName)) - {""}


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_gives_the_advantages_of_its_system(name: AlgorithmName) -> None:
    case = ALL_CASES[PRESETS[name][0]]
    config = algorithm_preset(name).advantage
    found = list(itertools.chain(*batch_advantages(INPUTS[case["inputs"][0]], config)))
    if config.whiten:
        found = whiten(found, [1.0] * len(found), config.std)
    assert close(found, list(itertools.chain(*case["outputs"]["advantages_groups"])))


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_gives_the_loss_of_its_system(name: AlgorithmName) -> None:
    case = ALL_CASES[PRESETS[name][1]]
    preset = algorithm_preset(name).loss
    config = LossConfig.model_validate({**preset.model_dump(), **DIFFERENT.get(name, {})})
    batch = make_batch(case, count_untrained=config.count_untrained)
    logprobs_BT = tensor("policy_logprobs_BT").requires_grad_()
    loss, _ = policy_loss(TokenScores(logprobs_BT=logprobs_BT), batch, config)
    loss.backward()
    assert close(loss.detach(), case["outputs"]["loss"])
    assert close(logprobs_BT.grad, case["outputs"]["gradient_policy_logprobs_BT"])


@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_what_is_not_supported_is_recorded(name: str) -> None:
    assert name in ALL_CASES


def test_every_recorded_case_is_compared_or_named_as_unsupported() -> None:
    compared = {
        *select("policy_loss"),
        *select("mismatch"),
        *select("kl"),
        *select("reward_overlong"),
        *select("defaults"),
        *(name for name in select("advantage") if "advantages_groups" in ALL_CASES[name]["outputs"]),
        *(name for name in select("gae") if "token_rewards_BT" in ALL_CASES[name]["inputs"]),
        *CREDIT,
        *VALUE_LOSSES,
    }
    assert [name for name in ALL_CASES if name not in compared and not is_unsupported(name)] == []


def test_what_is_given_wins_over_the_preset() -> None:
    config = RLTrainingConfig(algorithm="verl-dapo", loss=LossConfig(clip_high=0.2), num_minibatches=2)
    assert (config.loss.clip_high, config.loss.dual_clip, config.num_minibatches) == (0.2, 10.0, 2)


def test_a_file_may_name_a_preset_and_change_a_setting_deep_inside() -> None:
    settings = {"algorithm": "trl-dapo", "loss": {"mismatch": {"weight_high": 5.0}}}
    config = RLTrainingConfig.model_validate(settings)
    assert config.loss.mismatch == MismatchConfig(weight="sequence", weight_high=5.0, outside="zero")
    assert config.loss.ratio_base == "old"


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_preset_is_the_settings_that_it_stands_for(name: AlgorithmName) -> None:
    config = algorithm_preset(name)
    assert config.algorithm == ""
    spelled_out = RLTrainingConfig.model_validate(dict(ALGORITHMS[name].settings))
    assert config == spelled_out
    assert affecting_settings(config) == affecting_settings(spelled_out)
    assert RLTrainingConfig.model_validate(config.model_dump(mode="json")) == config
    assert RLTrainingConfig.model_validate(config.model_dump(mode="json", exclude_defaults=True)) == config


def test_overriding_a_preset_with_a_default_survives_writing_and_reading() -> None:
    config = RLTrainingConfig(algorithm="verl-dapo", loss=LossConfig(clip_high=0.2))
    assert RLTrainingConfig.model_validate(config.model_dump(mode="json", exclude_defaults=True)) == config


def test_a_form_that_sends_every_default_still_takes_the_preset() -> None:
    form = RLTrainingConfig().model_dump(mode="json")
    form["algorithm"], form["loss"]["clip_low"] = "verl-dapo", 0.1
    config = RLTrainingConfig.model_validate(form)
    assert (config.loss.clip_low, config.loss.clip_high, config.num_minibatches) == (0.1, 0.28, 16)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="verl-dapo"):
        algorithm_preset("verl-dappo")  # type: ignore[arg-type]


def test_a_misspelt_setting_beside_a_preset_is_refused() -> None:
    with pytest.raises(ValidationError, match="clip_hihg"):
        RLTrainingConfig.model_validate({"algorithm": "verl-dapo", "loss": {"clip_hihg": 0.2}})


def test_the_rollout_settings_of_a_preset_are_settings_of_rollouts() -> None:
    for preset in ALGORITHMS.values():
        RolloutConfig.model_validate(dict(preset.rollout))


def test_presets_with_one_update_ask_for_no_extra_forward_pass() -> None:
    free = {name for name in ALGORITHMS if not algorithm_preset(name).needs_old_scores}
    assert {"slime-grpo", "trl-dapo", "nemo-loo", "open-instruct", "prime-rl"} <= free
    assert not {"verl-dapo", "openrlhf-rloo"} & free


def test_the_documentation_has_every_preset_and_the_commit_of_its_source() -> None:
    text = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    for name, preset in ALGORITHMS.items():
        repository, commit = preset.source.partition(":")[0].split()
        assert f"| `{name}` |" in text
        assert f"| {repository} | {commit} |" in text
        recorded = {json.loads((PEERS / f"{system}.json").read_text())["commit"][:8] for system in SYSTEMS}
        assert commit in recorded
