"""verl: advantage estimators, policy losses, KL, value loss, GAE, rollout correction, overlong penalty of DAPO.

Also recorded from an unpacked release (folder `verl_release`), which has what the commit does not: token IcePop.
"""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

from tests.rollouts_core.algorithms.peers.recording import (
    INPUTS,
    Case,
    StandIn,
    advantages_per_token,
    as_groups,
    defaults_case,
    field_defaults,
    flat_groups,
    loss_and_gradient,
    prepare_imports,
    tensor,
)

STAND_INS = ("ray", "megatron", "vllm", "sglang", "flash_attn", "wandb", "mathruler", "torchdata", "peft", "pylatexenc")
ALGOS = "verl/trainer/ppo/core_algos.py"
CORRECTION = "verl/trainer/ppo/rollout_corr_helper.py"
LOSS_INPUTS = ["policy_logprobs_BT", "old_logprobs_BT", "advantages_B", "loss_mask_BT"]


def _advantage_cases() -> list[Case]:
    from verl.trainer.ppo import core_algos

    variants: list[tuple[str, Any, dict[str, Any]]] = [
        ("grpo", core_algos.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": True}),
        ("grpo_mean_only", core_algos.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        ("rloo", core_algos.compute_rloo_outcome_advantage, {}),
        ("rloo_vectorized", core_algos.compute_rloo_vectorized_outcome_advantage, {}),
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
                    file=ALGOS,
                    settings=settings,
                    inputs=[source],
                    outputs={"advantages_groups": as_groups(result[:, 0].tolist(), source)},
                )
            )
    return [*cases, *_passk_case(), *_opo_case(), *_reinforce_cases()]


def _passk_case() -> list[Case]:
    from verl.trainer.ppo.core_algos import compute_grpo_passk_outcome_advantage

    rewards, groups = flat_groups("rewards_groups")
    per_token = torch.tensor(rewards, dtype=torch.float64).unsqueeze(1)
    settings = {"norm_adv_by_std_in_grpo": False}
    result, _ = compute_grpo_passk_outcome_advantage(
        per_token, torch.ones_like(per_token), index=np.array(groups), config=settings
    )
    return [
        Case(
            name="advantage_passk",
            function="compute_grpo_passk_outcome_advantage",
            file=ALGOS,
            settings=settings,
            inputs=["rewards_groups"],
            outputs={"advantages_groups": as_groups(result[:, 0].tolist(), "rewards_groups")},
        )
    ]


def _opo_case() -> list[Case]:
    from verl.trainer.ppo.core_algos import compute_opo_outcome_advantage

    advantages, _ = compute_opo_outcome_advantage(
        _terminal_rewards(), tensor("loss_mask_BT"), index=np.array(INPUTS["group_index_B"])
    )
    return [
        Case(
            name="advantage_opo",
            function="compute_opo_outcome_advantage",
            file=ALGOS,
            settings={},
            inputs=["rewards_B", "loss_mask_BT", "group_index_B"],
            outputs={"advantages_BT": advantages},
        )
    ]


def _terminal_rewards() -> torch.Tensor:
    rewards_BT = torch.zeros_like(tensor("loss_mask_BT"))
    rewards_BT[:, 0] = tensor("rewards_B")
    return rewards_BT


def _reinforce_cases() -> list[Case]:
    from verl.trainer.ppo import core_algos

    baseline, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        _terminal_rewards(), tensor("loss_mask_BT"), index=np.array(INPUTS["group_index_B"])
    )
    gamma = SimpleNamespace(gamma=0.97)
    plus, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        tensor("token_rewards_BT"), tensor("loss_mask_BT"), config=gamma
    )
    return [
        Case(
            name="advantage_reinforce_plus_plus_baseline",
            function="compute_reinforce_plus_plus_baseline_outcome_advantage",
            file=ALGOS,
            settings={},
            inputs=["rewards_B", "loss_mask_BT", "group_index_B"],
            outputs={"advantages_BT": baseline},
        ),
        Case(
            name="advantage_reinforce_plus_plus",
            function="compute_reinforce_plus_plus_outcome_advantage",
            file=ALGOS,
            settings={"gamma": 0.97},
            inputs=["token_rewards_BT", "loss_mask_BT"],
            outputs={"advantages_BT": plus, "returns_BT": returns},
        ),
    ]


def _actor_config(settings: dict[str, Any]) -> Any:
    from verl.workers.config import FSDPActorConfig

    names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    chosen = {name: settings[name] for name in names if name in settings}
    extra = {"rollout_n": 4} if "rollout_n" in inspect.signature(FSDPActorConfig).parameters else {}
    return FSDPActorConfig(
        strategy="fsdp", ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=6, optim=_optim(), **chosen, **extra
    )


def _optim() -> Any:
    from verl.workers.config import FSDPOptimizerConfig

    return FSDPOptimizerConfig(lr=1e-6)


PPO_DEFAULT = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
GSPO = {**PPO_DEFAULT, "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"}


def _policy_variants() -> list[tuple[str, str, dict[str, Any]]]:
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    variants = [
        (f"vanilla_{mode.replace('-', '_')}", "vanilla", {**PPO_DEFAULT, "loss_agg_mode": mode}) for mode in modes
    ]
    dapo = {**PPO_DEFAULT, "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean"}
    return [
        *variants,
        ("dapo", "vanilla", dapo),
        ("no_dual_clip", "vanilla", {**PPO_DEFAULT, "clip_ratio_c": 1e9, "loss_agg_mode": "token-mean"}),
        ("gspo", "gspo", GSPO),
        ("gspo_wide", "gspo", {**GSPO, "clip_ratio_low": 0.1, "clip_ratio_high": 0.05}),
        ("cispo", "cispo", {**PPO_DEFAULT, "loss_agg_mode": "token-mean"}),
        (
            "cispo_wide",
            "cispo",
            {**PPO_DEFAULT, "clip_ratio_low": 10, "clip_ratio_high": 0.2, "loss_agg_mode": modes[0]},
        ),
    ]


def _policy_loss(mode: str, settings: dict[str, Any], advantages_BT: torch.Tensor, **correction: Any) -> dict[str, Any]:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    function = get_policy_loss_fn(mode)
    mask_BT = correction.pop("mask_BT", tensor("loss_mask_BT"))

    def loss_of(policy_logprobs_BT: torch.Tensor) -> torch.Tensor:
        return function(
            old_log_prob=tensor("old_logprobs_BT"),
            log_prob=policy_logprobs_BT,
            advantages=advantages_BT,
            response_mask=mask_BT,
            loss_agg_mode=settings["loss_agg_mode"],
            config=_actor_config(settings),
            **correction,
        )[0]

    return loss_and_gradient(loss_of)


def _policy_loss_cases() -> list[Case]:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    cases = [
        Case(
            name=f"policy_loss_{name}",
            function=get_policy_loss_fn(mode).__name__,
            file=ALGOS,
            settings={"loss_mode": mode, **settings},
            inputs=LOSS_INPUTS,
            outputs=_policy_loss(mode, settings, advantages_per_token()),
        )
        for name, mode, settings in _policy_variants()
    ]
    settings = {**PPO_DEFAULT, "loss_agg_mode": "token-mean"}
    cases.append(
        Case(
            name="policy_loss_vanilla_per_token_advantages",
            function="compute_policy_loss_vanilla",
            file=ALGOS,
            settings={"loss_mode": "vanilla", **settings},
            inputs=["policy_logprobs_BT", "old_logprobs_BT", "advantages_BT", "loss_mask_BT"],
            outputs=_policy_loss("vanilla", settings, tensor("advantages_BT")),
        )
    )
    return cases


def _kl_cases() -> list[Case]:
    from verl.trainer.ppo.core_algos import kl_penalty

    return [
        Case(
            name=f"kl_{kind}",
            function="kl_penalty",
            file=ALGOS,
            settings={"kl_penalty": kind},
            inputs=["policy_logprobs_BT", "ref_logprobs_BT"],
            outputs={"kl_BT": kl_penalty(tensor("policy_logprobs_BT"), tensor("ref_logprobs_BT"), kind)},
        )
        for kind in ("k1", "abs", "k2", "k3")
    ]


def _critic_cases() -> list[Case]:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return, compute_value_loss

    cases = []
    for name, gamma, lam in (("default", 1.0, 1.0), ("discounted", 0.97, 0.9)):
        advantages, returns = compute_gae_advantage_return(
            tensor("token_rewards_BT"), tensor("values_BT"), tensor("loss_mask_BT"), gamma, lam
        )
        cases.append(
            Case(
                name=f"gae_{name}",
                function="compute_gae_advantage_return",
                file=ALGOS,
                settings={"gamma": gamma, "lam": lam},
                inputs=["token_rewards_BT", "values_BT", "loss_mask_BT"],
                outputs={"advantages_BT": advantages, "returns_BT": returns},
                note="advantages are whitened over the mask; values at masked positions are not cleared from returns",
            )
        )
    for mode in ("token-mean", "seq-mean-token-mean"):

        def loss_of(new_values_BT: torch.Tensor, mode: str = mode) -> torch.Tensor:
            return compute_value_loss(
                vpreds=new_values_BT,
                returns=tensor("returns_BT"),
                values=tensor("values_BT"),
                response_mask=tensor("loss_mask_BT"),
                cliprange_value=0.5,
                loss_agg_mode=mode,
            )[0]

        cases.append(
            Case(
                name=f"value_loss_{mode.replace('-', '_')}",
                function="compute_value_loss",
                file=ALGOS,
                settings={"cliprange_value": 0.5, "loss_agg_mode": mode},
                inputs=["new_values_BT", "values_BT", "returns_BT", "loss_mask_BT"],
                outputs=loss_and_gradient(loss_of, "new_values_BT"),
            )
        )
    return cases


CORRECTIONS: list[tuple[str, dict[str, Any]]] = [
    ("token_tis", {"rollout_is": "token", "rollout_is_threshold": 2.0}),
    ("token_tis_normalized", {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True}),
    ("seq_tis", {"rollout_is": "sequence", "rollout_is_threshold": 2.0}),
    ("token_rs", {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_5.0"}),
    ("seq_rs", {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}),
    ("geo_rs", {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}),
    ("geo_rs_wide", {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"}),
    ("k3_rs", {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}),
    (
        "seq_tis_and_token_rs",
        {
            "rollout_is": "sequence",
            "rollout_is_threshold": 2.0,
            "rollout_rs": "token_k1",
            "rollout_rs_threshold": "0.5_2.0",
        },
    ),
]
ICEPOP = ("token_icepop", {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"})


def _mismatch_cases(*, has_icepop: bool) -> list[Case]:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    cases = []
    for name, settings in [*CORRECTIONS, *([ICEPOP] if has_icepop else [])]:
        weights, mask_BT, _ = compute_rollout_correction_and_rejection_mask(
            old_log_prob=tensor("old_logprobs_BT"),
            rollout_log_prob=tensor("rollout_logprobs_BT"),
            response_mask=tensor("loss_mask_BT"),
            **settings,
        )
        weights_BT = None if weights is None else weights.batch["rollout_is_weights"]
        policy = {**PPO_DEFAULT, "loss_agg_mode": "token-mean"}
        loss = _policy_loss("vanilla", policy, advantages_per_token(), mask_BT=mask_BT, rollout_is_weights=weights_BT)
        kept = {} if weights_BT is None else {"weights_BT": weights_BT}
        cases.append(
            Case(
                name=f"mismatch_{name}",
                function="compute_rollout_correction_and_rejection_mask, then compute_policy_loss_vanilla",
                file=CORRECTION,
                settings={**settings, **policy},
                inputs=[*LOSS_INPUTS, "rollout_logprobs_BT"],
                outputs={**kept, "loss_mask_BT": mask_BT, **loss},
            )
        )
    return cases


def _overlong_case() -> list[Case]:
    from verl import DataProto
    from verl.workers.reward_manager.dapo import DAPORewardManager

    overlong = INPUTS["overlong"]
    lengths, width = overlong["lengths"], max(overlong["lengths"])
    attention = [[1] + [1] * n + [0] * (width - n) for n in lengths]
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.ones(len(lengths), 1, dtype=torch.long),
            "responses": torch.ones(len(lengths), width, dtype=torch.long),
            "attention_mask": torch.tensor(attention),
        },
        non_tensors={
            "reward_model": np.array([{"ground_truth": str(reward)} for reward in overlong["rewards"]], dtype=object),
            "data_source": np.array(["made"] * len(lengths), dtype=object),
            "extra_info": np.array([{} for _ in lengths], dtype=object),
        },
    )
    settings = {"max_resp_len": overlong["max_tokens"], "len": overlong["buffer"], "penalty_factor": 1.0}
    buffer = SimpleNamespace(enable=True, len=overlong["buffer"], penalty_factor=1.0, log=True)
    manager = DAPORewardManager(
        SimpleNamespace(decode=lambda _tokens, **_options: "text", eos_token="<eos>"),
        0,
        compute_score=lambda ground_truth, **_rest: float(ground_truth),
        max_resp_len=overlong["max_tokens"],
        overlong_buffer_cfg=buffer,
    )
    return [
        Case(
            name="reward_overlong",
            function="DAPORewardManager.__call__",
            file="verl/workers/reward_manager/dapo.py",
            settings=settings,
            inputs=["overlong"],
            outputs={"rewards": manager(data).sum(dim=1)},
        )
    ]


def _defaults_cases() -> list[Case]:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.workers.config import ActorConfig, CriticConfig

    actor = (
        "clip_ratio",
        "clip_ratio_low",
        "clip_ratio_high",
        "clip_ratio_c",
        "loss_agg_mode",
        "loss_scale_factor",
        "entropy_coeff",
        "use_kl_loss",
        "kl_loss_coef",
        "kl_loss_type",
        "ppo_epochs",
    )
    algorithm = ("adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo", "use_kl_in_reward", "kl_penalty")
    critic = ("cliprange_value", "loss_agg_mode", "ppo_epochs")
    correction = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "bypass_mode")
    return [
        defaults_case("ActorConfig", "verl/workers/config/actor.py", field_defaults(ActorConfig), actor),
        defaults_case("AlgoConfig", "verl/trainer/config/algorithm.py", field_defaults(AlgoConfig), algorithm),
        defaults_case("CriticConfig", "verl/workers/config/critic.py", field_defaults(CriticConfig), critic),
        defaults_case(
            "RolloutCorrectionConfig",
            "verl/trainer/config/algorithm.py",
            field_defaults(RolloutCorrectionConfig),
            correction,
        ),
    ]


def record(checkout: Path) -> list[Case]:
    """Every case of verl."""
    prepare_imports(checkout, stand_ins=STAND_INS)
    # a class that transformers 5 no longer has and that only its model loading uses
    transformers.AutoModelForVision2Seq = StandIn
    has_icepop = "icepop" in (checkout / CORRECTION).read_text()
    return [
        *_advantage_cases(),
        *_policy_loss_cases(),
        *_kl_cases(),
        *_critic_cases(),
        *_mismatch_cases(has_icepop=has_icepop),
        *_overlong_case(),
        *_defaults_cases(),
    ]
