"""Requests to engines, and comparisons of the answers with a transformers forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import httpx
import torch
from transformers import PreTrainedModel

from rollouts_core.config import SamplingConfig
from rollouts_core.engines import Completion, GenerationRequest, InFlightEngine
from rollouts_core.engines.client import EngineClient
from rollouts_core.rollout.generate import complete_request
from rollouts_core.system.concurrency import gather
from tests.engines.models import SavedModel
from tests.engines.servers import Server
from tests.rollouts_core.embedded.tiny_models import expected_logprobs

Engine = EngineClient
ResultT = TypeVar("ResultT")
PROMPT = [4, 8, 9, 2, 5]
LOGPROB_TOLERANCE = 1e-4


def ask(
    prompt: list[int] = PROMPT,
    *,
    temperature: float = 1.0,
    num_tokens: int = 12,
    seed: int = 0,
    stop: tuple[int, ...] = (),
) -> GenerationRequest:
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=num_tokens)
    return GenerationRequest(prompt_tokens=prompt, sampling=sampling, stop_token_ids=stop, seed=seed)


def with_client(server: Server, use: Callable[[Engine], Awaitable[ResultT]]) -> ResultT:
    """What `use` returns of a new client."""

    async def run() -> ResultT:
        async with server.client() as client:
            return await use(client)

    return asyncio.run(run())


def worst_gap(saved: SavedModel, request: GenerationRequest, completion: Completion) -> float:
    """How far a completion's log-probs are from a transformers forward pass, nats."""
    temperature = request.sampling.temperature or 1.0
    expected = expected_logprobs(saved.model, request.prompt_tokens, completion.tokens, temperature=temperature)
    return float((expected - torch.tensor(completion.logprobs)).abs().max())


def versions_of(completions: list[Completion]) -> set[str]:
    return {version for completion in completions for version, _, _ in completion.version_spans}


def num_running(server: Server) -> int:
    """Requests that the server works on, by its own count."""
    if server.job.engine.kind == "vllm":
        lines = httpx.get(f"{server.url}/metrics", timeout=60.0).text.splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running")))
    if server.job.engine.kind == "sglang":
        loads = httpx.get(f"{server.url}/v1/loads", timeout=60.0).json()["loads"]
        return sum(int(load["num_running_reqs"]) for load in loads)
    return int(httpx.get(f"{server.url}/server_info", timeout=60.0).json()["internal_states"][0]["num_running_reqs"])


REQUESTS = [
    GenerationRequest(
        prompt_tokens=[4, 8, 9, 2, place],
        sampling=SamplingConfig(temperature=1.0, max_new_tokens=500),
        stop_token_ids=(),
        seed=0,
    )
    for place in range(2, 26)
]


def start_all(engine: InFlightEngine) -> asyncio.Future[list[Completion]]:
    """All requests, under way."""
    return asyncio.ensure_future(gather([partial(complete_request, engine, request) for request in REQUESTS]))


async def is_seen_at_work(server: Server, under_way: asyncio.Future[list[Completion]]) -> bool:
    """True as soon as the server says that it works on requests; False when they ended before."""
    while not under_way.done():
        if await asyncio.to_thread(num_running, server):
            return True
    return False


def check_spans(models: Mapping[str, PreTrainedModel], completions: Sequence[Completion]) -> set[str]:
    """Each token has to be of the version that its span names; returns those that are named.

    Args:
        completions: of `REQUESTS`, in their order.
    """
    seen: set[str] = set()
    for request, completion in zip(REQUESTS, completions, strict=True):
        for version, begin, end in completion.version_spans:
            expected = expected_logprobs(models[version], request.prompt_tokens, completion.tokens)
            gaps = (expected - torch.tensor(completion.logprobs)).abs()[begin:end]
            assert gaps.numel() == 0 or float(gaps.max()) < LOGPROB_TOLERANCE
            seen.add(version)
    return seen
