"""What a row of demonstrations says: the messages, the tools and the text in it, checked.

Not here: reading rows (rows.py), tokens (chat.py, dataset.py).

    {"messages": [...], "tools": [...]}                     conversation; every assistant turn may be trained on
    {"prompt": text or [...], "completion": text or [...]}  the prompt is given and never trained on
    {"text": ...}                                           plain text, trained on whole

A field that is null counts as absent: tables in which rows of several shapes lie together fill the gaps with nulls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from rollouts_core.config.messages import closest_name, first_line
from rollouts_core.data.chat import Conversation, is_prefill
from rollouts_core.data.strict_json import read_strict_json
from rollouts_core.data.turns import END_OF_THOUGHTS, THOUGHTS
from rollouts_core.errors import DataError
from rollouts_core.types import Message

Row = Mapping[str, Any]  # Any: JSON values of a user's file

COMPLETION_KEYS = ("completion", "response")
KNOWN_KEYS = ["messages", "prompt", *COMPLETION_KEYS, "text", "tools"]
PROMPT_ELSEWHERE = ("question", "instruction", "problem", "query", "input")
"""What datasets of others call a prompt; the likelier first."""
ALPACA_PROMPT = {"instruction", "input"}
"""What a row of Alpaca's form asks: both together."""
PREFERENCE = {"chosen", "rejected"}
ANSWER_ELSEWHERE = ("ground_truth", "solution", "label", "gold", "target", "final_answer", "expected_answer")
"""What datasets of others call an answer."""
COMPLETION_ELSEWHERE = ("answer", "output", "target")
"""What datasets of others call a completion, where Alpaca's form does not say it already."""
SAID_BESIDE_CONTENT = ("tool_calls", "function_call", *THOUGHTS)
"""What else than text a turn may hold."""
SYSTEM_FIELDS = ("system", "system_prompt")
"""Fields of a row in which datasets of others keep what the model is told first."""
TEMPLATE_FIELD = "chat_template_kwargs"
"""The field of a row in which TRL keeps values for the chat template."""
UNTRAINED_MARKS = ("weight", "train")
"""Keys of a message by which, where they are 0 or false, OpenAI's and Axolotl's rows leave a turn out of the loss."""
OTHER_ARGUMENTS = ("parameters", "input", "args", "kwargs", "params")
"""What others call the arguments of a tool call: without them an empty call would be trained on."""
MAX_SHOWN_CHARS = 80
MAX_SHOWN_KEYS = 20


def read_demonstration(row: Row) -> Conversation | str:
    """The conversation of a row, or its plain text.

    Raises:
        DataError: none of the known fields, or a field of another type than it must have.
    """
    completion = next((key for key in COMPLETION_KEYS if row.get(key) is not None), None)
    if row.get("messages") is not None:
        return Conversation(read_messages(row["messages"]), read_tools(row))
    if row.get("prompt") is not None and completion:
        prompt = _messages_or_text(row, "prompt", role="user")
        return _join(prompt, _messages_or_text(row, completion, role="assistant"), read_tools(row))
    if row.get("text") is not None:
        return _text(row, "text")
    expected = "expected `messages`, or `prompt` and `completion`, or `text`"
    raise DataError(f"{expected}; found {describe_keys(row)}{_find_completion_elsewhere(row)}")


def read_messages(messages: object, *, key: str = "messages") -> list[Message]:
    """A row's list of messages, checked: texts for role and content, tool calls as objects.

    Content may be null beside tool calls and becomes an empty text; a list of text parts is joined; other keys of a
    message stay, for the template to read.

    Raises:
        DataError: it is no such list; names the message.
    """
    if not isinstance(messages, list) or not messages:
        found = ", found a text: if it is JSON, parse it when the file is written" if isinstance(messages, str) else ""
        raise DataError(f"`{key}` must be a list with at least one message{found}")
    return [_message(message, i) for i, message in enumerate(messages)]


def read_tools(row: Row) -> list[dict[str, Any]] | None:  # Any: JSON schemas
    """The tools of a row: a list of JSON schemas, or the same as JSON text; None without any."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _parse_json(tools, "`tools`") if tools.strip() else None
    else:
        tools = _without_nulls(tools)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"`tools` must be a list of JSON schemas, found {_show(tools)}")
    return tools


def find_said(turns: Sequence[Message]) -> set[str]:
    """The keys by which turns of the assistant say something; with `END_OF_THOUGHTS` if their text holds thoughts."""
    found = {key for key in ("content", *SAID_BESIDE_CONTENT) if any(turn.get(key) for turn in turns)}
    return found | ({END_OF_THOUGHTS} if any(END_OF_THOUGHTS in turn["content"] for turn in turns) else set())


def says_nothing(turn: Message) -> bool:
    """Whether a turn of the assistant has no text, no thoughts and no tool calls."""
    return not turn["content"].strip() and not any(map(turn.get, SAID_BESIDE_CONTENT))


def find_unread(fields: Mapping[str, Any], messages: Sequence[Message]) -> set[str]:  # Any: JSON
    """Which fields of a row other systems read, and nothing here does; a system message may stand there twice."""
    has_system = any(message["role"] == "system" for message in messages)
    told = set() if has_system else {name for name in SYSTEM_FIELDS if isinstance(fields.get(name), str)}
    return {name for name in (*told, TEMPLATE_FIELD) if fields.get(name)}


def find_unheeded_marks(turns: Sequence[Mapping[str, Any]]) -> set[str]:  # Any: JSON
    """Which of `UNTRAINED_MARKS` would keep some of these turns out of the loss elsewhere."""
    return {key for key in UNTRAINED_MARKS if any(key in turn and not turn[key] for turn in turns)}


def describe_keys(row: Row) -> str:
    """The fields of a row that hold something, for an error, with the name that a misspelt one may have meant."""
    keys = sorted(key for key, value in row.items() if value is not None)
    nulls = sorted(key for key, value in row.items() if value is None and key in KNOWN_KEYS)
    more = [f"{len(keys) - MAX_SHOWN_KEYS} more"] if len(keys) > MAX_SHOWN_KEYS else []
    found = ", ".join([*keys[:MAX_SHOWN_KEYS], *more, *(f"{key} (null)" for key in nulls)])
    if "conversations" in keys:
        return (
            f"{found}; ShareGPT's `conversations` (`from`, `value`) must be converted to `messages` (`role`, `content`)"
        )
    if PREFERENCE.issubset(keys):
        return (
            f"{found}; of a pair of preference SFT learns the chosen side: rename chosen to messages where it is the "
            "whole conversation, else to completion"
        )
    if ALPACA_PROMPT.issubset(keys):
        return f"{found}; Alpaca's `instruction` and `input` must be put together as `prompt`; `output` is `completion`"
    if not {"prompt", "messages", "text"}.intersection(keys):
        for name in PROMPT_ELSEWHERE:
            if name in keys:
                return f"{found}; did you mean prompt? rename {name}"
    hints = (closest_name(key, KNOWN_KEYS) for key in keys if key not in KNOWN_KEYS)
    return (found or "no field at all") + next((hint for hint in hints if "did you mean" in hint), "")


def find_answer_elsewhere(row: Row) -> str:
    """Of a row without `answer`, which field seems to hold it, as the end of an error; "" where none does."""
    named = next((name for name in ANSWER_ELSEWHERE if row.get(name) is not None), "")
    if not named and isinstance(row.get("reward_model"), Mapping):
        named = "ground_truth of reward_model"
    return f"; did you mean {named}? call it answer" if named else ""


def _find_completion_elsewhere(row: Row) -> str:
    """Of a demonstration without `completion`, which field seems to be it, as the end of an error; "" for none."""
    is_asked = any(row.get(key) is not None for key in ("prompt", *PROMPT_ELSEWHERE))
    if not is_asked or row.keys() >= ALPACA_PROMPT or row.keys() >= PREFERENCE:
        return ""
    named = next((name for name in COMPLETION_ELSEWHERE if row.get(name) is not None), "")
    return f"; {named} is called completion in demonstrations" if named else ""


def _join(prompt: list[Message], completion: list[Message], tools: list[dict[str, Any]] | None) -> Conversation:  # JSON
    """A prompt and its completion. The assistant's turn at the end of a prompt goes on in the completion."""
    if not is_prefill(prompt) or completion[0]["role"] != "assistant":
        return Conversation([*prompt, *completion], tools, len(prompt))
    *given, begun = prompt
    prefill = begun["content"]
    turn = cast(Message, {**begun, **completion[0], "content": prefill + completion[0]["content"]})
    return Conversation([*given, turn, *completion[1:]], tools, len(given), prefill)


def _messages_or_text(row: Row, key: str, *, role: str) -> list[Message]:
    if isinstance(row[key], list):
        return read_messages(row[key], key=key)
    return [Message(role=role, content=_text(row, key))]


def _message(message: object, number: int) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"message {number} must have `role` and `content`, both text; found {_show(message)}")
    fields = {key: value for key, value in message.items() if value is not None}
    if fields.get("tool_calls"):
        fields["tool_calls"] = [_tool_call(call, number) for call in _as_list(fields["tool_calls"], number)]
        fields.setdefault("content", "")
    else:
        fields.pop("tool_calls", None)
    if isinstance(fields.get("content"), list):
        fields["content"] = _join_parts(fields["content"], number)
    if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
        raise DataError(f"message {number} must have `role` and `content`, both text; found {_show(message)}")
    return cast(Message, fields)  # checked above; a template may read further keys


def _as_list(calls: object, number: int) -> Sequence[object]:
    if not isinstance(calls, list):
        raise DataError(f"`tool_calls` of message {number} must be a list, found {_show(calls)}")
    return calls


def _tool_call(call: object, number: int) -> dict[str, Any]:  # Any: JSON
    """A tool call with its arguments as an object: templates write objects as JSON, and text as a quoted text."""
    call = _without_nulls(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"a tool call of message {number} must name a `function`, found {_show(call)}")
    what = f"`arguments` of a tool call of message {number}"
    if "arguments" not in function and (other := next((key for key in OTHER_ARGUMENTS if key in function), "")):
        raise DataError(f"{what} are missing, found `{other}`: rename it")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json(arguments, what) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise DataError(f"{what} must be a JSON object, found {_show(arguments)}")
    function = {**function, "arguments": arguments}
    assert isinstance(call, dict)
    return {**call, "function": function} if "function" in call else function


def _without_nulls(value: Any) -> Any:  # Any: JSON
    """A value without the keys that are null: tables give each object the keys of all others of its column.

    JSON text stays as it is, with its nulls.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _join_parts(parts: list[object], number: int) -> str:
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"message {number} has content that is no text: only text can be trained on, found {_show(parts)}"
        )
    return "".join(str(text) for text in texts)


def _parse_json(text: str, what: str) -> Any:  # Any: JSON
    try:
        return read_strict_json(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} must be JSON ({first_line(error)}), found {_show(text)}") from error


def _text(row: Row, key: str) -> str:
    if not isinstance(row[key], str):
        raise DataError(f"`{key}` must be text, found {type(row[key]).__name__}")
    return str(row[key])


def _show(value: object) -> str:
    return str(value)[:MAX_SHOWN_CHARS]
