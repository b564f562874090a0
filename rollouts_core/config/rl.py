"""`training.rl`: reinforcement learning, and how the name of an algorithm becomes its settings.

Not here: how completions are sampled and graded (rollout.py), what those names stand for (algorithms/presets.py).
"""

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


class RLTrainingConfig(Record):
    """Reinforcement learning from graded completions."""

    algorithm: AlgorithmName = Field(default="", json_schema_extra=PLACEMENT)
    """A system's algorithm by name, like "verl-dapo": fills in whatever of advantage, reward_shaping, loss and
    num_minibatches is not given. It is empty once they are filled in: the settings say everything."""
    num_steps: int = Field(default=100, ge=1, json_schema_extra=SELECTION)
    """Steps: one batch of rollouts each, and at most `num_minibatches` x `num_epochs` optimizer updates."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per pass over a batch of rollouts, each on as many whole groups."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over a batch of rollouts."""
    max_micro_batch_tokens: int = Field(default=16384, ge=2, json_schema_extra=PLACEMENT)
    """Padded tokens per forward and backward pass of a device; smaller needs less memory and gives the same step. On a
    CPU 2048 is faster."""
    packing: bool = True
    """Compute several completions in one row, which do not see each other: those of a prompt share it, where the
    attention kernel takes masks, and rows are filled up to the length of the longest."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    """What is added to rewards before."""
    loss: LossConfig = LossConfig()
    """The policy loss."""
    loss_fn: FunctionName = ""
    """Your own loss in place of the policy loss: `package.module:function` of (scores, batch), or of (scores, batch,
    config), whose `config` is the section `loss`."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is no finite number does: end the run, or skip its update and count it."""
    max_skipped_updates: int = Field(default=10, ge=0, json_schema_extra=PLACEMENT)
    """How many updates in a row may be skipped for that before the run ends; 0 sets no limit."""
    max_steps_without_signal: int = Field(default=50, ge=0, json_schema_extra=PLACEMENT)
    """How many steps in a row may teach nothing because their rewards tell nothing apart, before the run ends with a
    checkpoint; 0 sets no limit. An update by KL or entropy alone teaches nothing. Steps in which a policy that has
    learned gets the highest reward for everything do not count. A run that goes on counts on."""
    sync_every: int = Field(default=1, ge=1)
    """Steps between two publications of the weights to the engines. Above 1 completions are of older weights than the
    trainer's, for which the loss should correct: ratio_base "rollout" does."""
    log_every: int = Field(default=1, ge=1, json_schema_extra=PLACEMENT)
    """Steps between two lines of metrics."""
    checkpoint_every: int = Field(default=10, ge=1, json_schema_extra=SELECTION)
    """Steps between two checkpoints; selection chooses among them and the last one. Each is published too."""
    keep_checkpoints: int = Field(default=10, ge=1, json_schema_extra=SELECTION)
    """How many checkpoints stay on disk, the newest ones."""
    keep_best: int = Field(default=0, ge=0, json_schema_extra=SELECTION)
    """How many checkpoints stay besides those because they were the best: by the mean reward of the steps since
    the checkpoint before, with that of the groups that a filter dropped."""
    resume_from: str = Field(default="", json_schema_extra=PLACEMENT)
    """Checkpoint of another run of the same settings to go on from, for instance with a larger num_steps: its
    folder, or that of its stage, which means the newest one there."""
    allow_changed: tuple[str, ...] = Field(default=(), json_schema_extra=PLACEMENT)
    """Settings in which a checkpoint that is gone on from may differ, by the names that its refusal lists."""
    replicate: int = Field(default=0, ge=0)
    """Another number trains the same settings again with other random numbers: the order of prompts, sampling, new
    adapters, dropout. 0 takes `rollout.seed` itself."""
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
                'baseline is short for advantage = {estimator = "constant", baseline = ...}, and another advantage or '
                "algorithm is given besides: give one of them"
            )
        return {**given, "advantage": {"estimator": "constant", "baseline": settings["baseline"]}}

    @property
    def baseline(self) -> float:
        """The reward that counts as neutral, for the estimator `constant`."""
        return self.advantage.baseline

    @property
    def num_optim_steps(self) -> int:
        """Optimizer updates of the whole stage where every step has signal: what the learning rate's schedule spans."""
        return self.num_steps * self.num_minibatches * self.num_epochs

    @property
    def shares_prompts(self) -> bool:
        """Whether completions of one prompt share its positions in a row: only a mask can let them."""
        return self.packing and self.policy.takes_masks

    @property
    def objective_spec(self) -> Objective:
        """The record of the objective: what the loss reads and needs. `loss.objective` is its name."""
        return OWN_LOSS if self.loss_fn else ALL_OBJECTIVES[self.loss.objective]

    @property
    def modules_named(self) -> dict[str, str]:
        """The modules of a user's loss, or of an installed package's objective, by their settings."""
        return {setting: name.partition(":")[0] for setting, name in self.functions_named.items()}

    @property
    def functions_named(self) -> dict[str, str]:
        """A user's loss, or the record and the loss of an installed package's objective, as `package.module:name`."""
        if self.loss_fn:
            name = name_of_function(self.loss_fn)
            return {"training.rl.loss_fn": name} if ":" in name else {}
        record = ALL_OBJECTIVES.locate(self.loss.objective)
        setting = "training.rl.loss.objective"
        return {setting: record, f"the loss of {setting}": self.objective_spec.loss} if ":" in record else {}

    @property
    def with_values(self) -> bool:
        """Whether a value head is trained."""
        return self.advantage.estimator == "gae"

    @property
    def with_reference(self) -> bool:
        """Whether something compares with the model that training starts from."""
        return self.loss.kl_coef > 0 or self.reward_shaping.kl_coef > 0 or self.objective_spec.needs_reference

    @property
    def corrects_for_age(self) -> bool:
        """Whether the loss weighs a token by how much likelier it is now than when it was sampled."""
        has_ratio_to_rollout = self.objective_spec.has_ratio and self.loss.ratio_base == "rollout"
        return has_ratio_to_rollout or self.loss.mismatch.weight != "none"

    @property
    def needs_rollout_logprobs(self) -> bool:
        """Whether the policy loss reads the engine's log-probs. For `loss_fn`, `reads_rollout_logprobs` finds out."""
        loss = self.loss
        has_ratio = self.objective_spec.has_ratio or loss.drift_mask > 0 or loss.ratio_penalty > 0
        has_ratio = has_ratio or (loss.kl_coef > 0 and loss.kl_weight == "ratio")
        compares = (loss.ratio_base == "rollout" and has_ratio) or loss.mismatch != MismatchConfig()
        return compares or self.objective_spec.needs_rollout_logprobs

    @property
    def needs_old_scores(self) -> bool:
        """Whether the trainer must score a batch before its first update, which costs a forward pass."""
        loss, num_updates = self.loss, self.num_minibatches * self.num_epochs
        compares = loss.ratio_base == "old" or loss.mismatch != MismatchConfig()
        return self.with_values or self.reward_shaping.kl_coef > 0 or (num_updates > 1 and compares)

    def _broken_rules(self) -> Iterator[str]:
        if self.with_values and not self.loss.value_coef:
            yield 'advantage.estimator "gae" needs loss.value_coef above 0: its value head would not learn'


def algorithm_preset(name: AlgorithmName, **overrides: Any) -> RLTrainingConfig:  # Any: settings of every type
    """The settings of a system's algorithm: how it takes advantages, shapes rewards, computes the loss and updates.

    Args:
        name: a key of `ALGORITHMS`.
        overrides: other fields of the record, or whole sections of it.

    Raises:
        ValidationError: an unknown name or setting.
    """
    return RLTrainingConfig.model_validate({**overrides, "algorithm": name})


def _fill_in(record: type[Record], usual: Mapping[str, Any], given: Any) -> dict[str, Any]:  # Any: unchecked settings
    """`given`, with what it does not say taken from `usual`, section by section.

    Settings with every field of their record in them come from a form or a written record: only those say something
    there that differ from their defaults.
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
