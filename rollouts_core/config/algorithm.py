"""`training.rl.advantage`, `.reward_shaping` and `.loss`: the settings in which RL algorithms differ.

`algorithms/` has the formulas; `algorithms/presets.py` has the settings of well-known systems.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rollouts_core.algorithms.objectives import ALL_OBJECTIVES, describe_objectives
from rollouts_core.config.record import Finite, Record
from rollouts_core.plugins import KeyOf


class AdvantageConfig(Record):
    """How advantages are computed from the rewards of the completions."""

    estimator: Literal[
        "group_mean_std",
        "group_mean",
        "leave_one_out",
        "leave_one_out_std",
        "group_mean_batch_std",
        "batch_mean_std",
        "max_rl",
        "constant",
        "gae",
    ] = "group_mean_std"
    """Baseline that is subtracted from a reward, and divisor of the difference. group_mean_std (GRPO): mean and
    standard deviation of the group. group_mean (Dr. GRPO): mean of the group, no divisor. leave_one_out (RLOO): mean of
    the group's other completions, no divisor; leave_one_out_std also divides by their standard deviation.
    group_mean_batch_std: mean of the group, standard deviation of the batch. batch_mean_std: mean and standard
    deviation of the batch. max_rl: mean of the group, both as baseline and as divisor. constant: the setting
    `baseline`, no divisor. gae: PPO with a value head."""
    baseline: Finite = 0.0
    """Baseline of the estimator `constant`. A completion with this reward has advantage 0."""
    std: Literal["sample", "population"] = "sample"
    """How the standard deviation of rewards is computed. sample: divide the sum of squared deviations by the number of
    rewards less one. population: divide the sum by the number of rewards."""
    eps: Annotated[Finite, Field(ge=0)] = 1e-6
    """Number that is added to the divisor of a reward, so that the divisor is never almost 0."""
    singleton: Literal["zero", "reward"] = "zero"
    """Advantage of a completion that is the only one in its group. zero: 0. reward: its reward."""
    unscored: Literal["error", "exclude"] = "error"
    """Treatment of a completion that has no score (None from the reward function, NaN in a list). error: end the
    run. exclude: give it advantage 0 and leave it out of its group's baseline."""
    whiten: bool = False
    """Shift and scale the advantages to mean 0 and standard deviation 1 over all trained tokens of the batch."""
    gamma: Annotated[Finite, Field(ge=0, le=1)] = 1.0
    """Discount per token, for the estimator `gae`."""
    gae_lambda: Annotated[Finite, Field(ge=0, le=1)] = 1.0
    """Lambda of generalized advantage estimation, for the estimator `gae`. 0: one-step errors of the value head. 1:
    full returns, without the value head's estimates of later tokens."""


class RewardShapingConfig(Record):
    """Changes of the graded reward before advantages are computed. Reports show the reward without these changes."""

    max_response_tokens: int = Field(default=0, ge=0)
    """Length of a completion, in tokens, at which the penalty reaches `overlong_penalty`. Usually the value of
    `rollout.sampling.max_new_tokens`."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Number of tokens below `max_response_tokens` at which the penalty starts. From there, the penalty grows linearly.
    0: no penalty."""
    overlong_penalty: Annotated[Finite, Field(ge=0)] = 1.0
    """Reward that is subtracted from a completion of `max_response_tokens` tokens."""
    overlong_capped: bool = True
    """Subtract at most `overlong_penalty`, even from completions longer than `max_response_tokens`."""
    mask_truncated: bool = False
    """Leave truncated completions out of the loss. The rewards of truncated completions still count in baselines. The
    length penalty then affects only completions that end by themselves within the last `overlong_buffer_tokens`
    tokens."""
    kl_coef: Annotated[Finite, Field(ge=0)] = 0.0
    """Factor of the KL penalty. The KL divergence from the model that training starts from is summed over tokens,
    multiplied by this factor and subtracted from the reward."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimate of the KL divergence at each sampled token, with d = log policy - log reference. k1: d. abs: |d|. k2:
    d^2 / 2. k3: exp(-d) - 1 + d."""
    kl_credit: Literal["completion", "token"] = "completion"
    """Number from which the KL penalty is subtracted. completion: the sum over all tokens, from the completion's
    reward, before the baseline. token: the sum over this token and later tokens, from each token's advantage, after the
    baseline. The estimator `gae` always uses token."""

    def _broken_rules(self) -> Iterator[str]:
        if self.overlong_buffer_tokens > self.max_response_tokens:
            yield (
                f"overlong_buffer_tokens {self.overlong_buffer_tokens} must not exceed max_response_tokens "
                f"{self.max_response_tokens}: set max_response_tokens to rollout.sampling.max_new_tokens, and the "
                "buffer to a part of it"
            )


class MismatchConfig(Record):
    """Correction for an engine whose log-probs differ from the trainer's, although both have the same weights.

    For each token, w is exp(trainer's log-prob - engine's log-prob). A mask does not change the divisors of the loss.
    """

    weight: Literal["none", "token", "sequence", "geometric"] = "none"
    """Multiply the policy loss by a weight. token: w of each token. sequence: product of w over the completion.
    geometric: geometric mean of w over the completion."""
    weight_low: Annotated[Finite, Field(ge=0)] = 0.0
    """Lower limit of the weight."""
    weight_high: Annotated[Finite, Field(ge=0)] = 2.0
    """Upper limit of the weight. 0: no limit."""
    outside: Literal["clamp", "zero"] = "clamp"
    """Treatment of a weight outside its limits. clamp: the weight is set to the limit (truncated importance sampling).
    zero: the weight is set to 0 (IcePop)."""
    mask: Literal["none", "token", "geometric", "product"] = "none"
    """Which tokens or completions the loss leaves out. none: nothing. token: each token whose w is outside mask_low
    and mask_high. geometric, product: each completion for which the geometric mean or the product of w over its tokens
    is outside these limits."""
    mask_low: Annotated[Finite, Field(ge=0)] = 0.0
    """Lower limit of the mask; a smaller value is masked."""
    mask_high: Annotated[Finite, Field(ge=0)] = 0.0
    """Upper limit of the mask; a larger value is masked. 0: no limit."""

    def _broken_rules(self) -> Iterator[str]:
        for name, low, high in (
            ("weight", self.weight_low, self.weight_high),
            ("mask", self.mask_low, self.mask_high),
        ):
            if 0 < high <= low:
                yield f"{name}_low {low:g} must be below {name}_high {high:g}"
        if self.mask != "none" and not (self.mask_low or self.mask_high):
            yield f'mask "{self.mask}" needs limits: set mask_low, mask_high or both'


class LossConfig(Record):
    """The policy loss.

    The ratio is a token's probability under the current weights, divided by its probability before the update.
    """

    objective: Annotated[str, KeyOf(ALL_OBJECTIVES)] = Field(default="ppo", description=describe_objectives())
    ratio_base: Literal["rollout", "old"] = "rollout"
    """Denominator of the ratio. rollout: the log-probs of the engine at sampling. old: the log-probs of the trainer
    before the step's first update."""
    clip_low: Annotated[Finite, Field(ge=0)] = 0.2
    """The ratio is clipped from below at 1 - clip_low. 1 or more: no lower limit. For dppo: largest decrease of a
    token's probability."""
    clip_high: Annotated[Finite, Field(ge=0)] = 0.2
    """The ratio is clipped from above at 1 + clip_high. For dppo: largest increase of a token's probability."""
    dual_clip: Annotated[Finite, Field(ge=0)] = 0.0
    """Largest loss of a token with a negative advantage, as a multiple of the advantage's absolute value. Used by ppo
    and gspo. 0: no limit."""
    ratio_penalty: Annotated[Finite, Field(ge=0)] = 0.0
    """Factor with which the squared log-ratio is added to the loss."""
    drift_mask: Annotated[Finite, Field(ge=0)] = 0.0
    """Leave completions with a negative advantage out of the loss if their mean log-ratio is below minus this value. 0:
    keep all completions."""
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "constant_length"] = "token_mean"
    """How the token losses of an update are averaged. token_mean: mean over all trained tokens. sequence_mean: mean of
    each completion, then mean over completions. prompt_mean: mean of each prompt, then mean over prompts.
    constant_length: sum of the token losses, divided by the number of completions times `constant_length`."""
    constant_length: int = Field(default=0, ge=0)
    """Length that the aggregation `constant_length` uses for every completion, tokens."""
    count_untrained: bool = False
    """Whether completions without a trained token count in the divisor when the loss averages over completions."""
    entropy_coef: Annotated[Finite, Field(ge=0)] = 0.0
    """Factor with which the policy's entropy is subtracted from the loss."""
    kl_coef: Annotated[Finite, Field(ge=0)] = 0.0
    """Factor with which the KL divergence from the model that training starts from is added to the loss."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Estimate of the KL divergence at each sampled token, with d = log policy - log reference. k1: d. abs: |d|. k2:
    d^2 / 2. k3: exp(-d) - 1 + d."""
    kl_weight: Literal["none", "ratio", "on_policy"] = "none"
    """Factor of each token's KL estimate. ratio: the ratio of the loss, which makes the estimate unbiased. on_policy:
    value 1, but with the gradient of the ratio."""
    kl_input_clamp: Annotated[Finite, Field(ge=0)] = 20.0
    """Largest |d| in the KL estimator; larger values are clamped. 0: no limit."""
    kl_output_clamp: Annotated[Finite, Field(ge=0)] = 10.0
    """Largest absolute value of the KL estimate; larger values are clamped. 0: no limit."""
    value_coef: Annotated[Finite, Field(ge=0)] = 0.1
    """Factor of the value loss, half the squared error of the value head, for the estimator `gae`."""
    value_clip: Annotated[Finite, Field(ge=0)] = 0.2
    """Largest change of a value prediction from its value before the update. 0: no limit."""
    mismatch: MismatchConfig = MismatchConfig()
    """Correction for the difference between the log-probs of engine and trainer. `mismatch.weight` needs `ratio_base` =
    "old" if the objective uses the ratio."""

    def _broken_rules(self) -> Iterator[str]:
        if 0 < self.dual_clip <= 1:
            yield f"dual_clip must be above 1, or 0 for no limit, found {self.dual_clip:g}"
        if self.aggregation == "constant_length" and not self.constant_length:
            yield 'aggregation "constant_length" needs constant_length'
        corrects = self.mismatch.weight != "none"
        if corrects and self.ratio_base == "rollout" and ALL_OBJECTIVES[self.objective].has_ratio:
            yield (
                'mismatch.weight would correct twice: ratio_base "rollout" already corrects for the log-probs of the '
                'engine; set ratio_base = "old"'
            )
