"""Pins that weights which are sent to an engine, not written to files, arrive whole and proved, and that nobody hangs.

Without it a trainer on another machine than its engines trains on samples of older weights, or waits for ever for an
engine that died while it was sent new ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest
import torch

from rollouts_core.config import InFlight
from rollouts_core.embedded.weights import read_tensors
from rollouts_core.engines import Completion, EnginePool, InFlightEngine, SGLangEngine
from rollouts_core.engines.transfer import to_sglang as sending_module
from rollouts_core.engines.transfer.canary import Canary
from rollouts_core.engines.transfer.versions import SentBy, SentWeights, copy_to_host, split_buckets
from rollouts_core.errors import WeightSyncError
from rollouts_core.system.concurrency import gather
from rollouts_core.types import Sample
from tests.engines.asking import LOGPROB_TOLERANCE, ask, check_spans, is_seen_at_work, start_all, versions_of, worst_gap
from tests.engines.models import SavedModel, make, save
from tests.engines.servers import START_TIMEOUT_S, Server, serving

pytestmark = pytest.mark.timeout(400)

SMALL_BUCKET = 20_000
"""Bytes: some tensors of the small models together, the largest alone."""


@pytest.fixture
def other(server: Server, start: SavedModel, tmp_path: Path) -> Iterator[Server]:
    """A second server of the same kind."""
    with serving(server.job.engine.kind, start.directory, tmp_path / "run") as running:
        yield running


def sent(saved: SavedModel, version: str, way: SentBy) -> SentWeights:
    tensors = copy_to_host(read_tensors(saved.directory))
    return SentWeights(version=version, model_dir=saved.directory, tensors=tensors, transfer=way)


every_way = pytest.mark.parametrize(
    ("server", "way"),
    [
        pytest.param("embedded", "gloo", marks=pytest.mark.slow),
        pytest.param("sglang", "gloo", marks=pytest.mark.engine),
        # Between machines; the way that GPUs of one machine have is for `make test-nightly`.
        pytest.param("sglang", "tensors", marks=[pytest.mark.engine, pytest.mark.matrix]),
    ],
    indirect=["server"],
    scope="session",  # else `way`, which is no fixture, makes each test start a server of its own
)


@every_way
@pytest.mark.parametrize("bucket_bytes", [SMALL_BUCKET, 2**29])
def test_what_is_sent_is_served_and_proved(
    server: Server,
    start: SavedModel,
    trained: SavedModel,
    way: SentBy,
    bucket_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Proved by the checksum of every tensor; the log-probs here are a second opinion."""
    monkeypatch.setattr(sending_module, "BUCKET_BYTES", bucket_bytes)

    async def send_both() -> tuple[list[Completion], list[Completion]]:
        async with server.client() as engine:
            await engine.load_weights(sent(start, "start-1", way), "start-1")
            before = await engine.generate([ask()])
            await engine.load_weights(sent(trained, "trained-1", way), "trained-1")
            return before, await engine.generate([ask()])

    before, after = asyncio.run(send_both())
    assert (versions_of(before), versions_of(after)) == ({"start-1"}, {"trained-1"})
    assert worst_gap(start, ask(), before[0]) < LOGPROB_TOLERANCE
    assert worst_gap(trained, ask(), after[0]) < LOGPROB_TOLERANCE


@every_way
def test_only_what_changed_is_sent_and_the_whole_is_served_and_proved(
    server: Server, start: SavedModel, trained: SavedModel, way: SentBy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of what SGLang joins (q of q, k, v; up of gate and up), a norm, and the embedding that is the head, too."""
    changed = {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.mlp.up_proj.weight",
    }
    sent_names: list[set[str]] = []

    def watched(tensors: dict[str, torch.Tensor], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        sent_names.append(set(tensors))
        return split_buckets(tensors, max_bytes)

    monkeypatch.setattr(sending_module, "split_buckets", watched)
    mixed = deepcopy(start.model)
    state, other = mixed.state_dict(), trained.model.state_dict()
    mixed.load_state_dict({name: other[name] if name in changed else tensor for name, tensor in state.items()})
    mixed.tie_weights()
    first = sent(start, "start-7", way)
    tensors = copy_to_host({name: mixed.state_dict()[name] for name in first.tensors}, first.tensors)
    second = SentWeights(version="mixed-7", model_dir=start.directory, tensors=tensors, transfer=way)

    async def send_both() -> list[Completion]:
        async with server.client() as engine:
            await engine.load_weights(first, "start-7")
            await engine.load_weights(second, "mixed-7")
            return await engine.generate([ask()])

    completions = asyncio.run(send_both())
    assert sent_names == [set(first.tensors), changed]
    assert versions_of(completions) == {"mixed-7"}
    assert worst_gap(SavedModel(mixed, start.directory), ask(), completions[0]) < LOGPROB_TOLERANCE


@every_way
@pytest.mark.parametrize("in_flight", ["finish", "abort", "continue"])
def test_every_token_is_of_the_version_that_its_span_names(
    server: Server, start: SavedModel, trained: SavedModel, way: SentBy, in_flight: InFlight
) -> None:
    async def send_amid() -> list[Completion]:
        async with server.client() as client:
            engine = InFlightEngine(client, in_flight)
            await engine.load_weights(sent(start, "start-1", way), "start-1")
            with anyio.fail_after(120):
                while not await is_seen_at_work(server, under_way := start_all(engine)):
                    await under_way  # they ended before the server told of them
            await engine.load_weights(sent(trained, "trained-1", way), "trained-1")
            return await under_way

    models = {"start-1": start.model, "trained-1": trained.model}
    seen = check_spans(models, asyncio.run(send_amid()))
    assert "start-1" in seen


@every_way
def test_no_completion_is_of_half_the_weights_while_nobody_holds_requests_back(
    server: Server, start: SavedModel, trained: SavedModel, way: SentBy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending_module, "BUCKET_BYTES", 1)  # a bucket for each tensor: many moments in between
    requests = [ask([4, 8, place], num_tokens=40) for place in range(2, 26)]

    async def send_amid() -> list[Completion]:
        async with server.client() as engine:
            await engine.load_weights(sent(start, "start-2", way), "start-2")
            asked = [partial(engine.generate, [request]) for request in requests]
            under_way = asyncio.ensure_future(gather(asked, max_concurrent=4))
            await engine.load_weights(sent(trained, "trained-2", way), "trained-2")
            return [completion for [completion] in await under_way]

    models = {"start-2": start, "trained-2": trained}
    for request, completion in zip(requests, asyncio.run(send_amid()), strict=True):
        [version] = versions_of([completion])
        assert worst_gap(models[version], request, completion) < LOGPROB_TOLERANCE


@every_way
def test_a_trainer_goes_on_where_one_was_killed_amid_sending(server: Server, trained: SavedModel, way: SentBy) -> None:
    for path, body in (
        ("/update_weight_version", {"new_version": "mine-3, loading", "abort_all_requests": False}),
        ("/begin_weight_update", {}),
    ):
        assert httpx.post(f"{server.url}{path}", json=body, timeout=30.0).status_code == 200

    async def take_over() -> list[Completion]:
        async with server.client() as engine:
            await engine.load_weights(sent(trained, "trained-3", way), "trained-3")
            return await engine.generate([ask()])

    assert worst_gap(trained, ask(), asyncio.run(take_over())[0]) < LOGPROB_TOLERANCE


@every_way
def test_a_model_of_other_shapes_is_refused_before_it_is_sent(
    server: Server, start: SavedModel, tmp_path: Path, way: SentBy
) -> None:
    wide = save(make(2, hidden_size=64), tmp_path / "wide")

    async def send_the_other() -> list[Completion]:
        async with server.client() as engine:
            await engine.load_weights(sent(start, "start-4", way), "start-4")
            with pytest.raises(WeightSyncError, match=f"{server.url} serves a model with hidden_size"):
                await engine.load_weights(sent(wide, "wide-4", way), "wide-4")
            return await engine.generate([ask()])

    assert versions_of(asyncio.run(send_the_other())) == {"start-4"}


@every_way
def test_where_checksums_cannot_be_compared_a_canary_knows_what_was_sent(
    server: Server, start: SavedModel, trained: SavedModel, way: SentBy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of SGLang on a GPU, which come out of a kernel of its own."""
    held_tensors = SGLangEngine._held_tensors

    async def incomparable(engine: SGLangEngine) -> object:
        held = await held_tensors(engine)
        return type(held)(digests=held.digests, dtype=None)

    monkeypatch.setattr(SGLangEngine, "_held_tensors", incomparable)

    async def scores_of_others(samples: list[Sample]) -> list[list[float]]:
        return [[-20.0] * len(sample.tokens) for sample in samples]

    async def send() -> None:
        async with server.client() as engine:
            await engine.load_weights(sent(trained, "trained-5", way), "trained-5")
            with pytest.raises(WeightSyncError, match="nats per token away from those of the published weights"):
                wrong = Canary(temperature=1.0, score=scores_of_others)
                await engine.load_weights(sent(start, "start-5", way), "start-5", wrong)

    asyncio.run(send())


@pytest.mark.parametrize(
    ("server", "way"),
    [
        pytest.param("embedded", "gloo", marks=pytest.mark.slow),
        pytest.param("sglang", "gloo", marks=[pytest.mark.engine, pytest.mark.matrix]),
        pytest.param("sglang", "tensors", marks=[pytest.mark.engine, pytest.mark.matrix]),
    ],
    indirect=["server"],
)
def test_an_engine_that_stands_still_holds_no_other_up_and_rejoins_when_it_was_started_anew(
    server: Server, other: Server, start: SavedModel, trained: SavedModel, way: SentBy
) -> None:
    """Last, since it kills a server."""

    halted = other.process
    assert halted is not None

    async def publish_around_a_halt() -> tuple[dict[str, str], list[Completion], list[Completion]]:
        pool = EnginePool([server.client(), other.client()], sync_timeout_s=20.0, retry_s=0.5)
        async with pool:
            await pool.load_weights(sent(start, "start-6", way), "start-6")
            assert not pool.quarantined
            os.killpg(halted.pid, signal.SIGSTOP)
            with anyio.fail_after(120):
                await pool.load_weights(sent(trained, "trained-6", way), "trained-6")
            quarantined, meanwhile = pool.quarantined, await pool.generate([ask()])
            await asyncio.to_thread(other.kill)
            await asyncio.to_thread(other.start)
            with anyio.fail_after(START_TIMEOUT_S):
                while pool.quarantined:
                    await anyio.sleep(0.2)
            async with other.client() as engine:
                return quarantined, meanwhile, await engine.generate([ask()])

    quarantined, meanwhile, afterwards = asyncio.run(publish_around_a_halt())
    assert list(quarantined) == [other.url]
    assert "did not take trained-6 within 20 s" in quarantined[other.url]
    assert worst_gap(trained, ask(), meanwhile[0]) < LOGPROB_TOLERANCE
    assert versions_of(afterwards) == {"trained-6"}
    assert worst_gap(trained, ask(), afterwards[0]) < LOGPROB_TOLERANCE
