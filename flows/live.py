"""Live pages about the runs of a store: curves, samples, events, money.

Not here: what a page shows (rollouts_core/report/live.py), which stages a run came to (store_runs.py).

    GET /             the runs, the latest first
    GET /runs/<run>   a run; the page asks for itself again every few seconds; /runs/<run>/report when there is one

Served on loopback, by what `rollouts up` started or by `rollouts watch`, with the password of the store's Prefect
server. Nothing can be changed through it. The port is kept from one start to the next, so that links stay good.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollouts.flows.own_server.password import basic_authorization, own_password
from rollouts.flows.store_runs import (
    describe_run_state,
    find_run,
    lives,
    living_runs,
    load_run,
    report_path,
    runs_by_use,
    stage_name,
)
from rollouts.infra.ledger import StageUse
from rollouts.infra.process_identity import ProcessIdentity, identify
from rollouts.infra.secret_file import own_folder
from rollouts.infra.session import LOOPBACK
from rollouts_core.report.assets import find_policy
from rollouts_core.report.live import render_live, render_runs
from rollouts_core.system.files import write_json

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

STATE_FILE = "live.json"
MAX_RUNS = 50
"""Number of runs in the list. Older runs keep their pages, so that shared links stay valid."""
END_S = 10.0
MAX_LOOKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAddress:
    """The address of the live pages."""

    port: int
    process: ProcessIdentity

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def run_url(self, run: str) -> str:
        """The page of a run, by the name of its folder of results."""
        return f"{self.url}/runs/{run}"


@contextmanager
def served_live_pages(store: Path) -> Iterator[LiveAddress]:
    """Serve the pages as long as the block runs."""
    import uvicorn

    home = store.resolve() / "prefect"
    own_folder(home)
    listener = _listener(_last_port(home))
    config = uvicorn.Config(live_app(store.resolve()), log_level="warning", lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="live pages", daemon=True)
    thread.start()
    address = LiveAddress(port=listener.getsockname()[1], process=identify(os.getpid()))
    write_json(home / STATE_FILE, asdict(address))
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join(END_S)
        listener.close()


def find_live_pages(store: Path) -> LiveAddress | None:
    """The address of the store's pages; None if no process of this machine, or container, serves them."""
    try:
        state = json.loads((store.resolve() / "prefect" / STATE_FILE).read_text())
        address = LiveAddress(port=state["port"], process=ProcessIdentity(**state["process"]))
        if not address.process.is_here:  # its port may be another program's by now
            return None
        socket.create_connection((LOOPBACK, address.port), 1).close()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return address


def live_app(store: Path) -> Starlette:
    """The pages of a store; every request must carry the password."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, PlainTextResponse
    from starlette.routing import Route

    wanted = basic_authorization(own_password(store / "prefect"))

    def respond(page: str, *, nonce: str = "", policy: str = "") -> Response:
        script = f"script-src 'nonce-{nonce}'; connect-src 'self'" if nonce else "script-src 'none'"
        policy = policy or f"default-src 'none'; style-src 'unsafe-inline'; {script}"
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Frame-Options": "DENY"}
        return HTMLResponse(page.encode(errors="replace"), headers=headers)  # half an emoji cannot be encoded

    def refused(request: Request) -> Response | None:
        if secrets.compare_digest(request.headers.get("authorization", "").encode(), wanted.encode()):
            return None
        headers = {"WWW-Authenticate": 'Basic realm="rollouts"'}
        return PlainTextResponse("log in with the password of the store's Prefect server", 401, headers=headers)

    def runs(request: Request) -> Response:
        return refused(request) or respond(render_runs(list_runs(store)))

    def run(request: Request) -> Response:
        if answer := refused(request):
            return answer
        uses = find_run(store, request.path_params["run"])
        if uses is None:
            return PlainTextResponse("there is no such run, or it has not come to a stage yet", 404)
        nonce = secrets.token_urlsafe(16)
        page = looked_again(lambda: render_live(load_run(store, uses), script_nonce=nonce, now=time.time()))
        return respond(page, nonce=nonce)

    def report(request: Request) -> Response:
        if answer := refused(request):
            return answer
        uses = find_run(store, request.path_params["run"])
        path = report_path(store, uses) if uses else None
        if path is None or not path.is_file():
            return PlainTextResponse("there is no such run, or it has not come to its report yet", 404)
        page = path.read_text(encoding="utf-8", errors="replace")
        return respond(page, policy=find_policy(page))

    return Starlette(routes=[Route("/", runs), Route("/runs/{run}", run), Route("/runs/{run}/report", report)])


def looked_again(render: Callable[[], str]) -> str:
    """Render a page. Try again if a file was removed meanwhile, because RL removes samples and prune removes stages."""
    for _ in range(MAX_LOOKS - 1):
        with suppress(FileNotFoundError):
            return render()
    return render()


def list_runs(store: Path) -> list[dict[str, str]]:
    """The lines of the list of runs."""
    listed = runs_by_use(store)[:MAX_RUNS]
    living = living_runs(store)
    return [describe_run(store, uses, is_alive=lives(uses, living)) for uses in listed]


def describe_run(store: Path, uses: Sequence[StageUse], *, is_alive: bool) -> dict[str, str]:
    """A run's line in the list."""
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(uses[0].used_at))
    state = describe_run_state(store, uses, is_alive=is_alive)
    return {"key": uses[0].run, "name": uses[0].run, "stage": stage_name(uses[-1]), "state": state, "began": began}


def _listener(port: int) -> socket.socket:
    """A socket on the port, or on any free port if it is taken."""
    for candidate in (port, 0):
        listener = socket.socket(proto=socket.IPPROTO_TCP)  # named, or asyncio holds each answer back for 40 ms
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            listener.bind((LOOPBACK, candidate))
            listener.listen()  # before the address is published
            return listener
        listener.close()
    raise OSError("no port is free on this machine")


def _last_port(home: Path) -> int:
    try:
        return int(json.loads((home / STATE_FILE).read_text())["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
