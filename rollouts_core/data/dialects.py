"""Parse the tool calls in a policy's turn, in the format (dialect) of its chat template.

A dialect is a `response_template` of transformers, and transformers' parser does the parsing. The dialect comes from
the settings, the tokenizer, or `DIALECTS` for common models. A test selects the dialect: the chat template renders a
test call, and the first dialect that parses the rendered text back to the same call is used.

    probe call --chat template--> <tool_call>{"name": ...}</tool_call><|im_end|> --dialect--> the same call?
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import regex

from rollouts_core.data.chat import encode_texts, stop_token_ids
from rollouts_core.data.rendering import render_text
from rollouts_core.errors import DataError
from rollouts_core.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ResponseTemplate = Mapping[str, Any]  # Any: JSON
NAME = r"(?P<name>[^\s<>{}]+)"
PROBE_NAME = "compute"
PROBE_NUMBER = 82157
PROBE_ARGUMENTS = {"expression": "(57 + 83) * 2", "count": PROBE_NUMBER}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Compute.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "What to compute."},
                "count": {"type": "integer", "description": "How often."},
            },
            "required": ["expression", "count"],
        },
    },
}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
WHOLE = {"type": "function", "function": "{content}"}
THINK: ResponseTemplate = {"open": "<think>", "close": "</think>", "content": "text"}


def _dialect(calls: ResponseTemplate, thoughts: ResponseTemplate = THINK) -> ResponseTemplate:
    """Build a response template from the patterns for calls and thoughts. All other text is content."""
    fields = {"reasoning_content": thoughts, "tool_calls": {"repeats": True, **calls}, "content": {"content": "text"}}
    return {"defaults": {"role": "assistant"}, "start_anchor_pattern": r"\A", "fields": fields}


def _tagged(open_pattern: str, close_pattern: str, tag_pattern: str) -> ResponseTemplate:
    """Pattern for calls that write each argument as a tag. The tools' schemas decide which arguments are numbers or
    objects."""
    return {
        "open_pattern": open_pattern,
        "close_pattern": close_pattern,
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag_pattern, "value_parser": {"name": "text", "args": {"strip": False}}},
        "transform": NAMED,
    }


def _opening(mark: str, head: str, ahead: str) -> str:
    """Pattern for the beginning of a call: `mark`, then `head` with the tool's name.

    A call without a name matches, too, so that it is reported as broken. While a turn grows, the pattern waits for one
    of the characters `ahead`: without them, more text could still become the name.
    """
    return rf"{mark}\s*+(?:{head}|[^{ahead}]*+(?:\Z|(?=[{ahead}])))"


DIALECTS: Mapping[str, ResponseTemplate] = {
    # <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>: Hermes, Qwen2.5, Qwen3
    "hermes": _dialect({"open": "<tool_call>", "close": "</tool_call>", "content": "json", "transform": WHOLE}),
    # <tool_call><function=add><parameter=a>1</parameter></function></tool_call>: Qwen3-Coder, Qwen3.5, Nemotron 3
    "qwen_xml": _dialect(
        _tagged(
            _opening("<tool_call>", f"<function={NAME}>", ">{"),
            r"</function>\s*+</tool_call>",
            r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>",
        )
    ),
    # <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>: GLM-4.5 and later
    "glm": _dialect(
        _tagged(
            rf"<tool_call>\s*+(?:{NAME})?",
            r"</tool_call>",
            r"<arg_key>\s*(?P<key>[^<]*?)\s*</arg_key>\s*<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>",
        )
    ),
    # {"name": "add", "parameters": {"a": 1}} as the whole turn: Llama 3.1 and later
    "llama3": _dialect(
        {
            "open_pattern": r"""(?:\A\s*+(?:<\|python_tag\|>)?|(?<=\});\s*+)(?=\s*+\{\s*+"(?:name|type)"\s*+:\s*+")""",
            "close_pattern": r"(?<=\})(?=;\s*+\{)|<\|eot_id\|>|<\|eom_id\|>|\Z",
            "content": "json",
            "transform": WHOLE,
        }
    ),
    # assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>: gpt-oss
    "gpt_oss": _dialect(
        {
            "open_pattern": (
                r"(?:<\|start\|>assistant)?(?:\s?to=functions\.(?P<name>[^\s<]+)\s*+<\|channel\|>commentary"
                r"|<\|channel\|>commentary\s+to=functions\.(?P<name>[^\s<]+))"
                r"[^<]*+(?:<\|constrain\|>[^<]*+)?<\|message\|>"
            ),
            "close_pattern": r"<\|call\|>|<\|end\|>|(?=<\|start\|>)|\Z",
            "content": "json",
            "transform": NAMED,
        },
        {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
            "close_pattern": r"<\|end\|>|(?=<\|start\|>)",
            "content": "text",
        },
    ),
    # <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>: DeepSeek V3, R1 and V3.1
    "deepseek": _dialect(
        {
            "open_pattern": _opening(
                "<｜tool▁call▁begin｜>",
                r"function<｜tool▁sep｜>\s*+(?P<name>[^\s<｜]+)\s*+```json"
                r"|(?P<name>[^\s<｜]+)\s*+<｜tool▁sep｜>(?=\s*+\{)",
                "{",
            ),
            "close_pattern": r"(?:```\s*+)?<｜tool▁call▁end｜>",
            "content": "json",
            "transform": NAMED,
        }
    ),
    # <|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|>: Gemma of 2026
    "gemma": _dialect(
        {
            "open_pattern": _opening(r"<\|tool_call>", r"call:(?P<name>[^\s{<]+)", "{<"),
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": NAMED,
        },
        {"open": "<|channel>thought", "close": "<channel|>", "content": "text"},
    ),
    # <|tool_call_start|>[add(a=1), now()]<|tool_call_end|>: LFM2.5; `_read_python` reads the list
    "lfm2": _dialect(
        {
            "open": "<|tool_call_start|>",
            "close": "<|tool_call_end|>",
            "content": "text",
            "transform": {"type": "function", "function": {"python": "{content}"}},
        }
    ),
}
HERMES = "hermes"
"""Name of the dialect that most models use."""


class CallError(Exception):
    """A tool call cannot be parsed. The policy receives this message as the tool's reply."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed tool call of the policy."""

    name: str
    arguments: dict[str, Any]  # Any: JSON that the policy wrote


class Thought(NamedTuple):
    """A piece of the model's thoughts in a turn."""

    text: str


class Said(NamedTuple):
    """A piece of the model's answer in a turn."""

    text: str


Piece = Thought | Said | ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The format in which a policy writes tool calls."""

    name: str
    """A key of `DIALECTS`, or the origin of the response template (for messages)."""
    template: ResponseTemplate
    prefix: str = ""
    """The end of the generation prompt that affects parsing, for example an opening tag of thoughts."""
    end_id: int | None = None
    """Id of the special token that ends a turn with tool calls; None if unknown."""
    closing: str = ""
    """Text of the end-of-turn token if the dialect needs it to end a call. Decoded turns do not contain this text."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids of the known special tokens that end a turn with tool calls."""
        return () if self.end_id is None else (self.end_id,)

    def read(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall]:  # Any: JSON schemas
        """Parse the tool calls in a turn, in order. Calls inside thoughts are ignored.

        Args:
            tools: JSON schemas of the tools, to distinguish numbers from text if the dialect does not.

        Raises:
            CallError: a call cannot be parsed.
        """
        reader = TurnReader(self, tools)
        return [piece for piece in reader.feed(text) + reader.finish() if isinstance(piece, ToolCall)]


DEFAULT_DIALECT = Dialect(name=HERMES, template=DIALECTS[HERMES])
"""Dialect for a chat template that cannot write tool calls."""


def find_dialect(tokenizer: PreTrainedTokenizerBase, setting: str = "") -> Dialect:
    """Find the dialect in which the chat template writes tool calls.

    Args:
        setting: a key of `DIALECTS`, or a response template as JSON. If "", the tokenizer's own response template is
            tried first, then `DIALECTS` in order.

    Raises:
        DataError: no dialect parses the test call that the chat template rendered.
    """
    own = getattr(tokenizer, "response_template", None)
    return _find_dialect(tokenizer, json.dumps([tokenizer.chat_template, own]), setting)


@lru_cache(maxsize=64)
def _find_dialect(tokenizer: PreTrainedTokenizerBase, _templates: str, setting: str) -> Dialect:
    """Cached, because the test takes longer than parsing a turn. `_templates` is only part of the cache key."""
    candidates = _candidates(tokenizer, setting)
    probe = render_probe(tokenizer)
    if probe is None:
        return candidates[0]
    ended = _without_end(tokenizer, probe.text)
    texts = [probe.text] if ended is None else [probe.text, ended[1]]
    for candidate in candidates:
        dialect = replace(candidate, prefix=_cut_prefix(candidate, probe.prefix))
        if any(_reads_probe(dialect, text) for text in texts):
            whole = replace(candidate, prefix=_cut_prefix(candidate, probe.generation_prompt))
            return _with_end(tokenizer, whole, dialect, probe)
    tried = f"{candidates[0].name} cannot parse" if setting else f"none of the dialects {', '.join(DIALECTS)} can parse"
    raise DataError(
        f"the chat template writes a tool call as {probe.text!r}, which {tried}, so the policy's calls would be "
        "missed: set rollout.multi_turn.response_template to the model's response template as JSON, or to the name "
        "of a dialect"
    )


def find_call_end(tokenizer: PreTrainedTokenizerBase, setting: str = "") -> int | None:
    """Id of the special token that ends a turn with tool calls; None if unknown."""
    try:
        return find_dialect(tokenizer, setting).end_id
    except DataError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The test call as the chat template renders it."""

    text: str
    """The assistant turn with the test call, as rendered after the generation prompt."""
    prefix: str
    """The end of the generation prompt, as far as the rendered turn repeats it."""
    generation_prompt: str
    """The text that the template writes before a turn of the policy."""
    behind: str
    """Text after the turn with the test call if a tool's answer follows; "" if the answer changes how the turn is
    written."""


def count_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Length of the common prefix of two sequences."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def probe_turn(num_calls: int = 1) -> Message:
    """An assistant message that calls `PROBE_TOOL`."""
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": PROBE_NAME, "arguments": dict(PROBE_ARGUMENTS)},
        }
        for number in range(num_calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def render_probe(tokenizer: PreTrainedTokenizerBase, num_calls: int = 1) -> Probe | None:
    """Render the test call with the chat template. Returns None if the template writes fewer calls."""
    asks: list[Message] = [{"role": "user", "content": "?"}]
    answer: Message = {"role": "tool", "content": "280", "name": PROBE_NAME, "tool_call_id": "call00000"}
    said = [*asks, probe_turn(num_calls)]
    try:
        question = render_text(tokenizer, asks, [PROBE_TOOL], add_generation_prompt=False)
        asked = render_text(tokenizer, asks, [PROBE_TOOL], add_generation_prompt=True)
        whole = render_text(tokenizer, said, [PROBE_TOOL], add_generation_prompt=False)
    except DataError:
        return None
    start = count_shared(asked, whole)
    tag = whole.rfind("<", 0, start)
    if len(asked) > start and tag >= 0 and ">" not in whole[tag:start]:
        start = tag  # after the common text, both texts have tags that only begin with the same characters
    if whole[start:].count(str(PROBE_NUMBER)) < num_calls:
        return None
    try:
        answered = render_text(tokenizer, [*said, answer], [PROBE_TOOL], add_generation_prompt=True)
    except DataError:
        answered = ""
    begins = count_shared(question, asked)
    return Probe(
        text=whole[start:],
        prefix=asked[begins:start],
        generation_prompt=asked[begins:],
        behind=answered[len(whole) :] if answered.startswith(whole) else "",
    )


def _candidates(tokenizer: PreTrainedTokenizerBase, setting: str) -> list[Dialect]:
    if setting in DIALECTS:
        return [Dialect(name=setting, template=DIALECTS[setting])]
    if setting:
        return [_checked("rollout.multi_turn.response_template", setting)]
    own = getattr(tokenizer, "response_template", None)
    by_tokenizer = [_checked("the tokenizer's response_template", json.dumps(own))] if own else []
    return [*by_tokenizer, *(Dialect(name=name, template=template) for name, template in DIALECTS.items())]


def _checked(name: str, written: str) -> Dialect:
    """Build a dialect from a response template given as JSON text, or raise DataError."""
    from transformers.utils.chat_parsing.response_templates import load_response_template  # slow to import

    try:
        template = json.loads(written)
        load_response_template(template)
    except (ValueError, KeyError) as error:
        raise DataError(
            f"{name} is not a response template of transformers ({error}): give a response template as JSON, or one "
            f"of the names {', '.join(DIALECTS)}"
        ) from error
    return Dialect(name=name, template=template)


def _cut_prefix(dialect: Dialect, prefix: str) -> str:
    """The part of a generation prompt that affects parsing. For built-in dialects: from the last opening tag of
    thoughts."""
    if dialect.template not in DIALECTS.values():
        return prefix
    from transformers.utils.chat_parsing.response_templates import load_response_template  # slow to import

    opened = list(load_response_template(dialect.template).fields["reasoning_content"].open_re.finditer(prefix))
    return prefix[opened[-1].start() :] if opened else ""


def _reads_probe(dialect: Dialect, text: str) -> bool:
    try:
        return dialect.read(text, [PROBE_TOOL]) == [ToolCall(PROBE_NAME, dict(PROBE_ARGUMENTS))]
    except CallError:
        return False


def _without_end(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, str] | None:
    """The special token at the end of a turn, and the text before this token. None if the turn has no such token."""
    written = text.rstrip()
    for token in encode_texts(tokenizer, [written])[0][-1:]:
        known = tokenizer.added_tokens_decoder.get(token)
        if known is not None and known.special and written.endswith(known.content):
            return token, written.removesuffix(known.content)
    return None


def _with_end(tokenizer: PreTrainedTokenizerBase, whole: Dialect, probed: Dialect, probe: Probe) -> Dialect:
    """Add the special token that ends a turn with tool calls: the last token of the turn, or the first token after
    it."""
    if (ended := _without_end(tokenizer, probe.text)) is not None:
        token, text = ended
        if _reads_probe(probed, text):
            return replace(whole, end_id=token)
        if token in stop_token_ids(tokenizer):
            return replace(whole, end_id=token, closing=tokenizer.added_tokens_decoder[token].content)
    for token in encode_texts(tokenizer, [probe.behind.lstrip()])[0][:1]:
        known = tokenizer.added_tokens_decoder.get(token)
        if known is not None and known.special:
            return replace(whole, end_id=token)
    return whole


class TurnReader:
    """Parses a turn incrementally, while its text grows.

    Args:
        dialect: format of thoughts and calls.
        tools: JSON schemas of the tools, to distinguish numbers from text if the dialect does not.
    """

    def __init__(self, dialect: Dialect, tools: Sequence[dict[str, Any]] = ()) -> None:  # Any: JSON schemas
        from transformers.utils.chat_parsing import ResponseParser  # slow to import
        from transformers.utils.chat_parsing.response_templates import load_response_template

        loaded = load_response_template(dialect.template)
        field = loaded.fields.get("tool_calls")
        self._calls = None if field is None or field.open_re is None else field
        self._closing = dialect.closing
        self._parser = ResponseParser(loaded, prefix=dialect.prefix, tools=list(tools))
        self._fed = ""
        self._body = ""

    def feed(self, text: str) -> list[Piece]:
        """Parse the next part of the turn's text. Returns the pieces that are complete now.

        Raises:
            CallError: a call cannot be parsed. The text before this call in `text` is lost.
        """
        self._fed += text
        try:
            return self._pieces(self._parser.feed(text))
        except (ValueError, RecursionError) as error:
            raise CallError(f"the tool call is not valid JSON: {error.__cause__ or error}") from error
        except KeyError as error:  # the opening text of the call has no tool name
            raise CallError("the tool call has no name, or the name is in the wrong place") from error

    def finish(self) -> list[Piece]:
        """End the turn. Returns the remaining pieces.

        Raises:
            CallError: a call cannot be parsed, or its closing text is missing.
        """
        pieces = self.feed(self._closing)
        is_closed = self._calls is None or _ends_with(self._calls.close_re, self._fed)
        try:
            _, events = self._parser.finalize()
        except (ValueError, RecursionError) as error:
            reason = f"the tool call is not valid JSON: {error.__cause__ or error}"
            raise CallError(reason if is_closed else _say_unclosed(self._calls)) from error
        except KeyError as error:
            raise CallError("the tool call has no name, or the name is in the wrong place") from error
        if any(_is_call(event) for event in events) and not is_closed:
            raise CallError(_say_unclosed(self._calls))
        return pieces + self._pieces(events)

    def unread(self) -> str:
        """The text from the last tool call to the end of the turn. Used if this call cannot be parsed."""
        starts = [found.start() for found in self._calls.open_re.finditer(self._fed)] if self._calls else []
        return self._fed[starts[-1] :] if starts else ""

    def _pieces(self, events: Sequence[Mapping[str, Any]]) -> list[Piece]:  # Any: records of transformers
        pieces: list[Piece] = []
        for event in events:
            if event["field"] == "tool_calls":
                pieces += self._read_call(event)
            elif event["type"] == "region_chunk":
                is_thought = event["field"] != "content"
                pieces.append(Thought(event["text"]) if is_thought else Said(event["text"]))
        return pieces

    def _read_call(self, event: Mapping[str, Any]) -> list[ToolCall]:  # Any: records of transformers
        self._body = "" if event["type"] == "region_open" else self._body + event.get("text", "")
        if not _is_call(event) or self._calls is None:
            return []
        if self._calls.content == "xml-inline":
            pattern = self._calls.content_args["tag_pattern"]
            if rest := regex.sub(pattern, "", self._body, flags=regex.DOTALL).strip():
                raise CallError(f"the tool call has {rest[:80]!r} in addition to its arguments")
        values = event["value"] if isinstance(event["value"], list) else [event["value"]]
        functions = [value.get("function", value) if isinstance(value, dict) else value for value in values]
        return [ToolCall(**call) for function in functions for call in _as_calls(function)]


def _is_call(event: Mapping[str, Any]) -> bool:  # Any: records of transformers
    return bool(event["type"] == "region_close" and event["field"] == "tool_calls")


def _ends_with(pattern: Any, text: str) -> bool:  # Any: a pattern of the package regex
    return pattern is not None and any(found.end() == len(text) for found in pattern.finditer(text))


def _say_unclosed(field: Any) -> str:  # Any: a field of transformers' response templates
    if field.open_literals and field.close_literals:
        return f"a {field.open_literals[0]} has no closing {field.close_literals[0]}"
    return "the tool call is not closed"


def _as_calls(function: Any) -> list[dict[str, Any]]:  # Any: JSON that the policy wrote
    if isinstance(function, dict) and set(function) == {"python"}:
        return _read_python(function["python"])
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise CallError('a tool call must be an object with "name" and "arguments"')
    arguments = function.get("arguments", function.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise CallError('the "arguments" of a tool call must be an object')
    try:  # NaN is not valid JSON, and half of a surrogate pair cannot be tokenized
        json.dumps(function, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise CallError(f"the tool call is not valid JSON: {error}") from error
    return [{"name": function["name"], "arguments": arguments}]


def _read_python(text: str) -> list[dict[str, Any]]:  # Any: JSON
    """Parse tool calls in Python syntax, for example [add(a=1, said='x'), now()]."""
    try:
        listed = ast.parse(text.strip(), mode="eval").body
        calls = listed.elts if isinstance(listed, ast.List) else [listed]
        return [call for each in calls for call in _as_calls(_python_call(each))]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CallError(f"the tool calls are not a list like [add(a=1)]: {error}") from error


def _python_call(node: ast.expr) -> dict[str, Any]:  # Any: JSON
    if not isinstance(node, ast.Call) or node.args or not all(each.arg for each in node.keywords):
        raise ValueError("a call must have a name, and each argument must have a name")
    return {
        "name": ast.unparse(node.func),
        "arguments": {str(each.arg): ast.literal_eval(_JSONWords().visit(each.value)) for each in node.keywords},
    }


class _JSONWords(ast.NodeTransformer):
    """Replaces JSON's true, false and null by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node
