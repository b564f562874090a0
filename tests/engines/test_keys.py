"""Pins that a real server answers nobody without its key, and that the key is read from no list of processes or log.

Without it other users of a machine could take weights, replace them, or run code in the engine's process.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import httpx
import pytest

from rollouts_core.config import EngineKind, SamplingConfig
from rollouts_core.engines import GenerationRequest, SGLangEngine, VLLMEngine
from rollouts_core.errors import EngineError
from tests.engines.models import SavedModel
from tests.engines.servers import serving

pytestmark = pytest.mark.timeout(400)

KEY = "5d1e-known-to-nobody"
REQUEST = GenerationRequest(
    prompt_tokens=[4, 8, 9], sampling=SamplingConfig(max_new_tokens=8), stop_token_ids=(), seed=0
)
GUARDED = {
    "embedded": ("/generate", "/model_info", "/update_weights_from_disk", "/pause_generation"),
    "sglang": ("/generate", "/model_info", "/update_weights_from_disk", "/pause_generation"),
    "vllm": ("/v1/completions", "/collective_rpc", "/update_weight_version", "/sleep", "/tokenize", "/invocations"),
}
"""vLLM itself guards the first alone."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("embedded", marks=pytest.mark.slow),
        pytest.param("sglang", marks=[pytest.mark.engine, pytest.mark.matrix]),
        pytest.param("vllm", marks=[pytest.mark.engine, pytest.mark.matrix]),
    ],
)
def test_a_server_with_a_key_answers_those_who_have_it(
    kind: EngineKind, start: SavedModel, trained: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    with serving(kind, start.directory, tmp_path / "run", api_key_variable="ENGINE_KEY") as server:

        async def use() -> None:
            async with server.client() as engine:
                await engine.load_weights(trained.directory, "trained-1")
                [completion] = await engine.generate([REQUEST])
                assert completion.version_spans[0][0] == "trained-1"
            client = VLLMEngine if kind == "vllm" else SGLangEngine
            async with client(server.url, api_key="another") as stranger:
                with pytest.raises(EngineError, match=r"requires another API key.*rollout\.engine\.api_key_variable"):
                    await stranger.generate([REQUEST])

        asyncio.run(use())
        for path in GUARDED[kind]:
            assert httpx.post(f"{server.url}{path}", json={}, timeout=60.0).status_code == 401
        commands = subprocess.run(["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True, check=True).stdout
        assert KEY not in commands
        log = (server.run_dir / "log.txt").read_text()
        assert KEY not in log
        assert KEY not in (server.run_dir / "job.json").read_text()
