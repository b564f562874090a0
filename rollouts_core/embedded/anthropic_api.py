"""Anthropic's Messages API for a served model.

Not here: running a chat (chatting.py), OpenAI's API (openai_api.py).

    {"system": ..., "messages": [text, tool_use, tool_result, ...]} -> Chat -> [thinking, text, tool_use] blocks
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rollouts_core.embedded.chatting import Chat, ChatCall, follow_chat, prepare_chat, read_answer
from rollouts_core.embedded.exchange import error_body, event, json_answer, read_body
from rollouts_core.embedded.openai_api import EVENT_STREAM
from rollouts_core.embedded.openai_requests import TEXT_ALONE, Fields, Several, parse_request
from rollouts_core.embedded.protocol import Json
from rollouts_core.embedded.running import Completion
from rollouts_core.embedded.scheduler import RequestError
from rollouts_core.embedded.served import ServedModel, complete_all
from rollouts_core.errors import RolloutsError
from rollouts_core.types import Message

if TYPE_CHECKING:
    from rollouts_core.data.dialects import Piece

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}
MESSAGES_PATH = "/v1/messages"


class Block(BaseModel):
    """A content block of a message: text, tool use, tool result or thoughts."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None  # Any: JSON
    tool_use_id: str | None = None
    content: str | Several[Block] | None = None


class Turn(BaseModel):
    """A message of a conversation, from the user or the assistant."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    role: Literal["user", "assistant", "system"]
    content: str | Several[Block]


class ClientTool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]  # Any: a JSON schema


class ToolChoice(BaseModel):
    """Permits, forbids or requires tool calls."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    type: Literal["auto", "none", "any", "tool"]
    name: str = ""
    disable_parallel_tool_use: bool = False

    @property
    def must_call(self) -> str | None:
        """Name of the tool that the answer must call, "" for any tool; None if the answer may be text."""
        if self.type == "tool" and not self.name:
            raise RequestError("tool_choice: the type tool needs a name.")
        return {"any": "", "tool": self.name}.get(self.type)


class Thinking(BaseModel):
    """Enables or disables thinking. The token budget is ignored, because this engine has no such limit."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    type: Literal["enabled", "disabled", "adaptive"]


class CountRequest(Fields):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[Several[Turn], Field(min_length=1)]
    system: str | Several[Block] | None = None
    tools: Several[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: JSON

    def chat(self, fields: Mapping[str, Json]) -> Chat:
        """Convert the request to a `Chat`, which is independent of the API."""
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        values = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        choice = self.tool_choice or ToolChoice(type="auto")
        return Chat(
            messages=[*system, *(message for turn in self.messages for message in _messages(turn))],
            tools=[_tool(tool) for tool in self.tools or []] if choice.type != "none" else [],
            template_values=values | (self.chat_template_kwargs or {}),
            fields=fields,
            must_call=choice.must_call,
            calls_once=choice.disable_parallel_tool_use,
        )


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Json = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def sampling_params(self) -> dict[str, Json]:
        """Convert the fields to SGLang's sampling parameters."""
        given = {
            "max_new_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        return {name: value for name, value in given.items() if value is not None}


async def answer_messages(model: ServedModel, request: Request) -> Response:
    """POST /v1/messages."""
    body = await read_body(request)
    asked, call = await model.prepare(partial(_prepare, model, body))
    if asked.stream:
        return StreamingResponse(_stream(model, asked, call), media_type=EVENT_STREAM)
    [completion] = await complete_all(request, model.scheduler, call.generate.requests)
    pieces = read_answer(model, call, completion, 0)
    blocks = [_block(piece) for piece in pieces]
    used = {"input_tokens": completion.prompt_tokens, "output_tokens": len(completion.output_ids)}
    return json_answer({**_head(asked.model), "content": blocks, **_end(completion, pieces), "usage": used})


async def count_tokens(model: ServedModel, request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    body = await read_body(request)
    return json_answer({"input_tokens": await model.prepare(partial(_count, model, body))})


def _prepare(model: ServedModel, body: Json) -> tuple[MessagesRequest, ChatCall]:
    asked = parse_request(body, MessagesRequest)
    model.check_name(asked.model)
    return asked, prepare_chat(model, asked.chat({"sampling_params": asked.sampling_params()}))


def _count(model: ServedModel, body: Json) -> int:
    asked = parse_request(body, CountRequest)
    model.check_name(asked.model)
    chat = asked.chat({})
    form = model.chat.form(chat.template_values)
    return len(form.encode(chat.messages, chat.tools, context_length=model.scheduler.decoder.context_length))


async def _stream(model: ServedModel, asked: MessagesRequest, call: ChatCall) -> AsyncIterator[bytes]:
    num_prompt = len(call.generate.requests[0].input_ids)
    head = {**_head(asked.model), "content": [], "stop_reason": None, "stop_sequence": None}
    start = {**head, "usage": {"input_tokens": num_prompt, "output_tokens": 0}}
    yield _event("message_start", message=start)
    number = -1
    every: list[Piece] = []
    try:
        async with aclosing(follow_chat(model, call)) as all_news:
            async for news in all_news:
                for piece in news.pieces:
                    if not every or not _goes_on(every[-1], piece):
                        if every:
                            yield _event("content_block_stop", index=number)
                        number += 1
                        yield _event("content_block_start", index=number, content_block=_block(piece, is_start=True))
                    every.append(piece)
                    yield _event("content_block_delta", index=number, delta=_delta(piece))
                if isinstance(news.found, Completion):
                    if every:
                        yield _event("content_block_stop", index=number)
                    used = {"input_tokens": num_prompt, "output_tokens": len(news.found.output_ids)}
                    yield _event("message_delta", delta=_end(news.found, every), usage=used)
        yield _event("message_stop")
    except RolloutsError as error:
        yield event(error_body(MESSAGES_PATH, error), name="error")


def _event(kind: str, **fields: Json) -> bytes:
    return event({"type": kind, **fields}, name=kind)


def _head(name: str) -> dict[str, Json]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": name}


def _end(completion: Completion, pieces: Sequence[Piece]) -> dict[str, Json]:
    """The fields of an answer that say why the answer ended."""
    from rollouts_core.data.dialects import ToolCall  # slow to import

    if any(isinstance(piece, ToolCall) for piece in pieces):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if string := completion.finish_reason.string:
        return {"stop_reason": "stop_sequence", "stop_sequence": string}
    return {"stop_reason": STOP_REASONS[completion.finish_reason.kind], "stop_sequence": None}


def _goes_on(last: Piece, piece: Piece) -> bool:
    """True if a part of the answer continues the content block of the previous part."""
    from rollouts_core.data.dialects import ToolCall

    return type(last) is type(piece) and not isinstance(piece, ToolCall)


def _block(piece: Piece, *, is_start: bool = False) -> dict[str, Json]:
    """Anthropic's content block for a part of the answer. With `is_start` the block has no content yet."""
    from rollouts_core.data.dialects import Thought, ToolCall

    if isinstance(piece, ToolCall):
        arguments = {} if is_start else piece.arguments
        return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": piece.name, "input": arguments}
    text = "" if is_start else piece.text
    if isinstance(piece, Thought):
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _delta(piece: Piece) -> dict[str, Json]:
    from rollouts_core.data.dialects import Thought, ToolCall

    if isinstance(piece, ToolCall):
        return {"type": "input_json_delta", "partial_json": json.dumps(piece.arguments, ensure_ascii=False)}
    if isinstance(piece, Thought):
        return {"type": "thinking_delta", "thinking": piece.text}
    return {"type": "text_delta", "text": piece.text}


def _messages(turn: Turn) -> list[Message]:
    """Convert a message for chat templates. Tool results become separate messages before the user's text."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = [block for block in turn.content if block.type == "tool_result"]
    messages: list[Message] = [
        {"role": "tool", "content": _text(each.content or ""), "tool_call_id": each.tool_use_id or ""}
        for each in results
    ]
    calls = [block for block in turn.content if block.type == "tool_use"]
    thoughts = [block.thinking or "" for block in turn.content if block.type == "thinking"]
    rest = [block for block in turn.content if block.type not in ("tool_result", "tool_use", "thinking")]
    if calls or thoughts or rest or not results:
        fields: dict[str, Any] = {"role": turn.role, "content": _text(rest)}  # Any: JSON
        if calls:
            fields["tool_calls"] = [_call(block) for block in calls]
        if thoughts:
            fields["reasoning_content"] = "".join(thoughts)
        messages.append(cast("Message", fields))
    return messages


def _call(block: Block) -> dict[str, Json]:
    function = {"name": block.name or "", "arguments": block.input or {}}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: ClientTool) -> dict[str, Json]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(content: str | Sequence[Block]) -> str:
    if isinstance(content, str):
        return content
    if foreign := [block.type for block in content if block.text is None]:
        raise RequestError(f"A block of the type {foreign[0][:40]!r} is not supported. {TEXT_ALONE}")
    return "".join(block.text or "" for block in content)


ANTHROPIC_ENDPOINTS = {
    MESSAGES_PATH: (answer_messages, ["POST"]),
    f"{MESSAGES_PATH}/count_tokens": (count_tokens, ["POST"]),
}
