"""The settings of one training pipeline: frozen records with a docstring per field.

The docstrings are the help text of the Prefect form. A default stands in its field and nowhere else. Nothing here
imports torch, so the orchestrator can read, check and fingerprint a configuration without it.

Not here: machines and clouds (infra), reading data (dataset.py), what a name like "arithmetic" means (environments).

    Config
    ├── model        which checkpoint training starts from
    ├── data         files of demonstrations and prompts
    ├── training     sft: SFTTrainingConfig, rl: RLTrainingConfig, each with its optimizer
    ├── rollout      how completions are sampled, graded and filtered
    ├── evaluation   how checkpoints are compared
    └── deployment   where things run: never changes a result
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticKnownError

from rollouts_core.errors import ConfigError
from rollouts_core.messages import explain_validation_error

RecordT = TypeVar("RecordT", bound=BaseModel)

PLACEMENT: JsonDict = {"affects_result": False}
"""Marks a field that says where or how often, never what: it stays out of fingerprints."""


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DATA_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"must be a finite number, found {value}")
    return value


def name_of_function(function: str | Callable[..., Any]) -> str:  # Any: user functions of many shapes
    """`function` as a configuration writes it: its own name, or `package.module:function`."""
    if isinstance(function, str):
        return function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _write_function(function: str | Callable[..., Any]) -> str:  # Any: user functions of many shapes
    if not isinstance(function, str) and (not hasattr(function, "__qualname__") or "<" in function.__qualname__):
        raise ValueError(f"{function!r} cannot be named in a file: define it as a function of a module")
    return name_of_function(function)


Finite = Annotated[float, Field(strict=True), AfterValidator(_finite)]
GpuRank = Annotated[int, Field(ge=0, strict=True)]
FunctionName = Annotated[
    str | Callable[..., Any],  # Any: user functions of many shapes
    PlainSerializer(_write_function, return_type=str),
    WithJsonSchema({"type": "string"}),
]


SCALAR_ERRORS: dict[object, Literal["bool_type", "int_type", "float_type"]] = {
    bool: "bool_type",
    int: "int_type",
    float: "float_type",
}


def _scalar_of(annotation: object) -> object:
    """The type of a field without the checks around it; of one that may be None, the other type."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is Annotated or (len(parts) == 1 and type(None) in get_args(annotation)):
        return _scalar_of(parts[0])
    return annotation


class Record(BaseModel):
    """What all settings share: frozen, no unknown keys, field docstrings as help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_conversions(cls, value: Any, info: ValidationInfo) -> Any:  # Any: unchecked input
        """True is no number and "3" is no 3, although pydantic would take them for one."""
        assert info.field_name is not None, "only fields are validated"
        kind = SCALAR_ERRORS.get(_scalar_of(cls.model_fields[info.field_name].annotation))
        if kind and (isinstance(value, str) or isinstance(value, bool) != (kind == "bool_type")):
            raise PydanticKnownError(kind)
        return value


class ModelConfig(Record):
    """The model that training starts from."""

    path: str = Field(min_length=1, json_schema_extra=PLACEMENT)
    """Folder with a Hugging Face checkpoint (config.json, weights, tokenizer), or a hub id."""
    revision: str = ""
    """Commit or tag of a hub model; empty takes the default branch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights while training."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Leave off unless you have read that code."""


class DatasetConfig(Record):
    """One of several datasets of demonstrations that are trained on together."""

    path: str = Field(min_length=1, json_schema_extra=PLACEMENT)
    """JSONL or Parquet file, folder of a Hugging Face dataset, or hub id."""
    split: str = Field("train", min_length=1)
    """Which split, of a folder or hub dataset that has several."""
    subset: str = ""
    """Which configuration of a hub dataset that has several."""
    revision: str = Field("", json_schema_extra=PLACEMENT)
    """Commit or tag of a hub dataset; empty takes the newest commit when the run is planned."""
    max_samples: int | None = Field(None, ge=1)
    """Only so many rows, from the start."""
    repeat: Annotated[Finite, Field(gt=0)] = 1.0
    """How often an epoch visits each row. Below 1 an epoch takes a share of them, and the next epoch others."""


class DataConfig(Record):
    """Where demonstrations and prompts come from. Paths are relative to the configuration's file."""

    sft: str | tuple[DatasetConfig, ...] = ""
    """Demonstrations: rows with `messages`, with `prompt` and `completion`, or with `text`. One JSONL or Parquet file,
    dataset folder or hub id; or a list of such datasets, each with its share."""
    streaming: bool = Field(False, json_schema_extra=PLACEMENT)
    """Read and tokenize demonstrations while training instead of before: for data larger than memory."""
    prompts: str = ""
    """Prompts for RL: JSONL rows with `prompt` or `messages`, and `answer` where the reward needs one."""
    selection: str = ""
    """Prompts (or demonstrations, for the metric `loss`) that choose between checkpoints."""
    heldout: str = ""
    """Prompts (or demonstrations) for the report. No row of them may be among the selection's."""


class OptimConfig(Record):
    """AdamW and its learning-rate schedule."""

    lr: Annotated[Finite, Field(ge=0)] = 1e-5
    """Peak learning rate."""
    betas: tuple[Annotated[Finite, Field(ge=0, lt=1)], Annotated[Finite, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of AdamW's two moving averages."""
    eps: Annotated[Finite, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warmup."""
    num_warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0 to its peak."""
    min_lr_ratio: Annotated[Finite, Field(ge=0, le=1)] = 0.1
    """The learning rate at the last step, as a share of the peak."""
    max_grad_norm: Annotated[Finite, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""


class RLOptimConfig(OptimConfig):
    """AdamW with the defaults of RL, which hold also where only some of its settings are given."""

    lr: Annotated[Finite, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "constant"
    """Shape of the learning rate after warmup."""


class SFTTrainingConfig(Record):
    """Supervised fine-tuning on demonstrations."""

    num_steps: int = Field(1000, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(8, ge=1)
    """Rows per step; with packing a row holds as many demonstrations as fit into `max_length`."""
    micro_batch_size: int = Field(8, ge=1)
    """Rows per forward and backward pass; smaller needs less memory and gives the same step."""
    max_length: int = Field(2048, ge=2)
    """Tokens per row."""
    on_overlong: Literal["cut", "cut_or_drop", "drop"] = "cut"
    """Demonstrations of more than `max_length` tokens: cut them, where cutting away all that is trained on is an
    error; cut them, and leave out those; or leave out all of them."""
    packing: bool = True
    """Fill rows with several demonstrations, which do not see each other."""
    train_on: Literal["last_assistant", "all_assistant", "everything"] = "all_assistant"
    """Which tokens enter the loss."""
    seed: int = Field(0, ge=0)
    """Order of the demonstrations."""
    log_every: int = Field(10, ge=1, json_schema_extra=PLACEMENT)
    """Steps between two lines of metrics."""
    checkpoint_every: int = Field(200, ge=1)
    """Steps between two checkpoints; selection chooses among them and the last one."""
    keep_checkpoints: int = Field(10, ge=1)
    """How many checkpoints stay on disk, the newest ones."""
    optim: OptimConfig = OptimConfig()
    """Optimizer of this stage."""

    @model_validator(mode="after")
    def _check_micro_batch(self) -> Self:
        if self.batch_size % min(self.micro_batch_size, self.batch_size):
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
            )
        return self


class LossConfig(Record):
    """The clipped policy-gradient loss."""

    clip_low: Annotated[Finite, Field(ge=0, lt=1)] = 0.2
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[Finite, Field(ge=0)] = 0.2
    """The probability ratio is clipped above 1 + clip_high."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Average over all trained tokens of the step, or over each sample's mean."""


class RLTrainingConfig(Record):
    """Reinforcement learning from graded completions."""

    num_steps: int = Field(100, ge=1)
    """Steps: one batch of rollouts and at most one optimizer update each."""
    max_micro_batch_tokens: int = Field(16384, ge=2)
    """Padded tokens per forward and backward pass; smaller needs less memory and gives the same step."""
    advantage: Literal["group_mean_std", "group_mean", "leave_one_out", "constant"] = "group_mean_std"
    """What is subtracted from a reward: its group's mean (then divided by the group's standard deviation),
    its group's mean, the mean of the others of its group, or `baseline`."""
    baseline: Finite = 0.0
    """The reward that counts as neutral, for the advantage `constant`."""
    loss: LossConfig = LossConfig()
    """The policy loss."""
    sync_every: int = Field(1, ge=1)
    """Steps between two publications of the weights to the engines."""
    log_every: int = Field(1, ge=1, json_schema_extra=PLACEMENT)
    """Steps between two lines of metrics."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between two checkpoints; selection chooses among them and the last one."""
    keep_checkpoints: int = Field(10, ge=1)
    """How many checkpoints stay on disk, the newest ones."""
    replicate: int = Field(0, ge=0)
    """Another number trains the same settings again, as another sample of the same run."""
    optim: RLOptimConfig = RLOptimConfig()
    """Optimizer of this stage."""


class TrainingConfig(Record):
    """The two training stages."""

    sft: SFTTrainingConfig = SFTTrainingConfig()
    """Supervised fine-tuning."""
    rl: RLTrainingConfig = RLTrainingConfig()
    """Reinforcement learning."""


class SamplingConfig(Record):
    """How a completion is sampled."""

    temperature: Annotated[Finite, Field(ge=0, le=10)] = 1.0
    """Softmax temperature; 0 takes the most likely token."""
    max_new_tokens: int = Field(512, ge=1)
    """Token limit of a completion."""


class RolloutConfig(Record):
    """How RL gets its data: sample, grade, filter."""

    batch_size: int = Field(16, ge=1)
    """Prompts per step."""
    n_samples_per_prompt: int = Field(8, ge=1)
    """Completions per prompt: the group that shares a baseline."""
    over_sampling_factor: Annotated[Finite, Field(ge=1)] = 1.0
    """Prompts asked for at a time, as a multiple of the batch size, when a filter drops groups."""
    max_refills: int = Field(10, ge=1)
    """How often a step may ask for further prompts before it ends with an error."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Prompts longer than this are an error that names the row."""
    sampling: SamplingConfig = SamplingConfig()
    """How completions are sampled."""
    environment: str = Field("arithmetic", min_length=1)
    """Who grades: a name of `rollouts_core.environments.ENVIRONMENTS`."""
    generate_fn: FunctionName = ""
    """Takes the pending samples of a group and returns them finished; empty asks the engines."""
    reward_fn: FunctionName = ""
    """A name of `rollouts_core.rewards.REWARDS` or `package.module:function`; empty takes the environment's grade."""
    filter_fn: FunctionName = ""
    """Which groups are trained on: a name of `rollouts_core.filters.FILTERS` or `package.module:function`."""
    seed: int = Field(0, ge=0)
    """Order of the prompts and the randomness of sampling."""
    request_timeout_s: Annotated[Finite, Field(gt=0)] = Field(600.0, json_schema_extra=PLACEMENT)
    """How long one engine request may take before it is asked again."""


class EvaluationConfig(Record):
    """How checkpoints are compared, for selection and for the report."""

    metric: Literal["accuracy", "loss"] = "accuracy"
    """Mean reward on prompts, or mean loss on demonstrations."""
    max_prompts: int = Field(1024, ge=1)
    """At most this many rows of a file are used, from its start."""
    samples_per_prompt: int = Field(1, ge=1)
    """Completions per prompt; their rewards are averaged."""
    temperature: Annotated[Finite, Field(ge=0, le=10)] = 0.0
    """Softmax temperature; 0 takes the most likely token."""
    seed: int = Field(0, ge=0)
    """Randomness of sampling, the same for every checkpoint."""
    max_p_value: Annotated[Finite, Field(gt=0, le=1)] = 0.01
    """RL must beat the selected SFT checkpoint with at most this p-value, or the run fails; 1 accepts anything."""


class DeploymentConfig(Record):
    """Where things run on the node. Nothing here changes a result."""

    trainer_gpu_ranks: tuple[GpuRank, ...] = Field((), json_schema_extra=PLACEMENT)
    """GPUs of the trainer; empty trains on the CPU, or on the first GPU where there is one."""
    engine_gpu_ranks: tuple[GpuRank, ...] = Field((), json_schema_extra=PLACEMENT)
    """GPUs of the inference engine."""
    trainer_threads: int = Field(0, ge=0, json_schema_extra=PLACEMENT)
    """CPU threads of the trainer; 0 takes all cores."""
    engine_threads: int = Field(1, ge=1, json_schema_extra=PLACEMENT)
    """CPU threads of the embedded engine."""
    engine_port: int = Field(0, ge=0, le=65535, json_schema_extra=PLACEMENT)
    """Port of the engine on the node's loopback address; 0 chooses a free one."""
    max_running_requests: int = Field(128, ge=1, json_schema_extra=PLACEMENT)
    """Completions that the engine generates at the same time."""
    stage_timeout_minutes: int = Field(24 * 60, ge=1, json_schema_extra=PLACEMENT)
    """A stage that takes longer is stopped and counts as failed."""


class Config(Record):
    """Everything the training core needs to know for one pipeline."""

    mode: Literal["sft", "rl", "sft+rl"] = "sft+rl"
    """Which stages run: only SFT, only RL from `model.path`, or RL on the selected SFT checkpoint."""
    model: ModelConfig
    """The model that training starts from."""
    data: DataConfig
    """Demonstrations and prompts."""
    training: TrainingConfig = TrainingConfig()
    """SFT and RL settings."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling and grading for RL."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How checkpoints are compared."""
    deployment: DeploymentConfig = DeploymentConfig()
    """Placement on the node."""

    @property
    def demonstrations(self) -> tuple[DatasetConfig, ...]:
        """The datasets of `data.sft`, also where it is written as one path."""
        sft = self.data.sft
        return sft if isinstance(sft, tuple) else (DatasetConfig(path=sft),)

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        needed = {"sft": ["sft"], "rl": ["prompts"], "sft+rl": ["sft", "prompts"]}[self.mode]
        for name in [*needed, "selection", "heldout"]:
            if not getattr(self.data, name):
                raise ValueError(f'mode "{self.mode}" needs data.{name}')
        if self.mode != "sft" and self.evaluation.metric == "loss":
            raise ValueError(f'mode "{self.mode}" compares checkpoints by accuracy: evaluation.metric cannot be "loss"')
        if self.mode != "sft" and self.rollout.sampling.temperature == 0:
            raise ValueError("RL needs rollout.sampling.temperature above 0: greedy samples of a group are all equal")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The configuration in a TOML or JSON file; data and model paths become absolute.

        Raises:
            ConfigError: one sentence with the file, the key and what to do.
        """
        return parse_config(cls, resolve_paths(read_settings(Path(path)), Path(path).parent), source=str(path))

    def save(self, path: str | Path) -> None:
        """Write the settings that differ from their defaults as TOML or JSON, by the name's ending."""
        settings = self.model_dump(mode="json", exclude_defaults=True)
        is_json = Path(path).suffix == ".json"
        Path(path).write_text(json.dumps(settings, indent=2) if is_json else tomli_w.dumps(settings))


def read_settings(path: Path) -> dict[str, Any]:  # Any: unchecked file content
    """The content of a TOML or JSON settings file, unchecked."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {problem}: give the path of a TOML or JSON configuration")
    try:
        settings = json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): make it readable") from error
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path} is not valid {kind}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a table of settings at its top, found {type(settings).__name__}")
    return settings


def resolve_paths(settings: dict[str, Any], base: Path) -> dict[str, Any]:  # Any: unchecked file content
    """`settings` with data paths, and a model path that exists as a folder, made absolute against `base`.

    A model path that is no folder beside the file stays as it is: it may be a hub id. So does `data.sft` where it
    reads `organisation/name` and is nothing beside the file.
    """

    def absolute(value: Any) -> Any:  # Any: unchecked file content
        return str((base / value).resolve()) if isinstance(value, str) and value else value

    def dataset(value: Any) -> Any:  # Any: unchecked file content
        if isinstance(value, list | tuple):
            return [
                {**each, "path": dataset(each["path"])} if isinstance(each, dict) and "path" in each else each
                for each in value
            ]
        return value if isinstance(value, str) and _may_be_hub_id(value, base) else absolute(value)

    resolved = dict(settings)
    if isinstance(data := settings.get("data"), dict):
        resolved["data"] = {key: (dataset if key == "sft" else absolute)(value) for key, value in data.items()}
    if isinstance(model := settings.get("model"), dict):
        path = model.get("path")
        if isinstance(path, str) and (path.startswith((".", "/")) or (base / path).is_dir()):
            resolved["model"] = {**model, "path": absolute(path)}
    return resolved


def _may_be_hub_id(path: str, base: Path) -> bool:
    is_name = HUB_ID.fullmatch(path) is not None and not path.endswith(DATA_FILE_SUFFIXES)
    return is_name and not (base / path).exists()


def parse_config(model: type[RecordT], settings: dict[str, Any], *, source: str) -> RecordT:  # Any: unchecked
    """`settings` as a record of `model`; a misfit becomes one sentence that names `source` and the key."""
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain_validation_error(error, model, source=source)) from error
