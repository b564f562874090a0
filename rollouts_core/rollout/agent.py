"""From what an agent did to samples that can be trained on: every call of the policy, token by token.

Not here: holding a conversation (conversation.py), engines (engines/).

An agent calls the policy once per turn. What it read and what was sampled are kept as token ids, never as text: text
that is tokenized again may give other tokens, with log-probs that nobody measured.

    turn 0   prompt_tokens  [3 14 15 4]                        completion  [27 21 1]
    turn 1   prompt_tokens  [3 14 15 4  27 21 1  8 30 1 4]     completion  [33 1]

    interleaved    one sample    3 14 15 4 27 21 1 8 30 1 4 33 1      the prompt of each turn begins with all of
                   loss_mask     0  0  0 0  1  1 1 0  0 0 0  1 1      the turn before it
    branching      two samples   3 14 15 4 27 21 1
                   loss_mask     0  0  0 0  1  1 1
                                 3 14 15 4 27 21 1 8 30 1 4 33 1     for agents that shorten or rewrite their
                   loss_mask     0  0  0 0  0  0 0 0  0 0 0  1 1     history; all share the trajectory's reward
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
    """One call of the policy."""

    prompt_tokens: list[int]
    """What it read."""
    completion: Completion
    """What was sampled, with log-probs and weight versions."""
    outcome: Outcome = Outcome.OK
    """What the environment made of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The whole of what an agent did for one prompt."""

    turns: tuple[AgentTurn, ...]
    """At least one."""
    messages: tuple[Message, ...]
    """The conversation for people and rewards, the prompt's turns first."""
    status: Status
    """How it ended."""
    finish_reason: str
    """Why: the engine's word for it, or the budget that was used up."""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    """What joins the metadata of its samples."""


def agent_integration(
    trajectory: Trajectory, pending: Sample | None = None, *, form: TrajectoryForm = "interleaved"
) -> list[Sample]:
    """The samples that a trajectory gives, ungraded: one, or with `branching` one per turn.

    Args:
        pending: the sample that asked for the trajectory; its prompt, place and metadata stay.

    Raises:
        DataError: a turn of an interleaved trajectory that did not read what the turns before it said.
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
                f"prompt {pending.metadata.get('prompt_id', '?')!r}: turn {number} read other tokens than the turns "
                f"before it wrote, from token {place} on: the agent must keep token ids instead of tokenizing text "
                'again; one that rewrites its history needs the form "branching"'
            )
        before = [*turn.prompt_tokens, *turn.completion.tokens]


def _fill_in_tokens(sample: Sample, turns: Sequence[AgentTurn]) -> Sample:
    """The sample with the tokens of turns of which each one's prompt begins with all of the turn before it."""
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
    """Which policy versions sampled a completion whose first token stands at `start`."""
    return [
        VersionSpan(_version_number(version), start + begin, start + end)
        for version, begin, end in completion.version_spans
        if begin < end
    ]


def _version_number(version: str) -> int:
    """The number behind the last dash of an engine's weight version; -1 for a server's own start version."""
    number = version.rpartition("-")[2]
    return int(number) if number.isdigit() else -1
