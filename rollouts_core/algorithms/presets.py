"""Algorithms of well-known RL systems, as presets for the settings of `training.rl`.

A preset lists every setting that the system sets, even if the value equals our default. A later change of a default
therefore does not change the preset. `tests/rollouts_core/algorithms/test_presets.py` compares every preset with
numbers computed by the system's own functions. docs/algorithms.md explains the settings.

Presets do not set the optimizer, batch sizes or sampling. The field `rollout` documents the sampling settings that a
system uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

AlgorithmName = Literal[
    "",
    "slime-grpo",
    "slime-gspo",
    "verl-grpo",
    "verl-dr-grpo",
    "verl-rloo",
    "verl-gspo",
    "verl-dapo",
    "trl-dapo",
    "trl-grpo",
    "trl-dr-grpo",
    "trl-cispo",
    "openrlhf-rloo",
    "openrlhf-group-norm",
    "openrlhf-reinforce-baseline",
    "skyrl-grpo",
    "skyrl-maxrl",
    "nemo-loo",
    "open-instruct",
    "prime-rl",
    "nanochat",
    "torchtitan-grpo",
    "torchtitan-dapo",
]

Settings = Mapping[str, Any]  # Any: settings of every type


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmPreset:
    """The default algorithm of a system, or a recipe from the system's documentation."""

    source: str
    """Repository, commit and files from which the settings were taken."""
    settings: Settings
    """Values for settings of `training.rl`."""
    rollout: Settings = field(default_factory=dict)
    """Values for settings of `rollout` that the recipe expects. The preset documents these values but does not apply
    them."""


def _ppo(**others: Any) -> dict[str, Any]:  # Any: settings of every type
    """PPO loss settings that most systems share: clip range 0.2 on both sides, ratio to the trainer's own old
    log-probs."""
    usual = {
        "objective": "ppo",
        "ratio_base": "old",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 0.0,
        "aggregation": "token_mean",
        "entropy_coef": 0.0,
        "kl_coef": 0.0,
    }
    return {**usual, **others}


def _group_mean_std(**others: Any) -> dict[str, Any]:  # Any: settings of every type
    return {"estimator": "group_mean_std", "std": "sample", "eps": 1e-6, **others}


SLIME = "THUDM/slime 624b824a: slime/ray/rollout.py, slime/utils/ppo_utils.py, slime/backends/megatron_utils/loss.py"
VERL = "volcengine/verl b178a3cd: verl/trainer/ppo/core_algos.py, verl/trainer/config/actor/actor.yaml"
TRL = "huggingface/trl f2cd5771: trl/trainer/grpo_trainer.py, trl/trainer/grpo_config.py"
OPENRLHF = "OpenRLHF/OpenRLHF 3c3be623: openrlhf/models/loss.py, openrlhf/trainer/ppo_utils/experience_maker.py"
SKYRL = "NovaSky-AI/SkyRL a9564572: skyrl/backends/skyrl_train/utils/ppo_utils.py, skyrl/train/config/config.py"
NEMO = "NVIDIA-NeMo/RL 7ea279ab: nemo_rl/algorithms, examples/configs/grpo_math_1B.yaml"
OPEN_INSTRUCT = "allenai/open-instruct e6c3044a: open_instruct/grpo_utils.py, open_instruct/data_loader.py"

PRIME_RL = (
    "PrimeIntellect-ai/prime-rl 559b4477: src/prime_rl/trainer/rl/loss.py, src/prime_rl/orchestrator/algo/grpo.py"
)
NANOCHAT = "karpathy/nanochat 92d63d4e: scripts/chat_rl.py"
TORCHTITAN = "pytorch/torchtitan b5bcd76c: torchtitan/experiments/rl"

TRL_MISMATCH = {"weight": "sequence", "weight_low": 0.0, "weight_high": 3.0, "outside": "zero"}
OPENRLHF_KL = {"kl_coef": 0.01, "kl_estimator": "k1", "kl_credit": "token"}
K3_LIMITED = {"kl_estimator": "k3", "kl_weight": "none", "kl_input_clamp": 20.0, "kl_output_clamp": 10.0}

ALGORITHMS: dict[str, AlgorithmPreset] = {
    "slime-grpo": AlgorithmPreset(
        source=SLIME,
        settings={
            "advantage": _group_mean_std(),
            "loss": _ppo(aggregation="sequence_mean", count_untrained=True),
        },
    ),
    "slime-gspo": AlgorithmPreset(
        source=SLIME,
        settings={
            "advantage": _group_mean_std(),
            "loss": _ppo(objective="gspo", aggregation="sequence_mean", count_untrained=True),
        },
    ),
    "verl-grpo": AlgorithmPreset(
        source=f"{VERL}, docs/algo/grpo.md",
        settings={
            "num_minibatches": 4,
            "advantage": _group_mean_std(singleton="reward"),
            "loss": _ppo(dual_clip=3.0, kl_coef=0.001, **K3_LIMITED),
        },
    ),
    "verl-dr-grpo": AlgorithmPreset(
        source=f"{VERL}, docs/algo/grpo.md",
        settings={
            "num_minibatches": 4,
            "advantage": {"estimator": "group_mean", "singleton": "reward"},
            "loss": _ppo(dual_clip=3.0, aggregation="constant_length", constant_length=512),
        },
    ),
    "verl-rloo": AlgorithmPreset(
        source=VERL,
        settings={
            "num_minibatches": 4,
            "advantage": {"estimator": "leave_one_out", "singleton": "reward"},
            "loss": _ppo(dual_clip=3.0),
        },
    ),
    "verl-gspo": AlgorithmPreset(
        source=f"{VERL}, examples/gspo_trainer/run_qwen30b_gspo.sh",
        settings={
            "num_minibatches": 8,
            "advantage": _group_mean_std(singleton="reward"),
            "loss": _ppo(objective="gspo", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean"),
        },
    ),
    "verl-dapo": AlgorithmPreset(
        source=f"{VERL}, docs/algo/dapo.md; verl-project/verl-recipe e800faaf: dapo/",
        settings={
            "num_minibatches": 16,
            "advantage": _group_mean_std(singleton="reward"),
            "reward_shaping": {
                "max_response_tokens": 20480,
                "overlong_buffer_tokens": 4096,
                "overlong_penalty": 1.0,
                "overlong_capped": False,
            },
            "loss": _ppo(clip_high=0.28, dual_clip=10.0),
        },
        rollout={
            "batch_size": 512,
            "n_samples_per_prompt": 16,
            "over_sampling_factor": 3.0,
            "filter_fn": "reward_nonzero_std",
            "sampling": {"max_new_tokens": 20480},
        },
    ),
    "trl-dapo": AlgorithmPreset(
        source=TRL,
        settings={
            "advantage": _group_mean_std(eps=1e-4, unscored="exclude"),
            "loss": _ppo(mismatch=TRL_MISMATCH),
        },
    ),
    "trl-grpo": AlgorithmPreset(
        source=TRL,
        settings={
            "advantage": _group_mean_std(eps=1e-4, unscored="exclude"),
            "loss": _ppo(aggregation="sequence_mean", count_untrained=True, mismatch=TRL_MISMATCH),
        },
    ),
    "trl-dr-grpo": AlgorithmPreset(
        source=TRL,
        settings={
            "advantage": {"estimator": "group_mean", "unscored": "exclude"},
            "loss": _ppo(
                aggregation="constant_length", constant_length=512, count_untrained=True, mismatch=TRL_MISMATCH
            ),
        },
        rollout={"sampling": {"max_new_tokens": 512}},
    ),
    "trl-cispo": AlgorithmPreset(
        source=f"{TRL}; epsilon_high is an absolute bound there, 5.0 as its documentation recommends",
        settings={
            "advantage": _group_mean_std(eps=1e-4, unscored="exclude"),
            "loss": _ppo(objective="cispo", clip_low=1.0, clip_high=4.0, mismatch=TRL_MISMATCH),
        },
    ),
    "openrlhf-rloo": AlgorithmPreset(
        source=OPENRLHF,
        settings={
            "advantage": {"estimator": "leave_one_out"},
            "reward_shaping": OPENRLHF_KL,
            "loss": _ppo(),
        },
    ),
    "openrlhf-group-norm": AlgorithmPreset(
        source=OPENRLHF,
        settings={
            "advantage": _group_mean_std(eps=1e-9),
            "reward_shaping": OPENRLHF_KL,
            "loss": _ppo(),
        },
    ),
    "openrlhf-reinforce-baseline": AlgorithmPreset(
        source=OPENRLHF,
        settings={
            "advantage": {"estimator": "group_mean", "whiten": True, "std": "population"},
            "reward_shaping": OPENRLHF_KL,
            "loss": _ppo(),
        },
    ),
    "skyrl-grpo": AlgorithmPreset(
        source=SKYRL,
        settings={
            "num_minibatches": 4,
            "advantage": _group_mean_std(singleton="reward"),
            "loss": _ppo(kl_coef=0.001, **K3_LIMITED),
        },
    ),
    "skyrl-maxrl": AlgorithmPreset(
        source=SKYRL,
        settings={
            "num_minibatches": 4,
            "advantage": {"estimator": "max_rl", "eps": 1e-6, "singleton": "reward"},
            "loss": _ppo(kl_coef=0.001, **K3_LIMITED),
        },
    ),
    "nemo-loo": AlgorithmPreset(
        source=NEMO,
        settings={
            "advantage": {"estimator": "leave_one_out_std", "std": "sample", "eps": 1e-6},
            "loss": _ppo(kl_coef=0.01, **{**K3_LIMITED, "kl_weight": "on_policy"}),
        },
    ),
    "open-instruct": AlgorithmPreset(
        source=OPEN_INSTRUCT,
        settings={
            "advantage": {"estimator": "group_mean"},
            "loss": _ppo(
                clip_high=0.272,
                kl_coef=0.05,
                kl_estimator="k3",
                kl_input_clamp=40.0,
                kl_output_clamp=0.0,
                mismatch={"weight": "token", "weight_low": 0.0, "weight_high": 2.0, "outside": "clamp"},
            ),
        },
    ),
    "prime-rl": AlgorithmPreset(
        source=PRIME_RL,
        settings={
            "advantage": {"estimator": "group_mean"},
            "loss": _ppo(objective="dppo", ratio_base="rollout", ratio_penalty=1e-3),
        },
    ),
    "nanochat": AlgorithmPreset(
        source=NANOCHAT,
        settings={
            "advantage": {"estimator": "group_mean"},
            "loss": _ppo(objective="reinforce", aggregation="prompt_mean", count_untrained=True),
        },
        rollout={"batch_size": 16, "n_samples_per_prompt": 16},
    ),
    "torchtitan-grpo": AlgorithmPreset(
        source=TORCHTITAN,
        settings={"advantage": {"estimator": "group_mean"}, "loss": _ppo(ratio_base="rollout")},
    ),
    "torchtitan-dapo": AlgorithmPreset(
        source=TORCHTITAN,
        settings={"advantage": {"estimator": "group_mean"}, "loss": _ppo(ratio_base="rollout", clip_high=0.28)},
    ),
}
