"""Pins that adapters reach the real servers as adapters, and that they sample from the policy that is trained.

Without it RL would sample from the start model, or from the adapters of an earlier step, and only the reward shows it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts_core.backends.pytorch import PyTorchTrainingBackend
from rollouts_core.config import LoRAConfig, ModelConfig, PolicyConfig
from rollouts_core.engine_kinds.sglang import render_adapters
from rollouts_core.engines import PublishTarget, SGLangEngine, VLLMEngine, publish_weights
from rollouts_core.engines.launch import render_launch
from rollouts_core.engines.transfer.adapters import AdaptedWeights
from rollouts_core.errors import EngineError
from tests.engines.models import SavedModel
from tests.engines.servers import START_TIMEOUT_S, make_server, started_by_hand
from tests.rollouts_core.engines.transfer.test_adapters import TOLERANCE, sampled_gap, target_of, trained_backend
from tests.rollouts_core.model.test_policy import take_steps

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

RANK = 5
"""No rank that a server has slots for: it takes larger ones."""
POLICY = PolicyConfig(precision="bfloat16", lora=LoRAConfig(rank=RANK, alpha=15))


async def publish_and_go_on(
    engine: SGLangEngine | VLLMEngine, backend: PyTorchTrainingBackend, target: PublishTarget
) -> None:
    """Publish two versions, the second without the weights below, and one that the server refuses."""
    assert (await engine.adapter_form(RANK), await engine.adapter_form(1000)) == ("folder", "")
    await publish_weights(backend, [engine], target)
    assert await sampled_gap(engine, backend) < TOLERANCE
    await asyncio.to_thread(take_steps, backend, range(2, 4))
    assert await sampled_gap(engine, backend) > 100 * TOLERANCE
    base = target.weights_dir / "run-base" / "model.safetensors"
    written = base.stat().st_mtime_ns
    await publish_weights(backend, [engine], target)
    assert await sampled_gap(engine, backend) < TOLERANCE
    assert base.stat().st_mtime_ns == written
    assert await engine._adapters.names() == ["run-4"]
    published = target.newest.weights
    assert isinstance(published, AdaptedWeights)
    with pytest.raises(EngineError, match="load_lora_adapter answered 40"):
        await engine.take_adapters(replace(published, folder=published.folder.with_name("missing")), "run-5")
    assert await sampled_gap(engine, backend) < TOLERANCE
    assert await engine.weight_version() == "run-4"


def test_vllm_samples_from_the_trained_policy_also_after_a_restart(start: SavedModel, tmp_path: Path) -> None:
    model = ModelConfig(path=str(start.directory))
    backend, target = trained_backend(model, POLICY), target_of(model, tmp_path)
    server = make_server("vllm", start.directory, tmp_path / "run", adapter_rank=RANK)

    async def train() -> None:
        async with VLLMEngine(server.url, restart_timeout_s=2 * START_TIMEOUT_S) as engine:
            await engine.wait_until_ready(2 * START_TIMEOUT_S)
            await publish_and_go_on(engine, backend, target)
            server.kill()
            server.start()
            assert await sampled_gap(engine, backend) < TOLERANCE

    try:
        server.start()
        asyncio.run(train())
    finally:
        server.kill()


@pytest.mark.matrix
def test_sglang_samples_from_the_trained_policy(start: SavedModel, tmp_path: Path) -> None:
    model = ModelConfig(path=str(start.directory))
    backend, target = trained_backend(model, POLICY), target_of(model, tmp_path)
    server = make_server("sglang", start.directory, tmp_path / "run")
    command = render_launch(server.job, start.directory, on_gpu=False)
    argv = (*command.argv, *render_adapters(RANK), "--lora-backend", "torch_native")
    env = {**command.env, "PYTHONPATH": str(Path(__file__).parent / "unpinned")}

    async def train() -> None:
        async with SGLangEngine(server.url) as engine:
            await engine.wait_until_ready(START_TIMEOUT_S)
            await publish_and_go_on(engine, backend, target)

    with started_by_hand(replace(command, argv=argv, env=env), tmp_path):
        asyncio.run(train())
