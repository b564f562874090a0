"""Pins our advantages, credit per token and penalties to what well-known systems return for the same inputs.

The settings of each case, in the system's own names, are translated to ours here, and ours must give the same numbers.
Without it an advantage that bears a system's name would be our reading of it.

Not here: losses (test_peer_losses.py), whole presets (test_presets.py).
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from rollouts_core.algorithms.advantages import batch_advantages, gae_advantages, whiten
from rollouts_core.algorithms.credit import RolloutScores, assign_credit, shape_reward
from rollouts_core.config import (
    AdvantageConfig,
    RewardShapingConfig,
    RLTrainingConfig,
)
from rollouts_core.types import Sample
from tests.rollouts_core.algorithms.recorded import ALL_CASES, INPUTS, close, select, tensor, tensor_of


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
        found_T = torch.as_tensor(credit.advantages[place]).expand(length)[is_trained_T]
        assert close(found_T, tensor_of(case, "advantages_BT")[place, :length][is_trained_T])
        if credit.returns:
            found_T = credit.returns[place][is_trained_T]
            assert close(found_T, tensor_of(case, "returns_BT")[place, :length][is_trained_T])


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
