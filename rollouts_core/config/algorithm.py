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
    """Baseline that is subtracted from a reward, and divisor of the difference. group_mean_std (GRPO): mean and
    standard deviation of the group. group_mean (Dr. GRPO): mean of the group. leave_one_out (RLOO): mean of the group's
    other completions; leave_one_out_std also divides by their standard deviation. group_mean_batch_std: mean of the
    group, standard deviation of the batch. batch_mean_std: mean and standard deviation of the batch. max_rl: the
    group's mean as baseline and as divisor. constant: `baseline`. gae: PPO with a value head."""
    baseline: Finite = 0.0
    """Baseline of the estimator `constant`. A completion with this reward has advantage 0."""
    std: Literal["sample", "population"] = "sample"
    """Standard deviation of rewards. sample: divide the squared deviations by their number less one. population: by
    their number."""
    eps: Annotated[Finite, Field(ge=0)] = 1e-6
    """Added to the divisor, against a division by almost 0."""
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
    """Lambda of generalized advantage estimation, for the estimator `gae`. 0: one-step errors of the value head. 1:
    whole returns."""


class RewardShapingConfig(Record):
    """Changes to the graded reward before advantages are computed. Reports show the graded reward."""

    max_response_tokens: int = Field(default=0, ge=0)
    """Number of completion tokens at which `overlong_penalty` is reached, usually `rollout.sampling.max_new_tokens`."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Number of tokens before `max_response_tokens` over which the penalty grows from 0. 0: no penalty."""
    overlong_penalty: Annotated[Finite, Field(ge=0)] = 1.0
    """Subtracted from the reward of a completion of `max_response_tokens` tokens."""
    overlong_capped: bool = True
    """Subtract at most `overlong_penalty`, also from completions longer than `max_response_tokens`."""
    mask_truncated: bool = False
    """Leave truncated completions out of the loss; their rewards still count in baselines. The length penalty then
    affects only completions that end within the buffer."""
    kl_coef: Annotated[Finite, Field(ge=0)] = 0.0
    """Factor of the KL penalty: the KL divergence from the model that training starts from, summed over tokens, times
    this factor is subtracted from the reward."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimate of that divergence from the sampled tokens; d is log policy - log reference. k1: d. abs: |d|.
    k2: d^2 / 2. k3: exp(-d) - 1 + d."""
    kl_credit: Literal["completion", "token"] = "completion"
    """Target of the KL penalty. completion: the sum is subtracted from the completion's reward, before the baseline.
    token: the sum over this and later tokens is subtracted from each token's advantage, after the baseline. The
    estimator `gae` always uses token."""

    def _broken_rules(self) -> Iterator[str]:
        if self.overlong_buffer_tokens > self.max_response_tokens:
            yield (
                f"overlong_buffer_tokens {self.overlong_buffer_tokens} must not exceed max_response_tokens "
                f"{self.max_response_tokens}: set max_response_tokens to rollout.sampling.max_new_tokens, and the "
                "buffer to a part of it"
            )


class MismatchConfig(Record):
    """Correction for an engine whose log-probs differ from the trainer's for the same weights.

    w is exp(trainer's log-prob - engine's log-prob), per token. A mask does not change the divisors of the loss.
    """

    weight: Literal["none", "token", "sequence", "geometric"] = "none"
    """Multiply the policy loss by w of each token, or by the product or the geometric mean of w over the completion."""
    weight_low: Annotated[Finite, Field(ge=0)] = 0.0
    """Lower limit of the weight."""
    weight_high: Annotated[Finite, Field(ge=0)] = 2.0
    """Upper limit of the weight. 0: no limit."""
    outside: Literal["clamp", "zero"] = "clamp"
    """A weight outside the limits is set to the limit (truncated importance sampling), or to 0 (IcePop)."""
    mask: Literal["none", "token", "geometric", "product"] = "none"
    """Leave out of the loss. token: each token whose w is outside the limits below. geometric, product: each completion
    whose geometric mean or product of w over its tokens is outside the limits."""
    mask_low: Annotated[Finite, Field(ge=0)] = 0.0
    """Lower limit of the mask."""
    mask_high: Annotated[Finite, Field(ge=0)] = 0.0
    """Upper limit of the mask. 0: no limit."""

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
    """The ratio is clipped below 1 - clip_low. 1 or more: no lower limit. For dppo: largest decrease of a token's
    probability."""
    clip_high: Annotated[Finite, Field(ge=0)] = 0.2
    """The ratio is clipped above 1 + clip_high. For dppo: largest increase of a token's probability."""
    dual_clip: Annotated[Finite, Field(ge=0)] = 0.0
    """Largest loss of a token with a negative advantage, as a multiple of the advantage, in ppo and gspo. 0: no
    limit."""
    ratio_penalty: Annotated[Finite, Field(ge=0)] = 0.0
    """Factor of the squared log-ratio, which is added to the loss."""
    drift_mask: Annotated[Finite, Field(ge=0)] = 0.0
    """Leave out completions with a negative advantage whose mean log-ratio is below minus this value. 0: keep all."""
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "constant_length"] = "token_mean"
    """Average of the token losses of an update. token_mean: over all trained tokens. sequence_mean: over the means of
    the completions. prompt_mean: over the means of the prompts. constant_length: their sum divided by the number of
    completions times `constant_length`."""
    constant_length: int = Field(default=0, ge=0)
    """Length used for every completion by the aggregation `constant_length`."""
    count_untrained: bool = False
    """Count completions without a trained token when the loss averages over completions."""
    entropy_coef: Annotated[Finite, Field(ge=0)] = 0.0
    """Factor of the policy's entropy, which is subtracted from the loss."""
    kl_coef: Annotated[Finite, Field(ge=0)] = 0.0
    """Factor of the KL divergence from the model that training starts from, which is added to the loss."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Estimate of that divergence from the sampled tokens; d is log policy - log reference. k1: d. abs: |d|.
    k2: d^2 / 2. k3: exp(-d) - 1 + d."""
    kl_weight: Literal["none", "ratio", "on_policy"] = "none"
    """Factor of each token's KL estimate. ratio: the ratio, which makes the estimate unbiased. on_policy: 1, with the
    gradient of the ratio."""
    kl_input_clamp: Annotated[Finite, Field(ge=0)] = 20.0
    """Largest |d|; larger values are clamped. 0: no limit."""
    kl_output_clamp: Annotated[Finite, Field(ge=0)] = 10.0
    """Largest absolute value of the estimate; larger values are clamped. 0: no limit."""
    value_coef: Annotated[Finite, Field(ge=0)] = 0.1
    """Weight of half the squared error of the value head, for the estimator `gae`."""
    value_clip: Annotated[Finite, Field(ge=0)] = 0.2
    """Largest change of a value from its value before the update. 0: no limit."""
    mismatch: MismatchConfig = MismatchConfig()
    """Correction for the difference between the log-probs of engine and trainer. Weights need `ratio_base` = "old" if
    the objective has a ratio."""

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
