"""Pages that a browser of this machine shows: they reach no engine without a key, by any method.

Without these tests a page of a stranger could have an engine load other weights, stop it, or keep it busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.gate import CHANGING_GETS, Gate
from rollouts_core.embedded.scheduler import Scheduler
from tests.rollouts_core.embedded.tiny_models import make_model, save_model

HERE = {"Host": "127.0.0.1:30000"}
FOREIGN = (
    {**HERE, "Origin": "https://page.example"},
    {**HERE, "Origin": "null"},
    {**HERE, "Sec-Fetch-Site": "cross-site"},
    {**HERE, "Referer": "https://page.example/x"},
    {"Host": "page.example:30000"},
    {"Host": "localhost.page.example"},
    {"Host": "[x]"},
)
"""What browsers say of a script, a sandboxed frame, an image, an image in an old browser, and names that lead here."""
OF_THIS_MACHINE = (
    HERE,
    {"Host": "[::1]:30000"},
    {"Host": "localhost:30000", "Origin": "http://localhost:3000", "Referer": "http://localhost:3000/"},
    {**HERE, "Sec-Fetch-Site": "same-origin"},
    {**HERE, "Sec-Fetch-Site": "none"},
)
"""Programs, a page that this machine serves, an address that a person typed."""


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    directory = save_model(make_model(), tmp_path_factory.mktemp("model"))
    with Scheduler(Decoder(directory, num_slots=1), model_dir=directory) as running:
        yield running


def ask(scheduler: Scheduler, method: str, path: str, headers: dict[str, str]) -> int:
    async def ask_app() -> int:
        transport = httpx.ASGITransport(Gate(build_app(scheduler)))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return (await client.request(method, path, headers=headers)).status_code

    return asyncio.run(ask_app())


def endpoints(scheduler: Scheduler) -> list[tuple[str, str]]:
    routes: list[Any] = build_app(scheduler).routes
    return [(method, route.path) for route in routes for method in route.methods]


@pytest.mark.parametrize("headers", FOREIGN)
def test_no_endpoint_answers_a_page_of_another_site(scheduler: Scheduler, headers: dict[str, str]) -> None:
    assert {ask(scheduler, method, path, headers) for method, path in endpoints(scheduler)} == {403}


@pytest.mark.parametrize("headers", OF_THIS_MACHINE)
def test_programs_and_people_of_this_machine_are_answered(scheduler: Scheduler, headers: dict[str, str]) -> None:
    assert ask(scheduler, "GET", "/model_info", headers) == 200
    assert ask(scheduler, "POST", "/continue_generation", headers) == 200


def test_browsers_change_nothing_by_get(scheduler: Scheduler) -> None:
    """A link in a mail opens as an address that was typed; trainers of other projects do ask by GET."""
    for path in CHANGING_GETS:
        assert ask(scheduler, "GET", path, {**HERE, "Sec-Fetch-Site": "none"}) == 403
        assert ask(scheduler, "GET", path, HERE) == 200
    both = {path for method, path in endpoints(scheduler) if method == "POST" and ("GET", path) in endpoints(scheduler)}
    assert both == {*CHANGING_GETS}


def test_a_websocket_of_a_page_is_closed() -> None:
    sent: list[dict[str, Any]] = []

    async def keep(message: Any) -> None:
        sent.append(message)

    async def never(*_: Any) -> Any:
        raise AssertionError("the app was reached")

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [(b"origin", b"https://page.example")]}
    asyncio.run(Gate(never)(scope, never, keep))
    assert [message["type"] for message in sent] == ["websocket.close"]
