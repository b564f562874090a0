"""The endpoints of SGLang's HTTP API, served by a scheduler.

Not here: generation (scheduler.py), the form of requests and answers (protocol.py), the process (server.py).

Errors have SGLang's forms:
    {"error": "unknown field ..."}           the request has a wrong form
    {"error": {"message": "..."}}            the request is valid but cannot be fulfilled
    {"success": false, "message": "..."}     the calls of a weight update have the wrong order
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from rollouts_core.embedded.anthropic_api import ANTHROPIC_ENDPOINTS
from rollouts_core.embedded.chat_model import ChatModel
from rollouts_core.embedded.exchange import (
    as_object,
    error_answer,
    event,
    json_answer,
    parse_json,
    read_body,
    read_bytes,
    read_object,
    status_of,
    string_field,
)
from rollouts_core.embedded.openai_api import OPENAI_ENDPOINTS
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
    needs_time,
    parse_generate,
    progress_to_json,
    segments_from_json,
)
from rollouts_core.embedded.receiving import WeightReceiver
from rollouts_core.embedded.running import Completion, GenerationRequest, Partial
from rollouts_core.embedded.sampling import SamplingParams
from rollouts_core.embedded.scheduler import PauseMode, RequestError, Scheduler
from rollouts_core.embedded.segments import memory_scope
from rollouts_core.embedded.served import INCOMPLETE, ServedModel, complete_all, follow
from rollouts_core.embedded.weights import tensor_sha256
from rollouts_core.errors import InputError, RolloutsError

logger = logging.getLogger(__name__)

ENGINE_VERSION = "embedded, API of SGLang 0.5.23"
HEALTH_TIMEOUT_S = 20.0
Endpoint = Callable[[ServedModel, Request], Awaitable[Response]]


def build_app(scheduler: Scheduler, receiver: WeightReceiver | None = None, *, name: str = "") -> Starlette:
    """Build the HTTP app for a scheduler. The caller closes the scheduler, and the receiver if it passes one.

    Args:
        name: name of the model in requests; by default the name of its folder.
    """
    model = ServedModel(
        scheduler=scheduler,
        receiver=receiver or WeightReceiver(),
        tokenizer=scheduler.tokenizer,
        name=name or str(scheduler.model_dir),
        chat=ChatModel(scheduler.model_dir),
    )
    endpoints: dict[str, tuple[Endpoint, list[str]]] = {
        "/generate": (_generate, ["POST", "PUT"]),
        "/health": (_health, ["GET"]),
        "/health_generate": (_health_generate, ["GET"]),
        "/model_info": (_model_info, ["GET"]),
        "/get_model_info": (_model_info, ["GET"]),  # trainers still use the get_ paths of older releases of SGLang
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
        **OPENAI_ENDPOINTS,
        **ANTHROPIC_ENDPOINTS,
    }
    return Starlette(
        routes=[
            Route(path, partial(endpoint, model), methods=methods) for path, (endpoint, methods) in endpoints.items()
        ],
        exception_handlers={RolloutsError: _error_response, ClientDisconnect: _no_response},
    )


async def _generate(model: ServedModel, request: Request) -> Response:
    body = await read_body(request)
    parse = partial(parse_generate, body, model.encode(), context_length=model.scheduler.decoder.context_length)
    call = await model.prepare(lambda: model.checked(parse())) if needs_time(body) else parse()
    if call.is_stream:
        return StreamingResponse(_stream(model, call), media_type="text/event-stream")
    completions = await complete_all(request, model.scheduler, call.requests)
    answers = [
        completion_to_json(
            completion,
            asked,
            wants_logprobs=call.wants_logprobs,
            text=model.text_of_completion(completion, asked.params),
        )
        for completion, asked in zip(completions, call.requests, strict=True)
    ]
    return json_answer(answers if call.is_batch else answers[0])


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
    return json_answer(
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
    """Describe the server. The generation thread must report its state, so the request hangs if the thread hangs."""
    scheduler = model.scheduler
    load = await asyncio.wrap_future(scheduler.load())
    return json_answer(
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
            "takes_adapters": True,
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
    return json_answer(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": ENGINE_VERSION,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [load] if request.query_params.get("dp_rank", "0") == "0" else [],
        }
    )


async def _update_weights_from_disk(model: ServedModel, request: Request) -> Response:
    body = await read_object(request)
    model_path = string_field(body, "model_path")
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        raise ContractError(f"weight_version must be a string, found {version!r}")
    if body.get("abort_all_requests"):
        model.scheduler.abort_all()
    update = model.scheduler.update_weights(Path(model_path), weight_version=version)
    try:
        num_paused = await asyncio.wrap_future(update)
    except InputError as error:
        return json_answer({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
    message = "Succeeded to update model weights."
    if version is not None:
        message += f" Weight version updated to {version}."
    return json_answer({"success": True, "message": message, "num_paused_requests": num_paused})


async def _update_weights_from_segments(model: ServedModel, request: Request) -> Response:
    """Load weights that a trainer published in segments; the answer has the digest of each loaded tensor.

    SGLang lacks this endpoint. SGLang's endpoint for weights in memory accepts pickles, with which a caller could run
    code in the server.
    """
    body = await read_object(request)
    version = string_field(body, "weight_version")
    segments = segments_from_json(body.get("segments"))
    model_dir = Path(string_field(body, "model_path"))
    try:
        await asyncio.wrap_future(model.scheduler.update_weights(model_dir, segments=segments, weight_version=version))
    except InputError as error:
        return json_answer({"success": False, "message": str(error)}, status=400)
    digests = await asyncio.wrap_future(model.scheduler.weight_digests())
    return json_answer({"success": True, "weight_version": model.scheduler.weight_version, "checksums": digests})


async def _init_weights_update_group(model: ServedModel, request: Request) -> Response:
    await model.receiver.join(group_from_json(await read_object(request)))
    return json_answer({"success": True, "message": "Succeeded to initialize custom process group."})


async def _destroy_weights_update_group(model: ServedModel, request: Request) -> Response:
    model.receiver.leave(group_name_from_json(await read_object(request)))
    return json_answer({"success": True, "message": "Succeeded to destroy custom process group."})


async def _begin_weight_update(model: ServedModel, request: Request) -> Response:
    """Open a weight update. `kept`, the names of tensors that will not be sent, is an addition to SGLang's API."""
    kept = (await read_object(request)).get("kept", [])
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        raise ContractError(f"kept must be a list of names, found {kept!r}")
    model.receiver.begin([str(name) for name in kept])
    return json_answer({"success": True, "message": "Succeeded to begin weight update."})


async def _update_weights_from_distributed(model: ServedModel, request: Request) -> Response:
    """Receive a bucket of tensors that the trainer broadcasts. The tensors are loaded at the end of the update."""
    await model.receiver.receive(bucket_from_json(await read_object(request)))
    return json_answer({"success": True, "message": "Succeeded to update parameter online."})


async def _end_weight_update(model: ServedModel, _: Request) -> Response:
    """Load the sent tensors. If a tensor is missing or wrong, the server keeps the old weights."""
    tensors, kept = model.receiver.end()
    if tensors:
        update = model.scheduler.update_weights(
            model.scheduler.model_dir, tensors=tensors, kept=kept, weight_version=None
        )
        await asyncio.wrap_future(update)
    return json_answer({"success": True, "message": "Succeeded to end weight update."})


async def _update_weight_version(model: ServedModel, request: Request) -> Response:
    body = await read_object(request)
    version = string_field(body, "new_version")
    if body.get("abort_all_requests", True):
        await asyncio.wrap_future(model.scheduler.abort_all())
    await asyncio.wrap_future(model.scheduler.set_weight_version(version))
    return json_answer({"success": True, "message": f"Weight version updated to {version}", "new_version": version})


async def _weights_checker(model: ServedModel, request: Request) -> Response:
    body = await read_object(request)
    if (action := body.get("action", "checksum")) != "checksum":
        return json_answer({"success": False, "message": f"Unsupported action={action!r}"}, status=400)
    digests = await asyncio.wrap_future(model.scheduler.weight_digests(tensor_sha256))
    return json_answer(checksums_to_json(digests))


async def _pause_generation(model: ServedModel, request: Request) -> Response:
    mode: PauseMode = (await read_object(request)).get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise ContractError(f"mode must be one of {', '.join(get_args(PauseMode))}, found {mode!r}")
    await asyncio.wrap_future(model.scheduler.pause(mode))
    return json_answer({"message": "Generation paused successfully.", "status": "ok"})


async def _continue_generation(model: ServedModel, _: Request) -> Response:
    await asyncio.wrap_future(model.scheduler.resume())
    return json_answer({"message": "Generation continued successfully.", "status": "ok"})


async def _abort_request(model: ServedModel, request: Request) -> Response:
    if not (content := await read_bytes(request)):
        raise ContractError("expected a JSON object, found nothing")
    rid, is_all = abort_from_json(as_object(parse_json(content)))
    if is_all:
        model.scheduler.abort_all()
    elif rid:
        model.scheduler.abort(rid)
    return Response(status_code=200)


async def _keep_memory(_: ServedModel, __: Request) -> Response:
    """Answer like SGLang without releasing memory: weights and KV cache are in host memory, not in GPU memory."""
    return json_answer(None)


async def _flush_cache(model: ServedModel, _: Request) -> Response:
    """Answer like SGLang, with an error while requests run or wait. This engine caches nothing across requests, so it
    flushes nothing."""
    if model.scheduler.num_running or model.scheduler.num_waiting:
        return PlainTextResponse("Flush cache failed: there are running or waiting requests.\n", status_code=400)
    return PlainTextResponse("Cache flushed.\n")


async def _stream(model: ServedModel, call: GenerateCall) -> AsyncIterator[bytes]:
    """Yield server-sent events: after each step, the completion so far of each prompt; at the end, `[DONE]`."""
    try:
        async with aclosing(follow(model.scheduler, call.requests)) as news:
            async for index, found in news:
                yield event(_stream_answer(model, call, index, found))
    except RolloutsError as error:
        yield event({"error": {"message": str(error), "code": status_of(error)}})
    yield b"data: [DONE]\n\n"


def _stream_answer(model: ServedModel, call: GenerateCall, index: int, found: Partial | Completion) -> dict[str, Json]:
    place = index if call.is_batch else None
    asked = call.requests[index]
    if isinstance(found, Completion):
        text = model.text_of_completion(found, asked.params)
        return completion_to_json(found, asked, wants_logprobs=call.wants_logprobs, text=text, index=place)
    return progress_to_json(
        found,
        weight_version=model.scheduler.weight_version,
        wants_logprobs=call.wants_logprobs,
        text=model.text_of(found.output_ids, asked.params).rstrip(INCOMPLETE),
        index=place,
    )


async def _error_response(request: Request, error: Exception) -> Response:
    return error_answer(request.url.path, error)


async def _no_response(_: Request, __: Exception) -> Response:
    """Placeholder answer for a client that disconnected before it had sent the whole request."""
    return Response(status_code=400)
