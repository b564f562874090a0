"""Recognise rows in the formats of other systems, and convert those that training cannot read directly.

    find_shape(row) -> OpenAI, TRL, verl, slime, ShareGPT, Alpaca, question and answer, or None
    convert(row)    -> a row with `messages`, or with `prompt` and `completion` or `answer`

Formats that training reads directly: `conversations.py`, `dataset.py`. Files of rows: `rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollouts_core.data.conversations import (
    ANSWER_ELSEWHERE,
    COMPLETION_ELSEWHERE,
    COMPLETION_KEYS,
    PROMPT_ELSEWHERE,
    SYSTEM_FIELDS,
    Row,
)
from rollouts_core.data.strict_json import read_strict_json
from rollouts_core.errors import DataError

SHAREGPT_ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}
JSON_FIELDS = ("messages", "prompt", "completion", "conversations", "tools", "reward_model", "chosen", "rejected")
"""Fields that contain lists or objects. In a CSV file, their cells are JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """The format of a row: the fields that it has, and how to convert it."""

    name: str
    """Name of the format in a sentence, for example "ShareGPT's conversations"."""
    is_demonstration: bool
    """True if the row contains the text that the model should write."""
    is_prompt: bool
    """True if the row contains a question that the policy can answer."""
    has_answer: bool = False
    """True if the converted row has a reference answer in the field `answer`."""
    convert: Callable[[Row], Row] | None = None
    """Converts a row to the form that training reads; None if training reads the row directly."""


def find_shape(row: Row, *, for_rewards: bool) -> RowShape | None:
    """Recognise the format of a row; None if it is unknown.

    Args:
        for_rewards: convert the row to a prompt with an answer (RL) instead of a demonstration (SFT).
    """
    keys = {key for key, value in row.items() if value is not None}
    if "conversations" in keys:
        return RowShape(
            name="ShareGPT's conversations", is_demonstration=True, is_prompt=True, convert=_from_sharegpt(for_rewards)
        )
    if {"chosen", "rejected"} <= keys:
        name = "TRL's preference pairs (SFT trains on the chosen side)"
        return RowShape(name=name, is_demonstration=True, is_prompt="prompt" in keys, convert=_from_preference)
    if "instruction" in keys and keys & {"output", "input"}:
        return RowShape(name="Alpaca's instructions", is_demonstration=True, is_prompt=True, convert=_from_alpaca)
    if keys & {"messages", "prompt"}:
        return _shape_of_chat(row, keys, for_rewards=for_rewards)
    if "text" in keys:
        return RowShape(name="plain texts in TRL's form", is_demonstration=True, is_prompt=False)
    question = next((name for name in PROMPT_ELSEWHERE if name in keys), "")
    reply = next((name for name in (*COMPLETION_ELSEWHERE, *COMPLETION_KEYS, *ANSWER_ELSEWHERE) if name in keys), "")
    if question and reply:
        name = f"questions and answers ({question}, {reply})"
        convert = _renaming({question: "prompt", reply: "answer" if for_rewards else "completion"})
        return RowShape(name=name, is_demonstration=True, is_prompt=True, has_answer=True, convert=convert)
    return None


def _shape_of_chat(row: Row, keys: set[str], *, for_rewards: bool) -> RowShape:
    """The format of a row with `messages` or `prompt`."""
    if isinstance(row.get("reward_model"), Mapping) and row["reward_model"].get("ground_truth") is not None:
        name = "verl's prompts (reward_model.ground_truth)"
        return RowShape(name=name, is_demonstration=False, is_prompt=True, has_answer=True, convert=_from_verl)
    if any(key in keys for key in COMPLETION_KEYS) and "prompt" in keys:
        return RowShape(name="TRL's prompts and completions", is_demonstration=True, is_prompt=False)
    turns = row.get("messages") if "messages" in keys else row.get("prompt")
    is_answered = isinstance(turns, list) and bool(turns) and _role_of(turns[-1]) == "assistant" and "messages" in keys
    if is_answered:
        cut = _without_reply if for_rewards else None
        return RowShape(name="OpenAI's messages", is_demonstration=True, is_prompt=for_rewards, convert=cut)
    if "answer" in keys:
        return RowShape(name="prompts with answers", is_demonstration=False, is_prompt=True, has_answer=True)
    if other := next((name for name in ANSWER_ELSEWHERE if name in keys), ""):
        system = "slime's" if other == "label" else "TRL's" if other == "solution" else "other"
        name, convert = f"{system} prompts ({other})", _renaming({other: "answer"})
        return RowShape(name=name, is_demonstration=False, is_prompt=True, has_answer=True, convert=convert)
    return RowShape(name="prompts without answers", is_demonstration=False, is_prompt=True)


def find_json_columns(row: Row) -> dict[str, str]:
    """CSV columns whose text is a JSON list or object, each with the type "json", as for `DatasetConfig.columns`."""
    return {name: "json" for name in JSON_FIELDS if _parsed(row.get(name)) is not None}


def with_json(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with these columns parsed as JSON."""
    return {**row, **{name: _parsed(row[name]) for name in columns if name in row}}


def _parsed(value: object) -> list[Any] | dict[str, Any] | None:  # Any: JSON
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        found = read_strict_json(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list | dict) else None


def _role_of(turn: object) -> object:
    return turn.get("role") if isinstance(turn, Mapping) else None


def _renaming(names: Mapping[str, str]) -> Callable[[Row], Row]:
    """A conversion that renames fields of a row and keeps all other fields."""

    def rename(row: Row) -> Row:
        return {names.get(key, key): value for key, value in row.items()}

    return rename


def _from_sharegpt(for_rewards: bool) -> Callable[[Row], Row]:
    """A conversion from ShareGPT's turns (`from`, `value`) to `messages`. For rewards, the last answer becomes
    `answer`."""

    def convert(row: Row) -> Row:
        turns = row["conversations"]
        if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            raise DataError("`conversations` must be a list of turns with `from` and `value`")
        messages = [_from_turn(turn) for turn in turns]
        system = next((row[name] for name in SYSTEM_FIELDS if isinstance(row.get(name), str)), "")
        if system and not any(each["role"] == "system" for each in messages):
            messages.insert(0, {"role": "system", "content": system})
        others = {key: value for key, value in row.items() if key not in ("conversations", *SYSTEM_FIELDS)}
        converted = {"messages": messages, **others}
        return _without_reply(converted) if for_rewards else converted

    return convert


def _from_turn(turn: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    speaker, said = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    role = SHAREGPT_ROLES.get(str(speaker))
    if role is None or not isinstance(said, str):
        raise DataError(
            f"a turn of `conversations` must have `from` ({', '.join(SHAREGPT_ROLES)}) and `value`, found {turn!r:.80}"
        )
    return {"role": role, "content": said}


def _from_verl(row: Row) -> Row:
    return {**row, "answer": row["reward_model"]["ground_truth"]}


def _from_preference(row: Row) -> Row:
    others = {key: value for key, value in row.items() if key not in ("chosen", "rejected")}
    is_whole = isinstance(row["chosen"], list) and row.get("prompt") is None
    return {**others, "messages" if is_whole else "completion": row["chosen"]}


def _from_alpaca(row: Row) -> Row:
    asked = "\n\n".join(str(row[name]) for name in ("instruction", "input") if row.get(name))
    others = {key: value for key, value in row.items() if key not in ("instruction", "input", "output")}
    return {"prompt": asked, "completion": row.get("output") or "", **others}


def _without_reply(row: Row) -> Row:
    """Convert a conversation to a prompt: remove the assistant's last message, and keep its text as `answer`."""
    *asked, last = row["messages"]
    if _role_of(last) != "assistant":
        return row
    return {"answer": last.get("content") or "", **row, "messages": asked}
