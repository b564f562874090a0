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
        r"CUDA driver version is insufficient|no NVIDIA driver|No CUDA GPUs are available|invalid device ordinal",
        "it found no GPU that it can use: check the driver and deployment.engine_gpu_ranks",
    ),
    (
        r"max_position_embeddings|maximum context length.*greater|longer than the maximum model length",
        "the context is longer than the model allows: lower rollout.max_prompt_tokens or sampling.max_new_tokens",
    ),
    (r"No space left on device", "its disk is full: free some space"),
    (
        r"GatedRepoError|gated repo|401 Client Error|403 Client Error",
        "the hub refuses the model: accept its terms and give a token that may read it",
    ),
    (
        r"RepositoryNotFoundError|Repository Not Found|is not a local folder|No such file or directory"
        r"|FileNotFoundError|LocalEntryNotFoundError|does not appear to have a file named",
        "its model, or a file of it, is missing: check the model's path or name",
    ),
)


def explain_engine_log(log: str) -> str:
    """One sentence about why an engine failed, from the end of its log; empty when no known sign is in it."""
    for pattern, sentence in SIGNS:
        if re.search(pattern, log, re.IGNORECASE):
            return sentence
    return ""
