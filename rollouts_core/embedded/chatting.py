"""Run a chat request through the engine: convert it to one call of /generate, and yield its answers piece by piece.

Not here: the JSON of APIs (openai_api.py, anthropic_api.py), chat templates (chat_model.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollouts_core.embedded.chat_model import AnswerReader, ChatForm, ChatModel, join_pieces
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.protocol import GenerateCall, Json, parse_generate
from rollouts_core.embedded.receiving import WeightReceiver
from rollouts_core.embedded.running import Completion, Partial
from rollouts_core.embedded.scheduler import RequestError, Scheduler
from rollouts_core.embedded.served import ServedModel, follow
from rollouts_core.embedded.text_stream import TextStream

if TYPE_CHECKING:
    from rollouts_core.data.dialects import Piece
    from rollouts_core.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat request, independent of the API that received it."""

    messages: Sequence[Message]
    """The conversation so far. If the conversation ends with an unfinished assistant's turn, the model continues this
    turn."""
    tools: Sequence[dict[str, Any]]  # Any: JSON schemas
    """The tools that the model may call."""
    template_values: Mapping[str, Any]  # Any: JSON
    """Values of variables of the chat template."""
    fields: Mapping[str, Json]
    """Fields of the request to /generate, except the prompt."""
    has_thoughts_apart: bool = True
    """True to return thoughts separately from the answer, if the chat template supports thoughts."""
    must_call: str | None = None
    """Name of the tool that the answer must call, "" for any of `tools`; None if the answer may be text."""
    calls_once: bool = False
    """True to permit only one tool call in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A chat request that was converted to a call of /generate."""

    generate: GenerateCall
    """The call of /generate, with one request for each answer of the chat request."""
    form: ChatForm | None
    """Reads thoughts and tool calls in the answers; None if answers are plain text."""
    tools: Sequence[dict[str, Any]]  # Any: JSON schemas
    """The tools that the model may call."""
    calls_once: bool
    """True to permit only one tool call in an answer."""

    def new_reader(self) -> AnswerReader:
        """A reader of one answer."""
        return AnswerReader(self.form, self.tools, calls_once=self.calls_once)


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A new part of one answer of a chat request."""

    index: int
    """Index of the answer. A request may ask for several answers."""
    pieces: Sequence[Piece]
    """New parts of the answer: text, thoughts and tool calls."""
    found: Partial | Completion
    """The whole answer so far: a Completion if it is finished, else a Partial."""


@contextmanager
def loaded_model(model_dir: Path, name: str, *, num_threads: int) -> Iterator[ServedModel]:
    """Load a model in this process. The model runs one request at a time."""
    torch.set_num_threads(num_threads)
    with Scheduler(Decoder(model_dir, num_slots=1), model_dir=model_dir) as scheduler:
        yield ServedModel(
            scheduler=scheduler,
            receiver=WeightReceiver(),
            tokenizer=scheduler.tokenizer,
            name=name,
            chat=ChatModel(model_dir),
        )


def prepare_chat(model: ServedModel, chat: Chat) -> ChatCall:
    """Render a chat and convert it to a call of /generate. Tokenizing a long chat is slow.

    Raises:
        RequestError: the model has no chat template, or the template or the engine refuses the chat, or a tool call
            is required that cannot be forced.
    """
    if model.tokenizer is None:
        raise RequestError("Chats need a tokenizer, but the model directory has no tokenizer.json: use /generate.")
    form, decoder = model.chat.form(chat.template_values), model.scheduler.decoder
    reads_turns = bool(chat.tools) or (chat.has_thoughts_apart and form.has_thoughts)
    sampling = dict(chat.fields["sampling_params"])
    sampling["stop_token_ids"] = [*form.stop_ids, *sampling.get("stop_token_ids", ())]
    if reads_turns:
        sampling["skip_special_tokens"] = False  # some models mark tool calls with special tokens
    prompt = form.encode(chat.messages, chat.tools, context_length=decoder.context_length)
    body = {**chat.fields, "input_ids": prompt, "sampling_params": sampling}
    call = parse_generate(body, None, context_length=decoder.context_length)
    if chat.must_call is not None:
        call = _force_call(call, form, chat)
    return ChatCall(
        generate=model.checked(call), form=form if reads_turns else None, tools=chat.tools, calls_once=chat.calls_once
    )


def _force_call(call: GenerateCall, form: ChatForm, chat: Chat) -> GenerateCall:
    """Add the grammar of the required tool call to all requests of a call."""
    tools = [tool for tool in chat.tools if chat.must_call in ("", tool["function"]["name"])]
    if not tools:
        raise RequestError("tool_choice: tools does not have the required function.")
    if form.call_form is None:
        raise RequestError(
            f"tool_choice: calls in the form of this model's chat template ({form.dialect.name}) cannot be forced: use "
            "auto."
        )
    grammar = form.call_form.grammar(tools, is_single=chat.calls_once)
    try:
        requests = [replace(each, params=replace(each.params, grammar=grammar)) for each in call.requests]
    except ValueError as error:
        raise RequestError(str(error)) from error
    return replace(call, requests=tuple(requests))


def read_answer(model: ServedModel, call: ChatCall, completion: Completion, index: int) -> list[Piece]:
    """Split a finished answer into text, thoughts and tool calls."""
    reader = call.new_reader()
    return join_pieces(reader.finish(model.text_of_completion(completion, call.generate.requests[index].params)))


async def follow_chat(model: ServedModel, call: ChatCall) -> AsyncGenerator[News, None]:
    """Yield new parts of all answers until every answer is finished."""
    requests = call.generate.requests
    texts = [new_text_stream(model, call.generate, index) for index in range(len(requests))]
    readers = [call.new_reader() for _ in requests]
    async with aclosing(follow(model.scheduler, requests)) as news:
        async for index, found in news:
            if isinstance(found, Completion):
                text = texts[index].finish(model.text_of_completion(found, requests[index].params))
                pieces = readers[index].finish(text)
            else:
                pieces = readers[index].read(texts[index].read(found.output_ids))
            yield News(index=index, pieces=pieces, found=found)


def new_text_stream(model: ServedModel, call: GenerateCall, index: int) -> TextStream:
    """A converter of the tokens of completion number `index` to text."""
    assert model.tokenizer is not None, "the caller has checked the tokenizer"
    params = call.requests[index].params
    stops = () if params.no_stop_trim else params.stop
    return TextStream(model.tokenizer, stops, skip_special_tokens=params.skip_special_tokens)
