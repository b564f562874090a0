"""Pins what the real servers say about handing memory over on a CPU, where none of them can.

Both answer 200 and keep everything when they are asked: without a check the trainer would run out of memory on a GPU.
That they know the requests, and generate after them, shows here too: without it that would first show on a GPU.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rollouts_core.config import DeploymentConfig, EngineConfig, EngineKind, ModelConfig, SamplingConfig
from rollouts_core.engine_log import explain_engine_log
from rollouts_core.engines import Completion, GenerationRequest
from rollouts_core.engines.http import create_transport
from rollouts_core.errors import EngineError
from rollouts_core.job import InputModel, ServeJob
from tests.engines.asking import LOGPROB_TOLERANCE, ask, versions_of, worst_gap
from tests.engines.models import SavedModel
from tests.engines.servers import ROOT, Server, engine_python

pytestmark = pytest.mark.timeout(400)

REQUEST = GenerationRequest(
    prompt_tokens=[4, 8, 9], sampling=SamplingConfig(max_new_tokens=8), stop_token_ids=(), seed=0
)
FLAGS = {"sglang": "--enable-memory-saver", "vllm": "--enable-sleep-mode"}


def test_a_server_that_would_keep_its_memory_is_found_out_and_goes_on(server: Server, start: SavedModel) -> None:
    flag = FLAGS.get(server.job.engine.kind)

    async def use() -> None:
        async with server.client() as engine:
            await engine.load_weights(start.directory, "start-7")
            if flag:
                with pytest.raises(EngineError, match=f"was started without {flag}"):
                    await engine.release_memory()
            else:  # the embedded engine has no memory of a GPU
                await engine.release_memory()
                await engine.resume_memory()
                await engine.load_weights(start.directory, "start-7")
            [completion] = await engine.generate([REQUEST])
            assert completion.version_spans[0][0] == "start-7"

    asyncio.run(use())


class StartedForIt(httpx.AsyncBaseTransport):
    """The way to a server, on which it says that it was started with its flag: all else is the server's own."""

    def __init__(self) -> None:
        self.server = create_transport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self.server.handle_async_request(request)
        if request.url.path != "/server_info":
            return response
        said = json.loads(await response.aread())
        if "vllm_config" in said:
            said["vllm_config"]["model_config"]["enable_sleep_mode"] = True
        else:
            said["enable_memory_saver"] = True
        return httpx.Response(200, json=said)

    async def aclose(self) -> None:
        await self.server.aclose()


def test_a_server_takes_the_requests_for_its_memory_and_generates_after_them(
    server: Server, start: SavedModel, trained: SavedModel
) -> None:
    client = type(server.client())
    request = ask()

    async def use() -> Completion:
        async with client(server.url, transport=StartedForIt()) as engine:
            await engine.load_weights(start.directory, "start-8")
            await engine.generate([request])  # its cache has something to lose
            for version in ("trained-8", "trained-9"):  # twice: nothing of the first time is left over
                await engine.release_memory()
                assert await is_asleep(server)
                await engine.resume_memory()
                await engine.load_weights(trained.directory, version)
            [completion] = await engine.generate([request])
            return completion

    completion = asyncio.run(asyncio.wait_for(use(), 200))
    assert versions_of([completion]) == {"trained-9"}
    assert worst_gap(trained, request, completion) < LOGPROB_TOLERANCE


async def is_asleep(server: Server) -> bool:
    """What a server says of itself; only vLLM does."""
    if server.job.engine.kind != "vllm":
        return True
    async with httpx.AsyncClient() as client:
        return bool((await client.get(f"{server.url}/is_sleeping")).json()["is_sleeping"])


@pytest.mark.engine
@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_where_a_server_cannot_hand_memory_over_its_log_says_so_in_a_sentence(
    kind: EngineKind, start: SavedModel, tmp_path: Path
) -> None:
    job = ServeJob(
        model=InputModel(name="base", model=ModelConfig(path=str(start.directory)), digest=""),
        port=1,
        context_length=100,
        engine=EngineConfig(kind=kind, python=str(engine_python(kind)), extra_args=(FLAGS[kind],)),
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "rollouts_core", "serve", str(tmp_path / "job.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode != 0
    assert "remove deployment.colocated" in explain_engine_log(ended.stdout + ended.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_on_a_cpu_the_job_says_it_before_the_server_begins(kind: EngineKind, start: SavedModel, tmp_path: Path) -> None:
    job = ServeJob(
        model=InputModel(name="base", model=ModelConfig(path=str(start.directory)), digest=""),
        port=1,
        context_length=100,
        engine=EngineConfig(kind=kind),
        deployment=DeploymentConfig(colocated=True),
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "rollouts_core", "serve", str(tmp_path / "job.json")]
    env = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert ended.returncode == 2
    assert "deployment.colocated: this machine has no GPU" in ended.stdout + ended.stderr
