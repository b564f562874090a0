"""Pins what the real servers say about handing memory over on a CPU, where none of them can.

Both answer 200 and keep everything when they are asked: without a check the trainer would run out of memory on a GPU.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts_core.config import DeploymentConfig, EngineConfig, EngineKind, ModelConfig, SamplingConfig
from rollouts_core.engine_log import explain_engine_log
from rollouts_core.engines import GenerationRequest
from rollouts_core.errors import EngineError
from rollouts_core.job import InputModel, ServeJob
from tests.engines.conftest import SavedModel
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


@pytest.mark.engine
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
    assert "leave deployment.colocated out" in explain_engine_log(ended.stdout + ended.stderr)


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
    assert "deployment.colocated: no GPU is here" in ended.stdout + ended.stderr
