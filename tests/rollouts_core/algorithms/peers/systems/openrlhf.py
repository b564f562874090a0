"""OpenRLHF: advantages of the experience maker, PolicyLoss, ValueLoss, KL estimators, overlong penalty."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.rollouts_core.algorithms.peers.recording import (
    INPUTS,
    Case,
    advantages_per_token,
    as_groups,
    flat_groups,
    loss_and_gradient,
    prepare_imports,
    tensor,
)

STAND_INS = (
    "ray",
    "vllm",
    "deepspeed",
    "flash_attn",
    "peft",
    "wandb",
    "optree",
    "ring_flash_attn",
    "pylatexenc",
    "aiohttp",
    "openrlhf.trainer.ray",
)
LOSS = "openrlhf/models/loss.py"
MAKER = "openrlhf/trainer/ppo_utils/experience_maker.py"
LOSS_INPUTS = ["policy_logprobs_BT", "old_logprobs_BT", "advantages_B", "loss_mask_BT"]
ROWS_WITH_TOKENS = [i for i, row in enumerate(INPUTS["loss_mask_BT"]) if any(row)]


def _options(estimator: str, num_samples: int, **advantage: Any) -> SimpleNamespace:
    settings = {"gamma": 1.0, "lambd": 1.0, "no_std_norm": False, **advantage}
    return SimpleNamespace(
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator=estimator, **settings)),
        rollout=SimpleNamespace(n_samples_per_prompt=num_samples),
        reward=SimpleNamespace(clip_range=None),
    )


def _experience(rewards: torch.Tensor, mask_BT: torch.Tensor, values_BT: torch.Tensor | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        index=list(range(len(rewards))),
        rewards=rewards,
        kl=torch.zeros_like(mask_BT),
        action_mask=mask_BT,
        values=values_BT,
        info={},
    )


def _advantages(experience: SimpleNamespace, options: SimpleNamespace, kl_coef: float = 0.0) -> SimpleNamespace:
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=options),
        kl_ctl=SimpleNamespace(value=kl_coef),
        advantage_estimator=options.algo.advantage.estimator,
    )
    for name in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(maker, name, getattr(RemoteExperienceMaker, name).__get__(maker))
    RemoteExperienceMaker.compute_advantages_and_returns(maker, [experience])
    return experience


def _advantage_cases() -> list[Case]:
    variants: list[tuple[str, str, dict[str, Any]]] = [
        ("group_norm", "group_norm", {}),
        ("dr_grpo", "dr_grpo", {}),
        ("rloo", "rloo", {}),
        ("reinforce_baseline", "reinforce_baseline", {}),
        ("reinforce_baseline_no_std", "reinforce_baseline", {"no_std_norm": True}),
        ("reinforce_plus_plus", "reinforce", {}),
    ]
    rewards, _ = flat_groups("rewards_groups")
    cases = []
    for name, estimator, changed in variants:
        experience = _experience(
            torch.tensor(rewards, dtype=torch.float64), torch.ones(len(rewards), 1, dtype=torch.float64)
        )
        _advantages(experience, _options(estimator, 4, **changed))
        cases.append(
            Case(
                name=f"advantage_{name}",
                function="RemoteExperienceMaker.compute_advantages_and_returns",
                file=MAKER,
                settings={"estimator": estimator, "n_samples_per_prompt": 4, "gamma": 1.0, **changed},
                inputs=["rewards_groups"],
                outputs={"advantages_groups": as_groups(experience.advantages[:, 0].tolist(), "rewards_groups")},
                note="each completion has one token",
            )
        )
    return cases


def _token_advantage_cases() -> list[Case]:
    variants: list[tuple[str, str, dict[str, Any]]] = [
        ("gae_default", "gae", {}),
        ("gae_discounted", "gae", {"gamma": 0.97, "lambd": 0.9}),
        ("advantage_reinforce_plus_plus_discounted", "reinforce", {"gamma": 0.97}),
        ("advantage_reinforce_baseline_tokens", "reinforce_baseline", {}),
        ("advantage_group_norm_tokens", "group_norm", {}),
    ]
    cases = []
    for name, estimator, changed in variants:
        experience = _experience(
            tensor("rewards_B")[ROWS_WITH_TOKENS[:4]], tensor("loss_mask_BT")[ROWS_WITH_TOKENS[:4]]
        )
        experience.values = tensor("values_BT")[ROWS_WITH_TOKENS[:4]]
        experience.kl = (tensor("old_logprobs_BT") - tensor("ref_logprobs_BT"))[ROWS_WITH_TOKENS[:4]]
        _advantages(experience, _options(estimator, 2, **changed), kl_coef=0.1)
        cases.append(
            Case(
                name=name,
                function="RemoteExperienceMaker.compute_advantages_and_returns",
                file=MAKER,
                settings={
                    "estimator": estimator,
                    "n_samples_per_prompt": 2,
                    "kl_coef": 0.1,
                    "gamma": 1.0,
                    "lambd": 1.0,
                    **changed,
                    "rows": ROWS_WITH_TOKENS[:4],
                },
                inputs=["rewards_B", "old_logprobs_BT", "ref_logprobs_BT", "values_BT", "loss_mask_BT"],
                outputs={"advantages_BT": experience.advantages, "returns_BT": experience.returns},
                note="only the rows in settings; the reward sits at the last trained token; kl = old - ref (k1), in "
                "the reward with kl_coef",
            )
        )
    return cases


DEFAULTS: dict[str, Any] = {
    "clip_eps_low": 0.2,
    "clip_eps_high": 0.2,
    "dual_clip": None,
    "token_level_loss": True,
    "policy_loss_type": "ppo",
    "enable_vllm_is_correction": False,
    "vllm_is_truncated_threshold": None,
    "vllm_is_correction_type": "tis",
}


def _policy_loss(settings: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    from openrlhf.models.loss import PolicyLoss

    loss = PolicyLoss(**settings)

    def loss_of(policy_logprobs_BT: torch.Tensor) -> torch.Tensor:
        return loss(
            policy_logprobs_BT[rows],
            tensor("old_logprobs_BT")[rows],
            advantages_per_token()[rows],
            tensor("loss_mask_BT")[rows],
            rollout_log_probs=tensor("rollout_logprobs_BT")[rows],
        )[0]

    return loss_and_gradient(loss_of)


def _policy_loss_cases() -> list[Case]:
    correction = {"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": [0.5, 5.0]}
    variants: list[tuple[str, dict[str, Any]]] = [
        ("policy_loss_default", {}),
        ("policy_loss_per_sample", {"token_level_loss": False}),
        ("policy_loss_dual_clip", {"dual_clip": 3.0}),
        ("policy_loss_clip_higher", {"clip_eps_high": 0.28}),
        ("policy_loss_gspo", {"policy_loss_type": "gspo", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4}),
        ("policy_loss_gspo_wide", {"policy_loss_type": "gspo", "clip_eps_low": 0.1, "clip_eps_high": 0.05}),
        ("mismatch_tis", {**correction, "vllm_is_correction_type": "tis"}),
        ("mismatch_icepop", {**correction, "vllm_is_correction_type": "icepop"}),
        ("mismatch_seq_mask_tis", {**correction, "vllm_is_correction_type": "seq-mask-tis"}),
        (
            "mismatch_seq_mask_tis_narrow",
            {
                **correction,
                "vllm_is_correction_type": "seq-mask-tis",
                "vllm_is_truncated_threshold": [0.9, 1.1],
            },
        ),
    ]
    cases = []
    for name, changed in variants:
        # the geometric mean of a completion without a trained token is not a number
        rows = ROWS_WITH_TOKENS if "seq_mask" in name else list(range(6))
        cases.append(
            Case(
                name=name,
                function="PolicyLoss.forward",
                file=LOSS,
                settings={**DEFAULTS, **changed, "rows": rows},
                inputs=[*LOSS_INPUTS, *(["rollout_logprobs_BT"] if name.startswith("mismatch") else [])],
                outputs=_policy_loss(DEFAULTS | changed, rows),
            )
        )
    return cases


def _value_loss_cases() -> list[Case]:
    from openrlhf.models.loss import ValueLoss

    cases = []
    for name, settings in (
        ("default", {"clip_eps": 0.5, "token_level_loss": True}),
        ("per_sample", {"clip_eps": 0.5, "token_level_loss": False}),
        ("no_clip", {"clip_eps": None, "token_level_loss": True}),
    ):
        loss = ValueLoss(**settings)

        def loss_of(new_values_BT: torch.Tensor, loss: Any = loss) -> torch.Tensor:
            return loss(new_values_BT, tensor("values_BT"), tensor("returns_BT"), tensor("loss_mask_BT"))

        cases.append(
            Case(
                name=f"value_loss_{name}",
                function="ValueLoss.forward",
                file=LOSS,
                settings=settings,
                inputs=["new_values_BT", "values_BT", "returns_BT", "loss_mask_BT"],
                outputs=loss_and_gradient(loss_of, "new_values_BT"),
            )
        )
    return cases


def _kl_cases() -> list[Case]:
    from openrlhf.models.utils import compute_approx_kl

    return [
        Case(
            name=f"kl_{kind}",
            function="compute_approx_kl",
            file="openrlhf/models/utils.py",
            settings={"kl_estimator": kind},
            inputs=["policy_logprobs_BT", "ref_logprobs_BT"],
            outputs={"kl_BT": compute_approx_kl(tensor("policy_logprobs_BT"), tensor("ref_logprobs_BT"), kind)},
            note="computed in float32",
        )
        for kind in ("k1", "k2", "k3")
    ]


def _overlong_case() -> list[Case]:
    from openrlhf.trainer.ppo_utils.length_penalty import apply_overlong_penalty

    overlong = INPUTS["overlong"]
    experience = SimpleNamespace(
        response_length=torch.tensor(overlong["lengths"]),
        rewards=torch.tensor(overlong["rewards"], dtype=torch.float64),
    )
    settings = {
        "max_new_tokens": overlong["max_tokens"],
        "overlong_buffer_len": overlong["buffer"],
        "overlong_penalty_factor": overlong["penalty_factor"],
    }
    apply_overlong_penalty([experience], **settings)
    return [
        Case(
            name="reward_overlong",
            function="apply_overlong_penalty",
            file="openrlhf/trainer/ppo_utils/length_penalty.py",
            settings=settings,
            inputs=["overlong"],
            outputs={"rewards": experience.rewards},
        )
    ]


def record(checkout: Path) -> list[Case]:
    """Every case of OpenRLHF."""
    prepare_imports(checkout, stand_ins=STAND_INS)
    return [
        *_advantage_cases(),
        *_token_advantage_cases(),
        *_policy_loss_cases(),
        *_value_loss_cases(),
        *_kl_cases(),
        *_overlong_case(),
    ]
