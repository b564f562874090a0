"""Why an engine that ended did so, from the end of its log.

Not here: starting engines (engines/launch.py), waiting for them (tasks/engine.py, engines/child.py). Nothing here
imports torch: the orchestrator reads logs too.
"""

from __future__ import annotations

import re

SIGNS = (
    (r"address already in use|EADDRINUSE", "its port is in use: choose another port or end what listens there"),
    (
        r"out of memory|OutOfMemoryError|Cannot allocate memory|std::bad_alloc",
        "it ran out of memory: use a smaller model, a smaller context or more memory",
    ),
    (
        r"less than desired GPU memory utilization",
        "other programs have memory of its GPU: end them, give it a GPU of its own (deployment.engine_gpu_ranks), or "
        "let it take less by --gpu-memory-utilization in rollout.engine.extra_args",
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory"
        r"|Not enough memory\. Please try to increase|leave no GPU memory for the KV cache"
        r"|increase --mem-fraction-static",
        "its share of the memory does not hold the model and the context of completions: give it more by "
        "--mem-fraction-static (SGLang) or --gpu-memory-utilization (vLLM) in rollout.engine.extra_args, or use a "
        "smaller model or context",
    ),
    (
        r"Unsupported CPU attention configuration|head_size .*not supported|head size .* is not supported",
        "it cannot compute the model's attention here: its heads have a size that this engine lacks on this device",
    ),
    (
        r"unrecognized arguments?:|error: argument --",
        "it does not know one of its arguments: see rollout.engine.extra_args",
    ),
    (
        r"torch-memory-saver is not installed|No module named 'torch_memory_saver'",
        "it hands its memory over with the package torch-memory-saver, which its environment lacks: install it there, "
        "or leave deployment.colocated out",
    ),
    (
        r"Sleep mode is not supported|cumem allocator is not supported",
        "it cannot hand its memory over on this device: leave deployment.colocated out",
    ),
    (r"No module named", "a package is missing in its environment: install the engine there anew"),
    (
        r"driver on your system is too old|CUDA driver version is insufficient",
        "its torch is built for a newer CUDA than the GPU driver of its machine knows: update the driver, install a "
        "build for an older CUDA in its environment, or rent by node.query.min_cuda",
    ),
    (
        r"system not yet initialized|cudaErrorSystemNotReady",
        "the GPUs of its machine are not ready, because what joins them (nvidia-fabricmanager) does not run: start "
        "that, or take another machine",
    ),
    (
        r"no kernel image is available for execution",
        "its build cannot compute on this type of GPU: install one that can in its environment, or use another GPU",
    ),
    (
        r"no NVIDIA driver|No CUDA GPUs are available|invalid device ordinal",
        "it found no GPU that it can use: check the driver and deployment.engine_gpu_ranks",
    ),
    (
        r"Bfloat16 is only supported on GPUs",
        'its GPU has no bfloat16: set rollout.engine.dtype = "float16"',
    ),
    (
        r"failed to dispatch data type Float\b|only supports? fp16|Only Float16 or BFloat16 is supported",
        'it has no kernels for float32 on a GPU: set rollout.engine.dtype = "bfloat16"',
    ),
    (
        r"greater than the derived|maximum context length.*greater|longer than the maximum model length",
        "the context is longer than the model allows: lower rollout.max_prompt_tokens or sampling.max_new_tokens",
    ),
    (r"No space left on device", "its disk is full: free some space"),
    (
        r"RepositoryNotFoundError:|Repository Not Found for|is not a local folder",
        "its model is missing at the hub, or private: check its name, or set HF_TOKEN to a token that may read it",
    ),
    (
        r"GatedRepoError|Cannot access gated repo|access a gated repo|401 Client Error|403 Client Error|403 Forbidden",
        "the hub refuses the model: accept its terms and set HF_TOKEN to a token that may read it",
    ),
    (
        r"No such file or directory"
        r"|FileNotFoundError|LocalEntryNotFoundError|does not appear to have a file named",
        "its model, or a file of it, is missing: check the model's path or name",
    ),
    (
        r"NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError",
        "its GPUs cannot talk to each other by NCCL: look whether /dev/shm is large enough and what NCCL_DEBUG=INFO "
        "says, or give it a single GPU",
    ),
)


def explain_engine_log(log: str) -> str:
    """One sentence about why an engine failed, from the end of its log; empty when no known sign is in it."""
    for pattern, sentence in SIGNS:
        if re.search(pattern, log, re.IGNORECASE):
            return sentence
    return ""
