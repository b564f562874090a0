"""Pins what counts as the silence of a server amid requests, and what does not.

Without it a run waits ten minutes for every request of a server that stands still, or gives up one that works.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from rollouts_core.engines import Completion, SGLangEngine, VLLMEngine, recovery
from rollouts_core.engines.silence import SilenceWatch
from rollouts_core.errors import EngineUnavailableError
from tests.rollouts_core.engines.test_faults import BOTH, REQUEST, EngineType, completion_json, listening, stay_silent

pytestmark = pytest.mark.slow

SILENCE_TIMEOUT_S = 0.2
LONG_S = 5 * SILENCE_TIMEOUT_S
QUESTIONS = {SGLangEngine: "/server_info", VLLMEngine: "/is_paused"}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RETRY_PAUSE_S", 0.01)


class SlowServer(httpx.AsyncBaseTransport):
    """A server whose completions take long, and that answers the question as a test says: not at all, or like this."""

    def __init__(self, engine_type: EngineType, *answers: httpx.Response | None) -> None:
        self.question = QUESTIONS[engine_type]
        self.answers = list(answers)
        self.completion = completion_json(engine_type, [5, 6], [-1.0, -2.0], "length")
        self.num_questions = 0
        self.num_open_questions = 0
        self.most_open_questions = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == self.question:
            return await self._answer()
        if request.url.path in ("/generate", "/v1/completions"):
            await asyncio.sleep(LONG_S)
            return httpx.Response(200, json=self.completion)
        return httpx.Response(200, json={"weight_version": "default", "model_path": ""})

    async def _answer(self) -> httpx.Response:
        self.num_questions += 1
        self.num_open_questions += 1
        self.most_open_questions = max(self.most_open_questions, self.num_open_questions)
        try:
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if answer is None:
                await asyncio.sleep(60)
            return answer or httpx.Response(200)
        finally:
            self.num_open_questions -= 1


def client_of(engine_type: EngineType, url: str = "http://engine", **options: Any) -> SGLangEngine | VLLMEngine:
    return engine_type(url, restart_timeout_s=0.3, silence_timeout_s=SILENCE_TIMEOUT_S, **options)


def ask(engine: SGLangEngine | VLLMEngine, num_calls: int = 1) -> list[Any]:
    """The outcome of so many calls at the same time."""

    async def generate() -> list[Any]:
        async with engine:
            calls = [engine.generate([REQUEST]) for _ in range(num_calls)]
            return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)

    return asyncio.run(generate())


@BOTH
def test_all_requests_of_a_silent_server_are_broken_off_after_one_question(engine_type: EngineType) -> None:
    """It is away until it answers that: its version alone shows nothing."""
    server = SlowServer(engine_type, None)
    outcomes = ask(client_of(engine_type, transport=server), num_calls=8)
    assert {type(outcome) for outcome in outcomes} == {EngineUnavailableError}
    assert {str(outcome) for outcome in outcomes} == {
        "http://engine did not answer within 0.3 s: it took the connection and was silent"
    }
    assert server.most_open_questions == 1


@BOTH
def test_a_silent_server_that_answers_again_is_asked_again(engine_type: EngineType) -> None:
    server = SlowServer(engine_type, None, httpx.Response(200))
    [[completion]] = ask(client_of(engine_type, transport=server))
    assert isinstance(completion, Completion)
    assert server.num_questions > 1


@BOTH
@pytest.mark.parametrize("status", [200, 404, 429])
def test_a_server_that_answers_the_question_is_waited_for(engine_type: EngineType, status: int) -> None:
    server = SlowServer(engine_type, httpx.Response(status))
    [[completion]] = ask(client_of(engine_type, transport=server))
    assert isinstance(completion, Completion)
    assert server.num_questions > 1


def test_a_server_is_not_asked_while_it_has_no_requests() -> None:
    server = SlowServer(SGLangEngine, None)

    async def idle() -> None:
        async with client_of(SGLangEngine, transport=server) as engine:
            with pytest.raises(EngineUnavailableError):
                await engine.generate([REQUEST])
            num_asked = server.num_questions
            await asyncio.sleep(LONG_S)
            assert server.num_questions == num_asked

    asyncio.run(idle())


def test_a_call_that_begins_as_the_last_one_ends_is_watched_over_too() -> None:
    """So do the turns of a conversation: nothing else runs in between."""

    async def hang() -> None:
        await asyncio.sleep(60)

    async def call_twice() -> None:
        watch = SilenceWatch("engine", hang, lambda: False, timeout_s=SILENCE_TIMEOUT_S)
        await watch.over(lambda: asyncio.sleep(0.01))
        with anyio.fail_after(10), pytest.raises(EngineUnavailableError, match="engine was silent"):
            await watch.over(hang)

    asyncio.run(call_twice())


def test_a_server_may_be_silent_for_longer_amid_its_first_request_and_no_longer_then() -> None:
    """It compiles."""

    async def hang() -> None:
        await asyncio.sleep(60)

    async def call_twice() -> None:
        times = {"timeout_s": SILENCE_TIMEOUT_S, "start_timeout_s": 60.0}
        watch = SilenceWatch("engine", hang, lambda: False, **times)
        await watch.over(lambda: asyncio.sleep(LONG_S))
        with anyio.fail_after(10), pytest.raises(EngineUnavailableError, match=r"engine was silent for 0\.2 s"):
            await watch.over(hang)

    asyncio.run(call_twice())


def test_an_event_loop_that_is_held_up_is_no_silence_of_a_server() -> None:
    """A reward function may compute for as long as it likes, while an answer waits to be read."""

    async def answer() -> None:
        time.sleep(2 * SILENCE_TIMEOUT_S)
        for _ in range(3):  # a connection, what is sent, what comes
            await asyncio.sleep(0)

    async def grade_amid() -> bool:
        watch = SilenceWatch("engine", answer, lambda: False, timeout_s=SILENCE_TIMEOUT_S)
        await watch.over(lambda: asyncio.sleep(LONG_S))
        return watch.is_silent

    assert not asyncio.run(grade_amid())


def test_a_server_that_is_given_weights_may_be_silent(quickstart_dir: Path) -> None:
    class Loading(SlowServer):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/update_weights_from_disk":
                await asyncio.sleep(2 * LONG_S)
                return httpx.Response(400, text="no")
            return await super().handle_async_request(request)

    async def load_amid() -> list[Completion]:
        async with client_of(SGLangEngine, transport=Loading(SGLangEngine, None)) as engine:
            loading = asyncio.ensure_future(engine.load_weights(quickstart_dir / "base_model", "v1"))
            await asyncio.sleep(0)
            completions = await engine.watch.over(lambda: engine.complete([REQUEST]))
            loading.cancel()
            return completions

    assert len(asyncio.run(load_amid())) == 1


@BOTH
def test_a_network_that_swallows_everything_is_noticed(engine_type: EngineType) -> None:
    async def ask_it() -> None:
        async with listening(stay_silent) as url, client_of(engine_type, url) as engine:
            with pytest.raises(EngineUnavailableError, match=f"{url} did not answer within 0.3 s"):
                await asyncio.wait_for(engine.generate([REQUEST]), 30)

    asyncio.run(ask_it())
