"""Pins that what the clients send is what SGLang and vLLM publish as their requests, field by field.

Without it a field that a server does not know is ignored in silence, and sampling goes on without it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from rollouts_core.config import SamplingConfig
from rollouts_core.embedded.weights import read_tensors
from rollouts_core.engines import GenerationRequest, SGLangEngine, VLLMEngine
from rollouts_core.engines.content import expected_digests
from rollouts_core.engines.sent import SentWeights
from rollouts_core.errors import EngineError

SPECS = Path(__file__).parents[3].parent / "shared" / "specs"
REQUEST = GenerationRequest(
    prompt_tokens=[4, 8], sampling=SamplingConfig(temperature=0.7, max_new_tokens=2), stop_token_ids=(1,), seed=3
)


def load_spec(name: str) -> dict[str, Any]:  # Any: JSON
    path = SPECS / name
    if not path.exists():
        pytest.skip(f"the published description of the server is not at {path}")
    spec: dict[str, Any] = json.loads(path.read_text())  # Any: JSON
    return spec


def requests_of(engine_type: type[SGLangEngine] | type[VLLMEngine], model_dir: Path) -> list[httpx.Request]:
    """Every request of an update and of a completion, from a server that gives plausible answers."""
    seen: list[httpx.Request] = []
    digests = {name: found[0] for name, found in expected_digests(read_tensors(model_dir), _float32(), ()).items()}
    answers: dict[str, Any] = {  # Any: JSON
        "/model_info": {"weight_version": "v1", "model_path": ""},
        "/server_info": {
            "dtype": "float32",
            "device": "cpu",
            "vllm_config": {
                "model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "model": ""}
            },
        },
        "/update_weights_from_disk": {"success": True},
        "/weights_checker": {"ranks": [{"checksums": digests}]},
        "/weight_checker": {"checksums": {f"tp0:{name}": digest for name, digest in digests.items()}},
        "/weight_info": {"weight_version": "v1"},
    }

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=answers.get(request.url.path, {}))

    async def use() -> None:
        engine = engine_type("http://engine", transport=httpx.MockTransport(answer))
        await engine.load_weights(model_dir, "v1")
        if isinstance(engine, SGLangEngine):
            sent = SentWeights(version="v1", model_dir=model_dir, tensors=read_tensors(model_dir), transfer="tensors")
            await engine.load_weights(sent, "v1")
        with pytest.raises(EngineError, match="http://engine answered"):  # {} is no completion
            await engine.generate([REQUEST])

    asyncio.run(use())
    return seen


def _float32() -> Any:  # Any: torch.dtype, without torch's stubs
    import torch

    return torch.float32


@pytest.mark.parametrize(
    ("engine_type", "spec_name"),
    [(SGLangEngine, "sglang-0.5.23.openapi.json"), (VLLMEngine, "vllm-0.32.openapi.json")],
)
def test_every_request_is_valid_under_the_published_schema(
    engine_type: type[SGLangEngine] | type[VLLMEngine], spec_name: str, quickstart_dir: Path
) -> None:
    spec = load_spec(spec_name)
    requests = requests_of(engine_type, quickstart_dir / "base_model")
    assert len({request.url.path for request in requests}) >= 5
    for request in requests:
        operation = spec["paths"][request.url.path][request.method.lower()]
        parameters = {parameter["name"]: parameter["schema"] for parameter in operation.get("parameters", [])}
        for name, value in request.url.params.items():
            jsonschema.validate(value, {**spec, **parameters[name]})
        if "requestBody" not in operation:
            continue
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = json.loads(request.content)
        jsonschema.validate(body, {**spec, **schema})
        unknown = body.keys() - properties_of(spec, schema)
        assert not unknown, f"{request.url.path} does not know {unknown}"


def properties_of(spec: dict[str, Any], schema: dict[str, Any]) -> set[str]:  # Any: JSON
    """The names of the fields of a schema, through references and alternatives."""
    if "$ref" in schema:
        return properties_of(spec, spec["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    inner = [properties_of(spec, each) for each in schema.get("anyOf", [])]
    return set(schema.get("properties", {})).union(*inner)
