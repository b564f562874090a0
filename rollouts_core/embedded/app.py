"""The endpoints of SGLang's HTTP API over a scheduler: requests in, answers and streams out.

Not here: generation (scheduler.py), the form of requests and answers (protocol.py), the process (server.py).

Errors have SGLang's forms: {"error": "unknown field ..."} where a request breaks the contract, {"error": {"message":
"..."}} where it cannot be fulfilled, {"success": false, "message": "..."} where an update's calls are out of order.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import get_args

import anyio
import orjson
import torch
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from rollouts_core.embedded.protocol import (
    ContractError,
    GenerateCall,
    Json,
    abort_from_json,
    bucket_from_json,
    checksums_to_json,
    completion_to_json,
    group_from_json,
    group_name_from_json,
    load_to_json,
    parse_generate,
    progress_to_json,
    segments_from_json,
)
from rollouts_core.embedded.receiving import OrderError, WeightReceiver
from rollouts_core.embedded.running import Completion, GenerationRequest, Partial
from rollouts_core.embedded.sampling import SamplingParams
from rollouts_core.embedded.scheduler import MAX_WAITING_REQUESTS, PauseMode, RequestError, Scheduler
from rollouts_core.embedded.segments import memory_scope
from rollouts_core.embedded.weights import tensor_sha256
from rollouts_core.errors import EngineError, EngineUnavailableError, InputError, RolloutsError

logger = logging.getLogger(__name__)

ENGINE_VERSION = "embedded, API of SGLang 0.5.23"
MAX_BODY_BYTES = 32 * 2**20
"""Of any request: the token ids of 40 prompts of 100,000 tokens."""
NAMES_BODY_BYTES = 16 * 2**20
"""Of a request that names tensors."""
SMALL_BODY_BYTES = 64 * 2**10
"""Of every other request."""
MAX_BRACKETS = 8 * MAX_WAITING_REQUESTS
"""Of any request, also those in texts: millions of lists take the event loop seconds."""
BODY_BYTES = {
    "/generate": MAX_BODY_BYTES,
    "/update_weights_from_segments": NAMES_BODY_BYTES,
    "/begin_weight_update": NAMES_BODY_BYTES,
    "/update_weights_from_distributed": NAMES_BODY_BYTES,
}
HEALTH_TIMEOUT_S = 20.0
INCOMPLETE = "\ufffd"
"""What stands in a text for bytes that are no character, as at the end of one whose next token brings the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the endpoints answer from."""

    scheduler: Scheduler
    """Generates, and owns the weights."""
    receiver: WeightReceiver
    """Takes weights that are sent."""
    tokenizer: Tokenizer | None
    """Turns text into token ids and back; None where the model directory has no tokenizer.json."""
    encoding: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    """Requests whose text is turned into token ids at a time, which takes hundreds of bytes for each of the text."""

    def encode(self) -> Callable[[str], list[int]] | None:
        """The function from text to token ids, None without a tokenizer."""
        if (tokenizer := self.tokenizer) is None:
            return None
        # The form for several texts computes beside the event loop, and without the places of tokens in the text.
        return lambda text: list(tokenizer.encode_batch_fast([text])[0].ids)

    def text_of(self, token_ids: tuple[int, ...], params: SamplingParams) -> str:
        """The text of a completion, empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=params.skip_special_tokens)

    def text_of_completion(self, completion: Completion, params: SamplingParams) -> str:
        """The text of a completion up to what ended it, which `no_stop_trim` keeps; as in SGLang."""
        reason = completion.finish_reason
        ends_in_token = reason.kind == "stop" and not reason.string
        if params.no_stop_trim or not ends_in_token:
            text = self.text_of(completion.output_ids, params)
        else:
            text = self.text_of(completion.output_ids[:-1], params)
        before, found, _ = text.partition(reason.string) if reason.string else (text, "", "")
        return before + found if params.no_stop_trim else before


Endpoint = Callable[[ServedModel, Request], Awaitable[Response]]


def build_app(scheduler: Scheduler, receiver: WeightReceiver | None = None) -> Starlette:
    """The endpoints over `scheduler`; whoever made it closes it, and the receiver, where it is not the app's own."""
    model = ServedModel(scheduler=scheduler, receiver=receiver or WeightReceiver(), tokenizer=scheduler.tokenizer)
    endpoints: dict[str, tuple[Endpoint, list[str]]] = {
        "/generate": (_generate, ["POST", "PUT"]),
        "/health": (_health, ["GET"]),
        "/health_generate": (_health_generate, ["GET"]),
        "/model_info": (_model_info, ["GET"]),
        "/get_model_info": (_model_info, ["GET"]),  # the names of older releases of SGLang, which trainers still use
        "/server_info": (_server_info, ["GET"]),
        "/get_server_info": (_server_info, ["GET"]),
        "/v1/loads": (_loads, ["GET"]),
        "/update_weights_from_disk": (_update_weights_from_disk, ["POST"]),
        "/update_weights_from_segments": (_update_weights_from_segments, ["POST"]),
        "/init_weights_update_group": (_init_weights_update_group, ["POST"]),
        "/destroy_weights_update_group": (_destroy_weights_update_group, ["POST"]),
        "/begin_weight_update": (_begin_weight_update, ["POST"]),
        "/update_weights_from_distributed": (_update_weights_from_distributed, ["POST"]),
        "/end_weight_update": (_end_weight_update, ["POST"]),
        "/update_weight_version": (_update_weight_version, ["POST"]),
        "/weights_checker": (_weights_checker, ["GET", "POST"]),
        "/pause_generation": (_pause_generation, ["POST"]),
        "/continue_generation": (_continue_generation, ["POST"]),
        "/abort_request": (_abort_request, ["POST"]),
        "/release_memory_occupation": (_keep_memory, ["GET", "POST"]),
        "/resume_memory_occupation": (_keep_memory, ["GET", "POST"]),
        "/flush_cache": (_flush_cache, ["GET", "POST"]),
    }
    return Starlette(
        routes=[
            Route(path, partial(endpoint, model), methods=methods) for path, (endpoint, methods) in endpoints.items()
        ],
        exception_handlers={RolloutsError: _error_response, ClientDisconnect: _no_response},
    )


async def _generate(model: ServedModel, request: Request) -> Response:
    body = await _read_body(request)
    parse = partial(parse_generate, body, model.encode(), context_length=model.scheduler.decoder.context_length)
    has_text = isinstance(body, dict) and body.get("text") is not None
    call = await anyio.to_thread.run_sync(parse, limiter=model.encoding) if has_text else parse()
    if call.is_stream:
        return StreamingResponse(_stream(model, call), media_type="text/event-stream")
    futures = _submit_all(model.scheduler, call.requests)
    completions = await _wait_or_abort(request, model.scheduler, call.requests, futures)
    answers = [
        completion_to_json(
            completion,
            asked,
            wants_logprobs=call.wants_logprobs,
            text=model.text_of_completion(completion, asked.params),
        )
        for completion, asked in zip(completions, call.requests, strict=True)
    ]
    return _json(answers if call.is_batch else answers[0])


async def _health(model: ServedModel, _: Request) -> Response:
    return Response(status_code=200 if model.scheduler.is_healthy else 503)


async def _health_generate(model: ServedModel, _: Request) -> Response:
    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    probe = GenerationRequest(request_id=f"health_{uuid.uuid4().hex}", input_ids=(0,), params=params)
    try:
        await asyncio.wait_for(asyncio.wrap_future(model.scheduler.submit(probe)), HEALTH_TIMEOUT_S)
    except TimeoutError:
        model.scheduler.abort(probe.request_id)
        return Response(status_code=503)
    return Response(status_code=200)


async def _model_info(model: ServedModel, _: Request) -> Response:
    architecture = model.scheduler.decoder.architecture
    model_dir = str(model.scheduler.model_dir)
    return _json(
        {
            "model_path": model_dir,
            "served_model_name": model_dir,
            "tokenizer_path": model_dir if model.tokenizer is not None else None,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": model.scheduler.weight_version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": architecture.model_type,
            "architectures": [architecture.name],
        }
    )


async def _server_info(model: ServedModel, _: Request) -> Response:
    """As in SGLang what generates is asked for its state: a server in which that hangs does not answer."""
    scheduler = model.scheduler
    load = await asyncio.wrap_future(scheduler.load())
    return _json(
        {
            "status": "ready",
            "model_path": str(scheduler.model_dir),
            "served_model_name": str(scheduler.model_dir),
            "weight_version": scheduler.weight_version,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "context_length": scheduler.decoder.context_length,
            "max_running_requests": scheduler.decoder.num_slots,
            "dtype": str(scheduler.decoder.dtype).removeprefix("torch."),
            "device": "cpu",
            "num_threads": torch.get_num_threads(),
            "version": ENGINE_VERSION,
            "memory_scope": memory_scope(),
            "internal_states": [
                {
                    "num_running_reqs": load.num_running,
                    "num_waiting_reqs": load.num_waiting,
                    "is_paused": load.is_paused,
                }
            ],
        }
    )


async def _loads(model: ServedModel, request: Request) -> Response:
    if (form := request.query_params.get("format", "json")) != "json":
        raise RequestError(f"format {form} is not supported by the embedded engine: leave it out.")
    include = [name.strip() for name in request.query_params.get("include", "").split(",") if name]
    load = load_to_json(await asyncio.wrap_future(model.scheduler.load()), model.scheduler.decoder, include)
    return _json(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": ENGINE_VERSION,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [load] if request.query_params.get("dp_rank", "0") == "0" else [],
        }
    )


async def _update_weights_from_disk(model: ServedModel, request: Request) -> Response:
    body = await _read_object(request)
    model_path = _string(body, "model_path")
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        raise ContractError(f"weight_version must be a string, found {version!r}")
    if body.get("abort_all_requests"):
        model.scheduler.abort_all()
    update = model.scheduler.update_weights(Path(model_path), weight_version=version)
    try:
        num_paused = await asyncio.wrap_future(update)
    except InputError as error:
        return _json({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
    message = "Succeeded to update model weights."
    if version is not None:
        message += f" Weight version updated to {version}."
    return _json({"success": True, "message": message, "num_paused_requests": num_paused})


async def _update_weights_from_segments(model: ServedModel, request: Request) -> Response:
    """Load what a trainer published in segments; the answer says what is served from then on, tensor by tensor.

    SGLang has no such endpoint: it takes a pickle, by which the caller would run code in the server.
    """
    body = await _read_object(request)
    version = _string(body, "weight_version")
    segments = segments_from_json(body.get("segments"))
    model_dir = Path(_string(body, "model_path"))
    try:
        await asyncio.wrap_future(model.scheduler.update_weights(model_dir, segments=segments, weight_version=version))
    except InputError as error:
        return _json({"success": False, "message": str(error)}, status=400)
    digests = await asyncio.wrap_future(model.scheduler.weight_digests())
    return _json({"success": True, "weight_version": model.scheduler.weight_version, "checksums": digests})


async def _init_weights_update_group(model: ServedModel, request: Request) -> Response:
    await model.receiver.join(group_from_json(await _read_object(request)))
    return _json({"success": True, "message": "Succeeded to initialize custom process group."})


async def _destroy_weights_update_group(model: ServedModel, request: Request) -> Response:
    model.receiver.leave(group_name_from_json(await _read_object(request)))
    return _json({"success": True, "message": "Succeeded to destroy custom process group."})


async def _begin_weight_update(model: ServedModel, request: Request) -> Response:
    """Open an update; SGLang does not know `kept`, the names of tensors that will not be sent."""
    kept = (await _read_object(request)).get("kept", [])
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        raise ContractError(f"kept must be a list of names, found {kept!r}")
    model.receiver.begin([str(name) for name in kept])
    return _json({"success": True, "message": "Succeeded to begin weight update."})


async def _update_weights_from_distributed(model: ServedModel, request: Request) -> Response:
    """Keep a bucket of tensors that is broadcast to this server; they are loaded at the end of the update."""
    await model.receiver.receive(bucket_from_json(await _read_object(request)))
    return _json({"success": True, "message": "Succeeded to update parameter online."})


async def _end_weight_update(model: ServedModel, _: Request) -> Response:
    """Load what was sent, all of the model but what stays, or nothing."""
    tensors, kept = model.receiver.end()
    if tensors:
        update = model.scheduler.update_weights(
            model.scheduler.model_dir, tensors=tensors, kept=kept, weight_version=None
        )
        await asyncio.wrap_future(update)
    return _json({"success": True, "message": "Succeeded to end weight update."})


async def _update_weight_version(model: ServedModel, request: Request) -> Response:
    body = await _read_object(request)
    version = _string(body, "new_version")
    if body.get("abort_all_requests", True):
        await asyncio.wrap_future(model.scheduler.abort_all())
    await asyncio.wrap_future(model.scheduler.set_weight_version(version))
    return _json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})


async def _weights_checker(model: ServedModel, request: Request) -> Response:
    body = await _read_object(request)
    if (action := body.get("action", "checksum")) != "checksum":
        return _json({"success": False, "message": f"Unsupported action={action!r}"}, status=400)
    digests = await asyncio.wrap_future(model.scheduler.weight_digests(tensor_sha256))
    return _json(checksums_to_json(digests))


async def _pause_generation(model: ServedModel, request: Request) -> Response:
    mode: PauseMode = (await _read_object(request)).get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise ContractError(f"mode must be one of {', '.join(get_args(PauseMode))}, found {mode!r}")
    await asyncio.wrap_future(model.scheduler.pause(mode))
    return _json({"message": "Generation paused successfully.", "status": "ok"})


async def _continue_generation(model: ServedModel, _: Request) -> Response:
    await asyncio.wrap_future(model.scheduler.resume())
    return _json({"message": "Generation continued successfully.", "status": "ok"})


async def _abort_request(model: ServedModel, request: Request) -> Response:
    if not (content := await _read_bytes(request)):
        raise ContractError("expected a JSON object, found nothing")
    rid, is_all = abort_from_json(_as_object(_parse(content)))
    if is_all:
        model.scheduler.abort_all()
    elif rid:
        model.scheduler.abort(rid)
    return Response(status_code=200)


async def _keep_memory(_: ServedModel, __: Request) -> Response:
    """Nothing is handed over, since weights and cache lie in host memory; answered as by an SGLang that did."""
    return _json(None)


async def _flush_cache(model: ServedModel, _: Request) -> Response:
    """Nothing is cached across requests; with requests around, refused as in SGLang."""
    if model.scheduler.num_running or model.scheduler.num_waiting:
        return PlainTextResponse("Flush cache failed: there are running or waiting requests.\n", status_code=400)
    return PlainTextResponse("Cache flushed.\n")


def _submit_all(
    scheduler: Scheduler,
    requests: tuple[GenerationRequest, ...],
    listener_of: Callable[[int], Callable[[Partial], None]] | None = None,
) -> list[Future[Completion]]:
    """Submit all or none of the requests."""
    futures: list[Future[Completion]] = []
    for index, asked in enumerate(requests):
        try:
            futures.append(scheduler.submit(asked, on_progress=listener_of(index) if listener_of else None))
        except EngineError:
            scheduler.give_up([submitted.request_id for submitted in requests[:index]])
            raise
    return futures


async def _wait_or_abort(
    request: Request,
    scheduler: Scheduler,
    requests: tuple[GenerationRequest, ...],
    futures: list[Future[Completion]],
) -> list[Completion]:
    """The completions; when the client goes away they end early. How long to wait is the client's decision."""
    disconnected = asyncio.ensure_future(_until_disconnected(request))
    loop, unfinished = asyncio.get_running_loop(), [*futures]

    def note_end(_: Future[Completion]) -> None:
        unfinished.pop()  # in the generation thread: the loop is woken once, not for each of them
        if not unfinished:
            with suppress(RuntimeError):  # the server has ended meanwhile, and its loop with it
                loop.call_soon_threadsafe(disconnected.cancel)

    for future in futures:
        future.add_done_callback(note_end)
    try:
        await asyncio.wait([disconnected])
    finally:
        _abort_unfinished(scheduler, requests, futures)
        disconnected.cancel()
    return await asyncio.gather(*map(asyncio.wrap_future, futures))


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(model: ServedModel, call: GenerateCall) -> AsyncIterator[bytes]:
    """Server-sent events: per step and prompt everything so far, at the end `[DONE]`.

    Steps that are over before the client has read an earlier event have none: what it does not read is not kept.
    """
    loop = asyncio.get_running_loop()
    newest: dict[int, Partial | Future[Completion]] = {}
    has_news = asyncio.Event()

    def note(index: int, event: Partial | Future[Completion]) -> None:
        newest[index] = event
        has_news.set()

    def push(index: int, event: Partial | Future[Completion]) -> None:
        loop.call_soon_threadsafe(note, index, event)

    futures: list[Future[Completion]] = []
    try:
        futures += _submit_all(model.scheduler, call.requests, lambda index: partial(push, index))
        for index, future in enumerate(futures):
            future.add_done_callback(partial(push, index))
        num_open = len(futures)
        while num_open:
            await has_news.wait()
            has_news.clear()
            while newest:
                index = next(iter(newest))  # the one that waits for the longest
                event = newest.pop(index)
                num_open -= isinstance(event, Future)
                yield _event(_stream_answer(model, call, index, event))
    except RolloutsError as error:
        yield _event({"error": {"message": str(error), "code": _status_of(error)}})
    finally:
        _abort_unfinished(model.scheduler, call.requests, futures)
    yield b"data: [DONE]\n\n"


def _stream_answer(
    model: ServedModel, call: GenerateCall, index: int, event: Partial | Future[Completion]
) -> dict[str, Json]:
    place = index if call.is_batch else None
    asked = call.requests[index]
    params = asked.params
    if isinstance(event, Future):
        completion = event.result()
        text = model.text_of_completion(completion, params)
        return completion_to_json(completion, asked, wants_logprobs=call.wants_logprobs, text=text, index=place)
    return progress_to_json(
        event,
        weight_version=model.scheduler.weight_version,
        wants_logprobs=call.wants_logprobs,
        text=model.text_of(event.output_ids, params).rstrip(INCOMPLETE),
        index=place,
    )


def _abort_unfinished(
    scheduler: Scheduler, requests: tuple[GenerationRequest, ...], futures: list[Future[Completion]]
) -> None:
    scheduler.give_up([asked.request_id for asked, future in zip(requests, futures, strict=False) if not future.done()])


async def _read_body(request: Request) -> Json:
    return _parse(await _read_bytes(request))


async def _read_object(request: Request) -> dict[str, Json]:
    content = await _read_bytes(request)
    return _as_object(_parse(content) if content else {})


def _as_object(body: Json) -> dict[str, Json]:
    if not isinstance(body, dict):
        raise ContractError(f"expected a JSON object, found {type(body).__name__}")
    return body


async def _read_bytes(request: Request) -> bytearray:
    content, most = bytearray(), min(BODY_BYTES.get(request.url.path, SMALL_BODY_BYTES), MAX_BODY_BYTES)
    async for part in request.stream():
        content += part
        if len(content) > most:  # who sends in chunks does not say how much it will be
            raise RequestError(f"The request has more than the {most} bytes that are taken: send less at once.")
    return content


def _parse(content: bytearray) -> Json:
    if content.count(b"[") + content.count(b"{") > MAX_BRACKETS:
        raise RequestError(f"The request has more than {MAX_BRACKETS} lists and objects: send less at once.")
    try:
        return orjson.loads(content)
    except ValueError as error:
        raise ContractError(f"invalid JSON: {error}") from error


def _string(body: dict[str, Json], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise ContractError(f"{name} must be a string, found {value!r}")
    return value


def _json(content: Json, *, status: int = 200) -> Response:
    return Response(_render(content), status_code=status, media_type="application/json")


def _event(content: Json) -> bytes:
    return b"data: " + _render(content) + b"\n\n"


def _render(content: Json) -> bytes:
    try:
        return orjson.dumps(content)
    except TypeError:  # halves of characters, as a file of others may have them, which orjson does not write
        return json.dumps(content).encode()


async def _error_response(_: Request, error: Exception) -> Response:
    if isinstance(error, OrderError):
        return _json({"success": False, "message": str(error)}, status=400)
    content = str(error) if isinstance(error, ContractError) else {"message": str(error)}
    return _json({"error": content}, status=_status_of(error))


async def _no_response(_: Request, __: Exception) -> Response:
    """Who left before the request was whole reads none."""
    return Response(status_code=400)


def _status_of(error: Exception) -> int:
    if isinstance(error, EngineUnavailableError):
        return 503
    return 400 if isinstance(error, RequestError | InputError) else 500
