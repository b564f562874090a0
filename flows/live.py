"""Live web pages about the runs of a store: curves, samples, events, costs.

Not here: the content of a page (rollouts_core/report/live.py, live_blocks.py), the stages of a run (store_runs.py).

    GET /                           the runs, the latest first; /?q=small&state=running filters them
    GET /compare?run=<a>&run=<b>    the comparison of two or more runs, as `rollouts compare` writes it
    GET /runs/<run>                 a run
    GET /runs/<run>/blocks/<name>   data that the page requests: curves, and samples in blocks of limited size
    GET /runs/<run>/report          the report, after the run has written it

The list and the page of a run update themselves every few seconds.

The serving process of `rollouts up`, or `rollouts watch`, serves the pages on loopback. The pages require the password
of the store's Prefect server and only read the store. A restart keeps the port, so that links stay valid.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rollouts.flows.own_server.password import basic_authorization, own_password
from rollouts.flows.store_runs import (
    find_run,
    lives,
    living_runs,
    load_run,
    report_path,
    runs_by_use,
    stage_name,
    summarize_run,
)
from rollouts.infra.ledger import StageUse
from rollouts.infra.process_identity import ProcessIdentity, identify
from rollouts.infra.secret_file import own_folder
from rollouts.infra.session import LOOPBACK
from rollouts_core.errors import InputError, RolloutsError
from rollouts_core.report.assets import asset_blocks, find_policy
from rollouts_core.report.live import ListedRun, draw_spark, list_assets, live_assets, render_live, render_runs
from rollouts_core.report.live_blocks import StepCache, find_block
from rollouts_core.report.live_run import UNREADABLE
from rollouts_core.stages import is_training
from rollouts_core.system.files import write_json

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

STATE_FILE = "live.json"
MAX_RUNS = 50
"""Maximum number of runs in the list. Pages of older runs are still served, so that shared links stay valid."""
END_S = 10.0
MAX_LOOKS = 5
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAddress:
    """The port of the live pages, and the process that serves them."""

    port: int
    process: ProcessIdentity

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def run_url(self, run: str) -> str:
        """The URL of a run's page. `run` is the name of the run's folder of results."""
        return f"{self.url}/runs/{run}"


@contextmanager
def served_live_pages(store: Path) -> Iterator[LiveAddress]:
    """Serve the pages while the block runs."""
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
    """The address of the store's live pages (None if no process of this machine or container serves them)."""
    try:
        state = json.loads((store.resolve() / "prefect" / STATE_FILE).read_text())
        address = LiveAddress(port=state["port"], process=ProcessIdentity(**state["process"]))
        if not address.process.is_here:  # the pages are not served here, and another program may use the port
            return None
        socket.create_connection((LOOPBACK, address.port), 1).close()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return address


def live_app(store: Path) -> Starlette:
    """The web application with the pages of a store. Every request must contain the password."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route

    wanted = basic_authorization(own_password(store / "prefect"))

    common = {"Cache-Control": "no-store", "X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff"}
    static, cache = asset_blocks(), StepCache()
    policy_of_list, policy_of_live = list_assets().policy, live_assets().policy

    def respond(page: str, policy: str) -> Response:
        headers = {**common, "Content-Security-Policy": policy}
        return HTMLResponse(page.encode(errors="replace"), headers=headers)  # an unpaired surrogate cannot be encoded

    def runs(request: Request) -> Response:
        query, state = (request.query_params.get(name, "") for name in ("q", "state"))
        listed, is_cut = list_runs(store, query, state)
        return respond(render_runs(listed, query=query, state=state, is_cut=is_cut), policy_of_list)

    def run(request: Request) -> Response:
        uses = find_run(store, request.path_params["run"])
        if uses is None:
            return PlainTextResponse("there is no such run, or it has not begun a stage yet", 404)
        page = looked_again(lambda: render_live(load_run(store, uses), now=time.time()))
        return respond(page, policy_of_live)

    def comparison(request: Request) -> Response:
        names = request.query_params.getlist("run")
        try:
            page = render_comparison(store, names)
        except RolloutsError as error:
            return PlainTextResponse(str(error), 400, headers=common)
        return respond(page, find_policy(page))

    def block(request: Request) -> Response:
        name, uses = request.path_params["name"], find_run(store, request.path_params["run"])
        packed = static.get(name)
        if packed is None and uses is not None:
            packed = looked_again(lambda: find_block(load_run(store, uses), name, cache))
        if packed is None:
            return PlainTextResponse("the run has no such block", 404, headers=common)
        headers = {**common, "Content-Encoding": "gzip"}
        return Response(packed, media_type="text/plain; charset=utf-8", headers=headers)

    def report(request: Request) -> Response:
        uses = find_run(store, request.path_params["run"])
        path = report_path(store, uses) if uses else None
        if path is None or not path.is_file():
            return PlainTextResponse("there is no such run, or it has no report yet", 404)
        page = path.read_text(encoding="utf-8", errors="replace")
        return respond(page, find_policy(page))

    return Starlette(
        routes=[
            Route("/", _guarded(runs, wanted)),
            Route("/compare", _guarded(comparison, wanted)),
            Route("/runs/{run}", _guarded(run, wanted)),
            Route("/runs/{run}/report", _guarded(report, wanted)),
            Route("/runs/{run}/blocks/{name:path}", _guarded(block, wanted)),
        ]
    )


def _guarded(handler: Callable[[Request], Response], wanted: str) -> Callable[[Request], Response]:
    """Wrap a handler: a request without the header `Authorization: <wanted>` gets status 401."""
    from starlette.responses import PlainTextResponse

    def answer(request: Request) -> Response:
        if secrets.compare_digest(request.headers.get("authorization", "").encode(), wanted.encode()):
            return handler(request)
        headers = {"WWW-Authenticate": 'Basic realm="rollouts"'}
        return PlainTextResponse("log in with the password of the store's Prefect server", 401, headers=headers)

    return answer


def looked_again(render: Callable[[], Made]) -> Made:
    """Call `render`, and retry if a file vanished meanwhile, because RL or `rollouts prune` removed old files."""
    for _ in range(MAX_LOOKS - 1):
        with suppress(FileNotFoundError):
            return render()
    return render()


def render_comparison(store: Path, names: Sequence[str]) -> str:
    """The page of `rollouts compare` for runs that the user ticked in the list.

    Raises:
        RolloutsError: the runs cannot be compared.
    """
    from rollouts.flows.commands.compare import find_compared, load_compared
    from rollouts_core.report.compared import compare_runs
    from rollouts_core.report.compared_page import render_comparison_page

    if not names:
        raise InputError("no run is ticked: go back, and tick two runs or more")
    return render_comparison_page(compare_runs(load_compared(store, find_compared(store, names))))


def list_runs(store: Path, query: str = "", state: str = "") -> tuple[list[ListedRun], bool]:
    """The latest runs whose names contain `query` and whose state is `state`, and whether more runs match.

    An empty `query` or `state` matches every run.
    """
    living, found = living_runs(store), list[ListedRun]()
    for uses in runs_by_use(store):
        if query.casefold() not in uses[0].run.casefold():
            continue
        line = describe_run(store, uses, living)
        if state and line.state != state:
            continue
        if len(found) == MAX_RUNS:
            return found, True
        found.append(line)
    return found, False


def describe_run(store: Path, uses: Sequence[StageUse], living: Collection[str]) -> ListedRun:
    """A run's line in the list. If the run's files cannot be read, most fields of the line stay empty."""
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(use.began_at for use in uses)))
    key, is_alive = uses[0].run, lives(uses, living)
    try:
        run = summarize_run(store, uses, living=living)
        training = next((use for use in reversed(uses) if is_training(stage_name(use))), None)
        curve, title = draw_spark(stage_name(training), store / "stages" / training.stage) if training else ("", "")
    except UNREADABLE:
        return ListedRun(key=key, state="running" if is_alive else "stopped", stage=stage_name(uses[-1]), began=began)
    return ListedRun(
        key=key,
        state=run.state,
        stage=f"{run.training} {run.step:,}/{run.num_steps:,}" if run.training and is_alive else run.stage,
        began=began,
        score=f"{run.score.mean:.3f}" if run.score else "",
        interval=f"{run.score.low:.3f} to {run.score.high:.3f}" if run.score else "",
        change="" if run.change is None else f"{run.change:+.3f}".replace("-", "−"),
        direction="" if not run.change else "up" if run.change > 0 else "down",
        cost="" if run.usd is None else f"{run.usd:.2f} USD",
        has_report=bool(run.report),
        curve=curve,
        curve_title=title,
    )


def _listener(port: int) -> socket.socket:
    """A listening socket on the port or, if the port is in use, on any free port."""
    for candidate in (port, 0):
        listener = socket.socket(proto=socket.IPPROTO_TCP)  # without the protocol, asyncio delays answers by 40 ms
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            listener.bind((LOOPBACK, candidate))
            listener.listen()  # listens before other processes read the address
            return listener
        listener.close()
    raise OSError("no port is free on this machine")


def _last_port(home: Path) -> int:
    try:
        return int(json.loads((home / STATE_FILE).read_text())["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
