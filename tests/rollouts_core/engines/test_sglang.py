"""The client of an SGLang server: nothing it returns was sampled from other weights than those that were published.

Without these tests an engine that restarted, or that answered 200 to an update it did not take, would feed samples of
old weights into training, and nothing would show it but a reward that does not rise.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from rollouts_core.config import SamplingConfig
from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.embedded.weights import digest_tensors, read_tensors, tensor_sha256
from rollouts_core.engines import SGLangEngine, sync_weights_to_engines
from rollouts_core.engines.completion import GenerationRequest
from rollouts_core.engines.transfer.canary import Canary, canary_requests, checkpoint_canary
from rollouts_core.errors import (
    CheckpointError,
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    MachineLostError,
    WeightSyncError,
)
from rollouts_core.types import Sample, Status
from tests.rollouts_core.served_engine import served_engine

REQUESTS = [
    GenerationRequest(
        prompt_tokens=[4, 8, 9, 1, 5],
        sampling=SamplingConfig(max_new_tokens=6),
        stop_token_ids=(1,),
        seed=seed,
    )
    for seed in range(3)
]


@pytest.fixture
def model_dir(quickstart_dir: Path) -> Path:
    return quickstart_dir / "base_model"


@pytest.fixture
def trained_dir(model_dir: Path, tmp_path: Path) -> Path:
    """The base model with every weight changed."""
    target = tmp_path / "trained"
    shutil.copytree(model_dir, target)
    weights = {name: value * 4 for name, value in load_file(model_dir / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors")
    return target


def test_completions_come_in_the_order_of_the_requests_and_repeat_with_their_seeds(model_dir: Path) -> None:
    with served_engine(model_dir) as (engine, _):
        first = asyncio.run(engine.generate(REQUESTS))
    with served_engine(model_dir) as (engine, _):
        second = asyncio.run(engine.generate(REQUESTS[::-1]))
    assert [c.tokens for c in first] == [c.tokens for c in second[::-1]]
    assert all(len(c.tokens) == len(c.logprobs) > 0 for c in first)
    assert {c.status for c in first} <= {Status.COMPLETED, Status.TRUNCATED}


def test_loaded_weights_are_served_under_their_version(model_dir: Path, trained_dir: Path) -> None:
    async def load_and_generate(engine: SGLangEngine) -> set[str]:
        await engine.load_weights(trained_dir, "abc-7")
        return {version for c in await engine.generate(REQUESTS) for version, _, _ in c.version_spans}

    with served_engine(model_dir) as (engine, _):
        assert asyncio.run(load_and_generate(engine)) == {"abc-7"}


@pytest.mark.slow
def test_an_engine_that_came_back_with_its_start_weights_is_brought_up_to_date(
    model_dir: Path, trained_dir: Path
) -> None:
    async def generate_around_a_restart(engine: SGLangEngine, restart: Callable[[], None]) -> tuple[object, object]:
        await engine.load_weights(trained_dir, "abc-7")
        before = await engine.generate(REQUESTS)
        restart()
        return before, await engine.generate(REQUESTS)

    with served_engine(model_dir) as (engine, scheduler):

        def restart() -> None:
            scheduler.update_weights(model_dir, weight_version="default").result(10)

        before, after = asyncio.run(generate_around_a_restart(engine, restart))
    assert before == after


class LosingTransport(httpx.AsyncBaseTransport):
    """Passes requests on; loses the connection under the first answer of a path, as a server that dies does."""

    def __init__(self, transport: httpx.AsyncBaseTransport, lost_path: str) -> None:
        self.transport = transport
        self.lost_path = lost_path
        self.seen: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request.url.path)
        response = await self.transport.handle_async_request(request)
        if request.url.path == self.lost_path and self.seen.count(self.lost_path) == 1:
            raise httpx.ReadError("", request=request)
        return response


@pytest.mark.parametrize("lost_path", ["/update_weights_from_disk", "/model_info", "/weights_checker", "/generate"])
def test_an_update_or_a_request_under_which_the_server_vanished_is_made_again(
    model_dir: Path, trained_dir: Path, lost_path: str
) -> None:
    async def load_and_generate(engine: SGLangEngine) -> set[str]:
        await engine.load_weights(trained_dir, "abc-7")
        return {version for c in await engine.generate(REQUESTS) for version, _, _ in c.version_spans}

    with Scheduler(Decoder(model_dir, num_slots=4), model_dir=model_dir) as scheduler:
        transport = LosingTransport(httpx.ASGITransport(app=build_app(scheduler)), lost_path)
        engine = SGLangEngine("http://engine", transport=transport, restart_timeout_s=5.0)
        assert asyncio.run(load_and_generate(engine)) == {"abc-7"}
    assert transport.seen.count(lost_path) >= 2


class RestartingTransport(httpx.AsyncBaseTransport):
    """Passes requests on; after an update the server serves other weights, as one does that came back at once."""

    def __init__(self, scheduler: Scheduler, start_dir: Path) -> None:
        self.transport = httpx.ASGITransport(app=build_app(scheduler))
        self.scheduler = scheduler
        self.start_dir = start_dir
        self.version = "default"
        """What it serves when it came back."""
        self.restarts_left = 0
        self.num_updates = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self.transport.handle_async_request(request)
        if request.url.path == "/update_weights_from_disk":
            self.num_updates += 1
            if self.restarts_left:
                self.restarts_left -= 1
                update = self.scheduler.update_weights(self.start_dir, weight_version=self.version)
                await asyncio.wrap_future(update)
        return response


@pytest.mark.parametrize(
    ("version", "restarts", "num_updates", "is_taken"),
    [("default", 1, 2, True), ("default", 2, 2, False), ("abc-6", 1, 1, False)],
    ids=["a restart", "the same a second time", "an update that left the version before"],
)
def test_an_update_after_which_another_version_is_served_is_made_again_once(
    model_dir: Path, trained_dir: Path, version: str, restarts: int, num_updates: int, is_taken: bool
) -> None:
    """No connection is lost where a server comes back within milliseconds."""

    async def load_and_generate(engine: SGLangEngine, transport: RestartingTransport) -> set[str]:
        await engine.load_weights(model_dir, "abc-6")
        transport.num_updates, transport.restarts_left, transport.version = 0, restarts, version
        [result] = await sync_weights_to_engines([engine], trained_dir, version="abc-7")
        expected = "" if is_taken else f"http://engine serves {version} after it was given abc-7"
        assert (result.error, transport.num_updates) == (expected, num_updates)
        return {version for c in await engine.generate(REQUESTS) for version, _, _ in c.version_spans}

    with Scheduler(Decoder(model_dir, num_slots=4), model_dir=model_dir) as scheduler:
        transport = RestartingTransport(scheduler, model_dir)
        engine = SGLangEngine("http://engine", transport=transport, restart_timeout_s=5.0)
        served = asyncio.run(load_and_generate(engine, transport))
    assert served == {"abc-7" if is_taken else "abc-6"}


class WatchedTransport(httpx.AsyncBaseTransport):
    """Passes requests on, notes their paths, and may answer for the server which checksums its tensors have."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.transport = httpx.ASGITransport(app=build_app(scheduler))
        self.paths: list[str] = []
        self.checksums: dict[str, str] | None = None
        self.breaks_off_after: int | None = None
        """Completions of the next call end, broken off, after so many tokens."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        if request.url.path == "/weights_checker" and self.checksums is not None:
            return httpx.Response(200, json={"ranks": [{"checksums": self.checksums}]}, request=request)
        response = await self.transport.handle_async_request(request)
        if request.url.path != "/generate" or self.breaks_off_after is None:
            return response
        num_tokens, self.breaks_off_after = self.breaks_off_after, None
        answers = json.loads(await response.aread())
        for answer in answers:
            meta = answer["meta_info"]
            answer["output_ids"] = answer["output_ids"][:num_tokens]
            meta["output_token_logprobs"] = meta["output_token_logprobs"][:num_tokens]
            meta["finish_reason"] = {"type": "abort", "message": "Aborted"}
        return httpx.Response(200, json=answers, request=request)


@pytest.fixture
def watched(model_dir: Path) -> Iterator[tuple[SGLangEngine, WatchedTransport, Scheduler]]:
    with Scheduler(Decoder(model_dir, num_slots=16), model_dir=model_dir) as scheduler:
        transport = WatchedTransport(scheduler)
        yield SGLangEngine("http://engine", transport=transport, restart_timeout_s=5.0), transport, scheduler


@pytest.mark.slow
def test_after_an_update_that_failed_nothing_is_sampled_before_weights_are_proved_again(
    watched: tuple[SGLangEngine, WatchedTransport, Scheduler], trained_dir: Path, tmp_path: Path
) -> None:
    engine, transport, _ = watched
    nowhere = tmp_path / "nowhere"
    shutil.copytree(trained_dir, nowhere)
    (nowhere / "model.safetensors").write_bytes(b"cut off")

    async def run() -> list[tuple[str, ...]]:
        await engine.load_weights(trained_dir, "abc-7")
        with pytest.raises(WeightSyncError, match="refused abc-8"):
            await engine.load_weights(nowhere, "abc-8")
        transport.paths.clear()
        return [tuple(version for version, _, _ in c.version_spans) for c in await engine.generate(REQUESTS)]

    assert asyncio.run(run()) == [("abc-7",)] * len(REQUESTS)
    last_load = len(transport.paths) - 1 - transport.paths[::-1].index("/update_weights_from_disk")
    assert transport.paths[last_load:].index("/weights_checker") < transport.paths[last_load:].index("/generate")


@pytest.mark.slow
def test_no_request_returns_samples_of_weights_that_could_not_be_proved(
    watched: tuple[SGLangEngine, WatchedTransport, Scheduler], model_dir: Path, trained_dir: Path
) -> None:
    engine, transport, scheduler = watched

    async def run() -> list[object]:
        await engine.load_weights(trained_dir, "abc-7")
        scheduler.update_weights(model_dir, weight_version="default").result(10)  # it came back
        transport.checksums = digest_tensors(read_tensors(trained_dir), tensor_sha256) | {"lm_head.weight": "0" * 64}
        return await asyncio.gather(*(engine.generate(REQUESTS) for _ in range(4)), return_exceptions=True)

    assert [type(outcome) for outcome in asyncio.run(run())] == [WeightSyncError] * 4


@pytest.mark.slow
def test_where_checksums_say_nothing_a_server_that_came_back_is_proved_by_its_logprobs(
    watched: tuple[SGLangEngine, WatchedTransport, Scheduler], model_dir: Path, trained_dir: Path
) -> None:
    engine, transport, scheduler = watched
    transport.checksums = {}

    async def run() -> None:
        await engine.load_weights(trained_dir, "abc-7")
        scheduler.update_weights(model_dir, weight_version="default").result(10)  # it came back
        await engine.generate(REQUESTS)

    asyncio.run(run())
    # Each load is followed by a canary; besides, the request was made on the old weights and on the right ones.
    assert transport.paths.count("/update_weights_from_disk") == 2
    assert transport.paths.count("/generate") == 4


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_canary_that_was_broken_off_proves_nothing_and_is_asked_again(
    watched: tuple[SGLangEngine, WatchedTransport, Scheduler], trained_dir: Path, num_tokens: int
) -> None:
    """A few tokens may agree by chance, and with none there is nothing to compare."""
    engine, transport, _ = watched
    transport.checksums, transport.breaks_off_after = {}, num_tokens
    asyncio.run(engine.load_weights(trained_dir, "abc-7"))
    assert transport.paths.count("/generate") == 2


@pytest.mark.slow
def test_a_server_that_came_back_is_proved_by_the_canary_of_its_version(
    watched: tuple[SGLangEngine, WatchedTransport, Scheduler], model_dir: Path, trained_dir: Path
) -> None:
    """A forward pass of its own on the CPU takes minutes with a large model."""
    engine, transport, scheduler = watched
    transport.checksums = {}
    asked: list[int] = []
    of_files = checkpoint_canary(trained_dir)

    async def score(samples: list[Sample]) -> list[list[float]]:
        asked.append(len(samples))
        return await of_files.score(samples)

    async def run() -> None:
        await engine.load_weights(trained_dir, "abc-7", Canary(temperature=1.0, score=score))
        scheduler.update_weights(model_dir, weight_version="default").result(10)  # it came back
        await engine.generate(REQUESTS)

    asyncio.run(run())
    assert transport.paths.count("/update_weights_from_disk") == 2
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        (
            RuntimeError("CUDA out of memory"),
            WeightSyncError,
            "http://engine cannot be given abc-7: RuntimeError: CUDA",
        ),
        (MachineLostError("machine 2 is gone"), MachineLostError, "machine 2 is gone"),
    ],
)
def test_a_canary_that_nobody_can_answer_is_an_error_of_the_engine_and_one_of_the_trainer_stays_that(
    watched: tuple[SGLangEngine, WatchedTransport, Scheduler],
    trained_dir: Path,
    failure: Exception,
    kind: type[Exception],
    words: str,
) -> None:
    """The exit code of a job whose machine is lost tells whoever started it to start it again."""
    engine, transport, _ = watched
    transport.checksums = {}

    async def score(samples: list[Sample]) -> list[list[float]]:
        raise failure

    canary = Canary(temperature=1.0, score=score)
    with pytest.raises(kind, match=words):
        asyncio.run(engine.load_weights(trained_dir, "abc-7", canary))
    if kind is MachineLostError:
        with pytest.raises(kind, match=words):
            asyncio.run(sync_weights_to_engines([engine], trained_dir, version="abc-7", canary=canary))


def test_a_checkpoint_is_loaded_under_a_version_of_its_own_where_none_is_given(
    model_dir: Path, trained_dir: Path, tmp_path: Path
) -> None:
    same = shutil.copytree(trained_dir, tmp_path / "same" / "trained")
    other = shutil.copytree(model_dir, tmp_path / "other" / "trained")

    async def load(engine: SGLangEngine, path: Path) -> tuple[str, set[str]]:
        [result] = await sync_weights_to_engines([engine], path)
        assert not result.error
        return result.version, {version for c in await engine.generate(REQUESTS) for version, _, _ in c.version_spans}

    with served_engine(model_dir) as (engine, _):
        first, served_first = asyncio.run(load(engine, trained_dir))
        second, served_second = asyncio.run(load(engine, other))
        third, _ = asyncio.run(load(engine, same))
    assert (served_first, served_second) == ({first}, {second})
    assert first == third != second, "a version names the weights, not the folder"


def test_a_folder_without_weights_gets_no_version(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \*.safetensors: give the folder of a model or a checkpoint"):
        asyncio.run(sync_weights_to_engines([], tmp_path))


def test_weights_that_cannot_be_read_here_are_an_error_of_the_engine_that_was_given_them(
    model_dir: Path, tmp_path: Path
) -> None:
    with served_engine(model_dir) as (engine, _):
        [result] = asyncio.run(sync_weights_to_engines([engine], tmp_path / "nowhere", version="abc-7"))
    assert (result.engine, result.version) == ("http://engine", "abc-7")
    assert "http://engine cannot be given abc-7" in result.error


def test_a_lost_connection_without_words_is_named_by_its_kind() -> None:
    def lose(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("", request=request)

    engine = SGLangEngine("http://engine", transport=httpx.MockTransport(lose), restart_timeout_s=0.1)
    with pytest.raises(EngineUnavailableError, match="model_info: ReadError"):
        asyncio.run(engine.weight_version())


@contextmanager
def raw_server(payload: bytes) -> Iterator[str]:
    """The URL of a server that sends these bytes to whoever connects, and closes the connection."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(payload)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("payload", "kind", "words"),
    [
        (b"", EngineUnavailableError, "disconnected"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"a', EngineUnavailableError, "not completed"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{"a', EngineAnswerError, "answered no JSON"),
        (b"220 mail.example.org ESMTP\r\n\r\n", EngineError, "did not answer in HTTP: check that an engine listens"),
    ],
)
def test_a_broken_answer_is_an_error_that_names_the_engine(payload: bytes, kind: type[EngineError], words: str) -> None:
    async def ask(url: str) -> None:
        engine = SGLangEngine(url)
        try:
            await engine.weight_version()
        finally:
            await engine.aclose()

    with raw_server(payload) as url, pytest.raises(EngineError, match=f"{url}/model_info.*{words}") as raised:
        asyncio.run(ask(url))
    assert raised.type is kind


def answering(answers: dict[str, object]) -> SGLangEngine:
    """A client of a server that gives these answers by path."""

    def answer(request: httpx.Request) -> httpx.Response:
        found = answers[request.url.path]
        return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)

    return SGLangEngine("http://engine", transport=httpx.MockTransport(answer), restart_timeout_s=0.5)


ANSWERS_OF_AN_UPDATE: dict[str, object] = {
    "/update_weights_from_disk": {"success": True, "message": "ok"},
    "/model_info": {"weight_version": "abc-7"},
    "/server_info": {"dtype": "float32", "device": "cpu"},
}


def test_an_update_that_leaves_one_tensor_old_is_caught_by_its_digest(trained_dir: Path) -> None:
    checksums = digest_tensors(read_tensors(trained_dir), tensor_sha256) | {"lm_head.weight": "0" * 64}
    engine = answering({**ANSWERS_OF_AN_UPDATE, "/weights_checker": {"ranks": [{"checksums": checksums}]}})
    with pytest.raises(WeightSyncError, match=r"1 tensors differ, lm_head\.weight first"):
        asyncio.run(engine.load_weights(trained_dir, "abc-7"))


def uncompared(model_dir: Path) -> dict[str, object]:
    """Answers of a server that gives no checksums, and completions of a model."""
    with served_engine(model_dir) as (engine, _):
        completions = asyncio.run(engine.generate(canary_requests(1.0)))
    answers = [
        {
            "output_ids": completion.tokens,
            "meta_info": {
                "output_token_logprobs": [[logprob, 0, None] for logprob in completion.logprobs],
                "finish_reason": {"type": completion.finish_reason},
                "weight_version": "abc-7",
            },
        }
        for completion in completions
    ]
    return {**ANSWERS_OF_AN_UPDATE, "/weights_checker": {"ranks": []}, "/generate": answers}


def test_where_no_tensor_can_be_compared_the_logprobs_decide(model_dir: Path, trained_dir: Path) -> None:
    asyncio.run(answering(uncompared(trained_dir)).load_weights(trained_dir, "abc-7"))
    with pytest.raises(WeightSyncError, match=r"http://engine: its log-probs are .* nats per token away"):
        asyncio.run(answering(uncompared(model_dir)).load_weights(trained_dir, "abc-7"))


def test_an_update_that_leaves_the_old_version_is_an_error(trained_dir: Path) -> None:
    engine = answering({**ANSWERS_OF_AN_UPDATE, "/model_info": {"weight_version": "abc-6"}})
    with pytest.raises(WeightSyncError, match="serves abc-6 after it was given abc-7"):
        asyncio.run(engine.load_weights(trained_dir, "abc-7"))


def test_one_engine_that_refuses_is_named_and_the_others_are_updated(model_dir: Path, trained_dir: Path) -> None:
    refusing = answering(
        {**ANSWERS_OF_AN_UPDATE, "/update_weights_from_disk": {"success": False, "message": "no room"}}
    )
    with served_engine(model_dir) as (engine, _):
        results = asyncio.run(sync_weights_to_engines([engine, refusing], trained_dir, version="abc-7"))
    assert [bool(result.error) for result in results] == [False, True]
    assert "no room" in results[1].error


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "answered 400.*too long"),
        (httpx.Response(400, content=b"no", headers={"Content-Type": "text/plain; charset=rot13"}), "answered 400: no"),
        (httpx.Response(200, text="<html>"), "answered no JSON"),
        (httpx.Response(200, content=b"[" * 100_000), "answered no JSON"),
        ([], "answered 3 prompts with"),
        ([{"output_ids": [1]}] * 3, "without 'meta_info'"),
        (
            [
                {
                    "output_ids": [1, 2],
                    "meta_info": {
                        "output_token_logprobs": [[-0.1, 1, None]],
                        "finish_reason": {"type": "stop"},
                        "weight_version": "default",
                    },
                }
            ]
            * 3,
            "2 tokens with 1 logprobs",
        ),
    ],
)
def test_an_unusable_answer_is_an_error_that_names_the_engine(answer: object, words: str) -> None:
    with pytest.raises(EngineError, match=f"http://engine.*{words}"):
        asyncio.run(answering({"/generate": answer}).generate(REQUESTS))


@pytest.mark.slow
def test_a_server_that_stays_away_is_given_up_at_the_deadline() -> None:
    engine = answering({"/generate": httpx.Response(503), "/model_info": httpx.Response(503)})
    with pytest.raises(EngineUnavailableError, match=r"did not answer within 0\.5 s"):
        asyncio.run(engine.generate(REQUESTS))
