"""Pins that weights which are sent to vLLM, not written to files, arrive whole and proved, and that nobody hangs.

Without it vLLM on another GPU than the trainer's reads every version from a disk, or samples from half of one.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from rollouts_core.config import InFlight
from rollouts_core.engines import Completion, InFlightEngine, VLLMEngine
from rollouts_core.engines import vllm as vllm_module
from rollouts_core.engines.transfer import to_vllm as sending_module
from rollouts_core.errors import WeightSyncError
from tests.engines.asking import LOGPROB_TOLERANCE, ask, check_spans, is_seen_at_work, start_all, versions_of, worst_gap
from tests.engines.models import SavedModel, make, save
from tests.engines.servers import ROOT, Server, serving
from tests.engines.test_sending import SMALL_BUCKET, sent

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400), pytest.mark.parametrize("server", ["vllm"], indirect=True)]


@pytest.mark.parametrize("bucket_bytes", [SMALL_BUCKET, 2**29])
def test_what_is_sent_is_served_and_proved(
    server: Server, start: SavedModel, trained: SavedModel, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's head is its embedding: what is sent has none, and vLLM's own has to become the new embedding."""
    monkeypatch.setattr(sending_module, "BUCKET_BYTES", bucket_bytes)

    async def send_both() -> tuple[list[Completion], list[Completion]]:
        async with server.client() as engine:
            await engine.load_weights(sent(start, "start-1", "gloo"), "start-1")
            before = await engine.generate([ask()])
            await engine.load_weights(sent(trained, "trained-1", "gloo"), "trained-1")
            return before, await engine.generate([ask()])

    before, after = asyncio.run(send_both())
    assert (versions_of(before), versions_of(after)) == ({"start-1"}, {"trained-1"})
    assert worst_gap(start, ask(), before[0]) < LOGPROB_TOLERANCE
    assert worst_gap(trained, ask(), after[0]) < LOGPROB_TOLERANCE


def test_files_and_what_is_sent_may_alternate(server: Server, start: SavedModel, trained: SavedModel) -> None:
    async def alternate() -> list[Completion]:
        async with server.client() as engine:
            await engine.load_weights(sent(trained, "trained-2", "gloo"), "trained-2")
            await engine.load_weights(start.directory, "start-2")
            await engine.load_weights(sent(trained, "trained-3", "gloo"), "trained-3")
            return await engine.generate([ask()])

    assert worst_gap(trained, ask(), asyncio.run(alternate())[0]) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("in_flight", ["finish", "abort"])
def test_every_token_is_of_the_version_that_its_span_names(
    server: Server, start: SavedModel, trained: SavedModel, in_flight: InFlight
) -> None:
    async def send_amid() -> list[Completion]:
        async with server.client() as client:
            engine = InFlightEngine(client, in_flight)
            await engine.load_weights(sent(start, "start-4", "gloo"), "start-4")
            with anyio.fail_after(120):
                while not await is_seen_at_work(server, under_way := start_all(engine)):
                    await under_way  # they ended before the server told of them
            await engine.load_weights(sent(trained, "trained-4", "gloo"), "trained-4")
            return await under_way

    seen = check_spans({"start-4": start.model, "trained-4": trained.model}, asyncio.run(send_amid()))
    assert "start-4" in seen


DIES_AMID = """
import asyncio, os, signal, sys
from pathlib import Path
from rollouts_core.embedded.weights import read_tensors
from rollouts_core.engines import VLLMEngine
from rollouts_core.engines.transfer import to_vllm
from rollouts_core.engines.transfer.group import WeightGroup
from rollouts_core.engines.transfer.versions import SentWeights, copy_to_host

url, directory = sys.argv[1], Path(sys.argv[2])
broadcast, num_sent = WeightGroup.broadcast, 0

def broadcast_and_die(group, flat):
    global num_sent
    num_sent += 1
    if num_sent > 3:
        os.kill(os.getpid(), signal.SIGKILL)
    broadcast(group, flat)

WeightGroup.broadcast = broadcast_and_die
to_vllm.BUCKET_BYTES = 20_000

async def send():
    async with VLLMEngine(url) as engine:
        tensors = copy_to_host(read_tensors(directory))
        await engine.load_weights(
            SentWeights(version="half", model_dir=directory, tensors=tensors, transfer="gloo"), "half"
        )

asyncio.run(send())
"""


def test_a_trainer_goes_on_where_one_was_killed_amid_sending(
    server: Server, start: SavedModel, trained: SavedModel
) -> None:
    async def serve(saved: SavedModel, version: str) -> list[Completion]:
        async with server.client() as engine:
            with anyio.fail_after(200):
                await engine.load_weights(sent(saved, version, "gloo"), version)
                return await engine.generate([ask()])

    asyncio.run(serve(start, "start-5"))
    died = subprocess.run([sys.executable, "-c", DIES_AMID, server.url, str(trained.directory)], cwd=ROOT)
    assert died.returncode == -signal.SIGKILL
    assert worst_gap(start, ask(), asyncio.run(serve(start, "start-6"))[0]) < LOGPROB_TOLERANCE


def test_a_model_of_other_shapes_is_refused_before_it_is_sent(
    server: Server, start: SavedModel, tmp_path: Path
) -> None:
    wide = save(make(2, hidden_size=64), tmp_path / "wide")

    async def send_the_other() -> list[Completion]:
        async with server.client() as engine:
            await engine.load_weights(sent(start, "start-7", "gloo"), "start-7")
            with pytest.raises(WeightSyncError, match=f"{server.url} serves a model with hidden_size"):
                await engine.load_weights(sent(wide, "wide-7", "gloo"), "wide-7")
            return await engine.generate([ask()])

    assert versions_of(asyncio.run(send_the_other())) == {"start-7"}


def test_a_server_without_the_receiver_is_refused_in_a_sentence(
    server: Server, start: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_module, "RECEIVER", "another.Receiver")

    async def send() -> None:
        async with server.client() as engine:
            with pytest.raises(WeightSyncError, match=r"rollouts_receiver\.WeightReceiver as --worker-extension-cls"):
                await engine.load_weights(sent(start, "start-8", "gloo"), "start-8")

    asyncio.run(send())


@pytest.fixture
def mortal(server: Server, start: SavedModel, tmp_path: Path) -> Iterator[Server]:
    with serving("vllm", start.directory, tmp_path / "run") as running:
        yield running


@pytest.mark.matrix
def test_a_server_that_was_started_anew_is_joined_anew(mortal: Server, trained: SavedModel) -> None:
    async def send_around_a_restart() -> list[Completion]:
        async with mortal.client() as engine:
            assert isinstance(engine, VLLMEngine)
            await engine.load_weights(sent(trained, "trained-9", "gloo"), "trained-9")
            await asyncio.to_thread(mortal.kill)
            await asyncio.to_thread(mortal.start)
            await asyncio.to_thread(mortal.wait_until_ready)
            await engine.load_weights(sent(trained, "trained-10", "gloo"), "trained-10")
            return await engine.generate([ask()])

    completions = asyncio.run(send_around_a_restart())
    assert versions_of(completions) == {"trained-10"}
    assert worst_gap(trained, ask(), completions[0]) < LOGPROB_TOLERANCE
