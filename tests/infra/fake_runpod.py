"""RunPod's API v2 as far as it is used here, in front of `FakeCloud`."""

from __future__ import annotations

import asyncio
import getpass
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.infra.fake_cloud import KEY, FakeCloud, Machine, reply
from tests.infra.ssh_server import SSHServer

GPUS = [("NVIDIA H100 80GB HBM3", "H100 SXM", 80, 2.99, 2.49), ("NVIDIA RTX A6000", "RTX A6000", 48, 0.49, 0.33)]


class FakeRunPod(FakeCloud):
    def __init__(self) -> None:
        super().__init__()
        self.log = ["Pod Started"]
        """What every pod writes."""
        self.log_goes_on = False
        """More may come, so that the answer does not end."""

        self.num_elsewhere = 0
        """So many pods, of the first, are in another data center than the request preferred."""

    def routes(self) -> list[Any]:
        return [
            Route("/v2/catalog/gpus", self.gpus),
            Route("/v2/pods", self.pods, methods=["GET"]),
            Route("/v2/pods", self.create_pod, methods=["POST"]),
            Route("/v2/pods/{id}", self.pod, methods=["GET"]),
            Route("/v2/pods/{id}", self.end_pod, methods=["DELETE"]),
            Route("/v2/pods/{id}/logs", self.logs, methods=["GET"]),
        ]

    def is_create(self, method: str, path: str) -> bool:
        return (method, path) == ("POST", "/v2/pods")

    def error(self, status: int, text: str) -> Response:
        problem = {"title": "Error", "status": status, "detail": text}
        return JSONResponse(problem, status, media_type="application/problem+json")

    def refuse_capacity(self) -> Response:
        return self.error(400, "There are no longer any instances available with the requested specifications.")

    async def gpus(self, request: Request) -> Response:
        return reply({"gpus": [self.gpu(*each) for each in GPUS]})

    def gpu(self, gpu_id: str, name: str, memory: int, secure: float, community: float) -> dict[str, Any]:
        centers = [("EU-RO-1", "Romania", "HIGH"), ("US-TX-3", "Texas", "LOW"), ("CA-MTL-1", "Montreal", "NONE")]
        return {
            "id": gpu_id,
            "name": name,
            "pool": None,
            "manufacturer": "NVIDIA",
            "memory": memory,
            "secure": True,
            "community": True,
            "price": {"secure": secure, "community": community},
            "maxCount": {"secure": 8, "community": 2},
            "availability": "HIGH",
            "dataCenters": [{"id": key, "name": title, "availability": level} for key, title, level in centers],
        }

    async def create_pod(self, request: Request) -> Response:
        return await self.creates(request, "name", lambda machine: reply(self.describe(machine), 201))

    async def pods(self, request: Request) -> Response:
        if self.takes("fail_lists"):
            return self.error(403, "not today")
        return reply({"pods": [self.describe(machine) for machine in self.listed()]})

    async def pod(self, request: Request) -> Response:
        machine = self.shown(request.path_params["id"])
        return reply(self.describe(machine)) if machine else self.error(404, "there is no such pod")

    async def end_pod(self, request: Request) -> Response:
        machine = self.shown(request.path_params["id"])
        if machine is None:
            return self.error(404, "there is no such pod")
        return self.end(machine) or Response(status_code=204)

    async def logs(self, request: Request) -> Response:
        if self.shown(request.path_params["id"]) is None:
            return self.error(404, "there is no such pod")
        return StreamingResponse(self.events(), media_type="text/event-stream")

    async def events(self) -> AsyncIterator[str]:
        for number, line in enumerate(self.log):
            event = {"ts": "2026-06-01T12:02:03Z", "source": "container", "line": line}
            yield f"id: 2026-06-01T12:02:03Z/{number:012}\ndata: {json.dumps(event)}\n\n"
        while self.log_goes_on:
            await asyncio.sleep(0.05)
            yield ": still here\n\n"

    def data_center_of(self, machine: Machine) -> str:
        if list(self.machines).index(machine.id) < self.num_elsewhere:
            return "CA-MTL-1"
        return str(machine.request.get("dataCenterIds", ["EU-RO-1"])[0])

    def describe(self, machine: Machine) -> dict[str, Any]:
        status = self.status_of(machine, "STARTING", "RUNNING")
        asked = machine.request
        endpoint = {"host": self.host, "port": self.port, "username": self.user, "command": f"ssh {self.host}"}
        price = {each[0]: each[3] if asked["cloud"] == "SECURE" else each[4] for each in GPUS}[asked["gpu"]["id"]]
        return {
            "id": machine.id,
            "name": machine.name,
            "status": status,
            "actions": ["terminate"],
            "image": asked["image"],
            "args": "",
            "disk": asked["disk"],
            "mounts": {},
            "ports": asked["ports"],
            "env": asked["env"],
            "registry": None,
            "gpu": {"id": asked["gpu"]["id"], "count": asked["gpu"]["count"]},
            "cloud": asked["cloud"],
            "dataCenterId": self.data_center_of(machine),
            "cudaVersion": "12.8",
            "ssh": {"proxy": None, "direct": endpoint if status == "RUNNING" else None},
            "template": None,
            "cost": price * asked["gpu"]["count"] * self.faults.price_factor,
            "locked": False,
            "globalNetworking": {"enabled": False},
            "runtime": None,
            "createdAt": "2026-11-20T12:00:00Z",
            "startedAt": None,
        }


@contextmanager
def runpod_with(server: SSHServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRunPod]:
    """RunPod, with a key for it in the environment; all of its pods are one machine."""
    fake = FakeRunPod()
    fake.port, fake.user = server.port, getpass.getuser()
    with fake.served() as url:
        monkeypatch.setenv("RUNPOD_API_KEY", KEY)
        monkeypatch.setenv("RUNPOD_API_URL", url)
        yield fake
