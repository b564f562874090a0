"""Pins what a server's faults come to, the same for both clients: a message that names the engine, never a sample.

Without it a hung server hangs a run, and half an answer, or one without log-probs, becomes training data.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import httpx
import pytest

from rollouts_core.config import SamplingConfig
from rollouts_core.embedded.running import NO_NUMBERS
from rollouts_core.engines import (
    Completion,
    Endpoint,
    GenerationRequest,
    SGLangEngine,
    VLLMEngine,
    create_engine,
    http,
    recovery,
)
from rollouts_core.engines.transfer import delivery
from rollouts_core.engines.transfer.canary import checkpoint_canary
from rollouts_core.errors import EngineError, EngineUnavailableError, NoNumbersError, WeightSyncError
from rollouts_core.types import Sample, Status
from tests.kit.threads import join_threads
from tests.rollouts_core.served_engine import served_engine

EngineType = type[SGLangEngine] | type[VLLMEngine]
Answer = Callable[[httpx.Request], httpx.Response]
REQUEST = GenerationRequest(prompt_tokens=[4, 8], sampling=SamplingConfig(max_new_tokens=2), stop_token_ids=(), seed=0)
BOTH = pytest.mark.parametrize("engine_type", [SGLangEngine, VLLMEngine])


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RETRY_PAUSE_S", 0.01)


def completion_json(engine_type: EngineType, tokens: list[int], logprobs: list[Any] | None, reason: str) -> Any:
    """An answer with one completion, in the server's form."""
    if engine_type is VLLMEngine:
        found = None if logprobs is None else {"token_logprobs": logprobs}
        return {"choices": [{"token_ids": tokens, "logprobs": found, "finish_reason": reason}]}
    meta: dict[str, Any] = {"finish_reason": {"type": reason}, "weight_version": "default"}
    if logprobs is not None:
        meta["output_token_logprobs"] = [[logprob, 0, None] for logprob in logprobs]
    return [{"output_ids": tokens, "meta_info": meta}]


def canary_sample() -> Sample:
    """A prompt of two tokens and a completion of two."""
    return Sample(
        prompt="",
        tokens=[4, 8, 5, 6],
        loss_mask=[0.0, 0.0, 1.0, 1.0],
        rollout_log_probs=[0.0] * 4,
        status=Status.COMPLETED,
    )


def client_of(engine_type: EngineType, answer: Answer | httpx.Response, **options: Any) -> SGLangEngine | VLLMEngine:
    """A client of a server that answers completions like this, and says that its weights are the default."""

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path in ("/model_info", "/weight_info"):
            return httpx.Response(200, json={"weight_version": "default", "model_path": ""})
        return answer if isinstance(answer, httpx.Response) else answer(request)

    settings = {"restart_timeout_s": 0.5, **options}
    return engine_type("http://engine", transport=httpx.MockTransport(respond), **settings)


def ask(engine: SGLangEngine | VLLMEngine) -> list[Completion]:
    async def generate() -> list[Completion]:
        async with engine:
            return await engine.generate([REQUEST])

    return asyncio.run(generate())


@BOTH
def test_a_completion_that_was_broken_off_at_an_end_of_the_models_own_is_whole(
    engine_type: EngineType, tmp_path: Path
) -> None:
    """Its folder names more ends than the tokenizer does: going on behind one would train on what no server samples."""
    (tmp_path / "config.json").write_text('{"vocab_size": 16, "eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    broken_off = httpx.Response(200, json=completion_json(engine_type, [3], [-1.0], "abort"))
    [completion] = ask(client_of(engine_type, broken_off, model_dir=tmp_path))
    assert completion.status is Status.COMPLETED


@BOTH
@pytest.mark.parametrize(
    ("tokens", "logprobs", "reason", "words"),
    [
        ([5, 6], None, "length", "(without|cannot be read)"),
        ([5, 6], [-1.0], "length", "2 tokens with 1 logprobs"),
        ([5, 6], [-1.0, None], "length", "not finite numbers"),
        ([5, 6], [-1.0, float("-inf")], "length", "not finite numbers"),
        ([5], [-1.0], "length", "after 1 of 2 tokens: its context is too short"),
        ([5, 6], [-1.0, -1.0], "error", "with the reason 'error', expected one of stop, length, abort"),
    ],
)
def test_a_completion_that_training_could_not_use_is_an_error(
    engine_type: EngineType, tokens: list[int], logprobs: list[Any] | None, reason: str, words: str
) -> None:
    content = json.dumps(completion_json(engine_type, tokens, logprobs, reason))
    with pytest.raises(EngineError, match=f"http://engine.*{words}"):
        ask(client_of(engine_type, httpx.Response(200, text=content)))


@pytest.mark.parametrize(
    ("engine_type", "status", "answer"),
    [
        (SGLangEngine, 200, json.dumps(completion_json(SGLangEngine, [5, 6], [-1.0, float("nan")], "length"))),
        (VLLMEngine, 400, '{"error":{"message":"Out of range float values are not JSON compliant","code":400}}'),
        (SGLangEngine, 400, json.dumps({"error": {"message": NO_NUMBERS.message}})),
    ],
)
def test_what_engines_answer_whose_weights_compute_no_numbers_is_told_from_other_answers(
    engine_type: EngineType, status: int, answer: str
) -> None:
    with pytest.raises(NoNumbersError, match="http://engine"):
        ask(client_of(engine_type, httpx.Response(status, text=answer)))


@BOTH
def test_a_token_outside_the_vocabulary_is_an_error_in_the_prompt_and_in_the_answer(
    engine_type: EngineType, quickstart_dir: Path
) -> None:
    answer = httpx.Response(200, json=completion_json(engine_type, [5, 29], [-1.0, -1.0], "length"))
    engine = client_of(engine_type, answer, model_dir=quickstart_dir / "base_model")
    with pytest.raises(EngineError, match="http://engine: a completion has the token id 29, the served model has 29"):
        ask(engine)
    foreign = GenerationRequest(prompt_tokens=[-1], sampling=SamplingConfig(), stop_token_ids=(), seed=0)
    with pytest.raises(EngineError, match="http://engine: a prompt has the token id -1"):
        asyncio.run(engine.generate([foreign]))


@BOTH
@pytest.mark.parametrize("text", ['{"choices": [', "<html>", ""])
def test_half_an_answer_is_an_error(engine_type: EngineType, text: str) -> None:
    with pytest.raises(EngineError, match=r"http://engine/.* answered no JSON"):
        ask(client_of(engine_type, httpx.Response(200, text=text)))


@BOTH
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_or_broken_server_is_asked_again_and_then_given_up(engine_type: EngineType, status: int) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(status, text="overloaded")

    with pytest.raises(EngineUnavailableError, match=rf"http://engine .*answered {status}: overloaded"):
        ask(client_of(engine_type, answer))
    assert len(asked) == (recovery.MAX_BUSY_ATTEMPTS if status == 429 else 3)


@pytest.mark.slow
def test_a_busy_server_is_left_alone_for_as_long_as_it_asks() -> None:
    completion = httpx.Response(200, json=completion_json(SGLangEngine, [5, 6], [-1.0, -2.0], "length"))
    answers = [httpx.Response(429, headers={"Retry-After": "1"}), completion]
    began = time.monotonic()
    ask(client_of(SGLangEngine, lambda request: answers.pop(0)))
    assert time.monotonic() - began >= 1.0


@BOTH
def test_a_busy_server_that_recovers_answers(engine_type: EngineType) -> None:
    answers = [
        httpx.Response(429),
        httpx.Response(200, json=completion_json(engine_type, [5, 6], [-1.0, -2.0], "length")),
    ]
    [completion] = ask(client_of(engine_type, lambda request: answers.pop(0)))
    assert (completion.tokens, completion.logprobs) == ([5, 6], [-1.0, -2.0])


@BOTH
@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_request_that_the_server_refuses_is_not_repeated(engine_type: EngineType, status: int) -> None:
    answers = [httpx.Response(status, text="too long")]
    with pytest.raises(EngineError, match=f"http://engine/.* answered {status}: too long"):
        ask(client_of(engine_type, lambda request: answers.pop(0)))
    assert answers == []


@contextlib.asynccontextmanager
async def listening(behave: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """The URL of a real socket that treats its connections as told."""
    server = await asyncio.start_server(behave, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    writer.close()


async def reset_amid_the_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n[{")
    await writer.drain()
    writer.close()


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    ("behave", "words"),
    [
        (stay_silent, "did not answer within 0.3 s: .*Timeout on reading"),
        (reset_amid_the_answer, "did not answer within 0.3 s: .*not completed"),
    ],
)
def test_a_server_that_hangs_or_breaks_off_is_given_up_at_the_deadline(
    engine_type: EngineType, behave: Any, words: str
) -> None:
    async def ask_it() -> None:
        async with listening(behave) as url:
            engine = engine_type(url, request_timeout_s=0.2, restart_timeout_s=0.3)
            with pytest.raises(EngineUnavailableError, match=f"{url} {words}"):
                await engine.generate([REQUEST])
            await engine.aclose()

    asyncio.run(ask_it())


@BOTH
def test_nobody_listening_is_told_with_the_address(engine_type: EngineType) -> None:
    engine = engine_type("http://127.0.0.1:9", restart_timeout_s=0.2)
    with pytest.raises(EngineUnavailableError, match=r"http://127\.0\.0\.1:9 did not answer within 0\.2 s"):
        ask(engine)


@BOTH
def test_calls_that_wait_for_a_dead_server_are_given_up_together(engine_type: EngineType) -> None:
    """One after the other they would take the restart timeout once for each."""

    async def ask_it() -> float:
        async with engine_type("http://127.0.0.1:9", restart_timeout_s=2.0) as engine:
            began = perf_counter()
            outcomes = await asyncio.gather(*(engine.generate([REQUEST]) for _ in range(8)), return_exceptions=True)
            took_s = perf_counter() - began
        assert [str(outcome).partition(" ")[0] for outcome in outcomes] == ["http://127.0.0.1:9"] * 8
        assert {type(outcome) for outcome in outcomes} == {EngineUnavailableError}
        return took_s

    assert 2.0 <= asyncio.run(ask_it()) < 10.0  # and not 16


@BOTH
def test_a_call_after_a_failed_recovery_looks_for_the_server_again(engine_type: EngineType) -> None:
    answers: list[httpx.Response] = []
    content = completion_json(engine_type, [5, 6], [-1.0, -2.0], "length")

    def answer(request: httpx.Request) -> httpx.Response:
        if not answers:
            return httpx.Response(503)
        if request.url.path in ("/model_info", "/weight_info"):
            return httpx.Response(200, json={"weight_version": "default", "model_path": ""})
        return answers[0]

    async def ask_twice() -> list[Completion]:
        engine = engine_type("http://engine", transport=httpx.MockTransport(answer), restart_timeout_s=0.1)
        with pytest.raises(EngineUnavailableError):
            await engine.generate([REQUEST])
        answers.append(httpx.Response(200, json=content))
        return await engine.generate([REQUEST])

    assert asyncio.run(ask_twice())[0].tokens == [5, 6]


@BOTH
def test_after_the_last_attempt_nothing_is_waited_for(engine_type: EngineType) -> None:
    """The last answer of the server is the end; a look whether it is up would add the restart timeout to it."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path in ("/model_info", "/weight_info"):
            return httpx.Response(200, json={"weight_version": "default", "model_path": ""})
        return httpx.Response(503)

    engine = engine_type("http://engine", transport=httpx.MockTransport(answer), restart_timeout_s=0.5)
    with pytest.raises(EngineUnavailableError):
        ask(engine)
    assert asked[-1] in ("/generate", "/v1/completions")


@BOTH
def test_an_update_may_take_long_but_not_to_connect(engine_type: EngineType, quickstart_dir: Path) -> None:
    connect_s: dict[str, float] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        connect_s[request.url.path] = request.extensions["timeout"]["connect"]
        model_config = {"logprobs_mode": "processed_logprobs", "model": ""}
        body = {"success": True, "weight_version": "v1", "vllm_config": {"model_config": model_config}}
        return httpx.Response(200, json={**body, "checksums": {"tp0:lm_head.weight": "0" * 64}})

    async def load() -> None:
        engine = engine_type("http://engine", transport=httpx.MockTransport(answer))
        with contextlib.suppress(EngineError):  # these checksums prove nothing
            await engine.load_weights(quickstart_dir / "base_model", "v1")

    asyncio.run(load())
    assert connect_s.keys() & {"/update_weights_from_disk", "/collective_rpc"}
    assert set(connect_s.values()) == {http.CONNECT_TIMEOUT_S}


def test_the_event_loop_goes_on_while_weights_are_compared_and_a_canary_is_computed(
    quickstart_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocked, it answers no request and renews no deadline; with a large model that is minutes."""
    model_dir = quickstart_dir / "base_model"
    threads: set[str] = set()

    def compare(*_: object) -> list[str]:
        threads.add(threading.current_thread().name)
        return []

    monkeypatch.setattr(delivery, "find_unproven", compare)
    with served_engine(model_dir) as (engine, _):
        asyncio.run(engine.load_weights(model_dir, "v1"))

    async def tick_while_scoring() -> int:
        scoring = asyncio.ensure_future(checkpoint_canary(model_dir).score([canary_sample()]))
        num_ticks = 0
        while not scoring.done():
            await asyncio.sleep(0.002)
            num_ticks += 1
        assert len((await scoring)[0]) > 0
        return num_ticks

    assert asyncio.run(tick_while_scoring()) > 1
    assert threads.isdisjoint({"MainThread"})
    join_threads("short")  # a thread that computed with torch keeps its workers as long as it lives


def vllm_of(*, versions: list[str], mode: str = "processed_logprobs", has_development: bool = True) -> VLLMEngine:
    """A vLLM that reports these versions one after the other, the last one from then on."""

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path != "/v1/completions" and not has_development:
            return httpx.Response(404, json={"detail": "Not Found"})
        if path == "/weight_info":
            return httpx.Response(200, json={"weight_version": versions.pop(0) if len(versions) > 1 else versions[0]})
        if path == "/server_info":
            return httpx.Response(200, json={"vllm_config": {"model_config": {"logprobs_mode": mode, "model": ""}}})
        return httpx.Response(200, json=completion_json(VLLMEngine, [5, 6], [-1.0, -1.0], "length"))

    return VLLMEngine("http://engine", transport=httpx.MockTransport(answer), restart_timeout_s=0.5)


def test_vllm_that_gives_raw_logprobs_is_refused(quickstart_dir: Path) -> None:
    engine = vllm_of(versions=["default"], mode="raw_logprobs")
    with pytest.raises(WeightSyncError, match=r"gives raw_logprobs.*start it with --logprobs-mode processed_logprobs"):
        asyncio.run(engine.load_weights(quickstart_dir / "base_model", "v1"))


@pytest.mark.parametrize("slow", ["/pause", "/collective_rpc"])
def test_vllm_goes_on_after_an_update_that_was_given_up(slow: str, quickstart_dir: Path) -> None:
    """Paused for good it would hang every request that is made of it."""
    called: list[str] = []
    digests = {"tp0:lm_head.weight": "", "tp0:model.norm.weight": ""}
    answers: dict[str, Any] = {
        "/server_info": {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs", "model": ""}}},
        "/weight_checker": {"checksums": digests},
    }

    async def answer(request: httpx.Request) -> httpx.Response:
        called.append(request.url.path)
        if request.url.path == slow:
            await asyncio.sleep(60)
        return httpx.Response(200, json=answers.get(request.url.path, {}))

    async def give_up() -> None:
        engine = VLLMEngine("http://engine", transport=httpx.MockTransport(answer))
        with anyio.move_on_after(0.1):
            await engine.load_weights(quickstart_dir / "base_model", "v1")

    asyncio.run(give_up())
    assert called[-2:] == [slow, "/resume"]


def test_vllm_without_its_development_endpoints_is_told_how_to_start() -> None:
    with pytest.raises(EngineError, match="http://engine has no /weight_info: start vLLM with VLLM_SERVER_DEV_MODE=1"):
        ask(vllm_of(versions=["default"], has_development=False))


def test_vllm_completions_during_which_the_version_changed_are_of_no_version() -> None:
    [completion] = ask(vllm_of(versions=["v1", "v2"]))
    assert completion.version_spans == (("v1, replaced meanwhile", 0, 2),)


@pytest.mark.parametrize(
    ("provider", "client"), [("embedded", SGLangEngine), ("sglang", SGLangEngine), ("vllm", VLLMEngine)]
)
def test_an_endpoint_becomes_the_client_of_its_provider(provider: Any, client: EngineType) -> None:
    endpoint = Endpoint(provider=provider, url="http://engine", sampling=SamplingConfig(max_new_tokens=3))
    engine = create_engine(endpoint)
    assert isinstance(engine, client)
    assert engine.name == "http://engine"
    requests = endpoint.requests([[1], [2]], stop_token_ids=(7,), seed=5)
    assert [(r.prompt_tokens, r.seed, r.sampling.max_new_tokens) for r in requests] == [([1], 5, 3), ([2], 6, 3)]
