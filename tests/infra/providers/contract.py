"""A transport that holds both sides of every exchange against a provider's OpenAPI document.

Not here: what is exchanged (test_cloud_contracts.py). The documents have no licence by which they could be kept with
this project; ROLLOUTS_PROVIDER_SPECS names the folder that has them.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml
from openapi_core import Config, OpenAPI
from openapi_core.testing import MockRequest, MockResponse

from tests.kit.excuses import ExcusedSkip

SPECS_VARIABLE = "ROLLOUTS_PROVIDER_SPECS"


def specs_dir() -> Path:
    """Where the documents are; the test is skipped where they are not."""
    folder = Path(os.environ.get(SPECS_VARIABLE) or Path(__file__).resolve().parents[4] / "shared" / "specs")
    if not folder.is_dir():
        raise ExcusedSkip(f"the OpenAPI documents of the providers are not here: name their folder in {SPECS_VARIABLE}")
    return folder


@functools.cache
def parse_document(path: Path) -> dict[str, Any]:  # Any: JSON
    """The document as it is written."""
    text = path.read_text()
    return dict(json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=yaml.CSafeLoader))


@functools.cache
def read_document(path: Path) -> OpenAPI:
    """The document; whether it is a good one is not ours to check, and takes as long as a hundred exchanges."""
    deserializers: dict[str, Callable[[bytes], Any]] = {  # Any: JSON
        "application/problem+json": json.loads,  # JSON under another name
        "text/event-stream": bytes.decode,
    }
    config = Config(spec_validator_cls=None, extra_media_type_deserializers=deserializers)
    return OpenAPI.from_dict(parse_document(path), config=config)


class ContractTransport(httpx.BaseTransport):
    """Passes requests on and raises where a request or an answer is not as the document says."""

    def __init__(self, document: OpenAPI, server: str) -> None:
        self._document = document
        self._server = server.rstrip("/")
        self._wire = httpx.HTTPTransport()
        self.seen: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        asked = MockRequest(
            self._server,
            request.method.lower(),
            self._path_in_document(request.url.path),
            args=dict(request.url.params),
            headers=dict(request.headers),
            data=body or None,
            content_type="application/json",
        )
        self._document.validate_request(asked)
        response = self._wire.handle_request(request)
        content = response.read()
        answered = MockResponse(
            data=content,
            status_code=response.status_code,
            headers=dict(response.headers),
            content_type=response.headers.get("content-type", "").partition(";")[0],
        )
        self._document.validate_response(asked, answered)
        self.seen.append(f"{request.method} {request.url.path} {response.status_code}")
        return httpx.Response(response.status_code, headers=response.headers, content=content)

    def _path_in_document(self, path: str) -> str:
        """The path as the document has it: some leave out the slash that the real addresses end with."""
        return path if path in self._document.spec["paths"] else path.rstrip("/")

    def close(self) -> None:
        self._wire.close()
