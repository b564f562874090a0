"""Let engines on the trainer's GPUs free their memory while the trainer trains.

Not here: the servers' own calls (sglang.py, vllm.py), their command lines (launch.py).

    generate -> release_memory -> train -> release_cache -> resume_memory -> publish -> generate
                (engines)                  (trainer)        (engines)

An engine frees its cache and its weights without saving a copy. When the engine allocates the memory again, the content
is undefined. The engine therefore gets weights before it generates again, also after a step that trained nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio

from rollouts_core.backends.protocol import TrainingBackend
from rollouts_core.engines.protocol import InferenceEngine
from rollouts_core.errors import EngineError
from rollouts_core.system.concurrency import gather


@asynccontextmanager
async def memory_handed_over(
    backend: TrainingBackend, engines: Sequence[InferenceEngine], *, is_colocated: bool
) -> AsyncIterator[None]:
    """Let the engines release their memory during the block, if `is_colocated`. Afterwards the caller must load
    weights.

    Raises:
        EngineError: an engine cannot release memory, or did not allocate its memory again.
    """
    if not is_colocated:
        yield
        return
    await gather([engine.release_memory for engine in engines])
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True), suppress(EngineError):  # the next caller expects engines with memory
            await _take_back(backend, engines)
        raise
    await _take_back(backend, engines)


async def _take_back(backend: TrainingBackend, engines: Sequence[InferenceEngine]) -> None:
    await backend.release_cache().result()
    await gather([engine.resume_memory for engine in engines])
