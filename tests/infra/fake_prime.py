"""Prime Intellect's API as far as it is used here, in front of `FakeCloud`."""

from __future__ import annotations

import json
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.infra.fake_cloud import FakeCloud, Machine, reply

MAX_PAGE = 2
"""Less than is asked for, so that a client has to turn the page."""
USD_PER_HOUR, USD_PER_GB = 2.4, 0.0005
INCLUDED_GB = 50
DISK = {"minCount": INCLUDED_GB, "defaultCount": INCLUDED_GB, "maxCount": 1000, "step": 40, "pricePerUnit": USD_PER_GB}
H100: dict[str, Any] = {
    "cloudId": "h100:sxm/1",
    "gpuType": "H100_80GB",
    "socket": "SXM5",
    "provider": "hyperstack",
    "region": "united_states",
    "dataCenter": "US-1",
    "country": "US",
    "gpuCount": 1,
    "gpuMemory": 80,
    "disk": {**DISK, "defaultIncludedInPrice": True},
    "stockStatus": "High",
    "security": "secure_cloud",
    "prices": {"onDemand": USD_PER_HOUR, "communityPrice": None, "isVariable": False, "currency": "USD"},
    "images": ["axolotl", "ubuntu_22_cuda_12"],
    "isSpot": False,
    "prepaidTime": None,
}
CONFIGURATIONS: list[dict[str, Any]] = [
    H100 | {"cloudId": "sold-out", "stockStatus": "Unavailable"},
    H100 | {"cloudId": "paid-in-advance", "prepaidTime": 720.0},
    H100 | {"cloudId": "other-money", "prices": {"onDemand": 1.0, "currency": "EUR"}},
    H100 | {"cloudId": "of-the-market", "prices": {"onDemand": 1.5, "isVariable": True, "currency": "USD"}},
    H100 | {"cloudId": "no-gpu", "gpuType": "CPU_NODE", "gpuMemory": 0, "prices": {"onDemand": 0.2, "currency": "USD"}},
    H100,
    H100 | {"cloudId": "spot", "isSpot": True, "prices": {"onDemand": 0.9, "isVariable": True, "currency": "USD"}},
]


class FakePrime(FakeCloud):
    def __init__(self) -> None:
        super().__init__()
        self.keys: list[dict[str, Any]] = []

    def routes(self) -> list[Any]:
        return [
            Route("/api/v1/availability/gpus", self.gpus),
            Route("/api/v1/pods/", self.pods, methods=["GET"]),
            Route("/api/v1/pods/", self.create_pod, methods=["POST"]),
            Route("/api/v1/pods/{id}", self.pod, methods=["GET"]),
            Route("/api/v1/pods/{id}", self.end_pod, methods=["DELETE"]),
            Route("/api/v1/ssh_keys/", self.list_keys, methods=["GET"]),
            Route("/api/v1/ssh_keys/", self.add_key, methods=["POST"]),
        ]

    def new_id(self) -> str:
        return uuid.UUID(int=len(self.machines) + 1).hex

    def is_create(self, method: str, path: str) -> bool:
        return (method, path) == ("POST", "/api/v1/pods/")

    def error(self, status: int, text: str) -> Response:
        return reply({"errors": [{"param": "request", "details": text}]}, status)

    def refuse_capacity(self) -> Response:
        return self.error(422, "Requested configuration is not available")

    async def gpus(self, request: Request) -> Response:
        first = (int(request.query_params["page"]) - 1) * MAX_PAGE
        return reply({"items": CONFIGURATIONS[first : first + MAX_PAGE], "totalCount": len(CONFIGURATIONS)})

    async def create_pod(self, request: Request) -> Response:
        return await self.creates(request, "name", lambda machine: reply(self.describe(machine)), within="pod")

    async def pods(self, request: Request) -> Response:
        if self.takes("fail_lists"):
            return self.error(422, "not today")
        return self.page(request, [self.describe(machine) for machine in self.listed()])

    async def pod(self, request: Request) -> Response:
        machine = self.machines.get(request.path_params["id"])
        return reply(self.describe(machine)) if machine else self.error(404, "there is no such pod")

    async def end_pod(self, request: Request) -> Response:
        machine = self.machines.get(request.path_params["id"])
        if machine is None:
            return self.error(404, "there is no such pod")
        return self.end(machine) or reply({"status": "DELETING"})

    async def list_keys(self, request: Request) -> Response:
        return self.page(request, self.keys)

    async def add_key(self, request: Request) -> Response:
        about = {"id": f"key{len(self.keys)}", "userId": "me", "isPrimary": False, "isUserKey": True}
        key = about | json.loads(await request.body())
        if key["name"] in [known["name"] for known in self.keys]:
            return self.error(422, "There is a key of this name.")
        self.keys.append(key)
        return reply(self.keys[-1])

    def page(self, request: Request, rows: list[dict[str, Any]]) -> Response:
        offset, limit = int(request.query_params["offset"]), int(request.query_params["limit"])
        shown = rows[offset : offset + min(limit, MAX_PAGE)]
        return reply({"total_count": len(rows), "offset": offset, "limit": limit, "data": shown})

    def describe(self, machine: Machine) -> dict[str, Any]:
        is_over = self.shown(machine.id) is None
        status = "TERMINATED" if is_over else self.status_of(machine, "ACTIVE", "installed")
        is_installed = status == "installed"
        wanted = machine.request["pod"]
        price = USD_PER_HOUR + (wanted["diskSize"] - INCLUDED_GB) * USD_PER_GB
        return {
            "id": machine.id,
            "userId": "me",
            "name": machine.name,
            "providerType": machine.request["provider"]["type"],
            "status": "ACTIVE" if is_installed else status,
            "installationStatus": "FINISHED" if is_installed else "PENDING",
            "gpuName": wanted["gpuType"],
            "gpuCount": wanted["gpuCount"],
            "socket": wanted["socket"],
            "priceHr": round(price * self.faults.price_factor, 4),
            "sshConnection": [f"{self.user}@{self.host} -p {self.port}"] if is_installed else [None],
        }
