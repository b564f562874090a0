"""Log the policy's turns in running conversations, so that a resumed run does not sample the same turns again.

The state of an environment cannot be saved, so a resumed run starts its unfinished conversations again. While the
policy's input equals the logged input, the policy's turn is taken from the log and the environment computes its reply
again. From the first input that differs, the policy is sampled again.

    first run     prompt -> [turn 0] -> reply 0 -> [turn 1] -> reply 1 -> [turn 2, interrupted]
    second run    prompt -> (turn 0) -> reply 0 -> (turn 1) -> reply 1 -> (turn 2, begun)[the rest] -> ...
    [sampled by the engine]   (taken from the log)

Without the log, a run that is stopped often would lose its long conversations each time, and train mostly on short
conversations.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts_core.engines.completion import Completion
from rollouts_core.rollout.agent import AgentTurn, place_version_spans
from rollouts_core.types import Sample, Status

Place = tuple[int, int]
"""(group index, index in the group) of a sample."""


class TurnLog:
    """The policy's turns in all unfinished conversations, by group index and sample index."""

    def __init__(self) -> None:
        self._under_way: dict[Place, ConversationLog] = {}
        self._earlier: dict[Place, list[AgentTurn]] = {}

    def begin(self, pending: Sample) -> ConversationLog:
        """Start the log of a sample's conversation. Turns logged for the sample in an earlier run move into this
        log."""
        place = (pending.group_index, pending.index)
        log = self._under_way[place] = ConversationLog(self._earlier.pop(place, []))
        return log

    def end(self, group: Sequence[Sample], *, is_kept: bool = False) -> None:
        """Remove the conversation logs of a group whose generation finished or was cancelled.

        Args:
            is_kept: keep the logged turns, so that a later request of the group continues its conversations.
        """
        for pending in group:
            place = (pending.group_index, pending.index)
            log = self._under_way.pop(place, None)
            if is_kept and log is not None:
                self._earlier[place] = log.turns

    def versions_of(self, group: Sequence[Sample]) -> list[int]:
        """Weight versions of the logged turns from which the group's conversations would continue."""
        turns = itertools.chain(*(self._earlier.get((pending.group_index, pending.index), ()) for pending in group))
        return [span.version for turn in turns for span in place_version_spans(turn.completion, 0)]

    def forget(self, group: Sequence[Sample]) -> None:
        """Discard the logged turns of the group, so that its conversations start from the prompt."""
        for pending in group:
            self._earlier.pop((pending.group_index, pending.index), None)

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """All logged turns as JSON values, including the turns of finished conversations in unfinished groups."""
        turns_of = {**self._earlier, **{place: log.turns for place, log in self._under_way.items()}}
        return {
            "conversations": [
                {"group_index": group_index, "index": index, "turns": _turns_to_json(turns)}
                for (group_index, index), turns in turns_of.items()
                if turns
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Restore the logged turns from the result of `state_dict`."""
        self._earlier = {
            (record["group_index"], record["index"]): _turns_from_json(record["turns"])
            for record in state["conversations"]
        }


class ConversationLog:
    """The policy's turns in one conversation.

    Turns of this run come first, followed by turns of an earlier run that this run has not reached yet.
    """

    def __init__(self, earlier: Sequence[AgentTurn] = ()) -> None:
        self.turns = list(earlier)
        self._num_earlier = len(self.turns)

    def recall(self, turn: int, prompt_tokens: list[int]) -> Completion | None:
        """Return the logged completion of this turn, whole or partial, if its input was exactly `prompt_tokens`.

        Otherwise return None, and discard the logged completions of this turn and of all later turns.
        """
        if turn < self._num_earlier and self.turns[turn].prompt_tokens == prompt_tokens:
            return self.turns[turn].completion
        del self.turns[turn:]
        self._num_earlier = turn
        return None

    def note(self, turn: int, prompt_tokens: list[int], completion: Completion) -> None:
        """Store the completion of a turn; it replaces an earlier completion of the same turn."""
        self.turns[turn : turn + 1] = [AgentTurn(prompt_tokens=prompt_tokens, completion=completion)]


def _turns_to_json(turns: Sequence[AgentTurn]) -> list[dict[str, Any]]:  # Any: JSON
    """Turns as JSON records. A record has only the input tokens that follow the previous turn, so that each token is
    stored once."""
    records = []
    before: list[int] = []
    for turn in turns:
        completion = turn.completion
        records.append(
            {
                "read": turn.prompt_tokens[len(before) :],
                "tokens": completion.tokens,
                "logprobs": completion.logprobs,
                "status": completion.status.value,
                "finish_reason": completion.finish_reason,
                "version_spans": [list(span) for span in completion.version_spans],
            }
        )
        before = [*turn.prompt_tokens, *completion.tokens]
    return records


def _turns_from_json(records: Sequence[Mapping[str, Any]]) -> list[AgentTurn]:  # Any: JSON
    turns = []
    before: list[int] = []
    for record in records:
        completion = Completion(
            tokens=record["tokens"],
            logprobs=record["logprobs"],
            status=Status(record["status"]),
            finish_reason=record["finish_reason"],
            version_spans=tuple((version, start, end) for version, start, end in record["version_spans"]),
        )
        turns.append(AgentTurn(prompt_tokens=[*before, *record["read"]], completion=completion))
        before = [*turns[-1].prompt_tokens, *completion.tokens]
    return turns
