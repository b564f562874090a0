"""`training.rl.advantage`, `.reward_shaping` and `.loss`: the settings that distinguish RL algorithms.

Formulas: `algorithms/`. Settings of well-known systems: `algorithms/presets.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rollouts_core.algorithms.objectives import ALL_OBJECTIVES, describe_objectives
from rollouts_core.config.record import Finite, Record
from rollouts_core.plugins import KeyOf


class AdvantageConfig(Record):
    """Computes advantages from the rewards of the completions."""

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
    """Baseline that is subtracted from a reward, and its divisor. group_mean_std: GRPO. group_mean: Dr. GRPO.
    leave_one_out: RLOO. leave_one_out_std: also divided by the others' deviation. group_mean_batch_std: the deviation
    of the whole batch. batch_mean_std: its mean, too. max_rl: divided by the group's mean. constant: minus `baseline`.
    gae: PPO with a value head."""
    baseline: Finite = 0.0
    """The reward that counts as neutral, for the estimator `constant`."""
    std: Literal["sample", "population"] = "sample"
    """Whether squared deviations are divided by their number less one, or by their number."""
    eps: Annotated[Finite, Field(ge=0)] = 1e-6
    """Added to the divisor of a reward."""
    singleton: Literal["zero", "reward"] = "zero"
    """Advantage of the only completion in its group: 0, or its reward."""
    unscored: Literal["error", "exclude"] = "error"
    """For a completion without a score (None from the reward function, NaN in a list). error: end the run. exclude:
    leave it out of its group's baseline, with advantage 0."""
    whiten: bool = False
    """Shift and scale the advantages to mean 0 and deviation 1 over all trained tokens of the batch."""
    gamma: Annotated[Finite, Field(ge=0, le=1)] = 1.0
    """Discount per token, for the estimator `gae`."""
    gae_lambda: Annotated[Finite, Field(ge=0, le=1)] = 1.0
    """Weight of later tokens' surprises, for the estimator `gae`; 1 takes whole returns."""


class RewardShapingConfig(Record):
    """Changes to the graded reward before advantages are computed. Reports show the graded reward."""

    max_response_tokens: int = Field(default=0, ge=0)
    """Length limit of a response for the penalty below, usually `rollout.sampling.max_new_tokens`."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """The penalty grows over this many tokens before the limit; 0 has no penalty."""
    overlong_penalty: Annotated[Finite, Field(ge=0)] = 1.0
    """Penalty at the limit."""
    overlong_capped: bool = True
    """A response beyond the limit loses no more than one at the limit."""
    mask_truncated: bool = False
    """Leave truncated completions out of the loss; their rewards still count in baselines. The penalty above then acts
    only through completions that end within the buffer."""
    kl_coef: Annotated[Finite, Field(ge=0)] = 0.0
    """Subtract this times the KL divergence from the model that training starts from, summed over tokens."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimate of that divergence from the sampled tokens; d is log policy - log reference. k1: d. abs: |d|.
    k2: d^2 / 2. k3: exp(-d) - 1 + d."""
    kl_credit: Literal["completion", "token"] = "completion"
    """completion: subtract the sum from the completion's reward, before its baseline. token: after the baseline,
    subtract the sum over this and later tokens from each token's advantage. The estimator `gae` always credits
    tokens."""

    def _broken_rules(self) -> Iterator[str]:
        if self.overlong_buffer_tokens > self.max_response_tokens:
            yield (
                f"overlong_buffer_tokens {self.overlong_buffer_tokens} must not exceed max_response_tokens "
                f"{self.max_response_tokens}: set max_response_tokens to rollout.sampling.max_new_tokens, and the "
                "buffer to a part of it"
            )


class MismatchConfig(Record):
    """Correction for an engine whose log-probs differ from the trainer's for the same weights.

    w is exp(trainer - engine), per token. A mask does not change the divisors of the loss.
    """

    weight: Literal["none", "token", "sequence", "geometric"] = "none"
    """Multiply the policy loss by w of each token, or by the product or the geometric mean of w over the completion."""
    weight_low: Annotated[Finite, Field(ge=0)] = 0.0
    """Smallest weight."""
    weight_high: Annotated[Finite, Field(ge=0)] = 2.0
    """Largest weight; 0 sets no limit."""
    outside: Literal["clamp", "zero"] = "clamp"
    """A weight outside the limits is set to the limit (truncated importance sampling), or to 0 (IcePop)."""
    mask: Literal["none", "token", "geometric", "product"] = "none"
    """Leave out tokens by w, or completions by the geometric mean or product of w over their tokens, if it is outside
    the limits below."""
    mask_low: Annotated[Finite, Field(ge=0)] = 0.0
    """Smallest accepted value."""
    mask_high: Annotated[Finite, Field(ge=0)] = 0.0
    """Largest accepted value; 0 sets no limit."""

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
    """The policy loss. The ratio is a token's probability now divided by its probability before the update."""

    objective: Annotated[str, KeyOf(ALL_OBJECTIVES)] = Field(default="ppo", description=describe_objectives())
    ratio_base: Literal["rollout", "old"] = "rollout"
    """Denominator of the ratio: the engine's log-probs at sampling, or the trainer's own before the first update of the
    step."""
    clip_low: Annotated[Finite, Field(ge=0)] = 0.2
    """The ratio is clipped below 1 - clip_low; values from 1 on remove the lower bound. dppo: how far a probability may
    fall."""
    clip_high: Annotated[Finite, Field(ge=0)] = 0.2
    """The ratio is clipped above 1 + clip_high. dppo: how far a probability may rise."""
    dual_clip: Annotated[Finite, Field(ge=0)] = 0.0
    """A token with a negative advantage loses at most this multiple of it, in ppo and gspo; 0 sets no limit."""
    ratio_penalty: Annotated[Finite, Field(ge=0)] = 0.0
    """Penalty for the square of the log-ratio."""
    drift_mask: Annotated[Finite, Field(ge=0)] = 0.0
    """Leave out completions with a negative advantage whose mean log-ratio fell by more than this; 0 keeps all."""
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "constant_length"] = "token_mean"
    """Average over all trained tokens of the update, over each completion's mean, over each prompt's mean, or the sum
    divided by the number of completions and `constant_length`."""
    constant_length: int = Field(default=0, ge=0)
    """Length used for every completion by the aggregation `constant_length`."""
    count_untrained: bool = False
    """Count completions without a trained token when the loss averages over completions."""
    entropy_coef: Annotated[Finite, Field(ge=0)] = 0.0
    """Bonus for the entropy of the policy."""
    kl_coef: Annotated[Finite, Field(ge=0)] = 0.0
    """Penalty for the KL divergence from the model that training starts from."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Estimate of that divergence from the sampled tokens; d is log policy - log reference. k1: d. abs: |d|.
    k2: d^2 / 2. k3: exp(-d) - 1 + d."""
    kl_weight: Literal["none", "ratio", "on_policy"] = "none"
    """Multiply the estimate by the ratio, which makes it unbiased; on_policy: by a ratio of 1 that has its gradient."""
    kl_input_clamp: Annotated[Finite, Field(ge=0)] = 20.0
    """|d| is limited to this; 0 sets no limit."""
    kl_output_clamp: Annotated[Finite, Field(ge=0)] = 10.0
    """The absolute estimate is limited to this; 0 sets no limit."""
    value_coef: Annotated[Finite, Field(ge=0)] = 0.1
    """Weight of half the squared error of the value head, for the estimator `gae`."""
    value_clip: Annotated[Finite, Field(ge=0)] = 0.2
    """Largest change of a value from its value before the update. 0: no limit."""
    mismatch: MismatchConfig = MismatchConfig()
    """Correction for the difference between engine and trainer; with `ratio_base` = "old"."""

    def _broken_rules(self) -> Iterator[str]:
        if 0 < self.dual_clip <= 1:
            yield f"dual_clip must be above 1, or 0 for no limit, found {self.dual_clip:g}"
        if self.aggregation == "constant_length" and not self.constant_length:
            yield 'aggregation "constant_length" needs constant_length'
        corrects = self.mismatch.weight != "none"
        if corrects and self.ratio_base == "rollout" and ALL_OBJECTIVES[self.objective].has_ratio:
            yield (
                'mismatch.weight would correct twice with ratio_base "rollout", which already corrects: '
                'set ratio_base = "old"'
            )
