"""Pins that vLLM's silent failure with tied embeddings cannot reach training, and that it is still there.

vLLM answers 200 to `reload_weights` of a model whose output head is its embedding, takes all tensors over but the head,
and samples from half of each. Without these tests an RL run on a small Qwen or Llama model trains on noise.
When the last assertion of the first test fails, vLLM has mended it: then `content.write_untied` can go.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import httpx
import pytest

from rollouts.infra.ports import find_free_port
from rollouts.infra.session import LocalSession
from rollouts_core.config import DeploymentConfig, EngineConfig, ModelConfig
from rollouts_core.engines import VLLMEngine
from rollouts_core.engines.launch import render_launch
from rollouts_core.engines.transfer.canary import checkpoint_canary, prove
from rollouts_core.errors import WeightSyncError
from rollouts_core.job import InputModel, ServeJob
from tests.engines.asking import LOGPROB_TOLERANCE, ask, worst_gap
from tests.engines.models import SavedModel
from tests.engines.servers import START_TIMEOUT_S, engine_python, started_by_hand

pytestmark = [pytest.mark.engine, pytest.mark.matrix, pytest.mark.timeout(400)]


async def wait_until_ready(address: str) -> None:
    async with VLLMEngine(address) as engine:
        await engine.wait_until_ready(START_TIMEOUT_S)


@pytest.fixture(scope="module")
def url(start: SavedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A vLLM that somebody started by hand, on the tied model itself."""
    job = ServeJob(
        model=InputModel(name="base", model=ModelConfig(path=str(start.directory)), digest=""),
        port=find_free_port(LocalSession(sys.executable)),
        context_length=256,
        engine=EngineConfig(kind="vllm", python=str(engine_python("vllm"))),
        deployment=DeploymentConfig(max_running_requests=8),
    )
    command = render_launch(job, start.directory, on_gpu=False)
    address = f"http://127.0.0.1:{job.port}"
    with started_by_hand(command, tmp_path_factory.mktemp("by_hand")):
        asyncio.run(wait_until_ready(address))
        yield address


def test_an_update_that_keeps_the_old_head_is_refused_and_the_canary_would_see_it(
    url: str, start: SavedModel, trained: SavedModel
) -> None:
    async def load() -> None:
        async with VLLMEngine(url) as engine:
            await engine.load_weights(trained.directory, "trained-1")

    with pytest.raises(WeightSyncError, match=f"{url} serves a model whose output head is its embedding"):
        asyncio.run(load())

    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(trained.directory)}}
    with httpx.Client(base_url=url, timeout=60.0) as client:
        assert client.post("/collective_rpc", json=reload).status_code == 200
        assert client.post("/reset_prefix_cache").status_code == 200

    async def look() -> tuple[float, str]:
        async with VLLMEngine(url) as engine:
            [completion] = await engine.generate([ask()])
            gap = worst_gap(trained, ask(), completion)
            with pytest.raises(WeightSyncError) as caught:
                await prove(engine.name, engine.complete, checkpoint_canary(trained.directory))
            return gap, str(caught.value)

    gap, complaint = asyncio.run(look())
    assert "nats per token away from those of the published weights" in complaint
    assert gap > 1.0 > LOGPROB_TOLERANCE
