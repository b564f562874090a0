"""`training.rl`: reinforcement learning, and how the name of an algorithm becomes settings."""

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
"""Names of rules in warning_rules.py. The rule no_signal has `max_steps_without_signal`."""


class RLTrainingConfig(Record):
    """Reinforcement learning from graded completions."""

    algorithm: AlgorithmName = Field(default="", json_schema_extra=PLACEMENT)
    """A system's algorithm by name, for example "verl-dapo". Fills in the missing settings of advantage,
    reward_shaping, loss and num_minibatches. The saved configuration has these settings and an empty `algorithm`."""
    num_steps: int = Field(default=100, ge=1, json_schema_extra=SELECTION)
    """Steps: one batch of rollouts each, and at most `num_minibatches` x `num_epochs` optimizer updates."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per pass over a batch of rollouts, each on the same number of whole groups."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over a batch of rollouts."""
    max_micro_batch_tokens: int = Field(default=16384, ge=2, json_schema_extra=PLACEMENT)
    """Padded tokens per forward and backward pass of a device. Smaller values need less memory and give the same step.
    On a CPU 2048 is faster."""
    packing: bool = True
    """Compute several completions in one row, without attention between them. Completions of a prompt share its tokens
    if the attention kernel uses masks. Rows are filled up to the length of the longest completion."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    """Changes of rewards before advantages are computed."""
    loss: LossConfig = LossConfig()
    """The policy loss."""
    loss_fn: FunctionName = ""
    """Your own loss instead of the policy loss: `package.module:function` of (scores, batch) or (scores, batch,
    config), whose `config` is the section `loss`."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action if the loss or a gradient is NaN or infinite: end the run, or skip the update and count it."""
    max_skipped_updates: int = Field(default=10, ge=0, json_schema_extra=PLACEMENT)
    """Highest number of skipped updates in a row before the run ends; 0 sets no limit."""
    max_steps_without_signal: int = Field(default=50, ge=0, json_schema_extra=PLACEMENT)
    """Highest number of steps in a row without learning signal before the run ends with a checkpoint; 0 sets no limit.
    A step has no signal if the completions of each prompt have equal rewards, even if KL or entropy made an update. A
    solved task (best reward for every completion after learning) does not count. A resumed run keeps the count."""
    stop_on: tuple[StopRule, ...] = Field(default=(), json_schema_extra=PLACEMENT)
    """Warnings that end the run with a checkpoint, by their names; all others only warn. A resumed run begins to
    measure anew."""
    sync_every: int = Field(default=1, ge=1)
    """Steps between two publications of weights to the engines. Above 1, completions come from older weights than the
    trainer's, which the loss should correct, for example with ratio_base "rollout"."""
    log_every: int = Field(default=1, ge=1, json_schema_extra=PLACEMENT)
    """Steps between two lines of metrics."""
    checkpoint_every: int = Field(default=10, ge=1, json_schema_extra=SELECTION)
    """Steps between two checkpoints. Selection chooses among these and the last checkpoint. The weights of each
    checkpoint are also published to the engines."""
    keep_checkpoints: int = Field(default=10, ge=1, json_schema_extra=SELECTION)
    """Number of newest checkpoints to keep on disk."""
    keep_best: int = Field(default=0, ge=0, json_schema_extra=SELECTION)
    """Number of best checkpoints to keep besides the newest: by mean reward since the previous checkpoint, including
    groups that a filter dropped."""
    resume_from: str = Field(default="", json_schema_extra=PLACEMENT)
    """Checkpoint of another run with the same settings to resume from, for example with a larger num_steps. Name its
    folder, or its stage's folder for the newest one."""
    allow_changed: tuple[str, ...] = Field(default=(), json_schema_extra=PLACEMENT)
    """Settings in which `resume_from` may differ from this run, with the names from the error message."""
    replicate: int = Field(default=0, ge=0)
    """Number of a repetition with the same settings and other random numbers (order of prompts, sampling, new adapters,
    dropout). 0: random numbers of `rollout.seed`."""
    policy: PolicyConfig = PLAIN_POLICY
    """Precision, adapters and memory savings."""
    optim: RLOptimConfig = RLOptimConfig()
    """Optimizer of this stage."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_algorithm(cls, settings: Any) -> Any:  # Any: unchecked settings
        if not isinstance(settings, dict) or str(settings.get("algorithm")) not in ALGORITHMS:
            return settings
        return {**_fill_in(cls, ALGORITHMS[settings["algorithm"]].settings, settings), "algorithm": ""}

    @model_validator(mode="before")
    @classmethod
    def _place_baseline(cls, settings: Any) -> Any:  # Any: unchecked settings
        """`baseline=0.5` is short for the advantage `{"estimator": "constant", "baseline": 0.5}`."""
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
        """Optimizer updates of the whole stage if every step has signal; the length of the learning-rate schedule."""
        return self.num_steps * self.num_minibatches * self.num_epochs

    @property
    def shares_prompts(self) -> bool:
        """True if the completions of a prompt share the tokens of the prompt in a row, which needs a mask."""
        return self.packing and self.policy.takes_masks

    @property
    def objective_spec(self) -> Objective:
        """The record of the objective `loss.objective`."""
        return OWN_LOSS if self.loss_fn else ALL_OBJECTIVES[self.loss.objective]

    @property
    def modules_named(self) -> dict[str, str]:
        """The modules of a user's loss, or of an installed package's objective, by setting."""
        return {setting: name.partition(":")[0] for setting, name in self.functions_named.items()}

    @property
    def functions_named(self) -> dict[str, str]:
        """The user's loss, or the loss of an installed package's objective, as `package.module:name`."""
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
        """True if the loss or the rewards use the start model."""
        return self.loss.kl_coef > 0 or self.reward_shaping.kl_coef > 0 or self.objective_spec.needs_reference

    @property
    def corrects_for_age(self) -> bool:
        """True if the loss weighs each token by the ratio of its probability now to its probability at sampling."""
        has_ratio_to_rollout = self.objective_spec.has_ratio and self.loss.ratio_base == "rollout"
        return has_ratio_to_rollout or self.loss.mismatch.weight != "none"

    @property
    def needs_rollout_logprobs(self) -> bool:
        """True if the policy loss reads the engine's log-probs. For `loss_fn`, use `reads_rollout_logprobs`."""
        loss = self.loss
        has_ratio = self.objective_spec.has_ratio or loss.drift_mask > 0 or loss.ratio_penalty > 0
        has_ratio = has_ratio or (loss.kl_coef > 0 and loss.kl_weight == "ratio")
        compares = (loss.ratio_base == "rollout" and has_ratio) or loss.mismatch != MismatchConfig()
        return compares or self.objective_spec.needs_rollout_logprobs

    @property
    def needs_old_scores(self) -> bool:
        """True if the trainer must score a batch before its first update, which costs a forward pass."""
        loss, num_updates = self.loss, self.num_minibatches * self.num_epochs
        compares = loss.ratio_base == "old" or loss.mismatch != MismatchConfig()
        return self.with_values or self.reward_shaping.kl_coef > 0 or (num_updates > 1 and compares)

    def _broken_rules(self) -> Iterator[str]:
        if self.with_values and not self.loss.value_coef:
            yield 'advantage.estimator "gae" needs loss.value_coef above 0: otherwise its value head does not learn'


def algorithm_preset(name: AlgorithmName, **overrides: Any) -> RLTrainingConfig:  # Any: settings of every type
    """The settings of a system's algorithm.

    Args:
        name: a key of `ALGORITHMS`.
        overrides: other fields of the record, or whole sections of it.

    Raises:
        ValidationError: an unknown name or setting.
    """
    return RLTrainingConfig.model_validate({**overrides, "algorithm": name})


def _fill_in(record: type[Record], usual: Mapping[str, Any], given: Any) -> dict[str, Any]:  # Any: unchecked settings
    """Fill missing settings in `given` from `usual`, section by section.

    If all fields of a record are set, the settings come from a form or a saved record. Then only fields that differ
    from their defaults count as given.
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
"""The sections that an algorithm may fill in."""
