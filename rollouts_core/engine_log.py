"""Explain why an engine ended, from the end of its log.

This file must not import torch, because the orchestrator also reads these logs.
"""

from __future__ import annotations

import re

SIGNS = (
    (r"address already in use|EADDRINUSE", "its port is in use: choose another port or end the program that uses it"),
    (
        r"out of memory|OutOfMemoryError|Cannot allocate memory|std::bad_alloc",
        "it ran out of memory: use a smaller model, a smaller context or more memory",
    ),
    (
        r"less than desired GPU memory utilization",
        "other programs use memory of its GPU: end them, give it its own GPU (deployment.engine_gpu_ranks), or lower "
        "its share with --gpu-memory-utilization in rollout.engine.extra_args",
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory"
        r"|Not enough memory\. Please try to increase|leave no GPU memory for the KV cache"
        r"|increase --mem-fraction-static",
        "its share of the GPU memory is too small for the model and the context: raise the share with "
        "--mem-fraction-static (SGLang) or --gpu-memory-utilization (vLLM) in rollout.engine.extra_args, or use a "
        "smaller model or context",
    ),
    (
        r"Unsupported CPU attention configuration|head_size .*not supported|head size .* is not supported",
        "it cannot compute the model's attention here: the engine does not support this head size on this device",
    ),
    (
        r"unrecognized arguments?:|error: argument --",
        "it does not know one of its arguments: see rollout.engine.extra_args",
    ),
    (
        r"torch-memory-saver is not installed|No module named 'torch_memory_saver'",
        "handing over GPU memory needs the package torch-memory-saver in its environment: install it there, or "
        "remove deployment.colocated",
    ),
    (
        r"Sleep mode is not supported|cumem allocator is not supported",
        "it cannot hand over its memory on this device: remove deployment.colocated",
    ),
    (r"No module named", "a package is missing in its environment: reinstall the engine there"),
    (
        r"driver on your system is too old|CUDA driver version is insufficient",
        "its torch needs a newer CUDA than the GPU driver supports: update the driver, install a build for an older "
        "CUDA in its environment, or rent with node.query.min_cuda",
    ),
    (
        r"system not yet initialized|cudaErrorSystemNotReady",
        "the GPUs of its machine are not ready because the service that connects them (nvidia-fabricmanager) is not "
        "running: start the service, or use another machine",
    ),
    (
        r"no kernel image is available for execution",
        "its build does not support this type of GPU: install a matching build in its environment, or use another GPU",
    ),
    (
        r"no NVIDIA driver|No CUDA GPUs are available|invalid device ordinal",
        "it found no usable GPU: check the driver and deployment.engine_gpu_ranks",
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
        "its GPUs cannot communicate through NCCL: check the size of /dev/shm and the output with NCCL_DEBUG=INFO, or "
        "give it a single GPU",
    ),
)


def explain_engine_log(log: str) -> str:
    """Return a sentence with the cause of an engine's failure, from the end of its log; "" if no known pattern
    matches.
    """
    for pattern, sentence in SIGNS:
        if re.search(pattern, log, re.IGNORECASE):
            return sentence
    return ""
