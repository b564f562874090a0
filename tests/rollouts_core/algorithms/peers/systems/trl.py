"""TRL: advantages, engine correction and loss of GRPOTrainer and RLOOTrainer.

The advantages and the correction have no function of their own: their statements are cut out of the trainers' methods.
"""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.rollouts_core.algorithms.peers.recording import (
    INPUTS,
    Case,
    as_groups,
    defaults_case,
    field_defaults,
    flat_groups,
    loss_and_gradient,
    prepare_imports,
    run_statements,
    tensor,
)

GRPO = "trl/trainer/grpo_trainer.py"
RLOO = "trl/trainer/rloo_trainer.py"
SCORING = "_generate_and_score_completions"
LOSS_INPUTS = ["policy_logprobs_BT", "old_logprobs_BT", "advantages_B", "loss_mask_BT"]


def _advantages(checkout: Path, file: str, settings: dict[str, Any], source: str) -> list[list[float]]:
    from trl.trainer import grpo_trainer

    rewards, groups = flat_groups(source)
    stub = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_clip_range=None,
        beta=0.0,
        **settings,
    )
    namespace = {
        **vars(grpo_trainer),
        "self": stub,
        "device": torch.device("cpu"),
        "num_generations": len(rewards) // (groups[-1] + 1),
        "rewards_per_func": torch.tensor(rewards, dtype=torch.float64).unsqueeze(1),
    }
    run_statements(checkout / file, SCORING, "unscorable_mask =", "advantages = torch.nan_to_num", namespace)
    return as_groups(namespace["advantages"].tolist(), source)


def _advantage_cases(checkout: Path) -> list[Case]:
    variants: list[tuple[str, str, dict[str, Any]]] = [
        ("group", GRPO, {"scale_rewards": "group"}),
        ("batch", GRPO, {"scale_rewards": "batch"}),
        ("none", GRPO, {"scale_rewards": "none"}),
        ("rloo", RLOO, {"normalize_advantages": False}),
        ("rloo_normalized", RLOO, {"normalize_advantages": True}),
    ]
    return [
        Case(
            name="_".join(
                filter(None, ["advantage", name, source.removeprefix("rewards_").rpartition("groups")[0][:-1]])
            ),
            function=f"{'RLOO' if file == RLOO else 'GRPO'}Trainer.{SCORING} (part)",
            file=file,
            settings=settings,
            inputs=[source],
            outputs={"advantages_groups": _advantages(checkout, file, settings, source)},
        )
        for name, file, settings in variants
        for source in ("rewards_groups", "rewards_singleton_groups")
    ]


def _correction(checkout: Path, settings: dict[str, Any]) -> torch.Tensor:
    from trl.trainer import grpo_trainer

    namespace = {
        **vars(grpo_trainer),
        "self": SimpleNamespace(use_vllm=True, vllm_importance_sampling_correction=True, **settings),
        "completion_mask": tensor("loss_mask_BT"),
        "tool_mask": None,
        "old_per_token_logps": tensor("old_logprobs_BT"),
        "sampling_per_token_logps": tensor("rollout_logprobs_BT"),
    }
    # the correction is one `if`; its body begins with the mask
    last = "if self.vllm_importance_sampling_mode in ['sequence_truncate'"
    run_statements(checkout / GRPO, SCORING, "mask = completion_mask if tool_mask", last, namespace)
    return namespace["vllm_importance_sampling_ratio"]


GRPO_DEFAULT: dict[str, Any] = {
    "loss_type": "dapo",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "beta": 0.0,
    "importance_sampling_level": "token",
    "use_bias_correction_kl": False,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
    "max_completion_length": 7,
    "top_entropy_quantile": 1.0,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}


def _trainer(settings: dict[str, Any], policy_logprobs_BT: torch.Tensor) -> SimpleNamespace:
    """The attributes of a GRPOTrainer that its `_compute_loss` reads, for one process without accumulation."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    return SimpleNamespace(
        **settings,
        args=SimpleNamespace(**settings),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        vllm_importance_sampling_correction=settings["use_vllm"],
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value, sync_gradients=True
        ),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_model, **_options: (
            policy_logprobs_BT,
            torch.zeros_like(policy_logprobs_BT),
            None,
        ),
    )


def _grpo_loss(settings: dict[str, Any], **extra: torch.Tensor) -> dict[str, Any]:
    from trl.trainer.grpo_trainer import GRPOTrainer

    mask_BT = tensor("loss_mask_BT")
    ids = torch.ones(mask_BT.shape, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask_BT,
        "advantages": tensor("advantages_B"),
        "old_per_token_logps": tensor("old_logprobs_BT"),
        "ref_per_token_logps": tensor("ref_logprobs_BT"),
        "num_items_in_batch": mask_BT.sum(),
        **extra,
    }
    return loss_and_gradient(lambda values: GRPOTrainer._compute_loss(_trainer(settings, values), None, batch))


def _grpo_loss_cases() -> list[Case]:
    gspo = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
    variants: list[tuple[str, dict[str, Any]]] = [
        *((name, {"loss_type": name}) for name in ("grpo", "bnpo", "dapo", "dr_grpo", "sapo", "vespo")),
        ("cispo", {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("dapo_clip_higher", {"epsilon_high": 0.28}),
        ("delta", {"delta": 3.0}),
        ("kl", {"beta": 0.04}),
        ("kl_grpo", {"beta": 0.04, "loss_type": "grpo"}),
        ("kl_bias_corrected", {"beta": 0.04, "use_bias_correction_kl": True}),
        ("gspo", {**gspo, "loss_type": "grpo"}),
        ("gspo_wide", {**gspo, "loss_type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.05}),
        ("luspo", {**gspo, "loss_type": "luspo"}),
        ("opsm", {"off_policy_mask_threshold": 0.1}),
    ]
    return [
        Case(
            name=f"policy_loss_{name}",
            function="GRPOTrainer._compute_loss",
            file=GRPO,
            settings=GRPO_DEFAULT | changed,
            inputs=[*LOSS_INPUTS, *(["ref_logprobs_BT"] if "beta" in changed else [])],
            outputs=_grpo_loss(GRPO_DEFAULT | changed),
        )
        for name, changed in variants
    ]


def _mismatch_cases(checkout: Path) -> list[Case]:
    cases = []
    for mode, low, high in (
        ("sequence_mask", None, 3.0),
        ("sequence_truncate", None, 3.0),
        ("token_mask", None, 3.0),
        ("token_mask", 0.5, 5.0),
        ("token_truncate", None, 3.0),
    ):
        correction = {
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_min": low,
            "vllm_importance_sampling_clip_max": high,
        }
        weights = _correction(checkout, correction)
        loss = _grpo_loss(GRPO_DEFAULT | {"use_vllm": True}, importance_sampling_ratio=weights)
        cases.append(
            Case(
                name=f"mismatch_{mode}" + ("" if low is None else "_two_sided"),
                function=f"GRPOTrainer.{SCORING} (part), then _compute_loss",
                file=GRPO,
                settings={**correction, **GRPO_DEFAULT, "use_vllm": True},
                inputs=[*LOSS_INPUTS, "rollout_logprobs_BT"],
                outputs={"weights_BT": weights.expand(-1, len(INPUTS["loss_mask_BT"][0])), **loss},
            )
        )
    return cases


def _rloo_loss_case() -> list[Case]:
    from trl.trainer.rloo_trainer import RLOOTrainer

    settings = {"epsilon_low": 0.2, "epsilon_high": 0.2}
    mask_BT = tensor("loss_mask_BT")
    ids = torch.ones(mask_BT.shape, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask_BT,
        "advantages": tensor("advantages_B"),
        "old_logps": (tensor("old_logprobs_BT") * mask_BT).sum(1),
    }
    outputs = loss_and_gradient(
        lambda values: RLOOTrainer._compute_loss(_trainer(GRPO_DEFAULT | settings, values), None, batch)
    )
    return [
        Case(
            name="policy_loss_rloo",
            function="RLOOTrainer._compute_loss",
            file=RLOO,
            settings=settings,
            inputs=LOSS_INPUTS,
            outputs=outputs,
            note="one ratio per completion: exp of the summed log-ratio",
        )
    ]


def _defaults_cases() -> list[Case]:
    from trl import GRPOConfig, RLOOConfig

    shared = ("num_generations", "max_completion_length", "temperature", "beta", "epsilon", "epsilon_high")
    grpo = (
        "loss_type",
        "scale_rewards",
        "delta",
        "importance_sampling_level",
        "num_iterations",
        "mask_truncated_completions",
        "use_bias_correction_kl",
        "off_policy_mask_threshold",
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
        "top_entropy_quantile",
        "sapo_temperature_pos",
        "sapo_temperature_neg",
    )
    rloo = ("normalize_advantages", "reward_clip_range", "num_iterations", "mask_truncated_completions")
    return [
        defaults_case("GRPOConfig", "trl/trainer/grpo_config.py", field_defaults(GRPOConfig), shared + grpo),
        defaults_case("RLOOConfig", "trl/trainer/rloo_config.py", field_defaults(RLOOConfig), shared + rloo),
    ]


def record(checkout: Path) -> list[Case]:
    """Every case of TRL."""
    prepare_imports(checkout)
    return [
        *_advantage_cases(checkout),
        *_grpo_loss_cases(),
        *_mismatch_cases(checkout),
        *_rloo_loss_case(),
        *_defaults_cases(),
    ]
