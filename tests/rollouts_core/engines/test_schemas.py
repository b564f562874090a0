"""Pins that what the clients send is what SGLang and vLLM publish as their requests, field by field.

Without it a field that a server does not know is ignored in silence, and sampling goes on without it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import jsonschema
import pytest
import torch

from rollouts.infra.engines import has_generated, resume_generation
from rollouts_core.config import EngineKind, RewardConfig, SamplingConfig
from rollouts_core.config.reward import NATIVE_PATH
from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.embedded.weights import read_tensors
from rollouts_core.engine_kinds import ENGINES
from rollouts_core.engines import GenerationRequest, ScoringRequest, SGLangEngine, VLLMEngine
from rollouts_core.engines import sglang as sglang_module
from rollouts_core.engines import vllm as vllm_module
from rollouts_core.engines.transfer import to_sglang as sending_module
from rollouts_core.engines.transfer.checksums import expected_digests
from rollouts_core.engines.transfer.versions import SentBy, SentWeights, copy_to_host
from rollouts_core.errors import RewardError
from rollouts_core.reward_services import create_judge_reward
from rollouts_core.types import Sample
from tests.kit.excuses import ExcusedSkip
from tests.rollouts_core.scripted_service import Service

SPECS = Path(__file__).parents[3].parent / "shared" / "specs"
HERE = "http://127.0.0.1:9"
"""Where a group with the server meets; nothing else goes there."""
REQUEST = GenerationRequest(
    prompt_tokens=[4, 8], sampling=SamplingConfig(temperature=0.7, max_new_tokens=2), stop_token_ids=(1,), seed=3
)
SCORED = ScoringRequest(tokens=[4, 8], num_top=1, token_ids=(5,))


def load_spec(name: str) -> dict[str, Any]:  # Any: JSON
    path = SPECS / name
    if not path.exists():
        raise ExcusedSkip(f"the published description of the server is not at {path}")
    spec: dict[str, Any] = json.loads(path.read_text())  # Any: JSON
    return spec


@dataclass
class Noted(httpx.AsyncBaseTransport):
    """The way to a server that notes every request."""

    server: httpx.AsyncBaseTransport
    requests: list[httpx.Request] = field(default_factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.url.path == "/update_weights_from_tensor":  # which the embedded engine does not have
            return httpx.Response(200, json={})
        return await self.server.handle_async_request(request)


def requests_of_sglang(model_dir: Path) -> list[httpx.Request]:
    """Every request that the client of SGLang makes, to an embedded engine that answers it."""

    async def use(transport: Noted) -> None:
        async with SGLangEngine(HERE, transport=transport) as engine:
            await engine.load_weights(model_dir, "v1")
            await engine.segment_access()
            for way in WAYS:
                tensors = copy_to_host(read_tensors(model_dir))
                sent = SentWeights(version=way, model_dir=model_dir, tensors=tensors, transfer=way)
                await engine.load_weights(sent, way)
            await engine.generate([REQUEST, REQUEST])
            await engine.score([SCORED, SCORED])
            await engine.pause()
            await engine.resume()
            await engine.show_life()
            await engine.abort_running()
            await engine.release_memory()
            await engine.resume_memory()

    with Scheduler(Decoder(model_dir, num_slots=4), model_dir=model_dir) as scheduler:
        noted = Noted(httpx.ASGITransport(app=build_app(scheduler)))
        asyncio.run(use(noted))
    return noted.requests


def requests_of_vllm(model_dir: Path) -> list[httpx.Request]:
    """Every request that the client of vLLM makes, to a script of vLLM's answers."""
    digests = {name: found[0] for name, found in expected_digests(read_tensors(model_dir), torch.float32, ()).items()}
    config = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "model": "", "enable_sleep_mode": True}
    logprobs = {"token_logprobs": [-1.0, -1.0], "top_logprobs": [{"token_id:5": -1.0}]}
    choice = {"token_ids": [5, 6], "logprobs": logprobs, "finish_reason": "length", "index": 0}
    choice |= {"prompt_logprobs": [None, {"8": {"logprob": -1.0}}]}
    answers: dict[str, Any] = {  # Any: JSON
        "/server_info": {"vllm_config": {"model_config": config}},
        "/weight_checker": {"checksums": {f"tp0:{name}": digest for name, digest in digests.items()}},
        "/weight_info": {"weight_version": "v1"},
        "/v1/completions": {"choices": [choice]},
    }
    script = httpx.MockTransport(lambda request: httpx.Response(200, json=answers.get(request.url.path, {})))

    async def use(transport: Noted) -> None:
        async with VLLMEngine("http://engine", transport=transport) as engine:
            await engine.load_weights(model_dir, "v1")
            await engine.generate([REQUEST, REQUEST])
            await engine.score([SCORED, SCORED])
            await engine.show_life()
            await engine.abort_running()
            await engine.release_memory()
            await engine.resume_memory()

    noted = Noted(script)
    asyncio.run(use(noted))
    return noted.requests


def requests_beside_the_clients(kind: EngineKind, model_dir: Path) -> list[httpx.Request]:
    """Those that find out whether a server is ready, that have it go on after a pause, and that ask it as a judge."""
    noted: list[httpx.Request] = []

    def note(request: httpx.Request) -> httpx.Response:
        noted.append(request)
        return httpx.Response(200, json={})

    with httpx.Client(transport=httpx.MockTransport(note)) as client:
        has_generated(client, ENGINES[kind].probe, HERE, timeout_s=1.0)
        resume_generation(client, ENGINES[kind].resume_paths, HERE)
    path = "/v1/chat/completions" if kind == "vllm" else NATIVE_PATH
    return [*noted, httpx.Request("POST", f"{HERE}{path}", json=asked_as_a_judge(path, model_dir))]


def asked_as_a_judge(path: str, model_dir: Path) -> Any:  # Any: JSON
    """The body that a judge at this path is sent."""
    service = Service(lambda body: (400, {}))
    thread = threading.Thread(target=service.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    url = service.url + path.removesuffix("/chat/completions")
    config = RewardConfig(kind="judge", url=url, model=str(model_dir), judge_prompt="{response}", max_retries=0)
    with pytest.raises(RewardError):
        asyncio.run(create_judge_reward(config)(Sample(prompt="q", response="1+1=?")))
    service.server.shutdown()
    service.server.server_close()
    return service.bodies[0]


REQUESTS_OF: dict[EngineKind, Callable[[Path], list[httpx.Request]]] = {
    "sglang": requests_of_sglang,
    "vllm": requests_of_vllm,
}
SPEC_OF: dict[EngineKind, str] = {"sglang": "sglang-0.5.23.openapi.json", "vllm": "vllm-0.32.openapi.json"}
WAYS: tuple[SentBy, ...] = ("gloo", "tensors")
"""NCCL's requests are those of gloo."""
UNPUBLISHED = {"/collective_rpc"}
"""vLLM reads their bodies without publishing a form of them; tests/engines asks the real one."""


@pytest.mark.specs
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_every_request_is_valid_under_the_published_schema(kind: EngineKind, quickstart_dir: Path) -> None:
    spec = load_spec(SPEC_OF[kind])
    model_dir = quickstart_dir / "base_model"
    for request in [*REQUESTS_OF[kind](model_dir), *requests_beside_the_clients(kind, model_dir)]:
        path = request.url.path
        operation = spec["paths"][path][request.method.lower()]
        parameters = {parameter["name"]: parameter["schema"] for parameter in operation.get("parameters", [])}
        for name, value in request.url.params.multi_items():
            assert name in parameters, f"{path} does not know the parameter {name}"
            is_text = parameters[name].get("type") == "string"
            jsonschema.validate(value if is_text else json.loads(value), {**spec, **parameters[name]})
        if "requestBody" not in operation:
            assert request.content in (b"", b"{}") or path in UNPUBLISHED, f"{path} takes no body"
            continue
        assert request.content or not operation["requestBody"].get("required"), f"{path} wants a body"
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = json.loads(request.content or b"{}")
        jsonschema.validate(body, {**spec, **schema})
        unknown = body.keys() - properties_of(spec, schema)
        assert not unknown, f"{path} does not know {unknown}"


@pytest.mark.parametrize(("kind", "modules"), [("sglang", (sglang_module, sending_module)), ("vllm", (vllm_module,))])
def test_no_endpoint_that_a_client_names_is_left_out(
    kind: EngineKind, modules: tuple[ModuleType, ...], quickstart_dir: Path
) -> None:
    """Else a new request would be sent without having been compared with the server's description."""
    asked = {request.url.path for request in REQUESTS_OF[kind](quickstart_dir / "base_model")}
    named = {path for module in modules for path in re.findall(r'"(/[a-z0-9_/]+)"', inspect.getsource(module))}
    # SGLang has no segments, and /v1 begins the paths of adapters, which tests/engines/test_adapters.py asks for.
    assert named - asked == {"sglang": {"/update_weights_from_segments"}, "vllm": {"/v1"}}[kind]


def properties_of(spec: dict[str, Any], schema: dict[str, Any]) -> set[str]:  # Any: JSON
    """The names of the fields of a schema, through references and alternatives."""
    if "$ref" in schema:
        return properties_of(spec, spec["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    inner = [properties_of(spec, each) for each in schema.get("anyOf", [])]
    return set(schema.get("properties", {})).union(*inner)
