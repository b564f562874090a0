"""Convert an agent's trajectory to training samples with the exact token ids of every policy call.

An agent calls the policy once per turn. The policy's input and output are stored as token ids, never as text:
tokenizing the text again may give other tokens, and their log-probs are unknown.

    turn 0   prompt_tokens  [3 14 15 4]                        completion  [27 21 1]
    turn 1   prompt_tokens  [3 14 15 4  27 21 1  8 30 1 4]     completion  [33 1]

    interleaved    one sample    3 14 15 4 27 21 1 8 30 1 4 33 1      the prompt of each turn begins with the whole
                   loss_mask     0  0  0 0  1  1 1 0  0 0 0  1 1      previous turn
    branching      two samples   3 14 15 4 27 21 1
                   loss_mask     0  0  0 0  1  1 1
                                 3 14 15 4 27 21 1 8 30 1 4 33 1     for agents that shorten or rewrite their
                   loss_mask     0  0  0 0  0  0 0 0  0 0 0  1 1     history; all samples share the reward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollouts_core.engines.completion import Completion
from rollouts_core.environments.protocol import Outcome
from rollouts_core.errors import DataError
from rollouts_core.types import Message, Sample, Status, VersionSpan

TrajectoryForm = Literal["interleaved", "branching"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTurn:
    """One call of the policy (the model in training) by an agent."""

    prompt_tokens: list[int]
    """Token ids of the policy's input."""
    completion: Completion
    """Token ids that the policy sampled, with their log-probs and weight versions."""
    outcome: Outcome = Outcome.OK
    """The environment's judgement of this turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """All calls of the policy that an agent made for one prompt."""

    turns: tuple[AgentTurn, ...]
    """The calls of the policy, in order; at least one."""
    messages: tuple[Message, ...]
    """The conversation as text messages, beginning with the prompt. Rewards and reports use it; training uses `turns`.
    """
    status: Status
    """Status of the whole trajectory, for example completed or truncated."""
    finish_reason: str
    """The engine's finish reason of the last turn, or the name of the exhausted budget."""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    """JSON values to add to the metadata of the trajectory's samples."""


def agent_integration(
    trajectory: Trajectory, pending: Sample | None = None, *, form: TrajectoryForm = "interleaved"
) -> list[Sample]:
    """Convert a trajectory to ungraded samples: one sample if `form` is "interleaved", one per turn if it is
    "branching".

    Args:
        pending: the sample for which the agent ran. The results copy its prompt, group, index and metadata.

    Raises:
        DataError: in an interleaved trajectory, a turn's input does not begin with the tokens of the previous turns.
    """
    assert trajectory.turns, "a trajectory has at least one turn"
    asked_by = pending or Sample()
    last_said = next((m["content"] for m in reversed(trajectory.messages) if m["role"] == "assistant"), "")
    described = replace(
        asked_by,
        response=last_said,
        status=trajectory.status,
        finish_reason=trajectory.finish_reason,
        metadata={
            **asked_by.metadata,
            **trajectory.metadata,
            "conversation": list(trajectory.messages),
            "outcomes": [turn.outcome.value for turn in trajectory.turns],
        },
    )
    if form == "branching":
        return [
            _fill_in_tokens(replace(described, turn=number), [turn]) for number, turn in enumerate(trajectory.turns)
        ]
    _check_interleaved(trajectory, asked_by)
    return [_fill_in_tokens(described, trajectory.turns)]


def _check_interleaved(trajectory: Trajectory, pending: Sample) -> None:
    before: list[int] = []
    for number, turn in enumerate(trajectory.turns):
        read = turn.prompt_tokens[: len(before)]
        if read != before:
            place = next((i for i, pair in enumerate(zip(read, before, strict=False)) if len(set(pair)) > 1), len(read))
            raise DataError(
                f"prompt {pending.metadata.get('prompt_id', '?')!r}: the input of turn {number} must begin with the "
                f"tokens of the previous turns, but differs at token {place}: let the agent keep token ids instead "
                'of tokenizing text again. An agent that rewrites its history needs the form "branching"'
            )
        before = [*turn.prompt_tokens, *turn.completion.tokens]


def _fill_in_tokens(sample: Sample, turns: Sequence[AgentTurn]) -> Sample:
    """Return the sample with the tokens, masks, log-probs and versions of the turns. Each turn's input must begin with
    the tokens of the previous turns."""
    tokens: list[int] = []
    loss_mask: list[float] = []
    log_probs: list[float] = []
    spans: list[VersionSpan] = []
    for turn in turns:
        read = turn.prompt_tokens[len(tokens) :]
        completion = turn.completion
        start = len(tokens) + len(read)
        tokens += [*read, *completion.tokens]
        loss_mask += [0.0] * len(read) + [1.0] * len(completion.tokens)
        log_probs += [0.0] * len(read) + completion.logprobs
        spans += place_version_spans(completion, start)
    return replace(
        sample, tokens=tokens, loss_mask=loss_mask, rollout_log_probs=log_probs, policy_versions=tuple(spans)
    )


def place_version_spans(completion: Completion, start: int) -> list[VersionSpan]:
    """Weight versions of a completion's tokens, as spans within a sample in which the completion begins at index
    `start`."""
    return [
        VersionSpan(_version_number(version), start + begin, start + end)
        for version, begin, end in completion.version_spans
        if begin < end
    ]


def _version_number(version: str) -> int:
    """The number after the last dash of an engine's weight version; -1 if the version has no number, as at a server's
    start."""
    number = version.rpartition("-")[2]
    return int(number) if number.isdigit() else -1
