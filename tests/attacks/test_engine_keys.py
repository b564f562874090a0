"""Strangers who reach an engine with a key: no endpoint answers them, also none of vLLM's that its own key leaves open.

Without these tests other users of a machine could replace weights, or run code in the engine's process.
`tests/engines/test_keys.py` tries the same on the real servers.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.gate import Gate
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.engine_kinds.vllm import GATE
from rollouts_core.engines.in_vllm import rollouts_gate
from rollouts_core.engines.launch import render_launch
from tests.rollouts_core.embedded.tiny_models import make_model, save_model
from tests.rollouts_core.engines.test_launch import job_of, option

KEY = "sesame"


async def answer(_: Any, __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def ask(app: Any, method: str, path: str, authorization: str = "") -> int:
    async def ask_app() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            headers = {"Authorization": authorization} if authorization else {}
            return (await client.request(method, path, headers=headers)).status_code

    return asyncio.run(ask_app())


def test_no_endpoint_of_the_embedded_engine_answers_without_the_key(tmp_path: Path) -> None:
    directory = save_model(make_model(), tmp_path / "model")
    with Scheduler(Decoder(directory, num_slots=1), model_dir=directory) as scheduler:
        app = build_app(scheduler)
        routes: list[Any] = app.routes
        asked = [(method, route.path) for route in routes for method in route.methods]
        assert {ask(Gate(app, KEY), method, path) for method, path in asked} == {401}
        assert ask(Gate(app, KEY), "GET", "/model_info", f"Bearer {KEY}") == 200


@pytest.mark.parametrize("path", ["/collective_rpc", "/sleep", "/tokenize", "/v1/completions", "/health", "//health"])
def test_vllms_endpoints_ask_for_the_key(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    guarded = rollouts_gate.Gate(answer)
    assert ask(guarded, "POST", path) == 401
    assert ask(guarded, "POST", path, "Bearer other") == 401
    assert ask(guarded, "POST", path, f"Bearer {KEY}") == 200
    assert ask(guarded, "GET", "/health") == 200


def test_vllm_is_started_with_the_gate_and_finds_it() -> None:
    """By an interpreter that has none of this project's packages."""
    command = render_launch(job_of({"kind": "vllm", "dtype": "float16"}), Path("/models/m"), on_gpu=True)
    assert option(command.argv, "--middleware") == GATE
    module, _, name = GATE.partition(".")
    program = f"import {module}; {module}.{name}(None); import sys; assert 'rollouts_core' not in sys.modules"
    environment = {"PYTHONPATH": command.env["PYTHONPATH"], "VLLM_API_KEY": KEY}
    subprocess.run([sys.executable, "-P", "-S", "-c", program], env=environment, check=True)
