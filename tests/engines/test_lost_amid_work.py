"""Pins that an engine which is lost amid requests costs no sample and changes none, and comes back only when proved.

Without it a crash could bias a group, whose other samples were already drawn, or bring samples of start weights into
training; and an engine that hangs could hold the run up for ever.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import anyio
import httpx
import pytest
import torch

from rollouts_core.config import ModelConfig, RolloutConfig, SamplingConfig
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.engines import Completion, EnginePool
from rollouts_core.engines.http import create_transport
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.rollout.generate import create_engine_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.types import Message, Prompt, RolloutBatch, Sample
from tests.engines.asking import LOGPROB_TOLERANCE, REQUESTS, ask, num_running, versions_of, worst_gap
from tests.engines.models import SavedModel
from tests.engines.servers import START_TIMEOUT_S, Server, serving
from tests.rollouts_core.embedded.tiny_models import expected_logprobs

pytestmark = pytest.mark.timeout(400)

GROUP_SIZE = 8
NUM_GROUPS = 16
"""Several times what both engines have room for: some are under way for long."""


def share_of_even_digits(sample: Sample) -> float:
    return sum(character in "02468" for character in sample.response) / (1 + len(sample.response))


ROLLOUT = RolloutConfig(
    batch_size=NUM_GROUPS,
    n_samples_per_prompt=GROUP_SIZE,
    sampling=SamplingConfig(max_new_tokens=400),
    reward_fn=share_of_even_digits,
)
PROMPTS = [
    Prompt(id=f"sum-{number}", messages=(Message(role="user", content=f"{number}+1=?"),))
    for number in range(2 * NUM_GROUPS)
]


@pytest.fixture
def pair(start: SavedModel, tmp_path: Path) -> Iterator[list[Server]]:
    """Two embedded engines, each a process."""
    with (
        serving("embedded", start.directory, tmp_path / "first") as first,
        serving("embedded", start.directory, tmp_path / "second") as second,
    ):
        yield [first, second]


def pool_of(servers: list[Server]) -> EnginePool:
    """A pool that does without an engine a second after it was lost."""
    clients = [type(server.client())(server.url, restart_timeout_s=1.0) for server in servers]
    return EnginePool(clients, retry_s=0.2)


async def sample_two_batches(
    servers: list[Server], trained: SavedModel, amid: Callable[[EnginePool], Awaitable[None]] | None = None
) -> list[RolloutBatch]:
    """Two batches of the published weights; `amid` goes on beside the first and is waited for before the second."""
    tokenizer = load_tokenizer(ModelConfig(path=str(trained.directory)))
    async with pool_of(servers) as pool:
        await pool.load_weights(trained.directory, "run-7")
        generate = create_engine_generate_fn([pool], tokenizer, ROLLOUT)
        async with AsyncRolloutManager(DataBuffer(PROMPTS), ROLLOUT, generate_fn=generate) as manager:
            disturbance = asyncio.ensure_future(amid(pool)) if amid else None
            first = await manager.generate_batch()
            if disturbance:
                await disturbance
            return [first, await manager.generate_batch()]


@pytest.mark.slow
def test_a_kill_amid_requests_loses_no_sample_and_changes_none(pair: list[Server], trained: SavedModel) -> None:
    """The embedded engine draws a completion from its seed alone, so every bit can be compared."""
    victim = pair[1]

    async def kill_and_start_anew(pool: EnginePool) -> None:
        with anyio.fail_after(60):
            while not await asyncio.to_thread(num_running, victim):
                pass
        # The kill finds them under way.
        httpx.post(f"{victim.url}/pause_generation", json={"mode": "in_place"}, timeout=60.0)
        assert num_running(victim) > 0
        await asyncio.to_thread(victim.kill)
        with anyio.fail_after(60):
            while victim.url not in pool.quarantined:
                await anyio.sleep(0.05)
        await asyncio.to_thread(victim.start)  # with its start weights
        with anyio.fail_after(60):
            while pool.quarantined:
                await anyio.sleep(0.05)

    undisturbed = asyncio.run(sample_two_batches(pair, trained))
    disturbed = asyncio.run(sample_two_batches(pair, trained, kill_and_start_anew))
    for batch, expected in zip(disturbed, undisturbed, strict=True):
        assert [len(group) for group in batch.groups] == [GROUP_SIZE] * NUM_GROUPS
        assert batch.samples == expected.samples  # tokens, log-probs, rewards, groups, versions
    samples = [sample for batch in disturbed for sample in batch.samples]
    assert len({(sample.group_index, sample.index) for sample in samples}) == 2 * NUM_GROUPS * GROUP_SIZE
    assert {span.version for sample in samples for span in sample.policy_versions} == {7}
    assert max(gap_of(trained, sample) for sample in samples) < LOGPROB_TOLERANCE


def gap_of(saved: SavedModel, sample: Sample) -> float:
    """How far a sample's log-probs are from a transformers forward pass, nats."""
    begin = sample.loss_mask.index(1)
    expected = expected_logprobs(saved.model, sample.tokens[:begin], sample.tokens[begin:])
    assert sample.rollout_log_probs is not None
    return float((expected - torch.tensor(sample.rollout_log_probs[begin:])).abs().max())


@dataclass
class Noted(httpx.AsyncBaseTransport):
    """The way to a server, which notes what it is asked for."""

    paths: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = create_transport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        return await self.server.handle_async_request(request)

    async def aclose(self) -> None:
        await self.server.aclose()


async def time_requests(server: Server) -> float:
    """How long the requests take there, seconds, when whatever it prepares for its first ones is done."""
    async with server.client() as client:
        await client.generate(REQUESTS)
        began = perf_counter()
        await client.generate(REQUESTS)
        return perf_counter() - began


PROOF, COMPLETIONS = ("/weights_checker", "/weight_checker"), ("/generate", "/v1/completions")


def test_an_engine_that_hangs_amid_requests_is_done_without_and_proved_before_it_is_asked_again(
    server: Server, start: SavedModel, trained: SavedModel, tmp_path: Path
) -> None:
    process = server.process
    assert process is not None
    noted = Noted()

    async def hang_and_go_on(other: Server) -> tuple[list[Completion], list[Completion]]:
        timeout_s = 5.0 + 4 * await time_requests(server)
        hung = type(server.client())(server.url, request_timeout_s=timeout_s, restart_timeout_s=1.0, transport=noted)
        async with EnginePool([hung, other.client()], retry_s=0.2) as pool:
            await pool.load_weights(start.directory, "start-10")
            for _ in range(5):
                under_way = asyncio.ensure_future(pool.generate(REQUESTS))  # the first engine's, while none has any
                with anyio.fail_after(60):
                    while not await asyncio.to_thread(num_running, server):
                        if under_way.done():  # before anybody looked
                            under_way = asyncio.ensure_future(pool.generate(REQUESTS))
                os.killpg(process.pid, signal.SIGSTOP)
                meanwhile = await asyncio.wait_for(under_way, 120 + timeout_s)
                if pool.quarantined:
                    break
                os.killpg(process.pid, signal.SIGCONT)  # all of them had ended a moment before
            assert pool.quarantined.keys() == {server.url}
            await asyncio.wait_for(pool.load_weights(trained.directory, "trained-10"), 60)
            noted.paths.clear()
            os.killpg(process.pid, signal.SIGCONT)
            with anyio.fail_after(START_TIMEOUT_S):
                while pool.quarantined:
                    await anyio.sleep(0.05)
            return meanwhile, await pool.generate([ask()])

    with serving("embedded", start.directory, tmp_path / "other") as other:
        try:
            meanwhile, afterwards = asyncio.run(hang_and_go_on(other))
        finally:
            os.killpg(process.pid, signal.SIGCONT)
    assert versions_of(meanwhile) == {"start-10"}
    for request, completion in zip(REQUESTS, meanwhile, strict=True):
        assert worst_gap(start, request, completion) < LOGPROB_TOLERANCE
    asked = [path for path in noted.paths if path in PROOF + COMPLETIONS]
    assert asked[0] in PROOF
    assert asked[-1] in COMPLETIONS, "it is asked again: the first of two without any requests"
    assert versions_of(afterwards) == {"trained-10"}
    assert worst_gap(trained, ask(), afterwards[0]) < LOGPROB_TOLERANCE
