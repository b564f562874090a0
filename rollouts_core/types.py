"""The records of training data: a prompt, a sample, a batch of samples.

`data/dataset.py` reads prompts and samples from files. `batch.py` turns samples into tensors.

Index t of every per-token array of a `Sample` describes token t, given the tokens before it:

    tokens             [ 3, 14, 15,  4,   27, 21,  1 ]     prompt of four tokens, completion of three
    loss_mask          [ 0,  0,  0,  0,    1,  1,  1 ]     1 where the token enters the loss
    rollout_log_probs  [ 0,  0,  0,  0, -.2, -.9, -.1]     log p(token t | tokens < t) when it was sampled
    policy_versions                     [(7, 4, 7)]        tokens 4..6 were sampled by policy version 7

Only `batch.build_batch` shifts these arrays by one position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple, NotRequired, Self, TypedDict


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]  # Any: JSON arguments
    """Function calls of an assistant. Each call has the form {"function": {"name": ..., "arguments": {...}}}."""
    tool_call_id: NotRequired[str]
    """Id of the tool call whose result this turn (role `tool`) contains."""
    name: NotRequired[str]
    """Name of the tool whose result this turn contains, or of the speaker if several speakers have the same role."""
    reasoning_content: NotRequired[str]
    """The assistant's reasoning before its answer, for chat templates that render reasoning separately."""


class Status(StrEnum):
    """How the generation of a sample ended."""

    PENDING = "pending"
    """The completion is not generated, or only partly generated."""
    COMPLETED = "completed"
    """The policy ended its turn by itself."""
    TRUNCATED = "truncated"
    """Generation ended at the token limit."""
    ABORTED = "aborted"
    """Generation was cancelled. The partial completion is kept."""
    FAILED = "failed"
    """Generation failed for a reason outside the policy, which `metadata["error"]` describes. The sample is never
    graded."""
    INVALID = "invalid"
    """The sample is neither graded nor trained on. `metadata["invalid"]` has the reason: the chat template hid a reply
    from the policy, or the policy sampled token ids that its tokenizer lacks."""


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a sample were sampled by the weights of this version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a prompt dataset, before completions are sampled."""

    id: str
    """Id of the row, which is unique within its file. Only errors, logs and reports use the id."""
    messages: tuple[Message, ...]
    """The conversation that the policy continues."""
    answer: str = ""
    """Reference answer for rewards."""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # Any: fields of a user's row
    """All other fields of the row."""
    has_json_answer: bool = field(default=False, compare=False)
    """True if the row's answer was a JSON list or object. `answer` then is its JSON text."""
    row: int = field(default=0, compare=False)
    """Row number in the source file, from 1. Only errors and logs use the number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout, or one row of SFT data: prompt and completion tokens with their masks.

    Raises:
        ValueError: the per-token arrays have different lengths.
    """

    prompt: str | tuple[Message, ...] = ""
    """The prompt as text or as turns, for users and for rewards. Training reads `tokens`."""
    response: str = ""
    """The completion as text, for users and for rewards. In a conversation, the completion is the policy's last turn;
    `metadata["conversation"]` has all turns."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of prompt and completion, exactly as the policy read and sampled them."""
    loss_mask: list[float] = field(default_factory=list)
    """For each token: 0 for the prompt and for observations, 1 (or another weight) for trained tokens."""
    rollout_log_probs: list[float] | None = None
    """For each token: log-probability under the distribution that was sampled from, nats; 0 for tokens that were not
    sampled."""
    reward: float | None = None
    """Reward of the whole sample; None before grading, or if no reward could be computed."""
    group_index: int = 0
    """Number of the group. All samples that were generated together for a prompt have the same number and share a
    baseline."""
    index: int = 0
    """Number of the sample within its group, from 0."""
    turn: int | None = None
    """Number of the turn, if each turn of a trajectory is a sample of its own. All turns of a trajectory have the same
    `group_index`, the same `index` and the same reward. A trajectory counts once in the group's baseline."""
    status: Status = Status.PENDING
    """How the generation ended."""
    finish_reason: str = ""
    """The engine's name for the reason why generation ended."""
    policy_versions: tuple[VersionSpan, ...] = ()
    """The weight versions that sampled the tokens, in order."""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # Any: fields of a user's row
    """Other fields of the dataset row, including `answer` and `prompt_id`, and entries that reward functions add."""

    def __post_init__(self) -> None:
        if len(self.loss_mask) != len(self.tokens):
            raise ValueError(f"loss_mask has {len(self.loss_mask)} entries for {len(self.tokens)} tokens")
        if self.rollout_log_probs is not None and len(self.rollout_log_probs) != len(self.tokens):
            raise ValueError(
                f"rollout_log_probs has {len(self.rollout_log_probs)} entries for {len(self.tokens)} tokens"
            )

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as the turns of a conversation."""
        return (Message(role="user", content=self.prompt),) if isinstance(self.prompt, str) else self.prompt

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """The sample as JSON values, which share the sample's token lists. `sample_from_json` is the inverse."""
        lists = {"tokens": self.tokens, "loss_mask": self.loss_mask, "rollout_log_probs": self.rollout_log_probs}
        # asdict copies lists value by value, which takes about a microsecond per token.
        return asdict(replace(self, tokens=[], loss_mask=[], rollout_log_probs=None)) | lists


def sample_from_json(record: Mapping[str, Any]) -> Sample:  # Any: JSON
    known = {f.name for f in fields(Sample)}
    values = {key: value for key, value in record.items() if key in known}
    if not isinstance(values["prompt"], str):
        values["prompt"] = tuple(values["prompt"])
    values["status"] = Status(values["status"])
    values["policy_versions"] = tuple(VersionSpan(*span) for span in values["policy_versions"])
    return Sample(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The samples of one RL step, ordered by group and index, with the columns that training reads.

    N is the number of samples.
    """

    tokens: list[list[int]]
    """N lists of tokens."""
    loss_masks: list[list[float]]
    """N loss masks, each as long as the sample's token list."""
    rewards: list[float]
    """N rewards; NaN for a sample without a reward."""
    response_lengths: list[int]
    """N counts of sampled tokens."""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # Any: counters of several types
    """Notes about the batch's generation: epoch, step, and numbers of dropped groups by reason."""
    samples: tuple[Sample, ...] = ()
    """The samples that the columns were taken from."""

    @property
    def groups(self) -> list[list[Sample]]:
        """The samples of each group, in the order of the batch."""
        return group_samples(self.samples)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """The batch as JSON values; `from_json` is the inverse.

        Columns that can be computed from the samples are left out.
        """
        derived = _columns_of(self.samples)
        columns = {
            "tokens": self.tokens,
            "loss_masks": self.loss_masks,
            "rewards": [None if math.isnan(reward) else reward for reward in self.rewards],
            "response_lengths": self.response_lengths,
        }
        return {
            "samples": [sample.to_json() for sample in self.samples],
            "metadata": dict(self.metadata),
            **{name: column for name, column in columns.items() if column != derived[name]},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:  # Any: JSON
        """Rebuild a batch from the output of `to_json`; floats are equal bit for bit."""
        samples = tuple(sample_from_json(sample) for sample in record["samples"])
        columns = {name: record.get(name, column) for name, column in _columns_of(samples).items()}
        rewards = [math.nan if reward is None else reward for reward in columns["rewards"]]
        return cls(**{**columns, "rewards": rewards}, metadata=record["metadata"], samples=samples)


def extract_sample_fields(samples: Sequence[Sample]) -> dict[str, list[Any]]:  # Any: one type per column
    """The columns `tokens`, `loss_mask` and `reward` of some samples."""
    names = ("tokens", "loss_mask", "reward")
    return {name: [getattr(sample, name) for sample in samples] for name in names}


def compute_response_lengths(samples: Sequence[Sample]) -> list[int]:
    """Number of tokens in the loss, for each sample."""
    return [sum(1 for weight in sample.loss_mask if weight) for sample in samples]


def _columns_of(samples: Sequence[Sample]) -> dict[str, list[Any]]:  # Any: one type per column
    """The columns of a batch with these samples. A missing reward is None."""
    fields_of = extract_sample_fields(samples)
    return {
        "tokens": fields_of["tokens"],
        "loss_masks": fields_of["loss_mask"],
        "rewards": fields_of["reward"],
        "response_lengths": compute_response_lengths(samples),
    }


def trajectory_places(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of the samples of each trajectory, in order.

    A trajectory has several samples if each turn is its own sample.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for place, sample in enumerate(samples):
        key = (place,) if sample.turn is None else (sample.group_index, sample.index)
        places.setdefault(key, []).append(place)
    return list(places.values())


def group_samples(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each group. Groups are in the order of their first sample."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())
