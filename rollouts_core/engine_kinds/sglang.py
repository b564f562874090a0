"""The `EngineSpec` of SGLang: its command line, requirements and properties."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts_core.engine_kinds.spec import (
    LLAMA_LIKE,
    EngineBuild,
    EngineSpec,
    LaunchPart,
    ScoringAPI,
    memory_share,
    num_gpus_per_engine,
    read_scores,
)

if TYPE_CHECKING:
    from rollouts_core.job import ServeJob

ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Values that this project passes as --max-lora-rank, although SGLang accepts any value."""
ADAPTED_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of `LLAMA_LIKE` models."""
LIST_ARCHITECTURES = r"""
import importlib.util, pathlib, re
models = pathlib.Path(importlib.util.find_spec("sglang").submodule_search_locations[0], "srt/models")
for file in models.rglob("*.py"):
    for entry in re.findall(r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", file.read_text(encoding="utf-8"), re.M):
        print("\n".join(re.findall(r"\w+", entry)))
"""
"""Program that reads SGLang's model modules as text. Importing the modules would take a minute and fail on unsupported
GPUs."""


def render(job: ServeJob, model_dir: Path, *, dtype: str, on_gpu: bool) -> LaunchPart:
    """The interpreter's arguments that start SGLang's server, and environment variables."""
    num_running = job.deployment.max_running_requests
    arguments = [
        *("-P", "-m", "sglang.launch_server", "--model-path", str(model_dir)),
        *("--host", job.host, "--port", str(job.port), "--dtype", dtype),
        *(["--context-length", str(job.context_length)] if job.context_length else []),
        *("--max-running-requests", str(num_running), "--tp-size", num_gpus_per_engine(job)),
        *(_render_name(job.served_name) if job.served_name else ["--skip-tokenizer-init"]),  # RL sends token ids
        *(["--enable-memory-saver"] if job.deployment.colocated else []),
    ]
    if on_gpu:
        arguments += [*render_adapters(job.adapter_rank), *memory_share(job, SGLANG.memory_argument)]
        return LaunchPart(arguments=tuple(arguments), env={})
    on_cpu = [
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle", "--mem-fraction-static", "0.2"),
        *(["--max-total-tokens", str(job.context_length * num_running)] if job.context_length else []),
    ]
    env = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(job.deployment.engine_threads)}
    return LaunchPart(arguments=(*arguments, *on_cpu), env=env)


def _render_name(name: str) -> list[str]:
    """The arguments for a server that users query. For "auto", SGLang chooses the parser by the chat template."""
    return ["--served-model-name", name, "--tool-call-parser", "auto", "--reasoning-parser", "auto"]


def render_adapters(rank: int) -> list[str]:
    """The arguments that make room for two adapters: the served adapter, and the next adapter while it loads."""
    if not rank:
        return []
    return [
        *("--enable-lora", "--max-lora-rank", str(SGLANG.rank_of_slots(rank)), "--max-loras-per-batch", "2"),
        *("--lora-target-modules", *ADAPTED_LAYERS),
    ]


def render_key(api_key: str, folder: Path) -> LaunchPart:
    """Pass the API key in a private file, because other users can see the arguments of a process."""
    file = folder / "key.yaml"
    file.touch(mode=0o600)
    file.write_text(f"api-key: {json.dumps(api_key)}\n", encoding="utf-8")
    # At the level "info", SGLang's log begins with all settings, including the API key.
    return LaunchPart(arguments=("--config", str(file), "--log-level", "warning"), env={})


def _render_scoring(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {"input_ids": list(rows)}


def _read_scoring(answer: Any) -> list[list[float]]:  # Any: JSON
    return [read_scores(row["embedding"]) for row in answer]


SGLANG = EngineSpec(
    title="SGLang",
    client="rollouts_core.engines.sglang:SGLangEngine",
    probe=("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}),
    resume_paths=("/continue_generation",),  # a request while its memory is released would crash SGLang
    transfers=("auto", "gloo", "nccl", "tensors"),
    reserved_tokens=2,
    package="sglang",
    # SGLang's CUDA 13.0 needs the driver 580.65.06: table 2 of the release notes of the CUDA Toolkit 13.0. The disk
    # size is an estimate from the sizes of the wheels. SGLang has no build for CPUs that installs automatically.
    cuda_build=EngineBuild(
        package="sglang",
        requirements="sglang-cuda.txt",
        disk_gb=14.0,
        minutes=8.0,
        min_driver=(580, 65, 6),
    ),
    list_architectures=LIST_ARCHITECTURES,
    adapter_form="folder",
    adapts_on_cpu=False,  # SGLang pins the memory of adapters, which needs a GPU
    adapter_ranks=ADAPTER_RANKS,
    adapted_architectures=LLAMA_LIKE,
    render=render,
    render_key=render_key,
    memory_argument="--mem-fraction-static",
    # SGLang makes NCCL share memory without CUDA's virtual memory (`_set_envs_and_config` in its
    # srt/entrypoints/engine.py). NCCL reads the variable once, when the first group is created.
    nccl_variables={"NCCL_CUMEM_ENABLE": "0"},
    scoring=ScoringAPI(path="/classify", render=_render_scoring, read=_read_scoring, num_reserved=1),
)
