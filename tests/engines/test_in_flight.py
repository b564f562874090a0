"""Pins against every real server what becomes of completions amid which weights are published.

Without it tokens of the old weights are trained on with log-probs of the new ones, or a completion that was broken off
is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import anyio
import pytest

from rollouts_core.config import InFlight
from rollouts_core.engines import Completion, InFlightEngine
from rollouts_core.errors import EngineError
from rollouts_core.types import Status
from tests.engines.asking import check_spans, is_seen_at_work, start_all
from tests.engines.models import SavedModel
from tests.engines.servers import Server

pytestmark = pytest.mark.timeout(400)


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
