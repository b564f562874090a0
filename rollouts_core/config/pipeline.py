"""`Config`: all settings of one pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, create_model

from rollouts_core.config.data import DataConfig, DatasetConfig
from rollouts_core.config.deployment import DeploymentConfig
from rollouts_core.config.engine import EngineConfig
from rollouts_core.config.evaluation import EvaluationConfig
from rollouts_core.config.files import parse_config, read_settings, resolve_paths
from rollouts_core.config.hub import HubConfig
from rollouts_core.config.model import ModelConfig
from rollouts_core.config.record import Record
from rollouts_core.config.report import ReportConfig
from rollouts_core.config.rl import RLTrainingConfig, describe_unranked
from rollouts_core.config.rollout import RolloutConfig
from rollouts_core.config.sft import SFTTrainingConfig
from rollouts_core.engine_kinds import EngineSpec
from rollouts_core.engine_kinds.auto import WITHOUT_GPUS
from rollouts_core.stages import PIPELINES, TRAININGS, capitalized, kind_of, trainings_of
from rollouts_core.stages.kind import load


class TrainingConfig(Record):
    """The settings of each training stage."""

    sft: SFTTrainingConfig = SFTTrainingConfig()
    """Supervised fine-tuning."""
    rl: RLTrainingConfig = RLTrainingConfig()
    """Reinforcement learning."""


def _with_stages(record: type[Record]) -> type[Record]:
    """Add to `record` a section for each training stage in STAGES that has no field there."""
    sections: dict[str, Any] = {}  # Any: pydantic's pairs of type and default
    for name, kind in TRAININGS.items():
        if name not in record.model_fields:
            settings = load(kind.settings)
            sections[name] = (settings, Field(settings(), description=f"{capitalized(kind.title)}."))
    if not sections:
        return record
    return create_model(record.__name__, __base__=record, __module__=__name__, __doc__=record.__doc__, **sections)


if TYPE_CHECKING:
    Mode = str
else:
    Mode = Literal[tuple(PIPELINES)]
    TrainingConfig = _with_stages(TrainingConfig)


class Config(Record):
    """All settings of one pipeline that training needs."""

    mode: Mode = "sft+rl"
    """Stages to run: only SFT, only RL from `model.path`, or RL from the selected SFT checkpoint."""
    model: ModelConfig
    """The model that training starts from."""
    data: DataConfig
    """Demonstrations and prompts."""
    training: TrainingConfig = TrainingConfig()
    """Settings of SFT and RL."""
    rollout: RolloutConfig = RolloutConfig()
    """How completions are sampled, graded and filtered."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How checkpoints are evaluated and compared."""
    deployment: DeploymentConfig = DeploymentConfig()
    """GPUs, processes and ports on the node."""
    report: ReportConfig = ReportConfig()
    """The samples that the report contains."""
    hub: HubConfig = HubConfig()
    """From where models and public datasets are downloaded."""

    @property
    def trainings(self) -> dict[str, SFTTrainingConfig | RLTrainingConfig]:
        """The settings of each training stage of the mode, by name, in the order in which they run."""
        return {name: getattr(self.training, name) for name, _ in trainings_of(self.mode)}

    def reads(self, name: str) -> bool:
        """Return True if a training stage of the mode may read `data.NAME`."""
        return any(name in kind.reads for _, kind in trainings_of(self.mode))

    @property
    def is_graded(self) -> bool:
        """True if a training stage of the mode learns from rewards of completions."""
        return any(kind.is_graded for _, kind in trainings_of(self.mode))

    @property
    def samples_for_training(self) -> bool:
        """True if a training stage of the mode requests completions from engines."""
        return self.is_graded and not self.data.rollouts

    @property
    def missing_data(self) -> list[str]:
        """The settings of `data` that the mode needs but that are empty in the configuration."""
        needed = [names for _, kind in trainings_of(self.mode) for names in kind.needs]
        every = dict.fromkeys([*needed, ("selection",), ("heldout",)])
        return [names[0] for names in every if not any(getattr(self.data, name) for name in names)]

    @property
    def demonstrations(self) -> tuple[DatasetConfig, ...]:
        """The datasets of `data.sft`. A single path counts as one dataset."""
        sft = self.data.sft
        return sft if isinstance(sft, tuple) else (DatasetConfig(path=sft),)

    @property
    def evaluation_engine(self) -> EngineConfig:
        """The engine that generates the completions for evaluation."""
        engine = self.rollout.engine
        is_server = self.evaluation.engine == "rollout" and not engine.spec.is_own
        return engine if is_server else EngineConfig(kind=WITHOUT_GPUS)

    def _broken_rules(self) -> Iterator[str]:
        """Yield a sentence for each broken rule between sections."""
        yield from self._check_data()
        for name in self.trainings:
            yield from load(kind_of(name).rules)(self)
        yield from self._check_temperatures()

    def _check_data(self) -> Iterator[str]:
        if self.data.prompts and self.data.rollouts:
            yield "data.prompts and data.rollouts exclude each other: sample completions, or train on recorded ones"
        for name in () if self.data.prepare.name else self.missing_data:
            yield f'mode "{self.mode}" needs data.{name}: {_what_belongs_in(name)}'

    def _check_temperatures(self) -> Iterator[str]:
        """Yield a sentence for each temperature above the limit of the engine that it is sent to."""
        rollout, evaluation = self.rollout, self.evaluation
        asked: list[tuple[str, float, EngineSpec]] = []
        if self.samples_for_training:
            asked.append(("rollout.sampling.temperature", rollout.sampling.temperature, rollout.engine.spec))
        if evaluation.metric == "accuracy":
            asked.append(("evaluation.temperature", evaluation.temperature, self.evaluation_engine.spec))
        for name, temperature, engine in asked:
            if temperature > engine.max_temperature:
                yield (
                    f"{name} {temperature:g} is above {engine.max_temperature:g}, the limit of {engine.title}: "
                    "lower it, or choose another rollout.engine.kind"
                )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a TOML or JSON file. Relative paths of data and models become absolute.

        Raises:
            ConfigError: the file or a setting in it is invalid. The message names the file and the key, and says what
                to do.
        """
        return parse_config(cls, resolve_paths(read_settings(Path(path)), Path(path).parent), source=str(path))

    def save(self, path: str | Path) -> None:
        """Write the settings that differ from their defaults. The suffix of `path` chooses TOML or JSON."""
        settings = self.model_dump(mode="json", exclude_defaults=True)
        if Path(path).suffix == ".json":
            text = json.dumps(settings, indent=2)
        else:
            import tomli_w  # may be missing on a node, which only reads settings

            text = tomli_w.dumps(settings)
        Path(path).write_text(text, encoding="utf-8")


def _what_belongs_in(name: str) -> str:
    """The first sentence of the help text of a setting of `data`."""
    about = " ".join((DataConfig.model_fields[name].description or "").split())
    sentence = about.partition(". ")[0].removesuffix(".")
    return sentence[:1].lower() + sentence[1:]


def sft_rules(config: Config) -> Iterator[str]:
    """Yield a sentence if `keep_best` would compare checkpoints some of which have no evaluation loss."""
    sft = config.training.sft
    if sft.keep_best and not config.data.sft_eval:
        yield (
            f"training.sft.keep_best {sft.keep_best} compares checkpoints by their loss on data.sft_eval, which is not "
            f"set: set data.sft_eval; or {'remove roll_back_on, ' * bool(sft.roll_back_on)}set training.sft.keep_best "
            "to 0, and keep_checkpoints to the number of checkpoints that selection evaluates"
        )
    if not sft.keep_best or not config.data.sft_eval or sft.checkpoint_every % sft.eval_every == 0:
        return
    below = sft.checkpoint_every // sft.eval_every * sft.eval_every
    multiples = [below or sft.eval_every, (below or sft.eval_every) + sft.eval_every]
    divisors = [each for each in range(1, sft.checkpoint_every + 1) if sft.checkpoint_every % each == 0]
    nearest = sorted(divisors, key=lambda each: abs(each - sft.eval_every))[:2]
    yield (
        f"training.sft.keep_best {sft.keep_best} compares checkpoints by their loss on data.sft_eval, but "
        f"eval_every {sft.eval_every} does not divide checkpoint_every {sft.checkpoint_every}, so some are saved "
        f"without a loss: set training.sft.checkpoint_every to {multiples[0]} or {multiples[1]}, or "
        f"training.sft.eval_every to {' or '.join(map(str, sorted(nearest)))}"
    )


def rl_rules(config: Config) -> Iterator[str]:
    if config.evaluation.metric == "loss":
        yield f'mode "{config.mode}" compares checkpoints by accuracy: evaluation.metric cannot be "loss"'
    if config.rollout.sampling.temperature == 0:
        yield "RL needs rollout.sampling.temperature above 0: greedy samples of a group are all equal"
    advantage = config.training.rl.advantage
    is_alone = config.rollout.n_samples_per_prompt == 1 and advantage.singleton == "zero"
    if is_alone and advantage.estimator not in ("constant", "batch_mean_std", "gae"):
        yield (
            f'training.rl.advantage.estimator "{advantage.estimator}" compares the completions of a prompt: it '
            "needs rollout.n_samples_per_prompt of 2 or more, found 1"
        )
    yield from _batch_rules(config)
    if problem := describe_unranked(config.training.rl, config.rollout, is_recorded=not config.samples_for_training):
        yield f"training.rl.{problem}"
    yield from _colocated_rules(config)


def _batch_rules(config: Config) -> Iterator[str]:
    rl, rollout = config.training.rl, config.rollout
    if not config.samples_for_training:  # recorded rollouts have fixed batches
        return
    if rl.num_minibatches > rollout.batch_size:
        yield (
            f"training.rl.num_minibatches {rl.num_minibatches} exceeds the {rollout.batch_size} groups of a "
            "step (rollout.batch_size), but an update needs a whole group: lower the first or raise the second"
        )
    for name in (rollout.filter_fn, *(each.name for each in rollout.filters)):
        if rollout.n_samples_per_prompt == 1 and name in ("reward_nonzero_std", "quality_and_diversity"):
            yield (
                f'the filter "{name}" keeps prompts whose completions have different rewards, but '
                "rollout.n_samples_per_prompt is 1: remove the filter, or set it to 2 or more"
            )
    shaping, max_new_tokens = rl.reward_shaping, rollout.sampling.max_new_tokens
    penalty_start = shaping.max_response_tokens - shaping.overlong_buffer_tokens
    if shaping.overlong_buffer_tokens and penalty_start >= max_new_tokens:
        # The buffer in the settings of a system's algorithm may be longer than any completion of this run.
        smaller = f" and overlong_buffer_tokens to a part of it, like {max(1, max_new_tokens // 4)}"
        yield (
            f"training.rl.reward_shaping applies above {penalty_start} tokens (max_response_tokens - "
            f"overlong_buffer_tokens), but rollout.sampling.max_new_tokens {max_new_tokens} keeps all completions "
            f"shorter: set max_response_tokens to {max_new_tokens}"
            + smaller
            * (shaping.overlong_buffer_tokens > max_new_tokens)
        )


def _colocated_rules(config: Config) -> Iterator[str]:
    if not config.deployment.colocated:
        return
    if config.rollout.max_staleness:
        yield (
            "with deployment.colocated the engines stop during training, but with rollout.max_staleness "
            f"{config.rollout.max_staleness} they would generate during training: remove one of the two settings"
        )
    if config.training.rl.sync_every > 1:
        yield (
            "with deployment.colocated the engines lose their weights in each step: training.rl.sync_every must "
            f"be 1, found {config.training.rl.sync_every}"
        )
    if config.rollout.engine.weight_transfer == "nccl":
        other = "tensors" if "tensors" in config.rollout.engine.spec.transfers else "auto"
        yield (
            "with deployment.colocated engine and trainer share GPUs, but NCCL connects only processes on different "
            f'GPUs: set rollout.engine.weight_transfer = "{other}"'
        )
