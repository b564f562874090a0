"""What the policy has said in the conversations under way, so that a run that goes on need not sample it again.

Not here: holding a conversation (conversation.py), which groups are under way (manager.py).

What an environment holds cannot be saved, so a conversation is begun again after a restart. The policy's turns are then
taken from the log as long as it reads exactly what it read before; the environment does again what it did, and the
conversation stands where it stood. From the first other answer on the policy is asked again.

    first run     prompt -> [turn 0] -> reply 0 -> [turn 1] -> reply 1 -> [turn 2, broken off]
    second run    prompt -> (turn 0) -> reply 0 -> (turn 1) -> reply 1 -> (turn 2, begun)[the rest] -> ...

Without it the long conversations of a run that is often stopped would be begun over and over, and only the short ones
would come to be trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts_core.engines.completion import Completion
from rollouts_core.rollout.agent import AgentTurn, place_version_spans
from rollouts_core.types import Sample, Status

Place = tuple[int, int]
"""Group and index of a sample."""


class TurnLog:
    """The turns of conversations under way, by the sample that each one is for."""

    def __init__(self) -> None:
        self._under_way: dict[Place, ConversationLog] = {}
        self._earlier: dict[Place, list[AgentTurn]] = {}

    def begin(self, pending: Sample) -> ConversationLog:
        """The log of a conversation that begins. What an earlier run logged of it is used once."""
        place = (pending.group_index, pending.index)
        log = self._under_way[place] = ConversationLog(self._earlier.pop(place, []))
        return log

    def end(self, group: Sequence[Sample], *, is_kept: bool = False) -> None:
        """Forget the conversations of a group: all of them are over, or it was given up.

        Args:
            is_kept: they go on later, from what has been said.
        """
        for pending in group:
            place = (pending.group_index, pending.index)
            log = self._under_way.pop(place, None)
            if is_kept and log is not None:
                self._earlier[place] = log.turns

    def versions_of(self, group: Sequence[Sample]) -> list[int]:
        """The versions of the weights that said what conversations of a group would go on from."""
        turns = itertools.chain(*(self._earlier.get((pending.group_index, pending.index), ()) for pending in group))
        return [span.version for turn in turns for span in place_version_spans(turn.completion, 0)]

    def forget(self, group: Sequence[Sample]) -> None:
        """Let the conversations of a group go on from nothing."""
        for pending in group:
            self._earlier.pop((pending.group_index, pending.index), None)

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """The turns of the groups under way, also of those conversations that are over, as JSON values."""
        turns_of = {**self._earlier, **{place: log.turns for place, log in self._under_way.items()}}
        return {
            "conversations": [
                {"group_index": group_index, "index": index, "turns": _turns_to_json(turns)}
                for (group_index, index), turns in turns_of.items()
                if turns
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Go on with the conversations of `state_dict`."""
        self._earlier = {
            (record["group_index"], record["index"]): _turns_from_json(record["turns"])
            for record in state["conversations"]
        }


class ConversationLog:
    """The turns of one conversation: those said so far, and behind them those that an earlier run came to."""

    def __init__(self, earlier: Sequence[AgentTurn] = ()) -> None:
        self.turns = list(earlier)
        self._num_earlier = len(self.turns)

    def recall(self, turn: int, prompt_tokens: list[int]) -> Completion | None:
        """What the policy said in an earlier run when it read just this, whole or in part."""
        if turn < self._num_earlier and self.turns[turn].prompt_tokens == prompt_tokens:
            return self.turns[turn].completion
        del self.turns[turn:]
        self._num_earlier = turn
        return None

    def note(self, turn: int, prompt_tokens: list[int], completion: Completion) -> None:
        """Keep what the policy has said of this turn, in place of what it had said of it."""
        self.turns[turn : turn + 1] = [AgentTurn(prompt_tokens=prompt_tokens, completion=completion)]


def _turns_to_json(turns: Sequence[AgentTurn]) -> list[dict[str, Any]]:  # Any: JSON
    """What each turn read behind the turn before it, and what was said: each token is written once."""
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
