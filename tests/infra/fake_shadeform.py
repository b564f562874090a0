"""Shadeform's API as far as it is used here, in front of `FakeCloud`."""

from __future__ import annotations

import json
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.infra.fake_cloud import KEY, FakeCloud, Machine, reply

CONFIGURATION = {
    "memory_in_gb": 180,
    "storage_in_gb": 750,
    "vcpus": 28,
    "num_gpus": 1,
    "gpu_type": "H100",
    "vram_per_gpu_in_gb": 80,
    "os_options": ["ubuntu22.04_cuda12.8_shade_os"],
}
KIND = {
    "cloud": "hyperstack",
    "shade_instance_type": "H100",
    "cloud_instance_type": "n3-H100x1",
    "configuration": CONFIGURATION,
    "hourly_price": 210,
    "deployment_type": "vm",
    "availability": [{"region": "canada-1", "available": True}, {"region": "norway-1", "available": False}],
}


class FakeShadeform(FakeCloud):
    def __init__(self) -> None:
        super().__init__()
        self.keys: list[dict[str, str]] = []

    def routes(self) -> list[Any]:
        return [
            Route("/v1/instances/types", self.kinds),
            Route("/v1/instances/create", self.create, methods=["POST"]),
            Route("/v1/instances", self.instances),
            Route("/v1/instances/{id}/info", self.instance),
            Route("/v1/instances/{id}/delete", self.delete, methods=["POST"]),
            Route("/v1/sshkeys", self.list_keys),
            Route("/v1/sshkeys/add", self.add_key, methods=["POST"]),
        ]

    def new_id(self) -> str:
        return str(uuid.UUID(int=len(self.machines) + 1))

    def has_key(self, request: Request) -> bool:
        return request.headers.get("x-api-key") == KEY

    def is_create(self, method: str, path: str) -> bool:
        return path.endswith("/instances/create")

    def error(self, status: int, text: str) -> Response:
        return reply({"code": "ERROR", "message": text}, status)

    def refuse_capacity(self) -> Response:
        return self.error(400, "Out of stock.")

    async def kinds(self, request: Request) -> Response:
        return reply({"instance_types": [KIND]})

    async def list_keys(self, request: Request) -> Response:
        return reply({"ssh_keys": self.keys})

    async def add_key(self, request: Request) -> Response:
        key = {"id": str(uuid.UUID(int=1000 + len(self.keys))), **json.loads(await request.body())}
        if key["name"] in [known["name"] for known in self.keys]:
            return self.error(400, "There is a key of this name.")
        self.keys.append(key)
        return reply({"id": self.keys[-1]["id"]})

    async def create(self, request: Request) -> Response:
        return await self.creates(request, "name", lambda machine: reply({"id": machine.id}))

    async def instances(self, request: Request) -> Response:
        if self.takes("fail_lists"):
            return self.error(400, "not today")
        return reply({"instances": [self.describe(machine) for machine in self.listed()]})

    async def instance(self, request: Request) -> Response:
        machine = self.shown(request.path_params["id"])
        return reply(self.describe(machine)) if machine else self.error(404, "there is no such instance")

    async def delete(self, request: Request) -> Response:
        machine = self.shown(request.path_params["id"])
        if machine is None:
            return self.error(404, "there is no such instance")
        return self.end(machine) or Response(status_code=200)

    def describe(self, machine: Machine) -> dict[str, Any]:
        status = self.status_of(machine, "creating", "active")
        return {
            "id": machine.id,
            "name": machine.name,
            "cloud": "hyperstack",
            "region": "canada-1",
            "shade_instance_type": "H100",
            "cloud_instance_type": "n3-H100x1",
            "cloud_assigned_id": f"at-hyperstack-{machine.id}",
            "shade_cloud": True,
            "configuration": CONFIGURATION,
            "ip": self.host if status == "active" else "",
            "ssh_user": self.user,
            "ssh_port": self.port,
            "status": status,
            "cost_estimate": "0.1",
            "hourly_price": round(210 * self.faults.price_factor),
            "created_at": "2026-11-20T12:00:00Z",
        }
