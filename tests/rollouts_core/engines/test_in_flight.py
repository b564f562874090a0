"""Pins what becomes of requests under way when weights are published, and that every token is told from which it came.

Without it a publication hangs on a long completion, tokens that were paid for are thrown away, or training takes
log-probs of one version for those of another.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import httpx
import pytest
import torch

from rollouts_core.config import InFlight, ModelConfig, SamplingConfig
from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.engines import (
    EnginePool,
    InFlightEngine,
    SGLangEngine,
    VLLMEngine,
    in_flight,
    recovery,
    sync_weights_to_engines,
)
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.transfer.canary import PROMPT_TOKENS
from rollouts_core.errors import EngineError, EngineUnavailableError, WeightSyncError
from rollouts_core.model.loading import load_hf_model
from rollouts_core.rollout.generate import complete_request, continue_request, join_completions
from rollouts_core.types import Status
from tests.rollouts_core.embedded.tiny_models import expected_logprobs, make_model, save_model
from tests.rollouts_core.served_engine import served_engine

PROMPT = [4, 8, 9, 10, 5]
NUM_TOKENS = 400
LOGPROB_TOLERANCE = 1e-4


def ask(num_tokens: int = NUM_TOKENS, seed: int = 0) -> GenerationRequest:
    sampling = SamplingConfig(max_new_tokens=num_tokens)
    return GenerationRequest(prompt_tokens=PROMPT, sampling=sampling, stop_token_ids=(), seed=seed)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sets of weights of a model without an end of turn."""
    return {
        f"v-{seed}": save_model(make_model(seed=seed, eos_token_id=None), tmp_path_factory.mktemp("versions"))
        for seed in (1, 2)
    }


async def publish_amid(
    engine: InFlightEngine, scheduler: Scheduler, versions: dict[str, Path], request: GenerationRequest
) -> Completion:
    """What comes back for a request during which the second version is published."""
    await engine.load_weights(versions["v-1"], "v-1")
    task = asyncio.create_task(complete_request(engine, request))
    while not scheduler.num_running:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    await engine.load_weights(versions["v-2"], "v-2")
    return await task


def check_logprobs(completion: Completion, versions: dict[str, Path]) -> None:
    """Assert that each span's log-probs are those of its version's weights."""
    for version, start, end in completion.version_spans:
        model = load_hf_model(ModelConfig(path=str(versions[version]))).eval()
        expected = expected_logprobs(model, PROMPT, completion.tokens)[start:end]
        assert torch.allclose(expected, torch.tensor(completion.logprobs[start:end]), atol=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("in_flight", ["finish", "abort", "continue"])
@pytest.mark.parametrize("is_pooled", [False, True])
def test_every_token_of_a_completion_is_of_the_version_that_its_span_names(
    versions: dict[str, Path], in_flight: InFlight, is_pooled: bool
) -> None:
    async def run() -> Completion:
        with served_engine(versions["v-1"]) as (client, scheduler):
            engine = InFlightEngine(EnginePool([client]) if is_pooled else client, in_flight)
            return await publish_amid(engine, scheduler, versions, ask())

    completion = asyncio.run(run())
    assert (len(completion.tokens), completion.status) == (NUM_TOKENS, Status.TRUNCATED)
    spanned = [version for version, _, _ in completion.version_spans]
    assert spanned == (["v-1"] if in_flight == "finish" else ["v-1", "v-2"])
    check_logprobs(completion, versions)


@pytest.mark.parametrize("in_flight", ["finish", "abort", "continue"])
def test_what_is_asked_while_weights_are_loaded_comes_from_the_new_ones(
    versions: dict[str, Path], in_flight: InFlight
) -> None:
    async def run() -> Completion:
        with served_engine(versions["v-1"]) as (client, _):
            engine = InFlightEngine(client, in_flight)
            await engine.load_weights(versions["v-1"], "v-1")
            loading = asyncio.create_task(engine.load_weights(versions["v-2"], "v-2"))
            await asyncio.sleep(0)
            [completion] = await engine.generate([ask(8)])
            await loading
            return completion

    assert asyncio.run(run()).version_spans == (("v-2", 0, 8),)


def test_a_completion_that_was_broken_off_goes_on_as_if_it_had_not_been(versions: dict[str, Path]) -> None:
    """With unchanged weights the seed and the tokens so far decide all that follows."""

    async def run() -> tuple[Completion, Completion]:
        with served_engine(versions["v-1"]) as (engine, _):
            [whole] = await engine.generate([ask(60)])
            [first] = await engine.generate([ask(25)])
            [rest] = await engine.generate([continue_request(ask(60), first.tokens)])
            return whole, join_completions(first, rest)

    whole, joined = asyncio.run(run())
    assert joined.tokens == whole.tokens
    assert joined.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    assert joined.version_spans == (("default", 0, 25), ("default", 25, 60))


def test_a_completion_with_more_tokens_than_a_lower_limit_allows_ends_as_it_is(versions: dict[str, Path]) -> None:
    async def run() -> tuple[Completion, Completion]:
        with served_engine(versions["v-1"]) as (engine, _):
            [whole] = await engine.generate([ask(8)])
            begun = replace(whole, status=Status.ABORTED, finish_reason="abort")
            return whole, await complete_request(engine, ask(5), begun=begun)

    whole, ended = asyncio.run(run())
    assert ended == replace(whole, status=Status.TRUNCATED, finish_reason="length")


def test_an_engine_that_breaks_off_everything_is_given_up(
    versions: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts_core.rollout.generate.MAX_INTERRUPTIONS", 3)

    async def run() -> None:
        with served_engine(versions["v-1"]) as (engine, scheduler):
            scheduler.pause("retract").result()
            task = asyncio.create_task(complete_request(engine, ask()))
            while not task.done():
                await asyncio.sleep(0.005)
                scheduler.abort_all().result()
            await task

    with pytest.raises(EngineError, match="http://engine interrupted a completion 3 times"):
        asyncio.run(run())


def test_a_completion_that_outlives_all_versions_that_are_remembered_is_asked_for_again(
    versions: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "MAX_SPANNED_VERSIONS", 1)
    monkeypatch.setattr(recovery, "RETRY_PAUSE_S", 0.01)

    async def run() -> Completion:
        with served_engine(versions["v-1"]) as (client, scheduler):
            return await publish_amid(InFlightEngine(client, "continue"), scheduler, versions, ask())

    assert asyncio.run(run()).version_spans == (("v-2", 0, NUM_TOKENS),)


class Hanging(httpx.AsyncBaseTransport):
    """A server that answers nothing any more once it hangs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.hangs = False
        self.is_asked = asyncio.Event()
        self._inner = httpx.ASGITransport(app=build_app(scheduler))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.hangs:
            self.is_asked.set()
            await asyncio.Event().wait()
        return await self._inner.handle_async_request(request)


@contextmanager
def served_until_it_hangs(model_dir: Path) -> Iterator[tuple[SGLangEngine, Hanging]]:
    with Scheduler(Decoder(model_dir, num_slots=4), model_dir=model_dir) as scheduler:
        transport = Hanging(scheduler)
        yield SGLangEngine("http://hanging", transport=transport, restart_timeout_s=5.0), transport


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["finish", "abort", "continue"])
def test_an_engine_that_hangs_is_left_behind_and_its_requests_are_answered_by_the_others(
    versions: dict[str, Path], in_flight: InFlight
) -> None:
    async def run(client: SGLangEngine, other: SGLangEngine, hanging: Hanging) -> tuple[list[str], set[str]]:
        pool = EnginePool([other, client], sync_timeout_s=0.5)
        engine = InFlightEngine(pool, in_flight, finish_timeout_s=0.5)
        await engine.load_weights(versions["v-1"], "v-1")
        hanging.hangs = True
        tasks = [asyncio.create_task(engine.generate([ask(8)])) for _ in range(2)]
        await hanging.is_asked.wait()
        [result] = await sync_weights_to_engines([engine], versions["v-2"], version="v-2", timeout_s=30.0)
        for task in tasks:
            await task
        [completion] = await engine.generate([ask(8)])
        quarantined = set(pool.quarantined)
        await pool.aclose()
        return [result.error, completion.version_spans[0][0]], quarantined

    with served_engine(versions["v-1"]) as (other, _), served_until_it_hangs(versions["v-1"]) as (client, hanging):
        outcome = asyncio.run(asyncio.wait_for(run(client, other, hanging), 120))
    assert outcome == (["", "v-2"], {"http://hanging"})


@pytest.mark.slow
def test_an_only_engine_that_hangs_is_a_sentence_about_the_load_and_the_wait_before_it(
    versions: dict[str, Path],
) -> None:
    async def run(client: SGLangEngine, hanging: Hanging) -> str:
        engine = InFlightEngine(client, finish_timeout_s=0.2)
        await engine.load_weights(versions["v-1"], "v-1")
        hanging.hangs = True
        task = asyncio.create_task(engine.generate([ask(8)]))
        await hanging.is_asked.wait()
        [result] = await sync_weights_to_engines([engine], versions["v-2"], version="v-2", timeout_s=0.3)
        task.cancel()
        return result.error

    with served_until_it_hangs(versions["v-1"]) as (client, hanging):
        error = asyncio.run(asyncio.wait_for(run(client, hanging), 120))
    assert error == "it did not take v-2 within 0.3 s, after up to 0.2 s for the requests that were under way"


class AwayOncePaused(httpx.AsyncBaseTransport):
    """A server that cannot be reached from its first pause until it is said to be back."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.is_back = False
        self._was_paused = False
        self._inner = httpx.ASGITransport(app=build_app(scheduler))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._was_paused and not self.is_back:
            raise httpx.ConnectError("no route")
        response = await self._inner.handle_async_request(request)
        self._was_paused |= request.url.path == "/pause_generation" and b"retract" in request.content
        return response


@contextmanager
def served_until_a_pause(model_dir: Path) -> Iterator[tuple[SGLangEngine, AwayOncePaused]]:
    with Scheduler(Decoder(model_dir, num_slots=4), model_dir=model_dir) as scheduler:
        transport = AwayOncePaused(scheduler)
        yield SGLangEngine("http://away", transport=transport, restart_timeout_s=0.2), transport


def test_an_engine_that_was_lost_while_it_was_paused_answers_when_it_is_taken_back(versions: dict[str, Path]) -> None:
    async def run(client: SGLangEngine, other: SGLangEngine, away: AwayOncePaused) -> tuple[set[str], Completion]:
        async with EnginePool([other, client], retry_s=0.05) as pool:
            await pool.load_weights(versions["v-1"], "v-1")
            await InFlightEngine(pool, "continue").load_weights(versions["v-2"], "v-2")
            lost = set(pool.quarantined)
            away.is_back = True
            while pool.quarantined:
                await asyncio.sleep(0.01)
            [completion] = await client.generate([ask(8)])
            return lost, completion

    with served_engine(versions["v-1"]) as (other, _), served_until_a_pause(versions["v-1"]) as (client, away):
        lost, completion = asyncio.run(asyncio.wait_for(run(client, other, away), 60))
    assert lost == {"http://away"}
    assert completion.version_spans == (("v-2", 0, 8),)


def test_an_only_engine_that_was_lost_while_it_was_paused_answers_when_it_is_back(versions: dict[str, Path]) -> None:
    async def run(client: SGLangEngine, away: AwayOncePaused) -> Completion:
        await client.load_weights(versions["v-1"], "v-1")
        engine = InFlightEngine(client, "continue")
        with pytest.raises(EngineUnavailableError):
            await engine.load_weights(versions["v-2"], "v-2")
        away.is_back = True
        [completion] = await engine.generate([ask(8)])
        return completion

    with served_until_a_pause(versions["v-1"]) as (client, away):
        completion = asyncio.run(asyncio.wait_for(run(client, away), 60))
    assert completion.version_spans == (("v-1", 0, 8),)


class DeafToFirstResume(httpx.AsyncBaseTransport):
    """A server that goes on, and does not hear the first time that it is told to."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._num_told = 0
        self._inner = httpx.ASGITransport(app=build_app(scheduler))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/continue_generation":
            self._num_told += 1
            if self._num_told == 1:
                raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return await self._inner.handle_async_request(request)


@pytest.mark.parametrize("is_pooled", [False, True])
def test_paused_requests_go_on_although_nothing_more_is_asked_and_their_engine_did_not_hear_the_first_time(
    versions: dict[str, Path], is_pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "RETRY_PAUSE_S", 0.01)

    async def run(scheduler: Scheduler) -> Completion:
        client = SGLangEngine("http://deaf", transport=DeafToFirstResume(scheduler))
        await client.load_weights(versions["v-1"], "v-1")
        engine = InFlightEngine(EnginePool([client]) if is_pooled else client, "continue")
        task = asyncio.create_task(engine.generate([ask()]))
        while not scheduler.num_running:
            await asyncio.sleep(0.001)
        await engine.load_weights(versions["v-2"], "v-2")
        [completion] = await task
        return completion

    with Scheduler(Decoder(versions["v-1"], num_slots=4), model_dir=versions["v-1"]) as scheduler:
        completion = asyncio.run(asyncio.wait_for(run(scheduler), 60))
    assert [version for version, _, _ in completion.version_spans] == ["v-1", "v-2"]


class WithoutChecksums(httpx.AsyncBaseTransport):
    """A server that gives no checksums, as SGLang on a GPU."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._inner = httpx.ASGITransport(app=build_app(scheduler))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/weights_checker":
            return httpx.Response(200, json={"ranks": []})
        return await self._inner.handle_async_request(request)


@contextmanager
def served_without_checksums(model_dir: Path) -> Iterator[SGLangEngine]:
    with Scheduler(Decoder(model_dir, num_slots=4), model_dir=model_dir) as scheduler:
        yield SGLangEngine("http://engine", transport=WithoutChecksums(scheduler), restart_timeout_s=5.0)


def test_weights_that_only_sampling_proves_are_refused_while_the_engine_is_paused(versions: dict[str, Path]) -> None:
    """It would wait for an answer of an engine that waits for it."""

    async def run() -> tuple[str, Completion]:
        with served_without_checksums(versions["v-1"]) as client:
            with pytest.raises(WeightSyncError) as refused:
                await InFlightEngine(client, "continue").load_weights(versions["v-1"], "v-1")
            engine = InFlightEngine(client, "abort")
            await engine.load_weights(versions["v-2"], "v-2")
            [completion] = await engine.generate([ask(4)])
            return str(refused.value), completion

    message, completion = asyncio.run(run())
    assert 'it must sample to verify v-1, but it is paused: set rollout.in_flight = "finish" or "abort"' in message
    assert completion.version_spans == (("v-2", 0, 4),)


class SlowToProve(WithoutChecksums):
    """Such a server that answers no canary until it may; it counts what it is told to end."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.num_aborts = 0
        self.is_asked_for_proof = asyncio.Event()
        self.may_prove = asyncio.Event()
        self.may_prove.set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.num_aborts += request.url.path == "/abort_request"
        if request.url.path == "/generate" and json.loads(request.content)["input_ids"][0] == PROMPT_TOKENS:
            self.is_asked_for_proof.set()
            await self.may_prove.wait()
        return await super().handle_async_request(request)


@pytest.mark.slow
def test_a_publication_does_not_break_off_by_what_an_engine_proves_itself_that_came_back(
    versions: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "RETRY_PAUSE_S", 0.01)

    async def publish_amid_recovery(scheduler: Scheduler) -> tuple[int, Completion]:
        server = SlowToProve(scheduler)
        engine = InFlightEngine(SGLangEngine("http://engine", transport=server, restart_timeout_s=5.0), "abort")
        await engine.load_weights(versions["v-1"], "v-1")
        scheduler.update_weights(versions["v-2"], weight_version="default").result(10)  # it was started anew
        server.is_asked_for_proof.clear()
        server.may_prove.clear()
        asked = asyncio.create_task(complete_request(engine, ask(8)))
        await server.is_asked_for_proof.wait()
        publishing = asyncio.create_task(engine.load_weights(versions["v-2"], "v-2"))
        await asyncio.sleep(3 * in_flight.ABORT_INTERVAL_S)
        num_aborts = server.num_aborts
        server.may_prove.set()
        await publishing
        return num_aborts, await asked

    with Scheduler(Decoder(versions["v-1"], num_slots=4), model_dir=versions["v-1"]) as scheduler:
        num_aborts, completion = asyncio.run(asyncio.wait_for(publish_amid_recovery(scheduler), 60))
    assert num_aborts == 0
    assert (len(completion.tokens), completion.status) == (8, Status.TRUNCATED)


class LikeSGLangOnAGPU(httpx.AsyncBaseTransport):
    """A server whose checksums cannot be computed by others, and whose updates a test may have it lose."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.keeps: Path | None = None
        """What it loads in place of what it is given."""
        self._inner = httpx.ASGITransport(app=build_app(scheduler))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/update_weights_from_disk" and self.keeps:
            body = {**json.loads(request.content), "model_path": str(self.keeps)}
            request = httpx.Request("POST", request.url, json=body)
        response = await self._inner.handle_async_request(request)
        if request.url.path == "/server_info":
            await response.aread()
            return httpx.Response(200, json={**response.json(), "device": "cuda"})
        return response


def save_small_step(before: Path, folder: Path) -> Path:
    """The model after a step of training in which its embedding stayed as it was."""
    model = load_hf_model(ModelConfig(path=str(before))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" not in name:
                parameter.add_(torch.full_like(parameter, 1e-5))
    return save_model(model, folder)


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_update_that_changed_no_checksum_of_what_it_changed_is_none_however_small_it_was(
    versions: dict[str, Path], tmp_path: Path, is_lost: bool
) -> None:
    async def publish_twice(client: SGLangEngine, server: LikeSGLangOnAGPU) -> None:
        await client.load_weights(versions["v-1"], "v-1")
        server.keeps = versions["v-1"] if is_lost else None
        await client.load_weights(save_small_step(versions["v-1"], tmp_path), "v-1a")

    with Scheduler(Decoder(versions["v-1"], num_slots=4), model_dir=versions["v-1"]) as scheduler:
        server = LikeSGLangOnAGPU(scheduler)
        client = SGLangEngine("http://engine", transport=server, restart_timeout_s=5.0)
        if is_lost:
            with pytest.raises(WeightSyncError, match=r"the version v-1a, but its checksums of \d+ changed tensors"):
                asyncio.run(publish_twice(client, server))
        else:
            asyncio.run(publish_twice(client, server))


def test_vllm_refuses_to_go_on_with_new_weights() -> None:
    engine = VLLMEngine("http://engine", transport=httpx.MockTransport(lambda request: httpx.Response(200, json={})))
    with pytest.raises(EngineError, match=r"http://engine is vLLM, which cannot go on with new weights.*\"abort\""):
        asyncio.run(engine.pause())


def test_vllm_is_given_another_seed_for_each_rest_of_a_completion_and_its_own_for_the_whole() -> None:
    """It would draw the rest by the numbers of the beginning."""
    seeds: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/weight_info":
            return httpx.Response(200, json={"weight_version": "v-1"})
        body = json.loads(request.content)
        seeds.append(body["seed"])
        choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice]})

    engine = VLLMEngine("http://engine", transport=httpx.MockTransport(answer))
    rests = [continue_request(ask(8, seed=7), tokens) for tokens in ([], [4], [4, 4])]
    asyncio.run(engine.generate([*rests, continue_request(rests[1], [4])]))
    assert seeds[0] == 7
    assert len(set(seeds[:3])) == 3
    assert seeds[3] == seeds[2], "broken off twice, after the same tokens"


def test_an_engine_that_answers_no_abort_holds_nothing_up_when_requests_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of one that hangs end on another, while the one that hangs is still to answer."""
    monkeypatch.setattr(in_flight, "ABORT_TIMEOUT_S", 0.1)

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/abort_request":
            await asyncio.sleep(60)
        await asyncio.sleep(0.3)
        logprobs = [[-1.0, 5, None]]
        meta = {"output_token_logprobs": logprobs, "weight_version": "v", "finish_reason": {"type": "stop"}}
        return httpx.Response(200, json=[{"output_ids": [5], "meta_info": meta}])

    async def break_off() -> list[Completion]:
        async with SGLangEngine("http://engine", transport=httpx.MockTransport(answer)) as engine:
            guarded = InFlightEngine(engine)
            asked = asyncio.create_task(guarded.generate([ask()]))
            await asyncio.sleep(0.1)
            with anyio.fail_after(20):
                await guarded.break_off()
            return await asked

    assert asyncio.run(break_off())[0].tokens == [5]


@pytest.mark.parametrize("answers_after_s", [0, 60])
def test_vllm_answers_again_after_its_requests_were_ended(answers_after_s: float) -> None:
    """Also where nobody waited for the end: it hears of the pause all the same, when its step is over."""
    called: list[tuple[str, str]] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        called.append((request.url.path, request.url.params.get("mode", "")))
        if request.url.path == "/pause":
            await asyncio.sleep(answers_after_s)
        return httpx.Response(200, json={})

    async def end() -> None:
        with anyio.move_on_after(0.1):
            await VLLMEngine("http://engine", transport=httpx.MockTransport(answer)).abort_running()

    asyncio.run(end())
    assert called == [("/pause", "abort"), ("/resume", "")]
