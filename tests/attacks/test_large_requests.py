"""Requests that ask the embedded engine for more than it has: each is refused before anything is made of it.

Without these tests one request would fill the machine's memory, or keep all others waiting for minutes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollouts_core.data.chat import tokenize_prompt
from rollouts_core.embedded import exchange
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.protocol import MAX_CHARS_PER_TOKEN, ContractError, parse_generate
from rollouts_core.embedded.scheduler import MAX_WAITING_REQUESTS, RequestError, Scheduler
from rollouts_core.errors import DataError
from rollouts_core.types import Message
from tests.rollouts_core.embedded.test_server import add_tokenizer, ask, talk
from tests.rollouts_core.embedded.tiny_models import make_model, save_model

CONTEXT = 64
SHORT = {"max_new_tokens": 2}
ZEROS = itertools.product("0\u0660\u06f0\u07c0\u0966\u09e6", repeat=6)
SAME_TOKEN = ",".join(f'"{"".join(zeros)}3": 0' for zeros in ZEROS).encode()
"""A bias of one token, 46,656 times: its number begins with the zeros of several scripts."""


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    directory = add_tokenizer(save_model(make_model(seed=0), tmp_path / "served"))
    with Scheduler(Decoder(directory, num_slots=2, context_length=CONTEXT), model_dir=directory) as running:
        yield running


def held_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "' + b"a" * (60 << 20) + b'"}', "more than the permitted"),
        (b'{"text": "' + b"a " * (10 << 20) + b'"}', "longer than the model's context length"),
        (b'{"text": ["' + b"a " * (10 << 20) + b'", "a"]}', "longer than the model's context length"),
        (b'{"text": [' + b'"a",' * 4_000_000 + b'"a"]}', f"at most {MAX_WAITING_REQUESTS} completions"),
        (b'{"input_ids": [' + b"1," * 40_000_000 + b"1]}", "more than the permitted"),
        (b'{"input_ids": [' + b"1," * 10_000_000 + b"1]}", "longer than the model's context length"),
        (b'{"input_ids": [' + b"[1]," * 3_000_000 + b"[1]]}", "lists and objects: send less at once"),
        (b'{"input_ids": [' + b"[1]," * 100_000 + b"[1]]}", f"at most {MAX_WAITING_REQUESTS} completions"),
        (b'{"input_ids": [[' + b"1," * 10_000_000 + b"1],[1]]}", "longer than the model's context length"),
        (b'{"rid": "' + b"x" * (30 << 20) + b'", "input_ids": [3], "sampling_params": {"n": 1024}}', "rid may have"),
        (b'{"rid": ["' + b"x" * (30 << 20) + b'"], "input_ids": [3], "sampling_params": {"n": 1024}}', "rid may have"),
        (
            b'{"input_ids": [3], "sampling_params": {"stop_token_ids": [' + b"1," * 10_000_000 + b"1]}}",
            "may have at most",
        ),
        (b'{"input_ids": [3], "sampling_params": {"logit_bias": {' + SAME_TOKEN + b"}}}", "may have at most"),
        (b'{"input_ids": {"a": [' + b"1," * 10_000_000 + b"1]}}", "expected a list of token ids"),
    ],
    ids=[
        "60 MB",
        "20 MB",
        "several",
        "short texts",
        "40 million ids",
        "10 million ids",
        "lists",
        "prompts",
        "list",
        "long id",
        "long ids",
        "ends",
        "biases",
        "no list",
    ],
)
def test_a_request_of_more_than_the_engine_takes_is_refused_at_once(
    scheduler: Scheduler, content: bytes, words: str
) -> None:
    before, began = held_mb(), 0.0
    longest_s = 0.0

    async def conversation(client: httpx.AsyncClient) -> None:
        nonlocal began, longest_s
        began = time.monotonic()
        asked = asyncio.create_task(client.post("/generate", content=content))
        while not asked.done():
            last = time.monotonic()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, time.monotonic() - last)
        answer = asked.result()
        assert (answer.status_code, words in answer.text) == (400, True), answer.text[:300]
        assert (await client.get("/health")).status_code == 200

    talk(scheduler, conversation)
    assert time.monotonic() - began < 20
    assert longest_s < 60  # a request that is not refused takes minutes
    assert held_mb() - before < 900
    assert ask(scheduler, "POST", "/generate", {"input_ids": [3], "sampling_params": SHORT}).status_code == 200


CLASSES = "(?i)" + "[ -\uffff]" * 30


@pytest.mark.parametrize(
    ("path", "asked", "words"),
    [
        (
            "/generate",
            {"input_ids": [[3]] * 40, "sampling_params": [{"stop_regex": f"{CLASSES}{each}"} for each in range(40)]},
            "at most 32 different expressions",
        ),
        (
            "/generate",
            {"input_ids": [[3]] * 40, "sampling_params": [{"regex": "a" * each} for each in range(1, 41)]},
            "at most 32 different expressions",
        ),
        ("/generate", {"input_ids": [3], "sampling_params": {"stop": ["a" * 257]}}, "at most 256 characters, got 257"),
        ("/v1/completions", {"prompt": [3], "stop": "a" * (30 << 20)}, "at most 256 characters"),
        (
            "/v1/completions",
            {"prompt": [[3] * 63] * 5, "n": 1024, "max_tokens": 0, "echo": True},
            "at most 262144 tokens of prompts",
        ),
        (
            "/v1/completions",
            {"prompt": [[3] * 63] * 5, "n": 1024, "max_tokens": 0, "return_token_ids": True},
            "at most 262144 tokens of prompts",
        ),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text"}] * 60000}] * 8},
            "lists and objects: send less at once",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "text"}] * 60000}] * 8},
            "lists and objects: send less at once",
        ),
    ],
    ids=["stop patterns", "expressions", "stop", "30 MB stop", "echo", "token ids", "blocks", "parts"],
)
def test_a_short_request_for_much_work_or_text_is_refused_at_once(
    scheduler: Scheduler, path: str, asked: dict[str, Any], words: str
) -> None:
    before, began = held_mb(), time.monotonic()
    answer = ask(
        scheduler, "POST", path, asked if path == "/generate" else {"model": str(scheduler.model_dir), **asked}
    )
    assert (answer.status_code, words in answer.text) == (400, True), answer.text[:300]
    assert time.monotonic() - began < 10  # a request that is not refused takes minutes
    assert held_mb() - before < 300


def test_a_stop_pattern_is_compiled_beside_the_event_loop(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_compiling, may_end = threading.Event(), threading.Event()

    def compile_slowly(_: tuple[str, ...]) -> None:
        is_compiling.set()
        assert may_end.wait(20)

    monkeypatch.setattr("rollouts_core.embedded.sampling._check_patterns", compile_slowly)

    async def conversation(client: httpx.AsyncClient) -> None:
        body = {"input_ids": [3], "sampling_params": {**SHORT, "stop_regex": "a+"}}
        asked = asyncio.create_task(client.post("/generate", json=body))
        while not is_compiling.is_set():
            await asyncio.sleep(0.01)
        assert (await client.get("/health")).status_code == 200
        may_end.set()
        assert (await asked).status_code == 200

    talk(scheduler, conversation)


MESSAGE = b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": '


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        (
            "/v1/completions",
            b'{"model": "m", "prompt": "' + b"a " * (10 << 20) + b'"}',
            "longer than the model's context",
        ),
        ("/v1/completions", b'{"model": "m", "prompt": "' + b"a" * (60 << 20) + b'"}', "more than the permitted"),
        ("/v1/completions", b'{"model": "m", "prompt": [' + b"1," * 10_000_000 + b"1]}", "longer than the model's"),
        ("/v1/completions", b'{"model": "m", "prompt": [' + b"[1]," * 100_000 + b"[1]]}", "at most 65536 completions"),
        ("/v1/completions", b'{"model": "m", "prompt": [' + b"[1]," * 3_000_000 + b"[1]]}", "lists and objects"),
        ("/tokenize", b'{"prompt": "' + b"a " * (10 << 20) + b'"}', "may have at most"),
        ("/v1/chat/completions", MESSAGE + b'"' + b"a" * (60 << 20) + b'"}]}', "more than the permitted"),
        ("/v1/messages", MESSAGE + b'"' + b"a" * (60 << 20) + b'"}]}', "more than the permitted"),
    ],
    ids=["text", "60 MB", "ids", "prompts", "lists", "tokenize", "chat", "messages"],
)
def test_the_other_apis_have_the_same_limits(scheduler: Scheduler, path: str, content: bytes, words: str) -> None:
    content = content.replace(b'"m"', json.dumps(str(scheduler.model_dir)).encode(), 1)
    before, longest_s = held_mb(), 0.0

    async def conversation(client: httpx.AsyncClient) -> None:
        nonlocal longest_s
        asked = asyncio.create_task(client.post(path, content=content))
        while not asked.done():
            last = time.monotonic()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, time.monotonic() - last)
        assert (asked.result().status_code, words in asked.result().text) == (400, True), asked.result().text[:300]

    talk(scheduler, conversation)
    assert longest_s < 5
    assert held_mb() - before < 1200


@pytest.mark.parametrize("path", ["/abort_request", "/pause_generation", "/update_weight_version", "/weights_checker"])
def test_requests_that_say_little_are_taken_little_of(scheduler: Scheduler, path: str) -> None:
    answer = ask(scheduler, "POST", path, {"rid": "x" * (1 << 20)})
    assert (answer.status_code, f"more than the permitted {exchange.SMALL_BODY_BYTES} bytes" in answer.text) == (
        400,
        True,
    )


def test_a_text_is_turned_into_token_ids_beside_the_event_loop(scheduler: Scheduler) -> None:
    """Others are answered meanwhile, however long it takes."""
    tokenizer, is_encoding, may_end = scheduler.tokenizer, asyncio.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    class SlowTokenizer:
        def encode_batch_fast(self, texts: list[str]) -> Any:
            loops[0].call_soon_threadsafe(is_encoding.set)
            may_end.wait(20)
            return tokenizer.encode_batch_fast(texts)  # type: ignore[union-attr]

        def decode(self, *arguments: Any, **named: Any) -> str:
            return tokenizer.decode(*arguments, **named)  # type: ignore[union-attr]

    scheduler.tokenizer = SlowTokenizer()  # type: ignore[assignment]

    async def conversation(client: httpx.AsyncClient) -> None:
        loops.append(asyncio.get_running_loop())
        asked = asyncio.create_task(client.post("/generate", json={"text": "a", "sampling_params": SHORT}))
        await asyncio.wait_for(is_encoding.wait(), 10)
        assert (await client.get("/health")).status_code == 200
        may_end.set()
        assert (await asked).status_code == 200

    talk(scheduler, conversation)


def test_the_longest_text_that_fits_is_taken() -> None:
    text = "x" * (CONTEXT * MAX_CHARS_PER_TOKEN)
    assert parse_generate({"text": text}, lambda _: [1], context_length=CONTEXT).requests[0].input_ids == (1,)
    with pytest.raises(RequestError, match="longer than the model's context length"):
        parse_generate({"text": text + "x"}, lambda _: [1], context_length=CONTEXT)
    with pytest.raises(RequestError, match=r"The input \(64 tokens\) is longer"):
        parse_generate({"text": "x"}, lambda _: [1] * CONTEXT, context_length=CONTEXT)


def test_an_error_shows_the_beginning_of_a_large_value_alone() -> None:
    deep: Any = [1]
    for _ in range(500):
        deep = [deep] * 2
    began = time.monotonic()
    with pytest.raises(ContractError, match="invalid type"):
        parse_generate({"input_ids": [3], "rid": {"a": deep}}, None)
    assert time.monotonic() - began < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for i in range(90000) %}{{ 'x' * 2300 }}{% endfor %}", "writes 207,000,000 characters"),
        (
            "{% for i in range(90000) %}{% for j in range(90000) %}{% for k in range(90000) %}{% endfor %}{% endfor %}"
            "{% endfor %}x",
            "did not end within",
        ),
    ],
    ids=["200 MB", "without end"],
)
def test_a_chat_template_that_writes_too_much_or_does_not_end_is_refused(
    tokenizer: Any, template: str, words: str
) -> None:
    tokenizer.chat_template = template
    began = time.monotonic()
    with pytest.raises(DataError, match=words):
        tokenize_prompt(tokenizer, [Message(role="user", content="hi")])
    assert time.monotonic() - began < 60
