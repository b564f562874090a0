"""A provider of rented machines that lives in this process, remembers its machines, and fails as real ones do.

Not here: how each provider says it (fake_runpod.py and its like). A test sets the faults, then looks at `machines`.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

HANG_S = 1.5
KEY = "secret-key-of-the-tests"
_RUN_PART = re.compile(r"-a\d+-t\d+$")


@dataclass
class Machine:
    """What the provider knows about one machine."""

    id: str
    name: str
    created_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    status: str = ""
    """What the provider says about it; empty means what its age says."""
    request: dict[str, Any] = field(default_factory=dict)
    """What it was created with."""


@dataclass
class Faults:
    """What goes wrong; numbers count down with every time that it does."""

    drop_creates: int = 0
    """Create, then drop the connection."""
    hang_creates: int = 0
    """Create, then answer when nobody waits any more."""
    break_creates: int = 0
    """Create, then answer 500."""
    drop_before_create: int = 0
    """Drop the connection without creating."""
    no_capacity: int = 0
    no_money: int = 0
    """Refuse to create anything for an account that cannot pay, as this provider says it."""
    no_rights: int = 0
    """Answer 403 to whatever asks for a machine."""
    busy: int = 0
    """Answer 429 to whatever comes."""
    busy_creates: int = 0
    """Answer 429 to whatever asks for a machine, and create none."""
    retry_after: str = "0.05"
    down: int = 0
    """Answer 500 to whatever comes."""
    fail_lists: int = 0
    fail_ends: int = 0
    """End the machine, then answer 500."""
    drop_ends: int = 0
    """End the machine, then drop the connection."""
    list_lag_s: float = 0.0
    """Machines are not listed before this age."""
    boot_s: float = 0.0
    end_lag_s: float = 0.0
    """Ended machines are shown as before for this long."""
    never_ends: bool = False
    refuses_ends_again: bool = False
    """Answer 400 to whatever asks for the end of a machine that ends already."""
    refuses_key: bool = False
    extra_status: str = ""
    """Status of every machine that is there."""
    price_factor: float = 1.0
    """What machines really cost, compared with what was offered."""


class Dropped(Response):
    """An answer that breaks off."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})


class FakeCloud(ABC):
    """State, faults and what every provider's fake shares."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.faults = Faults()
        self.requests: list[tuple[str, str]] = []
        self.most_at_once = 0
        """The largest number of machines that one run had at the same time."""
        self.host, self.port, self.user = "127.0.0.1", 22, "root"
        """Where every machine answers."""
        self._lock = threading.Lock()
        self.app: ASGIApp = Starlette(routes=self.routes())

    # ── for tests ──

    def alive(self) -> list[Machine]:
        """The machines that cost money."""
        with self._lock:
            return [machine for machine in self.machines.values() if machine.ended_at is None]

    def num_creates(self) -> int:
        """How many requests to create a machine came."""
        return sum(1 for method, path in self.requests if self.is_create(method, path))

    @contextmanager
    def served(self) -> Iterator[str]:
        """The address under which it answers as long as the block runs."""
        # asyncio sends small parts at once only on sockets that name their protocol: each answer would take 40 ms.
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(self.front, interface="asgi3", log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        threading.Thread(target=server.run, args=([listener],), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True  # it does within 0.2 s, for which hundreds of tests need not wait

    # ── for the fakes ──

    @abstractmethod
    def routes(self) -> list[Any]: ...

    def has_key(self, request: Request) -> bool:
        return request.headers.get("authorization") == f"Bearer {KEY}"

    @abstractmethod
    def is_create(self, method: str, path: str) -> bool: ...

    @abstractmethod
    def error(self, status: int, text: str) -> Response: ...

    @abstractmethod
    def refuse_capacity(self) -> Response: ...

    def refuse_key(self, request: Request) -> Response:
        return self.error(401, f"who is {request.headers.get('authorization', '')}?")

    def refuse_money(self) -> Response:
        return self.error(402, "insufficient credits")

    def refuse_haste(self) -> Response:
        headers = {"Retry-After": self.faults.retry_after} if self.faults.retry_after else {}
        return PlainTextResponse("slow down", 429, headers=headers)

    async def front(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What comes before any route: the key, and faults of everything."""
        assert scope["type"] == "http"
        request = Request(scope, receive)
        self.requests.append((request.method, request.url.path))
        if self.faults.refuses_key or not self.has_key(request):
            await self.refuse_key(request)(scope, receive, send)
        elif self.takes("busy"):
            await self.refuse_haste()(scope, receive, send)
        elif self.takes("down"):
            await self.error(500, "out of order")(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def takes(self, fault: str) -> bool:
        """True when the fault is due; counts it down."""
        with self._lock:
            number = getattr(self.faults, fault)
            setattr(self.faults, fault, max(0, number - 1))
            return bool(number > 0)

    async def creates(
        self, request: Request, name_key: str, answer: Callable[[Machine], Response], *, within: str = ""
    ) -> Response:
        """Create a machine, with the faults of that; its name is in the part `within` of the request, or at its top."""
        body = json.loads(await request.body())
        if self.takes("drop_before_create"):
            return Dropped()
        if self.takes("busy_creates"):
            return self.refuse_haste()
        if self.takes("no_capacity"):
            return self.refuse_capacity()
        if self.takes("no_money"):
            return self.refuse_money()
        if self.takes("no_rights"):
            return self.error(403, "not with this key")
        machine = self.add((body[within] if within else body)[name_key], body)
        if self.takes("drop_creates"):
            return Dropped()
        if self.takes("hang_creates"):
            await asyncio.sleep(HANG_S)
        if self.takes("break_creates"):
            return self.error(500, "it broke")
        return answer(machine)

    def new_id(self) -> str:
        return f"m{len(self.machines):04d}"

    def add(self, name: str, body: dict[str, Any]) -> Machine:
        with self._lock:
            machine = Machine(id=self.new_id(), name=name, request=body)
            self.machines[machine.id] = machine
            run = _RUN_PART.sub("", name)
            mine = [m for m in self.machines.values() if m.ended_at is None and _RUN_PART.sub("", m.name) == run]
            self.most_at_once = max(self.most_at_once, len(mine))
            return machine

    def end(self, machine: Machine) -> Response | None:
        """End a machine; the answer where that fails."""
        if machine.ended_at is not None and self.faults.refuses_ends_again:
            return self.error(400, "it is ending")
        if not self.faults.never_ends and machine.ended_at is None:
            machine.ended_at = time.monotonic()
        if self.takes("drop_ends"):
            return Dropped()
        return self.error(500, "it broke") if self.takes("fail_ends") else None

    def shown(self, machine_id: str) -> Machine | None:
        """The machine as far as the provider admits that it has it."""
        machine = self.machines.get(machine_id)
        if machine is None:
            return None
        is_over = machine.ended_at is not None and time.monotonic() - machine.ended_at >= self.faults.end_lag_s
        return None if is_over else machine

    def listed(self) -> list[Machine]:
        """The machines of a list."""
        now = time.monotonic()
        there = [machine for key in list(self.machines) if (machine := self.shown(key)) is not None]
        return [machine for machine in there if now - machine.created_at >= self.faults.list_lag_s]

    def status_of(self, machine: Machine, starting: str, running: str) -> str:
        is_up = time.monotonic() - machine.created_at >= self.faults.boot_s
        return machine.status or self.faults.extra_status or (running if is_up else starting)


Handler = Callable[[Request], Awaitable[Response]]


def reply(content: Any, status: int = 200) -> Response:  # Any: JSON
    return JSONResponse(content, status)
