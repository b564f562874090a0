"""Vast.ai's API as far as it is used here, in front of `FakeCloud`."""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.infra.fake_cloud import FakeCloud, Machine, reply

PAGE = 2
"""Small, so that every list has several pages."""
MOST_ASKS = 64
"""A search answers no more, whatever limit it names."""
ASK = {
    **{"id": 7001, "gpu_name": "H100 SXM", "num_gpus": 1, "gpu_ram": 81559, "geolocation": "Romania, RO"},
    **{"direct_port_count": 20, "duration": 30 * 86400.0},
}
FILTERED = ("gpu_name", "gpu_ram", "num_gpus", "dph_total", "direct_port_count", "duration")

_FILTERS: dict[str, Callable[[Any, Any], bool]] = {
    **{"eq": operator.eq, "gt": operator.gt, "gte": operator.ge},
    "in": lambda value, wanted: value in wanted,
}


class FakeVast(FakeCloud):
    def __init__(self) -> None:
        super().__init__()
        self.asks: list[dict[str, Any]] = [{**ASK, "dph_total": 2.2}]
        """Without a `machine_id` they are for whatever machine, so that a test may rent after one that broke."""
        self.searches: list[dict[str, Any]] = []
        self.barred: set[int] = set()
        """Asks that our account may not take, although it may take others."""

    def routes(self) -> list[Any]:
        return [
            Route("/api/v0/bundles/", self.search, methods=["POST"]),
            Route("/api/v0/asks/{id:int}/", self.take, methods=["PUT"]),
            Route("/api/v1/instances/", self.instances),
            Route("/api/v0/instances/{id:int}/", self.destroy, methods=["DELETE"]),
        ]

    def new_id(self) -> str:
        return str(31_000_000 + len(self.machines))

    def is_create(self, method: str, path: str) -> bool:
        return method == "PUT"

    def error(self, status: int, text: str) -> Response:
        return reply({"success": False, "error": "error", "msg": text}, status)

    def refuse_capacity(self) -> Response:
        return self.error(410, "no_such_ask: it is no longer available")

    def refuse_key(self, request: Request) -> Response:
        if request.url.path == "/api/v0/bundles/":  # as its document says of a search
            return self.error(404, "Invalid user key")
        return super().refuse_key(request)

    async def search(self, request: Request) -> Response:
        query = json.loads(await request.body())
        self.searches.append(query)
        wanted = {key: value for key, value in query.items() if key in FILTERED}
        asks = [ask for ask in self.asks if all(_is_met(ask[key], value) for key, value in wanted.items())]
        asks.sort(key=lambda ask: [ask[column] for column, _ in query["order"]])
        shown = [{**ask, "end_date": time.time() + ask["duration"]} for ask in asks]
        return reply({"offers": shown[: min(query["limit"], MOST_ASKS)]})

    def refuse_money(self) -> Response:
        refusal = {"success": False, "error": "insufficient_credit", "msg": "Your account lacks credit."}
        return reply(refusal, 400)

    async def take(self, request: Request) -> Response:
        ask_id = request.path_params["id"]
        if ask_id in self.barred:
            said = f"error 403/3586: Offer {ask_id} is not your own. Hosts can only rent their own machines."
            return reply({"success": False, "error": "invalid_args", "msg": said, "ask_id": ask_id}, 403)
        return await self.creates(
            request, "label", lambda machine: reply({"success": True, "new_contract": int(machine.id)})
        )

    async def instances(self, request: Request) -> Response:
        if self.takes("fail_lists"):
            return self.error(401, "not today")
        token = request.query_params.get("after_token", "0")
        start = int(token) if token.isdecimal() else len(self.machines)
        wanted = json.loads(request.query_params.get("select_filters", "{}")).get("id", {}).get("eq")
        one = self.shown(str(wanted))
        machines = self.listed() if wanted is None else [one] if one else []
        next_token = str(start + PAGE) if start + PAGE < len(machines) else None
        shown = [self.describe(machine) for machine in machines[start : start + PAGE]]
        return reply({"success": True, "instances": shown, "next_token": next_token})

    async def destroy(self, request: Request) -> Response:
        machine = self.shown(str(request.path_params["id"]))
        if machine is None:
            return self.error(404, "there is no such instance")
        return self.end(machine) or reply({"success": True})

    def describe(self, machine: Machine) -> dict[str, Any]:
        status = self.status_of(machine, "loading", "running")
        is_up = status == "running"
        ports = {"ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(self.port)}]}} if is_up else {}
        return ports | {
            "id": int(machine.id),
            "label": machine.name,
            "actual_status": status if is_up or machine.status or self.faults.extra_status else None,
            "public_ipaddr": self.host,
            "dph_total": 2.2 * self.faults.price_factor,
            "onstart": machine.request["onstart"],
        }


def _is_met(value: Any, condition: dict[str, Any]) -> bool:
    """Whether a column of an ask is as a filter wants it."""
    ((how, wanted),) = condition.items()
    return bool(_FILTERS[how](value, wanted))
