"""AReaL: normalisation of rewards and advantages, GAE, the decoupled actor loss, rejection, SAPO, critic loss, KL."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

STAND_INS = (
    "uvloop",
    "torchdata",
    "ray",
    "aiofiles",
    "areal.api.engine_api",
    "areal.engine",
    "areal.infra",
    "areal.experimental",
    "areal.trainer.ppo.stats",
    "areal.utils.logging",
    "areal.utils.name_resolve",
    "areal.utils.perf_tracer",
    "areal.utils.pkg_version",
    "areal.utils.seqpack",
    "areal.utils.stats_tracker",
)
PACKAGES = ("areal", "areal.utils", "areal.trainer", "areal.trainer.ppo")
FUNCTIONAL = "areal/utils/functional/functional.py"
DATA = "areal/utils/data.py"
ACTOR = "areal/trainer/ppo/actor.py"
LOSS_INPUTS = ["policy_logprobs_BT", "old_logprobs_BT", "advantages_B", "loss_mask_BT"]
BATCH_NORM = {"mean_level": "batch", "std_level": "batch", "mean_leave1out": False, "std_unbiased": True}
GROUP_NORM = {**BATCH_NORM, "mean_level": "group", "std_level": "group", "group_size": 4}
NORMS: list[tuple[str, dict[str, Any]]] = [
    ("batch", BATCH_NORM),
    ("group", GROUP_NORM),
    ("group_mean_only", {**GROUP_NORM, "std_level": None}),
    ("group_mean_batch_std", {**GROUP_NORM, "std_level": "batch"}),
    ("group_leave_one_out", {**GROUP_NORM, "mean_leave1out": True, "std_level": None}),
    ("group_biased", {**GROUP_NORM, "std_unbiased": False}),
]


def _normalization_cases() -> list[Case]:
    from areal.api.cli_args import NormConfig
    from areal.utils.data import Normalization

    rewards, _ = flat_groups("rewards_groups")
    cases = [
        Case(
            name=f"advantage_{name}",
            function="Normalization.__call__",
            file=DATA,
            settings={**settings, "eps": 1e-5},
            inputs=["rewards_groups"],
            outputs={
                "advantages_groups": as_groups(
                    Normalization(NormConfig(**settings))(torch.tensor(rewards, dtype=torch.float64)).tolist(),
                    "rewards_groups",
                )
            },
            note="applied to the rewards, as `reward_norm` does",
        )
        for name, settings in NORMS
    ]
    for name, settings in (("batch", BATCH_NORM), ("group", {**GROUP_NORM, "group_size": 2})):
        normalize = Normalization(NormConfig(**settings))
        cases.append(
            Case(
                name=f"advantage_tokens_{name}",
                function="Normalization.__call__",
                file=DATA,
                settings={**settings, "eps": 1e-5},
                inputs=["advantages_BT", "loss_mask_BT"],
                outputs={"advantages_BT": normalize(tensor("advantages_BT"), tensor("loss_mask_BT"))},
                note="applied to the tokens' advantages, as `adv_norm` does",
            )
        )
    return cases


def _with_prompt(values_BT: torch.Tensor, before: int) -> torch.Tensor:
    """Room for one prompt token, and for one position past the longest row, which otherwise counts as cut off."""
    return torch.nn.functional.pad(values_BT, (before, 2 - before))


def _gae(settings: dict[str, Any], adv_norm: dict[str, Any] | None) -> dict[str, Any]:
    from areal.api.cli_args import NormConfig
    from areal.trainer.ppo.actor import PPOActor
    from areal.utils.data import KLEstimator, Normalization

    actor = SimpleNamespace(
        config=SimpleNamespace(overlong_reward_penalty=False, use_decoupled_loss=True, recompute_logprob=True),
        reward_norm=None,
        adv_norm=Normalization(NormConfig(**adv_norm)) if adv_norm else None,
        kl_estimator=KLEstimator("k1"),
        mask_no_eos_with_zero=False,
        **settings,
    )
    loss_mask = _with_prompt(tensor("loss_mask_BT", torch.float32), 1)
    positions = torch.arange(loss_mask.shape[1])
    attention = positions < torch.tensor(INPUTS["lengths_B"]).unsqueeze(1) + 1
    batch = {
        "input_ids": torch.ones(loss_mask.shape, dtype=torch.long),
        "attention_mask": attention.long(),
        "loss_mask": loss_mask,
        "logprobs": _with_prompt(tensor("rollout_logprobs_BT", torch.float32), 1),
        "ref_logp": _with_prompt(tensor("ref_logprobs_BT", torch.float32), 0),
        "rewards": tensor("rewards_B", torch.float32),
        "values": _with_prompt(tensor("values_BT", torch.float32), 0),
    }
    result = PPOActor._compute_advantages(actor, batch)
    width = len(INPUTS["loss_mask_BT"][0])
    return {"advantages_BT": result["advantages"][:, :width], "returns_BT": result["returns"][:, :width]}


def _gae_cases() -> list[Case]:
    default = {"reward_bias": 0.0, "reward_scaling": 1.0, "reward_clip": 20.0, "discount": 1.0, "gae_lambda": 1.0}
    variants: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
        ("no_norm", {**default, "kl_ctl": 0.0}, None),
        ("default", {**default, "kl_ctl": 0.1}, BATCH_NORM),
        ("discounted", {**default, "kl_ctl": 0.0, "discount": 0.97, "gae_lambda": 0.9}, None),
    ]
    return [
        Case(
            name=f"gae_{name}",
            function="PPOActor._compute_advantages",
            file=ACTOR,
            settings={**settings, "adv_norm": norm, "kl_estimator": "k1"},
            inputs=["rewards_B", "rollout_logprobs_BT", "ref_logprobs_BT", "values_BT", "loss_mask_BT", "lengths_B"],
            outputs=_gae(settings, norm),
            note="the reward sits at the last position of the row, trained or not; kl is engine minus reference, in "
            "the reward; computed in float32",
        )
        for name, settings, norm in variants
    ]


def _actor_loss(settings: dict[str, Any], rejection: dict[str, Any] | None) -> dict[str, Any]:
    from areal.api.cli_args import RejectionSamplingConfig
    from areal.utils.functional.functional import ppo_actor_loss_fn

    def loss_of(policy_logprobs_BT: torch.Tensor) -> torch.Tensor:
        return ppo_actor_loss_fn(
            policy_logprobs_BT,
            tensor("old_logprobs_BT"),
            tensor("rollout_logprobs_BT"),
            advantages_per_token(),
            loss_mask=tensor("loss_mask_BT").bool(),
            rejection_sampling=RejectionSamplingConfig(**rejection) if rejection else None,
            **settings,
        )[0]

    return loss_and_gradient(loss_of)


def _actor_loss_cases() -> list[Case]:
    default = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None, "importance_sampling_level": "token"}
    sequence = {"level": "sequence", "action": "mask", "metric": "ratio", "upper": 1.1, "lower": 0.9}
    variants: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
        ("policy_loss_default", {}, None),
        ("policy_loss_clip_higher", {"eps_clip_higher": 0.28}, None),
        ("policy_loss_dual_clip", {"c_clip": 3.0}, None),
        (
            "policy_loss_gspo",
            {"importance_sampling_level": "sequence", "eps_clip": 3e-4, "eps_clip_higher": 4e-4},
            None,
        ),
        (
            "policy_loss_gspo_wide",
            {"importance_sampling_level": "sequence", "eps_clip": 0.1, "eps_clip_higher": 0.05},
            None,
        ),
        ("mismatch_token_mask", {}, {"level": "token", "action": "mask", "metric": "ratio", "upper": 5.0}),
        (
            "mismatch_token_mask_two_sided",
            {},
            {"level": "token", "action": "mask", "metric": "ratio", "upper": 5.0, "lower": 0.5},
        ),
        ("mismatch_token_clamp", {}, {"level": "token", "action": "clamp", "metric": "ratio", "upper": 5.0}),
        ("mismatch_sequence_mask", {}, sequence),
        ("mismatch_sequence_clamp", {}, {**sequence, "action": "clamp"}),
        ("mismatch_sequence_kl_k3", {}, {**sequence, "metric": "kl_k3", "upper": 0.01, "lower": None}),
    ]
    return [
        Case(
            name=name,
            function="ppo_actor_loss_fn",
            file=FUNCTIONAL,
            settings={**default, **changed, "rejection_sampling": rejection},
            inputs=[*LOSS_INPUTS, *(["rollout_logprobs_BT"] if rejection else [])],
            outputs=_actor_loss(default | changed, rejection),
            note="old_logprobs_BT is the proximal policy, rollout_logprobs_BT the behaviour policy",
        )
        for name, changed, rejection in variants
    ]


def _other_loss_cases() -> list[Case]:
    from areal.utils.functional.functional import ppo_critic_loss_fn, sapo_loss_fn

    mask_BT = tensor("loss_mask_BT").bool()
    taus = {"tau_pos": 1.0, "tau_neg": 1.05}

    def sapo(policy_logprobs_BT: torch.Tensor) -> torch.Tensor:
        arguments = (policy_logprobs_BT, tensor("old_logprobs_BT"), advantages_per_token())
        return sapo_loss_fn(*arguments, loss_mask=mask_BT, **taus)[0]

    def critic(new_values_BT: torch.Tensor) -> torch.Tensor:
        single = (new_values_BT.float(), tensor("values_BT").float(), tensor("returns_BT").float())
        return ppo_critic_loss_fn(*single, value_eps_clip=0.2, loss_mask=mask_BT)[0]

    return [
        Case(
            name="policy_loss_sapo",
            function="sapo_loss_fn",
            file=FUNCTIONAL,
            settings=taus,
            inputs=LOSS_INPUTS,
            outputs=loss_and_gradient(sapo),
        ),
        Case(
            name="value_loss_default",
            function="ppo_critic_loss_fn",
            file=FUNCTIONAL,
            settings={"value_eps_clip": 0.2, "loss_fn_type": "mse"},
            inputs=["new_values_BT", "values_BT", "returns_BT", "loss_mask_BT"],
            outputs=loss_and_gradient(critic, "new_values_BT"),
            note="computed in float32",
        ),
    ]


def _kl_cases() -> list[Case]:
    from areal.utils.data import KLEstimator

    return [
        Case(
            name=f"kl_{kind}",
            function="KLEstimator.__call__",
            file=DATA,
            settings={"kl_estimator": kind, "apply_clamp": True},
            inputs=["policy_logprobs_BT", "ref_logprobs_BT"],
            outputs={"kl_BT": KLEstimator(kind)(tensor("policy_logprobs_BT"), tensor("ref_logprobs_BT"))},
            note="computed in float32",
        )
        for kind in ("k1", "k2", "k3")
    ]


def _overlong_case() -> list[Case]:
    from areal.utils.functional.functional import reward_overlong_penalty

    overlong = INPUTS["overlong"]
    lengths = torch.tensor(overlong["lengths"])
    mask = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).long()
    settings = {
        "overlong_tokens": overlong["buffer"],
        "overlong_penalty_factor": overlong["penalty_factor"],
        "max_response_length": overlong["max_tokens"],
    }
    batch = {"rewards": torch.tensor(overlong["rewards"]), "input_ids": mask, "loss_mask": mask}
    return [
        Case(
            name="reward_overlong",
            function="reward_overlong_penalty",
            file=FUNCTIONAL,
            settings=settings,
            inputs=["overlong"],
            outputs={"rewards": reward_overlong_penalty(batch, **settings)["rewards"]},
        )
    ]


def _defaults_cases() -> list[Case]:
    from areal.api.cli_args import NormConfig, PPOActorConfig, PPOCriticConfig

    actor = (
        "ppo_n_minibatches",
        "eps_clip",
        "eps_clip_higher",
        "c_clip",
        "reward_norm",
        "reward_scaling",
        "reward_bias",
        "reward_clip",
        "kl_ctl",
        "kl_estimator",
        "discount",
        "gae_lambda",
        "mask_no_eos_with_zero",
        "use_decoupled_loss",
        "rejection_sampling",
        "importance_sampling_level",
        "recompute_logprob",
    )
    file = "areal/api/cli_args.py"
    critic = ("ppo_n_minibatches", "eps_clip", "mask_no_eos_with_zero")
    return [
        defaults_case("PPOActorConfig", file, field_defaults(PPOActorConfig), actor),
        defaults_case("PPOCriticConfig", file, field_defaults(PPOCriticConfig), critic),
        defaults_case("NormConfig", file, field_defaults(NormConfig), tuple(field_defaults(NormConfig))),
    ]


def record(checkout: Path) -> list[Case]:
    """Every case of AReaL."""
    prepare_imports(checkout, stand_ins=STAND_INS)
    for package in PACKAGES:
        bare_package(package, checkout / package.replace(".", "/"))
    return [
        *_normalization_cases(),
        *_gae_cases(),
        *_actor_loss_cases(),
        *_other_loss_cases(),
        *_kl_cases(),
        *_overlong_case(),
        *_defaults_cases(),
    ]
