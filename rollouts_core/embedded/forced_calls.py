"""Write a grammar that forces a model to call tools, in the form in which its chat template writes calls.

Not here: following the grammar (constraints.py), reading calls (data/dialects.py).

    test call --chat template--> <tool_call>\\n{"name": "|compute|", "arguments": |{...}|}\\n</tool_call>
                                        before           name         link         arguments   after

Arguments are a JSON object, or a tag for each argument (qwen_xml, glm). Calls in other forms cannot be forced: gemma
and lfm2 write values that are neither JSON nor text up to a tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts_core.embedded.constraints import WHITE_SPACE
from rollouts_core.embedded.scheduler import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollouts_core.data.dialects import Dialect

Schema = Mapping[str, Any]  # Any: JSON
NAME = re.compile(r"[\w.-]+")
TAG = re.compile(r"<[^<]*")
LAST_TAG = re.compile(r"\s*<[^<]*\Z")
PLAIN_WORDS = {"type", "title", "description", "default", "examples", "anyOf"}
"""Keywords of a schema with "type": "string" that permit any text."""
TAGGED_WORDS = {"type", "title", "description", "properties", "required", "additionalProperties", "$schema"}
"""Keywords of a tool's parameters that a grammar of tags can follow."""
DEFINITIONS = ("$defs", "definitions")


class Tags(NamedTuple):
    """The texts around the name and the value of an argument."""

    opening: str
    middle: str
    closing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The texts around the parts of a tool call, as in the picture above."""

    before: str
    link: str
    after: str
    tags: Tags | None = None
    """The texts around each argument; None if the arguments are one JSON object."""
    between: str | None = None
    """The text from the arguments of a call to the name of the next call; None if a turn has only one call."""
    thoughts: tuple[str, str] | None = None
    """The texts around the thoughts that may precede the calls; None if no thoughts may. The first text is empty if the
    prompt has it, so that thoughts must precede the calls."""
    token_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids of the tokens that llguidance does not match by their text."""

    def grammar(self, tools: Sequence[Schema], *, is_single: bool) -> str:
        """The grammar of a turn that calls one of the tools, or several calls unless `is_single` is set.

        Raises:
            RequestError: the arguments of a tool cannot be forced to follow its schema.
        """
        names = [tool["function"]["name"] for tool in tools]
        if foreign := [name for name in names if not NAME.fullmatch(name)]:
            raise RequestError(f"tool_choice: {foreign[0][:80]!r} has characters besides letters, digits, _, . and -.")
        calls = [f"{_quote(name)} {self._fixed(self.link)} arguments_{number}" for number, name in enumerate(names)]
        more = "" if is_single or self.between is None else f"({self._fixed(self.between)} call)*"
        rules = [
            f"start: thoughts {self._fixed(self.before)} call {more} {self._fixed(self.after)}",
            f"call: {' | '.join(calls)}",
            *(f"arguments_{number}: {self._arguments(tool['function'])}" for number, tool in enumerate(tools)),
        ]
        if self.tags is not None:
            foreign = [tag.strip() for text in (*self.tags, self.after) for tag in TAG.findall(text)[:1]]
            rules += self._text_until(self.tags.closing, "text", without=foreign)
        if self.thoughts is None:
            rules.append('thoughts: ""')
        else:
            opening, closing = self.thoughts
            rules.append(f"thoughts: ({self._fixed(opening)} thought /{WHITE_SPACE}/){'?' if opening else ''}")
            rules += self._text_until(closing, "thought")
        return "\n".join(rules)

    def _arguments(self, function: Schema) -> str:
        """The grammar of the arguments of a tool."""
        schema = function["parameters"]
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if (
            schema.get("type", "object") != "object"
            or not isinstance(properties, dict)
            or not isinstance(required, list)
        ):
            raise RequestError(f"tool_choice: the parameters of {function['name']} are not the schema of an object.")
        if self.tags is None:
            return _json({"type": "object", **schema})
        definitions = {word: schema[word] for word in DEFINITIONS if word in schema}
        opening, middle, closing = map(self._fixed, self.tags)
        values = {name: _value(own, definitions, closing) for name, own in properties.items()}
        foreign = [
            *(schema.keys() - TAGGED_WORDS - definitions.keys()),
            *(name for name in required if name not in properties),
            *(name for name, value in values.items() if not value or not NAME.fullmatch(name)),
        ]
        if foreign:
            raise RequestError(
                f"tool_choice: {foreign[0][:80]!r} in the parameters of {function['name']} cannot be forced, because "
                "this model writes arguments as text between tags: permit any string there, an enum of strings, or "
                "only other types."
            )
        tagged = {name: f"({opening} {_quote(name)} {middle} {value})" for name, value in values.items()}
        return " ".join(each if name in required else f"{each}?" for name, each in tagged.items()) or '""'

    def _fixed(self, text: str) -> str:
        """The grammar of a fixed text."""
        parts = _split_at(self.token_ids, text)
        return " ".join(f"<[{self.token_ids[part]}]>" if part in self.token_ids else _quote(part) for part in parts)

    def _text_until(self, closing: str, rule: str, *, without: Sequence[str] = ()) -> list[str]:
        """The rule for any text that ends with its first `closing`, and has none of the texts `without`."""
        parts = _split_at(self.token_ids, closing.strip())
        first = next((number for number, part in enumerate(parts) if part in self.token_ids), None)
        banned = "".join(f" & ~/(?s:.*{_escape(text)}.*)/" for text in without if text not in closing)
        if first is None:  # a greedy match would go on beyond the closing text
            return [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: /(?s:.*){_escape(closing.strip())}/{banned}"]
        return [f"{rule}: {rule.upper()} {self._fixed(''.join(parts[first:]))}", f"{rule.upper()}: /(?s:.*)/{banned}"]


def find_call_form(
    tokenizer: PreTrainedTokenizerBase, dialect: Dialect, *, stop_ids: Collection[int], has_thoughts: bool
) -> CallForm | None:
    """Find how the chat template writes tool calls; None if its calls cannot be forced.

    Args:
        dialect: the dialect in which calls are read.
        stop_ids: ids of the tokens that end a turn.
        has_thoughts: True if the template supports thoughts.
    """
    from rollouts_core.data.dialects import render_probe  # slow to import

    marks = dialect.template["fields"].get("reasoning_content", {})
    opening, closing = marks.get("open", ""), marks.get("close", "")
    is_open = bool(opening and closing) and dialect.prefix.rfind(opening) > dialect.prefix.rfind(closing)
    may_think = is_open or bool(opening and closing and has_thoughts and not dialect.prefix)
    ends = list(map(tokenizer.decode, stop_ids))
    texts = []
    for num_calls in (1, 2):
        probe = render_probe(tokenizer, num_calls)
        text = "" if probe is None else _without_end(probe.text, ends)
        text = text.rpartition(closing)[2].lstrip() if may_think else text
        is_read = _count_calls(dialect, f"{closing}{text}" if is_open else text) == num_calls
        texts.append(text if is_read else "")
    form = _split(texts[0])
    if form is None:
        return None
    one, two = texts
    parts = two.split(one[len(form.before) : len(one) - len(form.after)])
    is_repeated = len(parts) == 3 and (parts[0], parts[2]) == (form.before, form.after)
    return replace(
        form,
        between=parts[1] if is_repeated else None,
        thoughts=("" if is_open else opening, closing) if may_think else None,
        token_ids={
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special or re.fullmatch("<.*>", token.content)
        },
    )


def _count_calls(dialect: Dialect, text: str) -> int:
    """Number of calls of the test tool that are read in a turn."""
    from rollouts_core.data.dialects import PROBE_ARGUMENTS, PROBE_TOOL, CallError

    try:
        return sum(call.arguments == PROBE_ARGUMENTS for call in dialect.read(text, [PROBE_TOOL]))
    except CallError:
        return 0


def _without_end(text: str, ends: Sequence[str]) -> str:
    """A turn without the text of the token that ends it."""
    written = text.rstrip()
    return next((written.removesuffix(end) for end in ends if end and written.endswith(end)), written)


def _split(text: str) -> CallForm | None:
    """Split the text of the test call; None if the arguments are neither a JSON object nor tags."""
    from rollouts_core.data.dialects import PROBE_ARGUMENTS, PROBE_NAME

    decoder = json.JSONDecoder()
    for found in re.finditer(r"\{", text):
        try:
            value, end = decoder.raw_decode(text, found.start())
        except ValueError:
            continue
        before, name, link = text[: found.start()].rpartition(PROBE_NAME)
        if value == PROBE_ARGUMENTS and name:
            return CallForm(before=before, link=link, after=text[end:])
    words = [PROBE_NAME, *(str(word) for argument in PROBE_ARGUMENTS.items() for word in argument)]
    parts = re.fullmatch(f"(.*){'(.*?)'.join(map(re.escape, words))}(.*)", text, re.DOTALL)
    if parts is None:
        return None
    before, ahead, middle, between, other_middle, rest = parts.groups()
    tag = LAST_TAG.search(between)
    opening = tag.group() if tag else ""
    closing = between.removesuffix(opening)
    if (
        not opening
        or not closing
        or middle != other_middle
        or not ahead.endswith(opening)
        or not rest.startswith(closing)
    ):
        return None
    return CallForm(
        before=before,
        link=ahead.removesuffix(opening),
        after=rest.removeprefix(closing),
        tags=Tags(opening, middle, closing),
    )


def _value(schema: object, definitions: Schema, closing: str) -> str:
    """The grammar of an argument's value between tags, with the closing tag; empty if its schema cannot be forced.

    The reader of calls takes a value as text unless the types in the schema say otherwise.
    """
    if not isinstance(schema, dict):
        return ""
    types, choices = _types(schema), schema.get("enum", [schema["const"]] if "const" in schema else [])
    if types and "string" not in types:
        return f"{_json({**definitions, **schema})} {closing}"
    if choices and types <= {"string"} and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(map(_quote, choices))}) {closing}"
    return "text" if _is_plain(schema) else ""


def _types(schema: Schema) -> set[str]:
    """The types of values that a schema names."""
    own = schema.get("type", [])
    inner = (_types(each) for word in ("anyOf", "oneOf") for each in schema.get(word, []) if isinstance(each, dict))
    return set(map(str, [own] if isinstance(own, str) else own)).union(*inner)


def _is_plain(schema: object) -> bool:
    """True if a schema permits any text."""
    return isinstance(schema, dict) and schema.keys() <= PLAIN_WORDS and all(map(_is_plain, schema.get("anyOf", [])))


def _json(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITE_SPACE}})}"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escape(text: str) -> str:
    """A regular expression for a text, between slashes."""
    return re.escape(text).replace("/", r"\/")


def _split_at(tokens: Collection[str], text: str) -> list[str]:
    """Split a text before and after each of these tokens."""
    pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    return [part for part in re.split(f"({pattern})", text) if part] if pattern else [text]
