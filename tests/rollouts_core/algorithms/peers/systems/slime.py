"""slime: reward normalisation, `loss_function` of the Megatron backend (policy, value), GAE, KL estimators."""

import argparse
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
    flat_groups,
    loss_and_gradient,
    padded,
    prepare_imports,
    rows,
    tensor,
)

STAND_INS = ("megatron", "ray", "sglang", "sglang_router", "wandb", "slime.backends.sglang_utils", "tensorboard")
LOSS = "slime/backends/megatron_utils/loss.py"
PPO = "slime/utils/ppo_utils.py"
ROLLOUT = "slime/ray/rollout.py"
DEFAULTS: dict[str, Any] = {
    "advantage_estimator": "grpo",
    "loss_type": "policy_loss",
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "eps_clip_c": None,
    "calculate_per_token_loss": False,
    "use_rollout_logprobs": False,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0,
    "custom_tis_function_path": None,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "get_mismatch_metrics": False,
    "entropy_coef": 0.0,
}
LOSS_INPUTS = ["policy_logprobs_BT", "old_logprobs_BT", "advantages_B", "loss_mask_BT", "lengths_B"]
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"


def _megatron_of_one_process() -> None:
    from megatron.core import mpu

    mpu.get_context_parallel_world_size = lambda: 1
    mpu.get_context_parallel_rank = lambda: 0
    mpu.get_data_parallel_world_size = lambda with_context_parallel=False: 1
    mpu.get_data_parallel_group = lambda with_context_parallel=False: None
    mpu.is_pipeline_last_stage = lambda: True


def _advantage_cases() -> list[Case]:
    from slime.ray.rollout import RolloutManager

    cases = []
    variants: list[tuple[str, str, dict[str, Any]]] = [
        ("grpo", "rewards_groups", {}),
        ("mean_only", "rewards_groups", {"grpo_std_normalization": False}),
        ("reinforce_plus_plus_baseline", "rewards_groups", {"advantage_estimator": "reinforce_plus_plus_baseline"}),
        ("no_normalization", "rewards_groups", {"rewards_normalization": False}),
        ("grpo_ragged", "rewards_ragged_groups", {}),
    ]
    for name, source, changed in variants:
        settings = {
            "advantage_estimator": "grpo",
            "rewards_normalization": True,
            "grpo_std_normalization": True,
            "n_samples_per_prompt": 4,
            "rollout_batch_size": len(INPUTS[source]),
            **changed,
        }
        stub = SimpleNamespace(custom_reward_post_process_func=None, args=SimpleNamespace(**settings))
        samples = [SimpleNamespace(get_reward_value=lambda _args, value=r: value) for r in flat_groups(source)[0]]
        _, advantages = RolloutManager._post_process_rewards(stub, samples)
        cases.append(
            Case(
                name=f"advantage_{name}",
                function="RolloutManager._post_process_rewards",
                file=ROLLOUT,
                settings=settings,
                inputs=[source],
                outputs={"advantages_groups": as_groups(advantages, source)},
                note="all samples are one row here" if name == "grpo_ragged" else "",
            )
        )
    return cases


def _batch(advantages: list[torch.Tensor]) -> dict[str, Any]:
    masks = rows("loss_mask_BT")
    return {
        "advantages": advantages,
        "log_probs": rows("old_logprobs_BT"),
        "rollout_log_probs": rows("rollout_logprobs_BT"),
        "ref_log_probs": rows("ref_logprobs_BT"),
        "values": rows("values_BT"),
        "returns": rows("returns_BT"),
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "response_lengths": INPUTS["lengths_B"],
        "total_lengths": [length + 1 for length in INPUTS["lengths_B"]],
        "unconcat_tokens": None,
    }


def _policy_loss(settings: dict[str, Any], advantages: list[torch.Tensor]) -> dict[str, Any]:
    """The loss that Megatron would step on: slime's, divided by the normalizer that it returns with it."""
    from slime.backends.megatron_utils import loss as module

    batch = _batch(advantages)
    names = ("custom_advantage_function_path", "custom_pg_loss_reducer_function_path")
    flags = dict.fromkeys((*names, "recompute_loss_function", "allgather_cp", "rollout_top_p"), None)
    options = SimpleNamespace(**{**flags, **settings})
    normalizers: list[float] = []

    def loss_of(policy_logprobs_BT: torch.Tensor) -> torch.Tensor:
        pieces = [row[:length] for row, length in zip(policy_logprobs_BT, INPUTS["lengths_B"], strict=True)]
        result = {"log_probs": pieces, "entropy": [torch.zeros_like(piece) for piece in pieces]}
        module.get_log_probs_and_entropy = lambda *_logits, **_options: (None, result)
        module.get_rollout_top_p_logprob_kwargs = lambda *_arguments: {}
        loss, normalizer, _ = module.loss_function(options, batch, 1, len(pieces), policy_logprobs_BT)
        normalizers.append(float(normalizer))
        return loss / normalizer

    outputs = loss_and_gradient(loss_of)
    return {**outputs, "normalizer": normalizers[-1]}


def _policy_loss_cases() -> list[Case]:
    variants: list[tuple[str, dict[str, Any]]] = [
        ("default", {}),
        ("per_token", {"calculate_per_token_loss": True}),
        ("clip_higher", {"eps_clip_high": 0.28}),
        ("dual_clip", {"eps_clip_c": 3.0}),
        ("tis", {"use_tis": True}),
        ("tis_per_token", {"use_tis": True, "calculate_per_token_loss": True}),
        ("icepop", {"use_tis": True, "tis_clip": 5.0, "tis_clip_low": 0.5, "custom_tis_function_path": ICEPOP}),
        ("rollout_logprobs", {"use_rollout_logprobs": True}),
        ("gspo", {"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4}),
        ("gspo_wide", {"advantage_estimator": "gspo", "eps_clip": 0.1, "eps_clip_high": 0.05}),
        ("cispo", {"advantage_estimator": "cispo"}),
        ("cispo_one_sided", {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0}),
        ("opsm", {"use_opsm": True}),
        ("opsm_wide", {"use_opsm": True, "opsm_delta": 0.1}),
        ("kl_k3", {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3"}),
        ("kl_low_var", {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "low_var_kl"}),
        ("kl_unbiased", {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3", "use_unbiased_kl": True}),
    ]
    whole = advantages_per_token()
    per_row = [row[:length] for row, length in zip(whole, INPUTS["lengths_B"], strict=True)]
    cases = []
    for name, changed in variants:
        settings = DEFAULTS | changed
        extra = ["rollout_logprobs_BT"] if settings["use_tis"] or settings["use_rollout_logprobs"] else []
        extra += ["ref_logprobs_BT"] if settings["use_kl_loss"] else []
        cases.append(
            Case(
                name=f"policy_loss_{name}",
                function="loss_function (policy_loss_function)",
                file=LOSS,
                settings=settings,
                inputs=LOSS_INPUTS + extra,
                outputs=_policy_loss(settings, per_row),
                note="loss and gradient are already divided by the normalizer, as Megatron does",
            )
        )
    cases.append(
        Case(
            name="policy_loss_per_token_advantages",
            function="loss_function (policy_loss_function)",
            file=LOSS,
            settings=DEFAULTS,
            inputs=[*LOSS_INPUTS[:2], "advantages_BT", *LOSS_INPUTS[3:]],
            outputs=_policy_loss(DEFAULTS, rows("advantages_BT")),
        )
    )
    return cases


def _kl_cases() -> list[Case]:
    from slime.utils.ppo_utils import compute_approx_kl

    return [
        Case(
            name=f"kl_{kind}",
            function="compute_approx_kl",
            file=PPO,
            settings={"kl_loss_type": kind},
            inputs=["policy_logprobs_BT", "ref_logprobs_BT"],
            outputs={"kl_BT": compute_approx_kl(tensor("policy_logprobs_BT"), tensor("ref_logprobs_BT"), kind)},
            note="computed in float32",
        )
        for kind in ("k1", "k2", "k3", "low_var_kl")
    ]


def _gae_cases() -> list[Case]:
    from slime.utils.ppo_utils import get_advantages_and_returns_batch

    cases = []
    for name, gamma, lambd in (("default", 1.0, 1.0), ("discounted", 0.97, 0.9)):
        lengths = INPUTS["lengths_B"]
        advantages, returns = get_advantages_and_returns_batch(
            lengths, lengths, rows("values_BT"), rows("token_rewards_BT"), gamma, lambd
        )
        cases.append(
            Case(
                name=f"gae_{name}",
                function="get_advantages_and_returns_batch",
                file=PPO,
                settings={"gamma": gamma, "lambd": lambd},
                inputs=["token_rewards_BT", "values_BT", "lengths_B"],
                outputs={"advantages_BT": padded(advantages), "returns_BT": padded(returns)},
                note="the mask is not an input: every position within the length counts; no whitening",
            )
        )
    return cases


def _token_advantage_cases() -> list[Case]:
    """`compute_advantages_and_returns`: from the normalised reward of a row to its tokens, and whitening."""
    from slime.backends.megatron_utils import loss as module

    module.dist.all_reduce = lambda *_tensors, **_options: None
    with_tokens = [row for row, mask in enumerate(INPUTS["loss_mask_BT"]) if any(mask)]
    variants: list[tuple[str, dict[str, Any]]] = [
        ("grpo_whitened", {"normalize_advantages": True}),
        ("ppo", {"advantage_estimator": "ppo", "kl_coef": 0.1}),
        ("ppo_whitened", {"advantage_estimator": "ppo", "gamma": 0.97, "lambd": 0.9, "normalize_advantages": True}),
        ("reinforce_plus_plus", {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.97, "kl_coef": 0.1}),
        (
            "reinforce_plus_plus_baseline_tokens",
            {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.1, "normalize_advantages": True},
        ),
    ]
    cases = []
    for name, changed in variants:
        settings = {
            "advantage_estimator": "grpo",
            "kl_coef": 0.0,
            "kl_loss_type": "k1",
            "gamma": 1.0,
            "lambd": 1.0,
            "normalize_advantages": False,
            "rows": with_tokens,
            **changed,
        }
        flags = {"use_rollout_logprobs": False, "custom_advantage_function_path": None, "use_opd": False}
        batch = _batch(rows("advantages_BT")) | {"rewards": INPUTS["rewards_B"]}
        del batch["unconcat_tokens"]
        chosen = {key: [values[row] for row in with_tokens] for key, values in batch.items()}
        module.compute_advantages_and_returns(SimpleNamespace(**settings, **flags), chosen)
        cases.append(
            Case(
                name=f"advantage_{name}",
                function="compute_advantages_and_returns",
                file=LOSS,
                settings=settings,
                inputs=["rewards_B", "old_logprobs_BT", "ref_logprobs_BT", "values_BT", "loss_mask_BT", "lengths_B"],
                outputs={"advantages_BT": padded(chosen["advantages"]), "returns_BT": padded(chosen["returns"])},
                note="only the rows in settings; kl is old minus reference; rewards_B are taken as they are",
            )
        )
    return cases


def _value_loss_cases() -> list[Case]:
    from slime.backends.megatron_utils import loss as module

    cases = []
    for per_token in (False, True):
        settings = {"loss_type": "value_loss", "value_clip": 0.2, "calculate_per_token_loss": per_token}
        flags = {"recompute_loss_function": None, "allgather_cp": None}
        options = SimpleNamespace(**settings, **flags)
        batch = _batch(rows("advantages_BT"))

        def loss_of(new_values_BT: torch.Tensor, batch: Any = batch, options: Any = options) -> torch.Tensor:
            pieces = [row[:length] for row, length in zip(new_values_BT, INPUTS["lengths_B"], strict=True)]
            module.get_values = lambda *_logits, **_options: (None, {"values": pieces})
            loss, normalizer, _ = module.loss_function(options, batch, 1, len(pieces), new_values_BT)
            return loss / normalizer

        cases.append(
            Case(
                name="value_loss_per_token" if per_token else "value_loss_default",
                function="loss_function (value_loss_function)",
                file=LOSS,
                settings=settings,
                inputs=["new_values_BT", "values_BT", "returns_BT", "loss_mask_BT", "lengths_B"],
                outputs=loss_and_gradient(loss_of, "new_values_BT"),
                note="divided by the normalizer that slime returns; no factor 1/2",
            )
        )
    return cases


def _defaults_case() -> Case:
    from slime.utils.arguments import get_slime_extra_args_provider

    parser = argparse.ArgumentParser(conflict_handler="resolve")
    get_slime_extra_args_provider()(parser)
    names = (
        "advantage_estimator",
        "rewards_normalization",
        "grpo_std_normalization",
        "normalize_advantages",
        "eps_clip",
        "eps_clip_high",
        "eps_clip_c",
        "value_clip",
        "gamma",
        "lambd",
        "kl_coef",
        "use_kl_loss",
        "kl_loss_coef",
        "kl_loss_type",
        "entropy_coef",
        "use_tis",
        "tis_clip",
        "tis_clip_low",
        "use_rollout_logprobs",
        "opsm_delta",
        "rollout_batch_size",
        "n_samples_per_prompt",
        "over_sampling_batch_size",
        "num_steps_per_rollout",
        "rollout_temperature",
        "rollout_top_p",
        "rollout_top_k",
    )
    values = {name: parser.get_default(name) for name in names}
    return defaults_case("arguments", "slime/utils/arguments.py", values, names)


def record(checkout: Path) -> list[Case]:
    """Every case of slime."""
    prepare_imports(checkout, stand_ins=STAND_INS)
    _megatron_of_one_process()
    return [
        *_advantage_cases(),
        *_policy_loss_cases(),
        *_kl_cases(),
        *_gae_cases(),
        *_token_advantage_cases(),
        *_value_loss_cases(),
        _defaults_case(),
    ]
