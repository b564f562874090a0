"""The fields of OpenAI's requests, and their conversion to requests to /generate.

Not here: answers (openai_api.py), limits of requests to /generate (protocol.py), chat templates (chat_model.py).

    {"messages": [...], "max_tokens": 5} -> ChatRequest -> {"input_ids": [...], "sampling_params": {...}}

Unknown fields are refused, as by OpenAI. A known field that this server does not support permits only the value that
has no effect, so that no setting is ignored silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from annotated_types import MaxLen
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollouts_core.embedded.protocol import Json
from rollouts_core.embedded.scheduler import RequestError
from rollouts_core.types import Message

MAX_SHOWN_CHARS = 200
MAX_LISTED = 65536
"""Highest number of elements in a list. Each wrong element adds about a kilobyte to the validation error."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions. Chats have no default limit besides the context length."""
IGNORED = {
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
}
"""Known fields that do not affect the answer. This server accepts and ignores these fields."""
TEXT_ALONE = "This model reads only text: send parts of the type text."


T = TypeVar("T")


class Fields(BaseModel):
    """Base class of JSON objects in requests. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


Several = Annotated[list[T], MaxLen(MAX_LISTED)]
RequestT = TypeVar("RequestT", bound=Fields)


class StreamOptions(Fields):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] | None = None


class SchemaRequest(BaseModel):
    """A JSON schema for an answer. Its name is ignored."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    schema_: dict[str, Any] = Field(alias="schema")  # Any: a JSON schema


class FormatRequest(BaseModel):
    """The field `response_format`: plain text, any JSON object, or JSON that follows a schema."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaRequest | None = None

    @property
    def schema_text(self) -> str:
        """The JSON schema that the answer must follow; empty for plain text."""
        if self.type == "text":
            return ""
        if self.type == "json_object":
            return '{"type": "object"}'
        if self.json_schema is None:
            raise RequestError("response_format: the type json_schema needs json_schema.schema.")
        return json.dumps(self.json_schema.schema_)


class SamplingFields(Fields):
    """The sampling fields of completions and chats: OpenAI's fields, and further fields that vLLM and SGLang accept.

    `parse_generate` checks the elements of long lists.
    """

    model: str
    frequency_penalty: float | None = None
    logit_bias: Json = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: Json = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    response_format: FormatRequest | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Json = None
    regex: str | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool = False
    rid: str | None = None

    @property
    def wants_usage(self) -> bool:
        """True if the stream must end with an event that has the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, max_tokens: int | None) -> dict[str, Json]:
        """Convert the fields to SGLang's sampling parameters. If `max_tokens` is None, only the context length limits
        the answer."""
        given = {
            "n": self.n,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "presence_penalty": self.presence_penalty,
            "sampling_seed": self.seed,
            "stop": self.stop,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "min_new_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": self.stop_token_ids,
            "skip_special_tokens": self.skip_special_tokens,
            "no_stop_trim": self.include_stop_str_in_output,
            "json_schema": self.response_format and self.response_format.schema_text,
            "regex": self.regex,
        }
        return {name: value for name, value in given.items() if value is not None} | {"max_new_tokens": max_tokens}


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Json
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    suffix: Literal[""] | None = None

    def generate_body(self) -> dict[str, Json]:
        """The body of the equivalent request to /generate."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of is not supported: set n, and choose among the n completions.")
        first = self.prompt[:1] if isinstance(self.prompt, list) else self.prompt
        is_text = isinstance(self.prompt, str) or (isinstance(first, list) and [type(each) for each in first] == [str])
        return {
            "text" if is_text else "input_ids": self.prompt,
            "sampling_params": self.sampling_params(self.max_tokens),
            "stream": self.stream,
            "rid": self.rid,
            **logprob_fields(self.logprobs, with_prompt=bool(self.echo)),
        }


class FunctionCall(Fields):
    """The function and arguments of a tool call."""

    name: str
    arguments: str | dict[str, Any]  # Any: JSON


class AssistantCall(Fields):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Part(BaseModel):
    """A part of a message's content. Only text parts are supported."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[Part] | None = None
    name: str | None = None
    tool_calls: Several[AssistantCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def message(self) -> Message:
        """The message in the form that chat templates expect."""
        fields: dict[str, Any] = {  # Any: JSON arguments
            "role": "system" if self.role == "developer" else self.role,
            "content": join_parts(self.content),
        }
        if self.tool_calls:
            fields["tool_calls"] = [_call(call) for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        return cast("Message", fields)


class FunctionTool(Fields):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # Any: a JSON schema
    strict: bool | None = None


class Tool(Fields):
    """A tool that the model may call. Only functions are supported."""

    type: Literal["function"]
    function: FunctionTool

    def schema_of_tool(self) -> dict[str, Any]:  # Any: a JSON schema
        """The tool in the form that chat templates expect."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**function, "parameters": parameters}}


class FunctionName(Fields):
    """The name of a function."""

    name: Annotated[str, Field(min_length=1)]


class NamedChoice(Fields):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[Several[ChatMessage], Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = None  # Any: JSON
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool = True
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    tools: Several[Tool] | None = None
    top_logprobs: int | None = None

    @property
    def limit(self) -> int | None:
        """Highest number of tokens of the answer; None if only the context length limits it."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def template_values(self) -> dict[str, Any]:  # Any: JSON
        """Values of variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})

    @property
    def usable_tools(self) -> list[dict[str, Any]]:  # Any: JSON schemas
        """The tools to show to the model; empty if `tool_choice` is "none"."""
        return [] if self.tool_choice == "none" else [tool.schema_of_tool() for tool in self.tools or []]

    @property
    def must_call(self) -> str | None:
        """Name of the tool that the answer must call, "" for any tool; None if the answer may be text."""
        if isinstance(self.tool_choice, NamedChoice):
            return self.tool_choice.function.name
        return "" if self.tool_choice == "required" else None

    def logprob_fields(self) -> dict[str, Json]:
        """The fields of a request to /generate that ask for log-probs."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs = true.")
        return logprob_fields((self.top_logprobs or 0) if self.logprobs else None, with_prompt=False)


class TokenizeRequest(Fields):
    """The body of POST /tokenize: one text, several texts, or a conversation."""

    model: str | None = None
    prompt: str | Several[str] | None = None
    messages: Several[ChatMessage] | None = None
    tools: Several[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: JSON
    add_special_tokens: bool = True


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Json
    skip_special_tokens: bool = True


def parse_request(body: Json, kind: type[RequestT]) -> RequestT:
    """Parse a JSON body. Fields that do not affect the answer are ignored.

    Raises:
        RequestError: a field is unknown, missing or has a wrong type. The message names the first wrong field.
    """
    if not isinstance(body, dict):
        raise RequestError(f"The request must be a JSON object, found {type(body).__name__}.")
    try:
        return kind.model_validate({name: value for name, value in body.items() if name not in IGNORED})
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(("list[", "str")))
        said = "this server has no such field" if problem["type"] == "extra_forbidden" else problem["msg"]
        raise RequestError(f"{place[:MAX_SHOWN_CHARS]}: {said[:MAX_SHOWN_CHARS]}.") from error


def join_parts(content: str | Sequence[Part] | None) -> str:
    """Join the text parts of a message's content.

    Raises:
        RequestError: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if foreign := [part.type for part in content if part.text is None]:
        raise RequestError(f"A part of the type {foreign[0][:40]!r} is not supported. {TEXT_ALONE}")
    return "".join(part.text or "" for part in content)


def logprob_fields(num_top: int | None, *, with_prompt: bool) -> dict[str, Json]:
    """The fields of /generate that ask for log-probs with `num_top` alternatives per position; {} for None."""
    if num_top is None:
        return {}
    if num_top < 0:
        raise RequestError(f"The number of log-probs must be at least 0, got {num_top}.")
    return {"return_logprob": True, "top_logprobs_num": num_top, "logprob_start_len": 0 if with_prompt else -1}


def _call(call: AssistantCall) -> dict[str, Any]:  # Any: JSON
    function = {"name": call.function.name, "arguments": _arguments(call)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(call: AssistantCall) -> Mapping[str, Any]:  # Any: JSON
    """Parse the arguments of a tool call, because chat templates expect a JSON object instead of text."""
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The arguments of the call of {call.function.name[:80]} are not JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise RequestError(f"The arguments of the call of {call.function.name[:80]} are not a JSON object.")
    return parsed
