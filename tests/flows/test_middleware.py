"""A form is not lost because SQLite was busy.

Without these tests Submit in the UI could fail now and then while a run is under way.
"""

from __future__ import annotations

import anyio
import httpx
import pytest
from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollouts.flows.own_server.middleware import asked_again_when_busy


def ask(num_refusals: int, *, patience_s: float) -> tuple[httpx.Response, list[bytes]]:
    """The answer of a server that is busy so many times, and the bodies that it was sent."""
    bodies: list[bytes] = []

    async def write(request: Request) -> Response:
        bodies.append(await request.body())
        if len(bodies) <= num_refusals:
            raise OperationalError("INSERT", {}, Exception("database is locked"))
        return Response(b"made", status_code=201)

    async def refuse(request: Request, error: Exception) -> Response:
        return Response(b"Service Unavailable", status_code=503)

    app = Starlette(routes=[Route("/", write, methods=["POST"])], exception_handlers={Exception: refuse})

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(asked_again_when_busy(app, patience_s=patience_s), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/", content=b"form")

    return anyio.run(post), bodies


@pytest.mark.parametrize("num_refusals", [0, 1, 3])
def test_a_busy_database_is_asked_again_with_the_same_body(num_refusals: int) -> None:
    answer, bodies = ask(num_refusals, patience_s=60.0)
    assert (answer.status_code, answer.content) == (201, b"made")
    assert bodies == [b"form"] * (num_refusals + 1)


def test_one_that_stays_busy_is_told_of_in_the_end() -> None:
    answer, bodies = ask(1000, patience_s=0.3)
    assert (answer.status_code, answer.content) == (503, b"Service Unavailable")
    assert len(bodies) > 1
