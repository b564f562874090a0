"""Pins against every real server what becomes of completions amid which weights are published.

Without it tokens of the old weights are trained on with log-probs of the new ones, or a completion that was broken off
is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

import anyio
import pytest
import torch
from transformers import PreTrainedModel

from rollouts_core.config import InFlight, SamplingConfig
from rollouts_core.engines import Completion, GenerationRequest, InFlightEngine
from rollouts_core.errors import EngineError
from rollouts_core.rollout.generate import complete_request
from rollouts_core.system.concurrency import gather
from rollouts_core.types import Status
from tests.engines.conftest import SavedModel
from tests.engines.servers import Server
from tests.engines.test_contract import LOGPROB_TOLERANCE, num_running
from tests.rollouts_core.embedded.tiny_models import expected_logprobs

pytestmark = pytest.mark.timeout(400)

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


async def publish_amid(server: Server, in_flight: InFlight, start: SavedModel, trained: SavedModel) -> list[Completion]:
    """Completions, more than the server has room for, during which other weights are published."""
    client = server.client()
    engine = InFlightEngine(client, in_flight)
    try:
        for _ in range(10):
            await engine.load_weights(start.directory, "start-1")
            with anyio.fail_after(120):
                while not await is_seen_at_work(server, under_way := start_all(engine)):
                    await under_way  # they ended before the server told of them
            await engine.load_weights(trained.directory, "trained-1")
            completions = await under_way
            if in_flight == "finish" or most_versions(completions) > 1:
                return completions
        raise AssertionError("the requests ended every time before the weights were published")
    finally:
        await client.aclose()


def most_versions(completions: Sequence[Completion]) -> int:
    """Of how many versions the tokens of one completion are at most."""
    return max(len({version for version, begin, end in c.version_spans if begin < end}) for c in completions)


@pytest.mark.parametrize("in_flight", ["finish", "abort", "continue"])
def test_every_token_is_of_the_version_that_its_span_names(
    server: Server, start: SavedModel, trained: SavedModel, in_flight: InFlight
) -> None:
    if in_flight == "continue" and server.job.engine.kind == "vllm":
        with pytest.raises(EngineError, match="vLLM, which cannot go on with new weights"):
            asyncio.run(publish_amid(server, in_flight, start, trained))
        return
    completions = asyncio.run(publish_amid(server, in_flight, start, trained))
    check_spans({"start-1": start.model, "trained-1": trained.model}, completions)
    assert {completion.status for completion in completions} <= {Status.TRUNCATED, Status.COMPLETED}
    assert most_versions(completions) == (1 if in_flight == "finish" else 2)
