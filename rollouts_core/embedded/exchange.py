"""Common parts of the endpoints: limits of bodies, JSON, events, and the status of an error.

Not here: the endpoints themselves (app.py, openai_api.py, anthropic_api.py).
"""

from __future__ import annotations

import json

import orjson
from starlette.requests import Request
from starlette.responses import Response

from rollouts_core.embedded.protocol import ContractError, Json
from rollouts_core.embedded.receiving import OrderError
from rollouts_core.embedded.scheduler import MAX_WAITING_REQUESTS, RequestError
from rollouts_core.errors import EngineUnavailableError, InputError

MAX_BODY_BYTES = 32 * 2**20
"""Limit of the body of any request, bytes: the token ids of 40 prompts of 100,000 tokens."""
NAMES_BODY_BYTES = 16 * 2**20
"""Limit of the body of a request that names tensors."""
SMALL_BODY_BYTES = 64 * 2**10
"""Limit of the body of every other request."""
MAX_BRACKETS = 8 * MAX_WAITING_REQUESTS
"""Limit of brackets in any request, also inside texts: millions of lists would block the event loop for seconds."""
TOKENIZER_PATHS = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize")
BODY_BYTES = {
    **dict.fromkeys(("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"), MAX_BODY_BYTES),
    **dict.fromkeys(("/v1/messages/count_tokens", *TOKENIZER_PATHS), MAX_BODY_BYTES),
    "/update_weights_from_segments": NAMES_BODY_BYTES,
    "/begin_weight_update": NAMES_BODY_BYTES,
    "/update_weights_from_distributed": NAMES_BODY_BYTES,
}
OPENAI_PATHS = ("/v1/completions", "/v1/chat/completions", *TOKENIZER_PATHS)
OPENAI_ERRORS = {400: "invalid_request_error", 404: "invalid_request_error", 500: "server_error", 503: "server_error"}
ANTHROPIC_ERRORS = {400: "invalid_request_error", 404: "not_found_error", 500: "api_error", 503: "overloaded_error"}


class UnknownModelError(RequestError):
    """A request for a model that is not served here."""


async def read_body(request: Request) -> Json:
    """The JSON of a request."""
    return parse_json(await read_bytes(request))


async def read_object(request: Request) -> dict[str, Json]:
    """The JSON object of a request; empty if the body is empty."""
    content = await read_bytes(request)
    return as_object(parse_json(content) if content else {})


def as_object(body: Json) -> dict[str, Json]:
    """The value if it is an object; else raises ContractError."""
    if not isinstance(body, dict):
        raise ContractError(f"expected a JSON object, found {type(body).__name__}")
    return body


async def read_bytes(request: Request) -> bytearray:
    """The body of a request, refused as soon as it exceeds the limit of its path."""
    content, most = bytearray(), min(BODY_BYTES.get(request.url.path, SMALL_BODY_BYTES), MAX_BODY_BYTES)
    async for part in request.stream():
        content += part
        if len(content) > most:  # a body in chunks does not state its length
            raise RequestError(f"The request has more than the permitted {most} bytes: send less at once.")
    return content


def parse_json(content: bytearray) -> Json:
    """The value of a JSON text."""
    if content.count(b"[") + content.count(b"{") > MAX_BRACKETS:
        raise RequestError(f"The request has more than {MAX_BRACKETS} lists and objects: send less at once.")
    try:
        return orjson.loads(content)
    except ValueError as error:
        raise ContractError(f"invalid JSON: {error}") from error


def string_field(body: dict[str, Json], name: str) -> str:
    """A field that must be a string."""
    value = body.get(name)
    if not isinstance(value, str):
        raise ContractError(f"{name} must be a string, found {value!r}")
    return value


def json_answer(content: Json, *, status: int = 200) -> Response:
    """An answer with a JSON body."""
    return Response(render_json(content), status_code=status, media_type="application/json")


def event(content: Json, *, name: str = "") -> bytes:
    """A server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + render_json(content) + b"\n\n"


def render_json(content: Json) -> bytes:
    """The JSON text of a value."""
    try:
        return orjson.dumps(content)
    except TypeError:  # orjson cannot write lone surrogates, which some files contain
        return json.dumps(content).encode()


def status_of(error: Exception) -> int:
    """The HTTP status of an error, which tells clients whether a retry helps."""
    if isinstance(error, UnknownModelError):
        return 404
    if isinstance(error, EngineUnavailableError):
        return 503
    return 400 if isinstance(error, RequestError | InputError) else 500


def error_answer(path: str, error: Exception) -> Response:
    """The answer to a failed request, in the form of the path's API."""
    if isinstance(error, OrderError):
        return json_answer({"success": False, "message": str(error)}, status=400)
    return json_answer(error_body(path, error), status=status_of(error))


def error_body(path: str, error: Exception) -> dict[str, Json]:
    """An error in the form of the path's API."""
    status = status_of(error)
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": ANTHROPIC_ERRORS[status], "message": str(error)}}
    if path in OPENAI_PATHS or path.startswith("/v1/models"):
        code = "model_not_found" if status == 404 else None
        return {"error": {"message": str(error), "type": OPENAI_ERRORS[status], "param": None, "code": code}}
    return {"error": str(error) if isinstance(error, ContractError) else {"message": str(error)}}
