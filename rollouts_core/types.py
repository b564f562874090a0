"""The records that training data is made of: a prompt, a sample, a batch of samples.

Not here: reading them from files (data/dataset.py), a batch from samples (rollout_batch.py), tensors (batch.py).

Index t of every per-token array of a `Sample` speaks about token t given the tokens before it:

    tokens             [ 3, 14, 15,  4,   27, 21,  1 ]     prompt of four tokens, completion of three
    loss_mask          [ 0,  0,  0,  0,    1,  1,  1 ]     1 where the token enters the loss
    rollout_log_probs  [ 0,  0,  0,  0, -.2, -.9, -.1]     log p(token t | tokens < t) when it was sampled
    policy_versions                     [(7, 4, 7)]        tokens 4..6 were sampled by policy version 7

Only `batch.build_batch` shifts them.
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
    """Functions that an assistant calls, as {"function": {"name": ..., "arguments": {...}}}."""
    tool_call_id: NotRequired[str]
    """Which call a message of the role `tool` answers."""
    name: NotRequired[str]
    """The tool that answers, or a speaker among several."""
    reasoning_content: NotRequired[str]
    """What an assistant thought before its answer, for templates that write it apart."""


class Status(StrEnum):
    """How the generation of a sample ended."""

    PENDING = "pending"
    """Not generated yet, or only partly."""
    COMPLETED = "completed"
    """The policy ended its turn by itself."""
    TRUNCATED = "truncated"
    """The token limit ended it."""
    ABORTED = "aborted"
    """It was stopped from outside and keeps what it has."""
    FAILED = "failed"
    """No usable completion exists, by no doing of the policy; `metadata["error"]` says why. It is never graded."""
    INVALID = "invalid"
    """It is neither graded nor trained on: the policy did not see what it was answered, or sampled ids that its
    tokenizer does not have; `metadata["invalid"]` says which."""


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a sample were sampled by this policy version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One dataset item before sampling."""

    id: str
    """Unique within its file; decides nothing, names it in messages and reports."""
    messages: tuple[Message, ...]
    """The conversation that the policy continues."""
    answer: str = ""
    """The reference that a reward compares with."""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # whatever else the row had
    """Every other field of the row."""
    has_json_answer: bool = field(default=False, compare=False)
    """Whether the row had a JSON list or object as its answer, of which `answer` is the text."""
    row: int = field(default=0, compare=False)
    """Its number in the file that it was read from, from 1; for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout, or one row of SFT data: prompt and completion tokens with their masks.

    Raises:
        ValueError: per-token arrays of different lengths.
    """

    prompt: str | tuple[Message, ...] = ""
    """What the policy was asked, for people and rewards; training reads `tokens`."""
    response: str = ""
    """The completion as text, for people and rewards; of several turns, the policy's last one. The whole conversation
    is in `metadata["conversation"]` then."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and completion, exactly as the policy saw and sampled them."""
    loss_mask: list[float] = field(default_factory=list)
    """Per token: 0 for prompt and observations, 1 (or a weight) where the token is trained on."""
    rollout_log_probs: list[float] | None = None
    """Per token, nats, of the distribution that was sampled from; 0 where nothing was sampled."""
    reward: float | None = None
    """The grade of the whole sample; None until it was graded, and where it could not be scored."""
    group_index: int = 0
    """The draw of the prompt: samples with the same number share their baseline."""
    index: int = 0
    """The place within the group."""
    turn: int | None = None
    """Which turn of its trajectory this is, where every turn is a sample of its own: those of one trajectory have the
    same `group_index` and `index`, share its reward, and count once in the group's baseline."""
    status: Status = Status.PENDING
    """How generation ended."""
    finish_reason: str = ""
    """The engine's own word for it."""
    policy_versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which tokens, in order."""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the row's other fields, rewards' notes
    """Whatever the dataset row and the reward want to keep; `answer` and `prompt_id` lie here."""

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
        """The sample as JSON values, with the sample's own lists of tokens; `sample_from_json` is the inverse."""
        lists = {"tokens": self.tokens, "loss_mask": self.loss_mask, "rollout_log_probs": self.rollout_log_probs}
        # asdict takes a microsecond per token.
        return asdict(replace(self, tokens=[], loss_mask=[], rollout_log_probs=None)) | lists


def sample_from_json(record: Mapping[str, Any]) -> Sample:  # Any: JSON
    """The sample that `Sample.to_json` wrote."""
    known = {f.name for f in fields(Sample)}
    values = {key: value for key, value in record.items() if key in known}
    if not isinstance(values["prompt"], str):
        values["prompt"] = tuple(values["prompt"])
    values["status"] = Status(values["status"])
    values["policy_versions"] = tuple(VersionSpan(*span) for span in values["policy_versions"])
    return Sample(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The samples of one RL step, ordered by group and place, with the columns that training reads."""

    tokens: list[list[int]]
    """N token lists."""
    loss_masks: list[list[float]]
    """N masks, each as long as its tokens."""
    rewards: list[float]
    """N grades; NaN for a sample without a reward."""
    response_lengths: list[int]
    """N counts of the tokens that the policy sampled."""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # counters of mixed types
    """Counters of how the batch came about: epoch, step, drops by reason."""
    samples: tuple[Sample, ...] = ()
    """The samples that the columns were taken from."""

    @property
    def groups(self) -> list[list[Sample]]:
        """The samples by group, in the order of the batch."""
        return group_samples(self.samples)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """The batch as JSON values; `from_json` is the inverse.

        Samples and counters, and only those columns that are not what the samples say.
        """
        said = _columns_of(self.samples)
        columns = {
            "tokens": self.tokens,
            "loss_masks": self.loss_masks,
            "rewards": [None if math.isnan(reward) else reward for reward in self.rewards],
            "response_lengths": self.response_lengths,
        }
        return {
            "samples": [sample.to_json() for sample in self.samples],
            "metadata": dict(self.metadata),
            **{name: column for name, column in columns.items() if column != said[name]},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:  # Any: JSON
        """The batch that `to_json` wrote: the same tokens, masks, rewards, groups and metadata, floats bit for bit."""
        samples = tuple(sample_from_json(sample) for sample in record["samples"])
        columns = {name: record.get(name, column) for name, column in _columns_of(samples).items()}
        rewards = [math.nan if reward is None else reward for reward in columns["rewards"]]
        return cls(**{**columns, "rewards": rewards}, metadata=record["metadata"], samples=samples)


def extract_sample_fields(samples: Sequence[Sample]) -> dict[str, list[Any]]:  # Any: one type per column
    """The columns `tokens`, `loss_mask` and `reward` of some samples."""
    names = ("tokens", "loss_mask", "reward")
    return {name: [getattr(sample, name) for sample in samples] for name in names}


def compute_response_lengths(samples: Sequence[Sample]) -> list[int]:
    """Per sample the number of tokens that the policy sampled."""
    return [sum(1 for weight in sample.loss_mask if weight) for sample in samples]


def _columns_of(samples: Sequence[Sample]) -> dict[str, list[Any]]:  # Any: one type per column
    """What a batch of the samples has as columns, with None for a reward that is missing."""
    fields_of = extract_sample_fields(samples)
    return {
        "tokens": fields_of["tokens"],
        "loss_masks": fields_of["loss_mask"],
        "rewards": fields_of["reward"],
        "response_lengths": compute_response_lengths(samples),
    }


def trajectory_places(samples: Sequence[Sample]) -> list[list[int]]:
    """The places of the samples of each trajectory, in order: one, unless each of its turns is a sample of its own."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, sample in enumerate(samples):
        key = (place,) if sample.turn is None else (sample.group_index, sample.index)
        places.setdefault(key, []).append(place)
    return list(places.values())


def group_samples(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples by `group_index`, groups in order of first appearance."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())
