"""Warn of settings without effect, because another setting replaces them or because a required setting is missing.

config/ rejects settings that contradict each other.
"""

from __future__ import annotations

import json
from operator import attrgetter

from rollouts_core.config import (
    Config,
    LoRAConfig,
    OptimConfig,
    PolicyConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
    TrainingConfig,
)
from rollouts_core.environments.protocol import describe_tools, is_multi_turn
from rollouts_core.findings import Caution
from rollouts_core.rollout.resolve import resolve_environment
from rollouts_core.stages import TRAININGS, kind_of
from rollouts_core.stages.kind import load


def find_settings_without_effect(config: Config) -> list[Caution]:
    """A warning for each setting that the user changed although it has no effect in this run."""
    found = _of_other_modes(config)
    for name, training in config.trainings.items():
        section = f"training.{name}"
        found += _of_stage(section, training.optim, training.policy, num_updates=training.num_optim_steps)
        found += [*_of_intervals(section, training), *_of_resuming(section, training)]
        found += load(kind_of(name).find_unused)(config)
    if config.evaluation.metric == "accuracy":
        found += _of_rollout(config.rollout)
    return [*map(Caution, found), *warn_of_equal_completions(config)]


def sft_without_effect(config: Config) -> list[str]:
    given = config.training.sft.eval_every
    if given == SFTTrainingConfig().eval_every or config.data.sft_eval:
        return []
    return [f"training.sft.eval_every {given} does nothing without data.sft_eval"]


def rl_without_effect(config: Config) -> list[str]:
    return [*_of_loss(config.training.rl), *_of_absent_parts(config.training.rl)]


def warn_of_equal_completions(config: Config) -> list[Caution]:
    """Warn if an evaluation samples several completions per prompt at temperature 0, where all are equal."""
    evaluation = config.evaluation
    is_greedy = evaluation.metric == "accuracy" and evaluation.temperature == 0
    if evaluation.samples_per_prompt == 1 or not is_greedy or is_multi_turn(resolve_environment(config.rollout)):
        return []
    return [
        Caution(
            f"evaluation.samples_per_prompt {evaluation.samples_per_prompt} only takes longer, because at "
            "evaluation.temperature 0 all completions of a prompt are equal: set evaluation.temperature above 0"
        )
    ]


def _of_other_modes(config: Config) -> list[str]:
    """A sentence for each changed section and each data file of trainings that the run's mode does not include."""
    data, training, usual = config.data, config.training, TrainingConfig()
    found: list[str] = []
    for name, kind in TRAININGS.items():
        if name in config.trainings:
            continue
        given = {kind.setting: getattr(training, name) != getattr(usual, name)}
        given |= {f"data.{each}": bool(getattr(data, each)) for each in kind.reads if not config.reads(each)}
        found += [
            f'{setting} does nothing: mode "{config.mode}" has no {kind.label}'
            for setting, is_given in given.items()
            if is_given
        ]
    if config.evaluation.metric == "loss" and config.rollout != RolloutConfig():
        found.append('rollout does nothing: no completions are generated without RL and with evaluation.metric "loss"')
    return found


def _of_stage(stage: str, optim: OptimConfig, policy: PolicyConfig, *, num_updates: int) -> list[str]:
    found: list[str] = []
    if optim.lr == 0:
        found.append(f"{stage}.optim.lr is 0, so the model does not change")
    if optim.schedule == "constant" and optim.min_lr_ratio != OptimConfig().min_lr_ratio:
        found.append(
            f'{stage}.optim.min_lr_ratio {optim.min_lr_ratio:g} does nothing with schedule "constant": set schedule to '
            '"cosine" or "linear"'
        )
    if optim.num_warmup_steps >= num_updates:
        found.append(
            f"{stage}.optim.num_warmup_steps {optim.num_warmup_steps} are not below the number of updates "
            f"({num_updates}), so the learning rate only rises"
        )
    unused = [name for name in LoRAConfig.model_fields if getattr(policy.lora, name) != getattr(LoRAConfig(), name)]
    if policy.lora.rank == 0 and unused:
        found.append(f"{stage}.policy.lora.{unused[0]} does nothing without lora.rank: all weights are trained")
    return found


def _of_intervals(stage: str, training: SFTTrainingConfig | RLTrainingConfig) -> list[str]:
    given, usual = training.checkpoint_every, type(training)().checkpoint_every
    if given <= training.num_steps or given == usual:
        return []
    return [
        f"{stage}.checkpoint_every {given} is above num_steps {training.num_steps}, so only the last step has a "
        "checkpoint: the selection has only one checkpoint, and an interrupted training starts again from the beginning"
    ]


def _of_resuming(stage: str, training: SFTTrainingConfig | RLTrainingConfig) -> list[str]:
    """A sentence about `allow_changed` without `resume_from`.

    Without `resume_from`, a training resumes only from its own checkpoints, whose settings are equal.
    """
    if not training.allow_changed or training.resume_from:
        return []
    return [f"{stage}.allow_changed does nothing without resume_from, the checkpoint to resume from"]


def _of_loss(rl: RLTrainingConfig) -> list[str]:
    """A sentence for each setting of the loss that needs several updates per step.

    With ratio_base "old", all ratios are 1 in the first update of a step, because the policy equals the old policy.
    """
    if rl.loss.ratio_base == "rollout" or rl.num_minibatches * rl.num_epochs > 1:
        return []
    given = {"drift_mask": rl.loss.drift_mask, "ratio_penalty": rl.loss.ratio_penalty}
    return [
        f'training.rl.loss.{name} does nothing with ratio_base "old" and one update per step: set '
        'ratio_base = "rollout", or more num_minibatches'
        for name, value in given.items()
        if value
    ]


def _of_absent_parts(rl: RLTrainingConfig) -> list[str]:
    """A sentence for each changed setting of a part of the algorithm that another setting switches off."""
    loss, shaping, has_values = rl.loss, rl.reward_shaping, rl.with_values
    has_penalty, has_kl_reward, has_kl_loss = shaping.overlong_buffer_tokens > 0, shaping.kl_coef > 0, loss.kl_coef > 0
    objective, is_chosen = rl.objective_spec, rl.loss_fn == ""
    is_constant, is_averaged = rl.advantage.estimator == "constant", loss.aggregation == "constant_length"
    parts = [
        ("advantage", "baseline", is_constant, 'without advantage.estimator = "constant"'),
        ("advantage", "gamma", has_values, 'without advantage.estimator = "gae"'),
        ("advantage", "gae_lambda", has_values, 'without advantage.estimator = "gae"'),
        ("reward_shaping", "max_response_tokens", has_penalty, "without overlong_buffer_tokens"),
        ("reward_shaping", "overlong_penalty", has_penalty, "without overlong_buffer_tokens"),
        ("reward_shaping", "overlong_capped", has_penalty, "without overlong_buffer_tokens"),
        ("reward_shaping", "kl_estimator", has_kl_reward, "without reward_shaping.kl_coef"),
        ("reward_shaping", "kl_credit", has_kl_reward, "without reward_shaping.kl_coef"),
        ("loss", "kl_estimator", has_kl_loss, "without loss.kl_coef"),
        ("loss", "kl_weight", has_kl_loss, "without loss.kl_coef"),
        ("loss", "kl_input_clamp", has_kl_loss, "without loss.kl_coef"),
        ("loss", "kl_output_clamp", has_kl_loss, "without loss.kl_coef"),
        ("loss", "value_coef", has_values, 'without advantage.estimator = "gae"'),
        ("loss", "value_clip", has_values, 'without advantage.estimator = "gae"'),
        ("loss", "objective", is_chosen, "with training.rl.loss_fn, which takes its place"),
        ("loss", "clip_low", objective.is_clipped, f'with the objective "{loss.objective}"'),
        ("loss", "clip_high", objective.is_clipped, f'with the objective "{loss.objective}"'),
        ("loss", "dual_clip", objective.is_capped, f'with the objective "{loss.objective}"'),
        ("loss", "constant_length", is_averaged, f'with the aggregation "{loss.aggregation}"'),
        ("loss.mismatch", "weight_low", loss.mismatch.weight != "none", "without loss.mismatch.weight"),
        ("loss.mismatch", "weight_high", loss.mismatch.weight != "none", "without loss.mismatch.weight"),
        ("loss.mismatch", "outside", loss.mismatch.weight != "none", "without loss.mismatch.weight"),
        ("loss.mismatch", "mask_low", loss.mismatch.mask != "none", "without loss.mismatch.mask"),
        ("loss.mismatch", "mask_high", loss.mismatch.mask != "none", "without loss.mismatch.mask"),
    ]
    found: list[str] = []
    for section, name, is_there, reason in parts:
        given, usual = (getattr(attrgetter(section)(each), name) for each in (rl, RLTrainingConfig()))
        if not is_there and given != usual:
            shown = f"{given:g}" if isinstance(given, float) else json.dumps(given)
            found.append(f"training.rl.{section}.{name} {shown} does nothing {reason}")
    return found


def _of_rollout(rollout: RolloutConfig) -> list[str]:
    grades = rollout.environment_name in ("", *rollout.reward_names)
    has_turns = rollout.multi_turn != RolloutConfig().multi_turn
    if grades and not has_turns:
        return []
    if not rollout.environment_name:
        return ["rollout.multi_turn does nothing without a rollout.environment that replies to the policy"]
    environment = resolve_environment(rollout)
    answers = is_multi_turn(environment)
    found: list[str] = []
    if not grades and not answers and not describe_tools(environment):
        instead = "rewards" if rollout.rewards else "reward_fn"
        found.append(f'rollout.environment "{rollout.environment_name}" does nothing: rollout.{instead} grades instead')
    if not answers and has_turns:
        found.append(
            f'rollout.multi_turn does nothing: the environment "{rollout.environment_name}" never replies to the policy'
        )
    return found
