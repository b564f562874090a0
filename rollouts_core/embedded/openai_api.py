"""OpenAI's endpoints for a served model: chats, completions, models; and /tokenize and /detokenize of SGLang and vLLM.

Not here: the fields of requests (openai_requests.py), running a chat (chatting.py), generation (scheduler.py).

Every request becomes a request to /generate, so that sampling, limits, weight versions and aborts are the same.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rollouts_core.embedded.chatting import (
    Chat,
    ChatCall,
    follow_chat,
    new_text_stream,
    prepare_chat,
    read_answer,
)
from rollouts_core.embedded.exchange import error_body, event, json_answer, read_body
from rollouts_core.embedded.openai_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
    parse_request,
)
from rollouts_core.embedded.protocol import MAX_CHARS_PER_TOKEN, GenerateCall, Json, needs_time, parse_generate
from rollouts_core.embedded.running import Completion, FinishReason, GenerationRequest, Partial, complete
from rollouts_core.embedded.scheduler import RequestError
from rollouts_core.embedded.scoring import Alternatives
from rollouts_core.embedded.served import ServedModel, complete_all, follow
from rollouts_core.errors import RolloutsError

if TYPE_CHECKING:
    from rollouts_core.data.dialects import Piece, ToolCall

EVENT_STREAM = "text/event-stream"
MAX_REPEATED_TOKENS = 2**18
"""Limit of the tokens of prompts in an answer with `echo` or `return_token_ids`. A token may have 256 characters."""
DONE = b"data: [DONE]\n\n"
UNFINISHED = FinishReason("length")
"""Placeholder for the finish reason of an unfinished completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fields that an answer and all its stream events have in common."""

    model: str
    """Model name, as in the request."""
    kind: str
    """Value of the answer's field `object`, for instance "chat.completion"."""
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: Sequence[Json], **more: Json) -> dict[str, Json]:
        """The JSON of an answer or a stream event with these choices."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }


async def list_models(model: ServedModel, _: Request) -> Response:
    """GET /v1/models."""
    return json_answer({"object": "list", "data": [_card(model)]})


async def show_model(model: ServedModel, request: Request) -> Response:
    """GET /v1/models/{model}."""
    model.check_name(request.path_params["model"])
    return json_answer(_card(model))


def _card(model: ServedModel) -> dict[str, Json]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "rollouts",
        "root": str(model.scheduler.model_dir),
        "max_model_len": model.scheduler.decoder.context_length,
    }


async def complete_chat(model: ServedModel, request: Request) -> Response:
    """POST /v1/chat/completions."""
    body = await read_body(request)
    asked, call = await model.prepare(partial(_prepare_chat, model, body))
    head = Head(model=asked.model, kind="chat.completion", id=f"chatcmpl-{uuid.uuid4().hex}")
    if asked.stream:
        return StreamingResponse(_stream_chat(model, asked, call, head), media_type=EVENT_STREAM)
    completions = await complete_all(request, model.scheduler, call.generate.requests)
    choices = [
        _chat_choice(model, asked, index, read_answer(model, call, completion, index), completion)
        for index, completion in enumerate(completions)
    ]
    return json_answer(head.body(choices, **_closing_fields(model, asked, call.generate, completions)))


def _prepare_chat(model: ServedModel, body: Json) -> tuple[ChatRequest, ChatCall]:
    asked = parse_request(body, ChatRequest)
    model.check_name(asked.model)
    chat = Chat(
        messages=[message.message() for message in asked.messages],
        tools=asked.usable_tools,
        template_values=asked.template_values,
        fields={"sampling_params": asked.sampling_params(asked.limit), "rid": asked.rid, **asked.logprob_fields()},
        has_thoughts_apart=asked.separate_reasoning,
        must_call=asked.must_call,
        calls_once=asked.parallel_tool_calls is False,
    )
    return asked, prepare_chat(model, chat)


def _chat_choice(
    model: ServedModel, asked: ChatRequest, index: int, pieces: Sequence[Piece], completion: Completion
) -> dict[str, Json]:
    said, thoughts, calls = split_pieces(pieces)
    content = said or (None if calls else "")
    message: dict[str, Json] = {"role": "assistant", "content": content, "refusal": None}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [_call_to_json(call) for call in calls]
    return {
        "index": index,
        "message": message,
        "logprobs": _chat_logprobs(model, completion, 0) if asked.logprobs else None,
        "finish_reason": "tool_calls" if calls else completion.finish_reason.kind,
        **({"token_ids": list(completion.output_ids)} if asked.return_token_ids else {}),
    }


async def _stream_chat(model: ServedModel, asked: ChatRequest, call: ChatCall, head: Head) -> AsyncIterator[bytes]:
    chunk = Head(model=head.model, kind="chat.completion.chunk", id=head.id, created=head.created)
    count = len(call.generate.requests)
    num_calls, num_sent = [0] * count, [0] * count
    completions: list[Completion] = []
    try:
        for index in range(count):
            yield event(chunk.body([_delta(index, {"role": "assistant", "content": ""})]))
        async with aclosing(follow_chat(model, call)) as all_news:
            async for news in all_news:
                index, so_far = news.index, as_completion(news.found)
                is_whole = isinstance(news.found, Completion)
                delta = _delta_of(news.pieces, num_calls[index])
                num_calls[index] += len(delta.get("tool_calls", ()))
                choice = _delta(index, delta)
                if asked.logprobs:
                    choice["logprobs"] = _chat_logprobs(model, so_far, num_sent[index])
                if asked.return_token_ids:
                    choice["token_ids"] = list(so_far.output_ids[num_sent[index] :])
                has_tokens = len(so_far.output_ids) > num_sent[index] and (asked.logprobs or asked.return_token_ids)
                num_sent[index] = len(so_far.output_ids)
                if is_whole:
                    completions.append(so_far)
                    choice["finish_reason"] = "tool_calls" if num_calls[index] else so_far.finish_reason.kind
                if delta or is_whole or has_tokens:
                    yield event(chunk.body([choice]))
        if asked.wants_usage:
            yield event(chunk.body([], **_closing_fields(model, asked, call.generate, completions)))
    except RolloutsError as error:
        yield event(error_body("/v1/chat/completions", error))
    yield DONE


def _delta(index: int, delta: dict[str, Json]) -> dict[str, Json]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta_of(pieces: Sequence[Piece], num_calls: int) -> dict[str, Json]:
    """OpenAI's `delta` for new parts of a message. Each tool call is sent as a whole."""
    said, thoughts, calls = split_pieces(pieces)
    delta: dict[str, Json] = {}
    if said:
        delta["content"] = said
    if thoughts:
        delta["reasoning_content"] = thoughts
    if calls:
        delta["tool_calls"] = [{"index": num_calls + place, **_call_to_json(call)} for place, call in enumerate(calls)]
    return delta


def split_pieces(pieces: Sequence[Piece]) -> tuple[str, str, list[ToolCall]]:
    """Split the parts of an assistant's turn into (answer, thoughts, tool calls)."""
    from rollouts_core.data.dialects import Said, Thought, ToolCall  # slow to import

    said = "".join(piece.text for piece in pieces if isinstance(piece, Said))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return said, thoughts, [piece for piece in pieces if isinstance(piece, ToolCall)]


def _call_to_json(call: ToolCall) -> dict[str, Json]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


async def complete_text(model: ServedModel, request: Request) -> Response:
    """POST /v1/completions."""
    body = await read_body(request)
    asked = parse_request(body, CompletionRequest)
    model.check_name(asked.model)
    if model.tokenizer is None and (asked.stream or asked.echo):
        raise RequestError("stream and echo need a tokenizer.json in the model directory: use /generate.")
    generate = asked.generate_body()
    context_length = model.scheduler.decoder.context_length
    parse = partial(parse_generate, generate, model.encode(), context_length=context_length)
    call = await model.prepare(lambda: model.checked(parse())) if needs_time(generate) else model.checked(parse())
    _check_repeated(asked, call)
    head = Head(model=asked.model, kind="text_completion", id=f"cmpl-{uuid.uuid4().hex}")
    if asked.stream:
        return StreamingResponse(_stream_text(model, asked, call, head), media_type=EVENT_STREAM)
    completions = await complete_all(request, model.scheduler, call.requests)
    choices = []
    for index, (each, completion) in enumerate(zip(call.requests, completions, strict=True)):
        text = model.text_of_completion(completion, each.params)
        choices.append(_text_choice(model, asked, index, each, completion, text=text, begin=None))
    return json_answer(head.body(choices, **_closing_fields(model, asked, call, completions)))


def _check_repeated(asked: CompletionRequest, call: GenerateCall) -> None:
    """Raise RequestError if the answer would repeat too many tokens of prompts. Each completion repeats its prompt."""
    count = sum(len(each.input_ids) for each in call.requests) if asked.echo or asked.return_token_ids else 0
    if count > MAX_REPEATED_TOKENS:
        raise RequestError(
            f"With echo or return_token_ids an answer may have at most {MAX_REPEATED_TOKENS} tokens of prompts, and "
            f"this one would have {count}: lower n, or send fewer prompts at once."
        )


async def _stream_text(
    model: ServedModel, asked: CompletionRequest, call: GenerateCall, head: Head
) -> AsyncIterator[bytes]:
    texts = [new_text_stream(model, call, index) for index in range(len(call.requests))]
    num_sent: list[int | None] = [None] * len(texts)
    completions: list[Completion] = []
    try:
        async with aclosing(follow(model.scheduler, call.requests)) as news:
            async for index, found in news:
                each, so_far = call.requests[index], as_completion(found)
                is_whole = isinstance(found, Completion)
                if is_whole:
                    completions.append(so_far)
                    text = texts[index].finish(model.text_of_completion(so_far, each.params))
                else:
                    text = texts[index].read(so_far.output_ids)
                choice = _text_choice(model, asked, index, each, so_far, text=text, begin=num_sent[index])
                has_tokens = choice["logprobs"] is not None or asked.return_token_ids
                if choice["text"] or is_whole or has_tokens:
                    num_sent[index] = len(so_far.output_ids)
                    choice["finish_reason"] = so_far.finish_reason.kind if is_whole else None
                    yield event(head.body([choice]))
        if asked.wants_usage:
            yield event(head.body([], **_closing_fields(model, asked, call, completions)))
    except RolloutsError as error:
        yield event(error_body("/v1/completions", error))
    yield DONE


def _text_choice(
    model: ServedModel,
    asked: CompletionRequest,
    index: int,
    each: GenerationRequest,
    completion: Completion,
    *,
    text: str,
    begin: int | None,
) -> dict[str, Json]:
    """OpenAI's JSON of a completion from token `begin` on. If `begin` is None, the whole completion, after its prompt
    if `asked.echo` is set."""
    with_prompt = bool(asked.echo) and begin is None
    if with_prompt:
        text = model.text_of(each.input_ids, each.params) + text
    return {
        "index": index,
        "text": text,
        "logprobs": None
        if asked.logprobs is None
        else text_logprobs(model, each, completion, begin=begin, echoes=bool(asked.echo)),
        "finish_reason": completion.finish_reason.kind,
        **(
            {"token_ids": list(completion.output_ids[begin or 0 :]), "prompt_token_ids": list(each.input_ids)}
            if asked.return_token_ids
            else {}
        ),
    }


def as_completion(found: Partial | Completion) -> Completion:
    """Convert an unfinished completion to a `Completion` with a placeholder as finish reason."""
    return found if isinstance(found, Completion) else complete(found, UNFINISHED, weight_version="")


def _closing_fields(
    model: ServedModel, asked: SamplingFields, call: GenerateCall, completions: Sequence[Completion]
) -> dict[str, Json]:
    """The fields at the end of an answer: numbers of tokens, and version of the weights."""
    per_prompt = asked.n or 1
    num_prompt = sum(len(each.input_ids) for each in call.requests[::per_prompt])
    num_new = sum(len(completion.output_ids) for completion in completions)
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
    return {"usage": usage, "metadata": {"weight_version": model.scheduler.weight_version}}


def _chat_logprobs(model: ServedModel, completion: Completion, begin: int) -> dict[str, Json]:
    """OpenAI's JSON for the log-probs of a chat's tokens from `begin` on."""
    text_of = _token_texts(model)
    found = completion.alternatives

    def entry(token_id: int, logprob: float) -> dict[str, Json]:
        text = text_of(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}

    content = []
    for place in range(begin, len(completion.output_ids)):
        top = _top(found, place)
        token = entry(completion.output_ids[place], completion.output_logprobs[place])
        content.append({**token, "top_logprobs": [entry(token_id, logprob) for token_id, logprob in top]})
    return {"content": content, "refusal": None}


def text_logprobs(
    model: ServedModel, asked: GenerationRequest, completion: Completion, *, begin: int | None, echoes: bool
) -> dict[str, Json]:
    """The log-probs of /v1/completions from token `begin` on. If `begin` is None, all log-probs, also of an echoed
    prompt.

    The first token of a prompt has no log-prob.
    """
    text_of = _token_texts(model)
    with_prompt, first = echoes and begin is None, begin or 0
    scores = completion.prompt_scores
    rows: list[tuple[int, float | None, list[tuple[int, float]]]] = []
    if with_prompt and scores is not None:
        rows.append((asked.input_ids[0], None, []))
        for place, token_id in enumerate(asked.input_ids[1:]):
            rows.append((token_id, float(scores.logprobs_T[place]), _top(scores.alternatives, place)))
    for place in range(first, len(completion.output_ids)):
        rows.append(
            (completion.output_ids[place], completion.output_logprobs[place], _top(completion.alternatives, place))
        )
    tokens = [text_of(token_id) for token_id, _, _ in rows]
    ahead = (
        completion.output_ids[:first] if with_prompt or not echoes else asked.input_ids + completion.output_ids[:first]
    )
    offset, offsets = len(model.text_of(ahead, asked.params)), []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [logprob for _, logprob, _ in rows],
        "top_logprobs": [
            None if own is None else {text_of(token_id): own, **{text_of(other): logprob for other, logprob in top}}
            for token_id, own, top in rows
        ],
        "text_offset": offsets,
    }


def _token_texts(model: ServedModel) -> Callable[[int], str]:
    """Return a function that gives the text of a token. Without a tokenizer, the function gives the token's id as
    text."""
    tokenizer = model.tokenizer
    known: dict[int, str] = {}

    def text_of(token_id: int) -> str:
        if token_id not in known:
            numbered = f"token_id:{token_id}"  # as in vLLM
            known[token_id] = numbered if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
        return known[token_id]

    return text_of


def _top(found: Alternatives | None, place: int) -> list[tuple[int, float]]:
    """(token id, log-prob) of the most probable tokens at a position."""
    if found is None:
        return []
    return list(zip(found.top_ids_TK[place].tolist(), found.top_logprobs_TK[place].tolist(), strict=True))


async def tokenize(model: ServedModel, request: Request) -> Response:
    """POST /tokenize."""
    body = await read_body(request)
    tokens = await model.prepare(partial(_tokenize, model, parse_request(body, TokenizeRequest)))
    is_list = bool(tokens) and isinstance(tokens[0], list)
    count = [len(each) for each in tokens] if is_list else len(tokens)
    return json_answer({"tokens": tokens, "count": count, "max_model_len": model.scheduler.decoder.context_length})


def _tokenize(model: ServedModel, asked: TokenizeRequest) -> list[Json]:
    if asked.model is not None:
        model.check_name(asked.model)
    if (tokenizer := model.tokenizer) is None:
        raise RequestError("The model directory has no tokenizer.json.")
    most = model.scheduler.decoder.context_length * MAX_CHARS_PER_TOKEN
    if asked.messages is not None:
        form = model.chat.form(asked.chat_template_kwargs or {})
        tools = [tool.schema_of_tool() for tool in asked.tools or []]
        messages = [message.message() for message in asked.messages]
        return form.encode(messages, tools, context_length=model.scheduler.decoder.context_length)
    if asked.prompt is None:
        raise RequestError("Either prompt or messages should be provided.")
    prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    if max(map(len, prompts), default=0) > most:
        raise RequestError(f"A text may have at most {most} characters here, found {max(map(len, prompts))}.")

    def encode(prompt: str) -> list[int]:  # one at a time, because the tokenizer needs 100 bytes per character
        return list(tokenizer.encode_batch_fast([prompt], add_special_tokens=asked.add_special_tokens)[0].ids)

    return encode(asked.prompt) if isinstance(asked.prompt, str) else [encode(prompt) for prompt in prompts]


async def detokenize(model: ServedModel, request: Request) -> Response:
    """POST /detokenize."""
    asked = parse_request(await read_body(request), DetokenizeRequest)
    if asked.model is not None:
        model.check_name(asked.model)
    if model.tokenizer is None:
        raise RequestError("The model directory has no tokenizer.json.")
    text = await model.prepare(partial(_detokenize, model, asked))
    return json_answer({"text": text, "prompt": text})  # `text` is SGLang's field, `prompt` is vLLM's


def _detokenize(model: ServedModel, asked: DetokenizeRequest) -> str | list[str]:
    assert model.tokenizer is not None, "the caller has checked the tokenizer"
    is_list = isinstance(asked.tokens, list) and bool(asked.tokens) and isinstance(asked.tokens[0], list)
    texts = asked.tokens if is_list else [asked.tokens]
    if not all(isinstance(ids, list) and set(map(type, ids)) <= {int} for ids in texts):
        raise RequestError("tokens must be a list of token ids, or a list of such lists.")
    size = model.scheduler.decoder.architecture.vocab_size
    if outside := [ids for ids in texts if ids and not 0 <= min(ids) <= max(ids) < size]:
        raise RequestError(f"tokens has ids outside the vocabulary of {size} tokens: {outside[0][:5]}...")
    decoded = model.tokenizer.decode_batch(texts, skip_special_tokens=asked.skip_special_tokens)
    return decoded if is_list else decoded[0]


OPENAI_ENDPOINTS = {
    "/v1/models": (list_models, ["GET"]),
    "/v1/models/{model:path}": (show_model, ["GET"]),
    "/v1/chat/completions": (complete_chat, ["POST"]),
    "/v1/completions": (complete_text, ["POST"]),
    "/v1/tokenize": (tokenize, ["POST"]),
    "/v1/detokenize": (detokenize, ["POST"]),
    "/tokenize": (tokenize, ["POST"]),  # path in vLLM
    "/detokenize": (detokenize, ["POST"]),
}
