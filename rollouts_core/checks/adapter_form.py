"""Predict whether RL sends LoRA adapters to the engines as adapters, or merged into the weights, and why.

The engines themselves decide when they start (engines/transfer/adapters.py).
"""

from __future__ import annotations

from pathlib import Path

from rollouts_core.config import Config, DeploymentConfig, RLTrainingConfig, RolloutConfig
from rollouts_core.embedded.architecture import read_json
from rollouts_core.errors import CheckpointError
from rollouts_core.findings import Caution


def describe_adapter_form(config: Config) -> list[str]:
    """Report how RL sends its LoRA adapters to the engines. Returns an empty list if RL trains no adapters or uses no
    engines."""
    if not config.training.rl.policy.lora.rank or not config.is_graded or config.data.rollouts:
        return []
    reason = find_merge_reason(config.training.rl, config.rollout, config.deployment)
    if reason := reason or find_unknown_architecture(config.rollout, Path(config.model.path)):
        return [
            Caution(
                "training.rl.policy.lora: adapters are merged into the weights that the engines get, because "
                f"{reason}; rounding to bfloat16 in the engines can lose small updates (metric `update_arrived_share`)"
            )
        ]
    spec = config.rollout.engine.spec
    others = ["on other machines"] if spec.adapter_form == "folder" else []
    others += [] if spec.adapts_on_cpu else ["without a GPU"]
    limit = f" (merged into the weights for {spec.title} {' or '.join(others)})" if others else ""
    return [f"training.rl.policy.lora: adapters are sent to the engines as adapters{limit}"]


def sends_adapters(training: RLTrainingConfig, rollout: RolloutConfig, deployment: DeploymentConfig) -> bool:
    """True if RL trains LoRA adapters, and the settings allow sending them to the engines unmerged."""
    return training.policy.lora.rank > 0 and not find_merge_reason(training, rollout, deployment)


def find_merge_reason(training: RLTrainingConfig, rollout: RolloutConfig, deployment: DeploymentConfig) -> str:
    """The reason, for messages, why engines get merged weights instead of adapters; "" if engines get adapters."""
    spec, rank = rollout.engine.spec, training.policy.lora.rank
    if spec.adapter_form != "folder":
        return "" if spec.adapter_form else f"{spec.title} does not support adapters"
    if rollout.engine.weight_transfer != "auto":
        return f'rollout.engine.weight_transfer "{rollout.engine.weight_transfer}" sends only merged weights'
    if rollout.engine.router_url or rollout.engine.router_python:
        return "requests through sglang-router cannot name an adapter"
    if rollout.in_flight == "continue":
        return 'running requests cannot switch to another adapter (rollout.in_flight "continue")'
    if deployment.colocated:
        return "deployment.colocated frees the memory of the engines, including adapters"
    if not spec.rank_of_slots(rank):
        return f"{spec.title} supports adapters only up to rank {max(spec.adapter_ranks)}"
    return ""


def find_unknown_architecture(rollout: RolloutConfig, folder: Path) -> str:
    """A reason, for messages, if the engine may not support adapters for this model's architecture.

    Returns "" if the architecture is on the engine's list, or if the model's folder is not on this machine.
    """
    known = rollout.engine.spec.adapted_architectures
    if not known or not (folder / "config.json").is_file():
        return ""
    try:
        architecture = str((read_json(folder / "config.json").get("architectures") or ["?"])[0])
    except CheckpointError:  # the checks of the model report an unreadable config.json
        return ""
    title = rollout.engine.spec.title
    return "" if architecture in known else f"{title} is not known to support adapters for {architecture}"
