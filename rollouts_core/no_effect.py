"""Say which settings of a run do nothing, because another setting takes their place or is missing.

Not here: settings that cannot go together (config/), what is wrong with models and data (validate.py).
"""

from __future__ import annotations

from rollouts_core.config import (
    Config,
    LoRAConfig,
    OptimConfig,
    PolicyConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
)
from rollouts_core.environments.protocol import describe_tools, is_multi_turn
from rollouts_core.findings import Caution
from rollouts_core.resolve import resolve_environment


def find_settings_without_effect(config: Config) -> list[Caution]:
    """A warning for each setting that somebody gave and that changes nothing in the stages of this run."""
    sft, rl = config.training.sft, config.training.rl
    found: list[Caution] = []
    if config.mode != "rl":
        found += _of_stage("training.sft", sft.optim, sft.policy, num_updates=sft.num_steps)
        found += _of_intervals("training.sft", sft)
        if sft.eval_every != SFTTrainingConfig().eval_every and not config.data.sft_eval:
            found.append(Caution(f"training.sft.eval_every {sft.eval_every} does nothing without data.sft_eval"))
    if config.mode != "sft":
        found += _of_stage("training.rl", rl.optim, rl.policy, num_updates=rl.num_optim_steps)
        found += _of_intervals("training.rl", rl)
        found += _of_loss(rl)
    return found + (_of_rollout(config.rollout) if config.evaluation.metric == "accuracy" else [])


def _of_stage(stage: str, optim: OptimConfig, policy: PolicyConfig, *, num_updates: int) -> list[Caution]:
    found: list[Caution] = []
    if optim.lr == 0:
        found.append(Caution(f"{stage}.optim.lr is 0: nothing is learned"))
    if optim.num_warmup_steps >= num_updates:
        found.append(
            Caution(
                f"{stage}.optim.num_warmup_steps {optim.num_warmup_steps} are as many as all updates ({num_updates}), "
                "or more: the learning rate does nothing but rise"
            )
        )
    unused = [name for name in LoRAConfig.model_fields if getattr(policy.lora, name) != getattr(LoRAConfig(), name)]
    if policy.lora.rank == 0 and unused:
        found.append(
            Caution(f"{stage}.policy.lora.{unused[0]} does nothing without lora.rank: all weights are trained")
        )
    return found


def _of_loss(rl: RLTrainingConfig) -> list[Caution]:
    """With one update per step nothing has moved yet from the trainer's own log-probs before it."""
    if rl.loss.ratio_base == "rollout" or rl.num_minibatches * rl.num_epochs > 1:
        return []
    given = {"drift_mask": rl.loss.drift_mask, "ratio_penalty": rl.loss.ratio_penalty}
    return [
        Caution(
            f'training.rl.loss.{name} does nothing with ratio_base "old" and one update per step: take "rollout", or '
            "more num_minibatches"
        )
        for name, value in given.items()
        if value
    ]


def _of_intervals(stage: str, training: SFTTrainingConfig | RLTrainingConfig) -> list[Caution]:
    given, usual = training.checkpoint_every, type(training)().checkpoint_every
    if given <= training.num_steps or given == usual:
        return []
    return [
        Caution(
            f"{stage}.checkpoint_every {given} is more than its num_steps {training.num_steps}: there is no checkpoint "
            "but the last one to choose, and a training that is interrupted begins anew"
        )
    ]


def _of_rollout(rollout: RolloutConfig) -> list[Caution]:
    if rollout.environment == "" or rollout.environment in rollout.reward_names:
        return []
    environment = resolve_environment(rollout)
    if is_multi_turn(environment) or describe_tools(environment):
        return []
    instead = "rewards" if rollout.rewards else "reward_fn"
    return [Caution(f'rollout.environment "{rollout.environment}" does nothing: rollout.{instead} grades in its place')]
