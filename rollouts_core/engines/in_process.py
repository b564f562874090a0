"""Serve a model by the embedded engine in this process, without a port: for notebooks, scripts and evaluations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.engines.sglang import SGLangEngine


@asynccontextmanager
async def serve_in_process(
    model_dir: str | Path, *, max_running_requests: int = 64, context_length: int | None = None
) -> AsyncIterator[SGLangEngine]:
    """Load a model on the CPU, and yield a client of the engine that serves it until the end of the block.

    Args:
        model_dir: folder of a model or checkpoint.
        max_running_requests: highest number of completions that are generated together.
        context_length: limit of the tokens of a prompt with its completion; None for the model's own limit.

    Raises:
        CheckpointError: the model cannot be loaded.
    """
    folder = Path(model_dir)
    decoder = Decoder(folder, num_slots=max_running_requests, context_length=context_length)
    with Scheduler(decoder, model_dir=folder) as scheduler:
        engine = SGLangEngine(
            "http://in-process", model_dir=folder, transport=httpx.ASGITransport(app=build_app(scheduler))
        )
        try:
            yield engine
        finally:
            await engine.aclose()
