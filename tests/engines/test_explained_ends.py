"""Pins that a real engine that cannot start is explained by what it printed.

The texts are those of its versions and of its libraries': they change, and a user would read two hundred lines again.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollouts_core.config import EngineKind
from rollouts_core.engine_log import explain_engine_log
from tests.engines.models import SavedModel
from tests.engines.servers import engine_python
from tests.rollouts_core.data.hub import Hub, serve_hub

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

END_TIMEOUT_S = 300.0
COMMANDS = {
    "sglang": ("-m", "sglang.launch_server", "--device", "cpu", "--model-path"),
    "vllm": ("-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--max-model-len", "64", "--model"),
}
VARIABLES = {"sglang": {"SGLANG_USE_CPU_ENGINE": "1"}, "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1"}}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as hub:
        yield hub


def end_of(kind: EngineKind, model: str, folder: Path, hub: Hub, *, port: int = 1) -> str:
    """What an engine prints that cannot start; it has nothing in its cache and no token."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    ended = subprocess.run(
        [engine_python(kind), *COMMANDS[kind], model, "--host", "127.0.0.1", "--port", str(port)],
        env=kept | VARIABLES[kind] | {"HF_HOME": str(folder), "HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=END_TIMEOUT_S,
        check=False,
        text=True,
    )
    assert ended.returncode != 0
    return ended.stdout


@pytest.mark.parametrize("kind", ["sglang", pytest.param("vllm", marks=pytest.mark.matrix)])
def test_a_gated_model_is_refused_by_the_hub(kind: EngineKind, hub: Hub, tmp_path: Path) -> None:
    hub.gated.add("team/gated")
    log = end_of(kind, "team/gated", tmp_path, hub)
    assert "the hub refuses the model: accept its terms" in explain_engine_log(log), log


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_model_that_the_hub_does_not_show_is_missing_or_private(kind: EngineKind, hub: Hub, tmp_path: Path) -> None:
    log = end_of(kind, "team/nothing", tmp_path, hub)
    assert "missing at the hub, or private" in explain_engine_log(log), log


def test_a_port_is_in_use(hub: Hub, start: SavedModel, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        log = end_of("vllm", str(start.directory), tmp_path, hub, port=taken.getsockname()[1])
    assert "its port is in use" in explain_engine_log(log), log
