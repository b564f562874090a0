"""Helpers for all endpoints: read and limit request bodies; write JSON answers, stream events and errors.

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
"""Limit of the body of a request with prompts, bytes; enough for the token ids of 40 prompts of 100,000 tokens."""
NAMES_BODY_BYTES = 16 * 2**20
"""Limit of the body of a request that lists tensors, bytes."""
SMALL_BODY_BYTES = 64 * 2**10
"""Limit of the body of every other request, bytes."""
MAX_BRACKETS = 8 * MAX_WAITING_REQUESTS
"""Limit of opening brackets in a request body, also inside strings. Parsing millions of lists would block the event
loop for seconds."""
MAX_CHAT_BRACKETS = MAX_WAITING_REQUESTS
"""Limit of opening brackets in a request that may contain a chat. pydantic needs 40 microseconds per part of a message,
and blocks the event loop meanwhile."""
TOKENIZER_PATHS = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize")
CHAT_PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens")
BODY_BYTES = {
    **dict.fromkeys(("/generate", "/v1/completions", *CHAT_PATHS, *TOKENIZER_PATHS), MAX_BODY_BYTES),
    "/update_weights_from_segments": NAMES_BODY_BYTES,
    "/begin_weight_update": NAMES_BODY_BYTES,
    "/update_weights_from_distributed": NAMES_BODY_BYTES,
}
OPENAI_PATHS = ("/v1/completions", "/v1/chat/completions", *TOKENIZER_PATHS)
OPENAI_ERRORS = {400: "invalid_request_error", 404: "invalid_request_error", 500: "server_error", 503: "server_error"}
ANTHROPIC_ERRORS = {400: "invalid_request_error", 404: "not_found_error", 500: "api_error", 503: "overloaded_error"}


class UnknownModelError(RequestError):
    """A request names a model that this server does not serve."""


async def read_body(request: Request) -> Json:
    """Read and parse the JSON body of a request."""
    is_chat = request.url.path in (*CHAT_PATHS, *TOKENIZER_PATHS)
    return parse_json(await read_bytes(request), MAX_CHAT_BRACKETS if is_chat else MAX_BRACKETS)


async def read_object(request: Request) -> dict[str, Json]:
    """Read and parse the JSON object in the body of a request. An empty body gives an empty object."""
    content = await read_bytes(request)
    return as_object(parse_json(content) if content else {})


def as_object(body: Json) -> dict[str, Json]:
    """Return the JSON value if it is an object. Raises ContractError otherwise."""
    if not isinstance(body, dict):
        raise ContractError(f"expected a JSON object, found {type(body).__name__}")
    return body


async def read_bytes(request: Request) -> bytearray:
    """Read the body of a request. Raises RequestError as soon as it exceeds the size limit of its path."""
    content, most = bytearray(), min(BODY_BYTES.get(request.url.path, SMALL_BODY_BYTES), MAX_BODY_BYTES)
    async for part in request.stream():
        content += part
        if len(content) > most:  # counted here, because chunked bodies have no Content-Length
            raise RequestError(f"The request has more than the permitted {most} bytes: send less at once.")
    return content


def parse_json(content: bytearray, max_brackets: int = MAX_BRACKETS) -> Json:
    """Parse the JSON of a request body. Raises RequestError or ContractError if this fails."""
    if content.count(b"[") + content.count(b"{") > max_brackets:
        raise RequestError(f"The request has more than {max_brackets} lists and objects: send less at once.")
    try:
        return orjson.loads(content)
    except ValueError as error:
        raise ContractError(f"invalid JSON: {error}") from error


def string_field(body: dict[str, Json], name: str) -> str:
    """Return a required string field. Raises ContractError for other values."""
    value = body.get(name)
    if not isinstance(value, str):
        raise ContractError(f"{name} must be a string, found {value!r}")
    return value


def json_answer(content: Json, *, status: int = 200) -> Response:
    return Response(render_json(content), status_code=status, media_type="application/json")


def event(content: Json, *, name: str = "") -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + render_json(content) + b"\n\n"


def render_json(content: Json) -> bytes:
    try:
        return orjson.dumps(content)
    except TypeError:  # orjson cannot write lone surrogates
        return json.dumps(content).encode()


def status_of(error: Exception) -> int:
    """The HTTP status of an error. 4xx means that a retry does not help."""
    if isinstance(error, UnknownModelError):
        return 404
    if isinstance(error, EngineUnavailableError):
        return 503
    return 400 if isinstance(error, RequestError | InputError) else 500


def error_answer(path: str, error: Exception) -> Response:
    """The HTTP answer for an error, in the form of the API (SGLang, OpenAI or Anthropic) that the path belongs to."""
    if isinstance(error, OrderError):
        return json_answer({"success": False, "message": str(error)}, status=400)
    return json_answer(error_body(path, error), status=status_of(error))


def error_body(path: str, error: Exception) -> dict[str, Json]:
    """The JSON of an error, in the form of the API that the path belongs to."""
    status = status_of(error)
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": ANTHROPIC_ERRORS[status], "message": str(error)}}
    if path in OPENAI_PATHS or path.startswith("/v1/models"):
        code = "model_not_found" if status == 404 else None
        return {"error": {"message": str(error), "type": OPENAI_ERRORS[status], "param": None, "code": code}}
    return {"error": str(error) if isinstance(error, ContractError) else {"message": str(error)}}
