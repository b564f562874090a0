"""Lambda's cloud API as far as it is used here, in front of `FakeCloud`."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.infra.fake_cloud import FakeCloud, Machine, reply

REGION = {"name": "us-west-1", "description": "California, USA"}
KIND = {
    "name": "gpu_1x_h100_pcie",
    "description": "1x H100 (80 GB PCIe)",
    "gpu_description": "H100 (80 GB PCIe)",
    "price_cents_per_hour": 249,
    "specs": {"vcpus": 26, "memory_gib": 200, "storage_gib": 1024, "gpus": 1},
}
PRIVATE_ADDRESS = "10.0.2.100"
OPERATION = {"available": True}


class FakeLambda(FakeCloud):
    def __init__(self) -> None:
        super().__init__()
        self.keys: list[dict[str, str]] = []

    def routes(self) -> list[Any]:
        return [
            Route("/api/v1/instance-types", self.kinds),
            Route("/api/v1/instances", self.instances),
            Route("/api/v1/instances/{id}", self.instance),
            Route("/api/v1/instance-operations/launch", self.launch, methods=["POST"]),
            Route("/api/v1/instance-operations/terminate", self.terminate, methods=["POST"]),
            Route("/api/v1/ssh-keys", self.list_keys, methods=["GET"]),
            Route("/api/v1/ssh-keys", self.add_key, methods=["POST"]),
        ]

    def is_create(self, method: str, path: str) -> bool:
        return path.endswith("/launch")

    def error(self, status: int, text: str, code: str = "") -> Response:
        code = code or {401: "global/invalid-api-key", 404: "global/object-does-not-exist"}.get(status, "global/x")
        return reply({"error": {"code": code, "message": text, "suggestion": "Try something else."}}, status)

    def refuse_capacity(self) -> Response:
        return self.error(400, "Not enough capacity.", "instance-operations/launch/insufficient-capacity")

    def refuse_money(self) -> Response:
        return self.error(403, "Your account is inactive.", "global/account-inactive")

    async def kinds(self, request: Request) -> Response:
        return reply({"data": {KIND["name"]: {"instance_type": KIND, "regions_with_capacity_available": [REGION]}}})

    async def list_keys(self, request: Request) -> Response:
        return reply({"data": self.keys})

    async def add_key(self, request: Request) -> Response:
        key = {"id": f"key{len(self.keys)}", **json.loads(await request.body())}
        if key["name"] in [known["name"] for known in self.keys]:
            return self.error(400, "There is a key of this name.", "global/invalid-parameters")
        self.keys.append(key)
        return reply({"data": key})

    async def launch(self, request: Request) -> Response:
        body = json.loads(await request.body())
        if [key["name"] for key in self.keys if key["name"] in body["ssh_key_names"]] != body["ssh_key_names"]:
            return self.error(404, "there is no such key")
        return await self.creates(request, "name", lambda machine: reply({"data": {"instance_ids": [machine.id]}}))

    async def instances(self, request: Request) -> Response:
        if self.takes("fail_lists"):
            return self.error(403, "not today", "global/account-inactive")
        return reply({"data": [self.describe(machine) for machine in self.listed()]})

    async def instance(self, request: Request) -> Response:
        machine = self.shown(request.path_params["id"])
        return reply({"data": self.describe(machine)}) if machine else self.error(404, "there is no such instance")

    async def terminate(self, request: Request) -> Response:
        (wanted,) = json.loads(await request.body())["instance_ids"]
        machine = self.shown(wanted)
        if machine is None:
            return self.error(404, "there is no such instance")
        return self.end(machine) or reply({"data": {"terminated_instances": [self.describe(machine)]}})

    def describe(self, machine: Machine) -> dict[str, Any]:
        status = self.status_of(machine, "booting", "active")
        description: dict[str, Any] = {
            "id": machine.id,
            "name": machine.name,
            "status": status,
            "ssh_key_names": machine.request["ssh_key_names"],
            "file_system_names": [],
            "region": REGION,
            "instance_type": {**KIND, "price_cents_per_hour": round(249 * self.faults.price_factor)},
            "actions": dict.fromkeys(("migrate", "rebuild", "restart", "cold_reboot", "terminate"), OPERATION),
        }
        return description | ({"ip": self.host, "private_ip": PRIVATE_ADDRESS} if status == "active" else {})
