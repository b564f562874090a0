"""Read and check a row of demonstrations: its messages, tools or text.

    {"messages": [...], "tools": [...]}                     conversation; every assistant turn may be trained on
    {"prompt": text or [...], "completion": text or [...]}  the prompt is context and never trained on
    {"text": ...}                                           plain text; all of it is trained on

A field with the value null counts as missing, because tables fill missing fields with null.
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
"""Names of the prompt field in other datasets, most likely first."""
ALPACA_PROMPT = {"instruction", "input"}
"""The two fields of an Alpaca row that together form the prompt."""
PREFERENCE = {"chosen", "rejected"}
ANSWER_ELSEWHERE = ("ground_truth", "solution", "label", "gold", "target", "final_answer", "expected_answer")
"""Names of the answer field in other datasets."""
COMPLETION_ELSEWHERE = ("answer", "output", "target")
"""Names of the completion field in other datasets except Alpaca, whose rows have a format of their own."""
SAID_BESIDE_CONTENT = ("tool_calls", "function_call", *THOUGHTS)
"""Message keys for parts of an assistant message other than its text."""
SYSTEM_FIELDS = ("system", "system_prompt")
"""Names of the row field for the system message in other datasets."""
TEMPLATE_FIELD = "chat_template_kwargs"
"""Row field in which TRL stores values for the chat template."""
UNTRAINED_MARKS = ("weight", "train")
"""Message keys with which OpenAI's and Axolotl's rows exclude a message from the loss (by 0 or false)."""
OTHER_ARGUMENTS = ("parameters", "input", "args", "kwargs", "params")
"""Wrong names for the `arguments` of a tool call. A call with such a name is rejected, because the model would be
trained on a call without arguments."""
MAX_SHOWN_CHARS = 80
MAX_SHOWN_KEYS = 20


def read_demonstration(row: Row) -> Conversation | str:
    """Read the conversation of a row, or its plain text.

    Raises:
        DataError: the row has no known field, or a field has a wrong type.
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
    """Check the messages of a row: role and content must be text, tool calls must be objects.

    Null content in a message with tool calls becomes "". A list of text parts is joined to one text. Other keys of a
    message are kept for the chat template.

    Args:
        key: name of the row field, for error messages.

    Raises:
        DataError: the list is invalid. The error names the message.
    """
    if not isinstance(messages, list) or not messages:
        found = ", found text: if it is JSON, parse it when writing the file" if isinstance(messages, str) else ""
        raise DataError(f"`{key}` must be a list with at least one message{found}")
    return [_message(message, i) for i, message in enumerate(messages)]


def read_tools(row: Row) -> list[dict[str, Any]] | None:  # Any: JSON schemas
    """The tools of a row, given as a list of JSON schemas or as JSON text of such a list. None if the row has no
    tools."""
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
    """Keys of the non-empty parts of assistant messages.

    The result also contains `END_OF_THOUGHTS` if the text of a message contains thoughts.
    """
    found = {key for key in ("content", *SAID_BESIDE_CONTENT) if any(turn.get(key) for turn in turns)}
    return found | ({END_OF_THOUGHTS} if any(END_OF_THOUGHTS in turn["content"] for turn in turns) else set())


def says_nothing(turn: Message) -> bool:
    """True if an assistant message has no text, no thoughts and no tool calls."""
    return not turn["content"].strip() and not any(map(turn.get, SAID_BESIDE_CONTENT))


def find_unread(fields: Mapping[str, Any], messages: Sequence[Message]) -> set[str]:  # Any: JSON
    """Row fields that other systems would use but this project ignores.

    A field for the system message does not count if the messages already contain a system message.
    """
    has_system = any(message["role"] == "system" for message in messages)
    told = set() if has_system else {name for name in SYSTEM_FIELDS if isinstance(fields.get(name), str)}
    return {name for name in (*told, TEMPLATE_FIELD) if fields.get(name)}


def find_unheeded_marks(turns: Sequence[Mapping[str, Any]]) -> set[str]:  # Any: JSON
    """Keys of `UNTRAINED_MARKS` with which other systems would exclude one of these messages from the loss."""
    return {key for key in UNTRAINED_MARKS if any(key in turn and not turn[key] for turn in turns)}


def describe_keys(row: Row) -> str:
    """Text for an error: the non-empty fields of a row, with a hint about wrong or misspelt names."""
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
            f"{found}; SFT uses the chosen side of a preference pair: rename chosen to messages if it is the whole "
            "conversation, else to completion"
        )
    if ALPACA_PROMPT.issubset(keys):
        return f"{found}; join Alpaca's `instruction` and `input` to `prompt`, and rename `output` to `completion`"
    if not {"prompt", "messages", "text"}.intersection(keys):
        for name in PROMPT_ELSEWHERE:
            if name in keys:
                return f"{found}; did you mean prompt? rename {name} to prompt"
    hints = (closest_name(key, KNOWN_KEYS) for key in keys if key not in KNOWN_KEYS)
    return (found or "no field at all") + next((hint for hint in hints if "did you mean" in hint), "")


def find_answer_elsewhere(row: Row) -> str:
    """Hint for an error: the field that probably contains the missing `answer`; "" if there is no such field."""
    named = next((name for name in ANSWER_ELSEWHERE if row.get(name) is not None), "")
    if not named and isinstance(row.get("reward_model"), Mapping):
        named = "ground_truth of reward_model"
    return f"; did you mean {named}? rename it to answer" if named else ""


def _find_completion_elsewhere(row: Row) -> str:
    """Hint for an error: the field that probably contains the missing `completion`; "" if there is no such field."""
    is_asked = any(row.get(key) is not None for key in ("prompt", *PROMPT_ELSEWHERE))
    if not is_asked or row.keys() >= ALPACA_PROMPT or row.keys() >= PREFERENCE:
        return ""
    named = next((name for name in COMPLETION_ELSEWHERE if row.get(name) is not None), "")
    return f"; {named} may be the completion: rename it to completion" if named else ""


def _join(prompt: list[Message], completion: list[Message], tools: list[dict[str, Any]] | None) -> Conversation:  # JSON
    """Join a prompt and its completion. If the prompt ends with an assistant message, the completion continues this
    message."""
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
    return cast(Message, fields)  # role and content are checked above; other keys are kept for the template


def _as_list(calls: object, number: int) -> Sequence[object]:
    if not isinstance(calls, list):
        raise DataError(f"`tool_calls` of message {number} must be a list, found {_show(calls)}")
    return calls


def _tool_call(call: object, number: int) -> dict[str, Any]:  # Any: JSON
    """Check a tool call, and parse arguments given as JSON text, because a chat template would write the text with
    quotes."""
    call = _without_nulls(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"a tool call of message {number} must name a `function`, found {_show(call)}")
    what = f"`arguments` of a tool call of message {number}"
    if "arguments" not in function and (other := next((key for key in OTHER_ARGUMENTS if key in function), "")):
        raise DataError(f"{what} are missing, found `{other}`: rename it to `arguments`")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json(arguments, what) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise DataError(f"{what} must be a JSON object, found {_show(arguments)}")
    function = {**function, "arguments": arguments}
    assert isinstance(call, dict)
    return {**call, "function": function} if "function" in call else function


def _without_nulls(value: Any) -> Any:  # Any: JSON
    """Remove keys with the value null. A table gives every object the keys of all objects in its column.

    JSON text is left unchanged.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _join_parts(parts: list[object], number: int) -> str:
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"message {number} has content other than text, but only text can be trained on; found {_show(parts)}"
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
