"""Pins how a service is asked: how many requests at a time, over how many connections, how late again.

Without it 128 samples are 128 connections at once, and an overloaded service is asked three times within two seconds.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from typing import Any

import pytest

from rollouts_core.config import RewardConfig
from rollouts_core.errors import ConfigError, EnvironmentUnavailableError
from rollouts_core.system import backoff
from rollouts_core.system.backoff import MAX_RETRY_AFTER_S, draw_backoff, read_retry_after
from rollouts_core.system.concurrency import gather
from rollouts_core.system.http_service import HTTPService
from tests.rollouts_core.scripted_service import Answer, Service


def answer_slowly(body: dict[str, Any]) -> Answer:
    time.sleep(0.02)
    return 200, body


def service_of(server: Service, **changes: Any) -> HTTPService:
    return HTTPService(server.url, RewardConfig(kind="http", url=server.url, **changes))


def ask_all(service: HTTPService, num: int) -> list[int]:
    """The answers to so many requests at the same time."""

    async def ask() -> list[int]:
        return await gather([partial(service.ask, {"n": n}, lambda answer: int(answer["n"])) for n in range(num)])

    return asyncio.run(ask())


def test_requests_are_bounded_and_share_connections(serve: Any) -> None:
    server = serve(answer_slowly)
    assert ask_all(service_of(server, max_concurrent=3), 12) == list(range(12))
    assert server.max_under_way == 3
    assert len(server.clients) == 3


def test_a_service_outlives_the_event_loop_that_first_asked_it(serve: Any) -> None:
    service = service_of(serve(answer_slowly))
    assert [ask_all(service, 2), ask_all(service, 2)] == [[0, 1], [0, 1]]


@pytest.mark.slow
def test_a_service_that_says_when_is_asked_no_sooner(serve: Any) -> None:
    answers: list[Answer] = [(429, {}, {"Retry-After": "1"})]
    server = serve(lambda body: answers.pop() if answers else (200, body))
    began = time.monotonic()
    assert ask_all(service_of(server), 1) == [0]
    assert 1.0 <= time.monotonic() - began < 3.0


def test_a_request_keeps_its_slot_while_it_pauses(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST_BACKOFF_S", 0.2)
    answers: list[Answer] = [(503, {})]
    server = serve(lambda body: answers.pop() if answers else (200, body))
    ask_all(service_of(server, max_concurrent=1), 2)
    assert [body["n"] for body in server.bodies] in ([0, 0, 1], [1, 1, 0])


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("7", 7, 7),
        ("0", 0, 0),
        ("86400", MAX_RETRY_AFTER_S, MAX_RETRY_AFTER_S),
        ("soon", 0, 0),
        ("-5", 0, 0),
        ("", 0, 0),
    ],
)
def test_retry_after_is_a_number(text: str, least: float, most: float) -> None:
    assert least <= read_retry_after({"Retry-After": text}) <= most


@pytest.mark.parametrize(("seconds", "least", "most"), [(60, 30, 60), (-86400, 0, 0)])
def test_retry_after_is_a_date(seconds: int, least: float, most: float) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)
    assert least <= read_retry_after({"Retry-After": date}) <= most


def test_pauses_grow_to_their_limit_and_differ() -> None:
    assert 0.25 <= draw_backoff(1) <= 0.5
    assert 1.0 <= draw_backoff(3) <= 2.0
    assert 15.0 <= draw_backoff(50) <= 30.0
    assert len({draw_backoff(1) for _ in range(5)}) > 1


def test_an_answer_that_dribbles_is_given_up_at_the_deadline() -> None:
    async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(100):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)

    async def ask() -> None:
        async with await asyncio.start_server(dribble, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            config = RewardConfig(kind="http", url=url, timeout_s=0.3, max_retries=0)
            await HTTPService(url, config).ask({}, lambda answer: answer)

    began = time.monotonic()
    with pytest.raises(EnvironmentUnavailableError, match=r"in 1 attempts: it did not answer within 0\.3 s"):
        asyncio.run(ask())
    assert time.monotonic() - began < 2.0


def test_a_key_that_is_not_set_is_named(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    service = service_of(serve(answer_slowly), api_key_variable="JUDGE_KEY")
    with pytest.raises(ConfigError, match="api_key_variable JUDGE_KEY is not set"):
        ask_all(service, 1)


def test_a_key_with_the_end_of_a_line_that_a_file_of_windows_left_is_sent_without(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame\r\n")
    server = serve(answer_slowly)
    assert ask_all(service_of(server, api_key_variable="JUDGE_KEY"), 1) == [0]
    assert server.keys == ["Bearer sesame"]


@pytest.mark.parametrize("held", ["schlüssel", "sk-12…89", "two words", "two\nlines"])
def test_what_no_header_can_carry_is_no_key(serve: Any, monkeypatch: pytest.MonkeyPatch, held: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", held)
    service = service_of(serve(answer_slowly), api_key_variable="JUDGE_KEY")
    with pytest.raises(ConfigError, match="the value of api_key_variable JUDGE_KEY is not a valid key") as caught:
        ask_all(service, 1)
    assert held not in str(caught.value)
