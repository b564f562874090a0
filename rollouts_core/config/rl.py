"""`training.rl`: reinforcement learning. A validator here replaces the name of an algorithm by its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from rollouts_core.algorithms.objectives import ALL_OBJECTIVES, OWN_LOSS, Objective
from rollouts_core.algorithms.presets import ALGORITHMS, AlgorithmName
from rollouts_core.config.algorithm import AdvantageConfig, LossConfig, MismatchConfig, RewardShapingConfig
from rollouts_core.config.optim import RLOptimConfig
from rollouts_core.config.policy import PLAIN_POLICY, PolicyConfig
from rollouts_core.config.record import PLACEMENT, SELECTION, FunctionName, Record, name_of_function
from rollouts_core.config.roll_back import roll_back_rules
from rollouts_core.config.rollout import RolloutConfig

StopRule = Literal[
    "reward_halved",
    "entropy_collapse",
    "all_truncated",
    "gradient_spikes",
    "engine_mismatch",
    "staleness",
    "unparsed_calls",
    "rounded_updates",
]
"""Names of the rules in warning_rules.py. The rule no_signal has its own setting, `max_steps_without_signal`."""


class RLTrainingConfig(Record):
    """Reinforcement learning from rewards of completions."""

    algorithm: AlgorithmName = Field(default="", json_schema_extra=PLACEMENT)
    """Algorithm of a well-known system, for example "verl-dapo". The algorithm fills in those settings of advantage,
    reward_shaping, loss and num_minibatches that are not given. The saved configuration contains the filled-in
    settings, and an empty `algorithm`."""
    num_steps: int = Field(default=100, ge=1, json_schema_extra=SELECTION)
    """Number of steps. A step is one batch of rollouts and at most `num_minibatches` x `num_epochs` optimizer
    updates."""
    num_minibatches: int = Field(default=1, ge=1)
    """Number of optimizer updates per pass over a batch of rollouts. Each update uses an equal part of the batch's
    groups."""
    num_epochs: int = Field(default=1, ge=1)
    """Number of passes over a batch of rollouts."""
    max_micro_batch_tokens: int = Field(default=16384, ge=2, json_schema_extra=PLACEMENT)
    """Largest number of tokens, padding included, per forward and backward pass of a device. Smaller values need less
    memory and give the same step. On a CPU, 2048 is faster."""
    packing: bool = True
    """Put several completions into one row, without attention between them. If the attention kernel uses masks,
    completions of the same prompt share the prompt's tokens. A row is at most as long as the longest completion with
    its prompt."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    """Changes of rewards before advantages are computed."""
    loss: LossConfig = LossConfig()
    """The policy loss."""
    loss_fn: FunctionName = ""
    """Your own loss function in place of the policy loss: `package.module:function`. The function takes (scores, batch)
    or (scores, batch, config); `config` is the section `loss`."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action if the loss or a gradient is NaN or infinite: end the run, or skip the update and count it."""
    max_skipped_updates: int = Field(default=10, ge=0, json_schema_extra=PLACEMENT)
    """Largest number of skipped updates in a row; after one more, the run ends. 0: no limit."""
    max_steps_without_signal: int = Field(default=50, ge=0, json_schema_extra=PLACEMENT)
    """Number of steps in a row without learning signal at which the run saves a checkpoint and ends. 0: no limit. A
    step has no signal if the completions of each prompt have equal rewards, even if KL or entropy made an update. A
    step of a solved task does not count: every completion gets the best reward so far, after the policy has learned. A
    resumed run continues the count."""
    stop_on: tuple[StopRule, ...] = Field(default=(), json_schema_extra=PLACEMENT)
    """Names of warnings that end the run with a checkpoint. All other warnings are only shown. A resumed run forgets
    the measurements of earlier attempts."""
    roll_back_on: tuple[StopRule, ...] = Field(default=(), json_schema_extra=SELECTION)
    """Names of warnings that end the training and make its best checkpoint the only result. The run continues with this
    checkpoint. Needs `keep_best`, and a `checkpoint_every` below `num_steps`. A resumed run forgets the measurements of
    earlier attempts."""
    sync_every: int = Field(default=1, ge=1)
    """Number of steps from one publication of weights to the next. With a value above 1, the engines sample with older
    weights than the trainer has. The loss should then correct for the difference between the log-probs of old and new
    weights, for example with `loss.ratio_base` = "rollout"."""
    log_every: int = Field(default=1, ge=1, json_schema_extra=PLACEMENT)
    """Number of steps from one line of metrics to the next."""
    checkpoint_every: int = Field(default=10, ge=1, json_schema_extra=SELECTION)
    """Number of steps from one checkpoint to the next. Selection chooses among these checkpoints and the last one. The
    weights of each checkpoint are also published to the engines."""
    keep_checkpoints: int = Field(default=10, ge=1, json_schema_extra=SELECTION)
    """Number of newest checkpoints that are kept on disk."""
    keep_best: int = Field(default=0, ge=0, json_schema_extra=SELECTION)
    """Number of best checkpoints that are kept besides the newest ones. Checkpoints are ranked by the mean reward of
    the next step, whose completions the checkpoint's weights sampled. Groups that a filter drops count too. Needs
    `rollout.max_staleness` 0, `rollout.max_partial_staleness` 0 and prompts, not recorded completions."""
    resume_from: str = Field(default="", json_schema_extra=PLACEMENT)
    """Checkpoint of another run with the same settings from which to resume, for example with a larger num_steps. The
    value is the checkpoint's folder, or the folder of its stage for the newest checkpoint."""
    allow_changed: tuple[str, ...] = Field(default=(), json_schema_extra=PLACEMENT)
    """Settings that may differ between this run and the checkpoint that it resumes from. Use the names in the error
    message."""
    replicate: int = Field(default=0, ge=0)
    """Index of a repetition with the same settings but other random numbers (order of prompts, sampling, new adapters,
    dropout). 0: the random numbers that `rollout.seed` gives."""
    policy: PolicyConfig = PLAIN_POLICY
    """Precision, adapters and settings that save memory."""
    optim: RLOptimConfig = RLOptimConfig()
    """Optimizer of RL."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_algorithm(cls, settings: Any) -> Any:  # Any: unchecked settings
        if not isinstance(settings, dict) or str(settings.get("algorithm")) not in ALGORITHMS:
            return settings
        return {**_fill_in(cls, ALGORITHMS[settings["algorithm"]].settings, settings), "algorithm": ""}

    @model_validator(mode="before")
    @classmethod
    def _place_baseline(cls, settings: Any) -> Any:  # Any: unchecked settings
        """Replace the shorthand `baseline=0.5` by the advantage `{"estimator": "constant", "baseline": 0.5}`."""
        if not isinstance(settings, dict) or "baseline" not in settings:
            return settings
        given = {name: value for name, value in settings.items() if name != "baseline"}
        if "advantage" in given or given.get("algorithm"):
            raise ValueError(
                'baseline is short for advantage = {estimator = "constant", baseline = ...}, but another advantage or '
                "algorithm is given too: give only one of them"
            )
        return {**given, "advantage": {"estimator": "constant", "baseline": settings["baseline"]}}

    @property
    def baseline(self) -> float:
        """The baseline of the estimator `constant`."""
        return self.advantage.baseline

    @property
    def num_optim_steps(self) -> int:
        """Optimizer updates of the whole stage if every step has learning signal.

        The learning-rate schedule has this length.
        """
        return self.num_steps * self.num_minibatches * self.num_epochs

    @property
    def shares_prompts(self) -> bool:
        """True if the completions of a prompt share the tokens of the prompt in a row, which needs an attention kernel
        with masks.
        """
        return self.packing and self.policy.takes_masks

    @property
    def objective_spec(self) -> Objective:
        """The registry entry of the objective that `loss.objective` names."""
        return OWN_LOSS if self.loss_fn else ALL_OBJECTIVES[self.loss.objective]

    @property
    def modules_named(self) -> dict[str, str]:
        """For each setting with a user's loss or an installed package's objective: the module that it names."""
        return {setting: name.partition(":")[0] for setting, name in self.functions_named.items()}

    @property
    def functions_named(self) -> dict[str, str]:
        """The user's loss, or the loss of an installed package's objective, as `package.module:name`, by setting."""
        if self.loss_fn:
            name = name_of_function(self.loss_fn)
            return {"training.rl.loss_fn": name} if ":" in name else {}
        record = ALL_OBJECTIVES.locate(self.loss.objective)
        setting = "training.rl.loss.objective"
        return {setting: record, f"the loss of {setting}": self.objective_spec.loss} if ":" in record else {}

    @property
    def with_values(self) -> bool:
        """True if a value head is trained."""
        return self.advantage.estimator == "gae"

    @property
    def with_reference(self) -> bool:
        """True if the loss or the rewards need the log-probs of the model that training starts from."""
        return self.loss.kl_coef > 0 or self.reward_shaping.kl_coef > 0 or self.objective_spec.needs_reference

    @property
    def corrects_for_age(self) -> bool:
        """True if the loss corrects for the age of tokens: it weights a token by its current probability, divided by
        its probability at sampling.
        """
        has_ratio_to_rollout = self.objective_spec.has_ratio and self.loss.ratio_base == "rollout"
        return has_ratio_to_rollout or self.loss.mismatch.weight != "none"

    @property
    def needs_rollout_logprobs(self) -> bool:
        """True if the policy loss reads the engine's log-probs.

        For a user's `loss_fn`, use `reads_rollout_logprobs`.
        """
        loss = self.loss
        has_ratio = self.objective_spec.has_ratio or loss.drift_mask > 0 or loss.ratio_penalty > 0
        has_ratio = has_ratio or (loss.kl_coef > 0 and loss.kl_weight == "ratio")
        compares = (loss.ratio_base == "rollout" and has_ratio) or loss.mismatch != MismatchConfig()
        return compares or self.objective_spec.needs_rollout_logprobs

    @property
    def needs_old_scores(self) -> bool:
        """True if the trainer must score a batch before its first update. Scoring costs one forward pass."""
        loss, num_updates = self.loss, self.num_minibatches * self.num_epochs
        compares = loss.ratio_base == "old" or loss.mismatch != MismatchConfig()
        return self.with_values or self.reward_shaping.kl_coef > 0 or (num_updates > 1 and compares)

    def _broken_rules(self) -> Iterator[str]:
        yield from roll_back_rules(self)
        if self.with_values and not self.loss.value_coef:
            yield 'advantage.estimator "gae" needs loss.value_coef above 0: otherwise its value head does not learn'


def describe_unranked(training: RLTrainingConfig, rollout: RolloutConfig, *, is_recorded: bool) -> str:
    """The reason why `keep_best` cannot rank the checkpoints of a training; empty if `keep_best` can rank them.

    Args:
        is_recorded: the completions are recorded, so no checkpoint samples any.
    """
    if not training.keep_best or not (is_recorded or rollout.max_token_age):
        return ""
    older = "max_staleness" if rollout.max_staleness else "max_partial_staleness"
    found = "recorded completions" if is_recorded else f"rollout.{older} {rollout.max_token_age}"
    return (
        f"keep_best {training.keep_best} compares checkpoints by the reward of the completions that each one sampled, "
        f"but with {found} other weights sample too: {'remove roll_back_on, ' * bool(training.roll_back_on)}set "
        "keep_best to 0, and keep_checkpoints to the number of checkpoints that selection evaluates"
    )


def algorithm_preset(name: AlgorithmName, **overrides: Any) -> RLTrainingConfig:  # Any: settings of every type
    """Return the settings of a well-known system's algorithm.

    Args:
        name: a key of `ALGORITHMS`.
        overrides: other fields of the record, or whole sections of it.

    Raises:
        ValidationError: a name or a setting is unknown.
    """
    return RLTrainingConfig.model_validate({**overrides, "algorithm": name})


def _fill_in(record: type[Record], usual: Mapping[str, Any], given: Any) -> dict[str, Any]:  # Any: unchecked settings
    """Fill in settings that `given` lacks from `usual`, section by section.

    A record in which all fields are set comes from a form or a saved file. Only its fields that differ from their
    defaults count as given.
    """
    said = given.model_dump(exclude_unset=True) if isinstance(given, BaseModel) else dict(given)
    if said.keys() >= record.model_fields.keys():
        defaults = record().model_dump()
        said = {name: value for name, value in said.items() if value != defaults.get(name)}
    filled = {**usual, **said}
    for name, section in SECTIONS.items():
        if name in usual and isinstance(said.get(name), dict | BaseModel):
            filled[name] = _fill_in(section, usual[name], said[name])
    return filled


SECTIONS: dict[str, type[Record]] = {
    "advantage": AdvantageConfig,
    "reward_shaping": RewardShapingConfig,
    "loss": LossConfig,
    "mismatch": MismatchConfig,
}
"""Sections for which an algorithm may have settings."""
