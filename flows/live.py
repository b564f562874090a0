"""Pages about the runs of a store that change while one looks at them: curves, samples, events, money.

Not here: what a page shows (rollouts_core/report/live.py), which stages a run came to (infra/ledger.py).

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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rollouts.flows.password import basic_authorization, own_password
from rollouts.infra.jobs import JobExit, describe_exit, describe_saved
from rollouts.infra.ledger import LEDGER_FILE, Ledger, StageUse
from rollouts.infra.process_identity import ProcessIdentity, identify
from rollouts.infra.renting.rentals import all_rentals, usd_spent
from rollouts.infra.secret_file import own_folder
from rollouts.infra.session import LOOPBACK
from rollouts.tasks.places import EVALUATION_FILE
from rollouts.tasks.spending import RUN_FILE
from rollouts_core.report.assets import find_policy
from rollouts_core.report.live import LiveRun, LiveStage, render_live, render_runs
from rollouts_core.run_directory import RunDirectory
from rollouts_core.system.files import write_json

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

STATE_FILE = "live.json"
MAX_RUNS = 50
"""So many are listed; the others have their pages too, for links that were given out."""
END_S = 10.0
MAX_LOOKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAddress:
    """Where the pages are."""

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
        return HTMLResponse(page.encode(errors="replace"), headers=headers)  # half of an emoji is no text

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
    """A page, made anew where a file is gone that was there a moment ago: RL removes samples, and prune stages."""
    for _ in range(MAX_LOOKS - 1):
        with suppress(FileNotFoundError):
            return render()
    return render()


def runs_by_use(store: Path) -> list[list[StageUse]]:
    """The stages that each run came to, in order; the run that came to one last is the first."""
    runs: dict[str, list[StageUse]] = {}
    with Ledger(store / LEDGER_FILE) as ledger:
        for use in ledger.stage_uses():
            runs.setdefault(use.run, []).append(use)
    runs.pop("", None)
    return sorted(runs.values(), key=lambda uses: uses[-1].used_at, reverse=True)


def find_run(store: Path, name: str) -> list[StageUse] | None:
    """The stages of one run, by the name of its folder of results."""
    return next((uses for uses in runs_by_use(store) if uses[0].run == name), None)


def report_path(store: Path, uses: Sequence[StageUse]) -> Path:
    """The path of a run's report."""
    return store / "runs" / uses[0].run / "report.html"


def list_runs(store: Path) -> list[dict[str, str]]:
    """The lines of the list of runs."""
    listed = runs_by_use(store)[:MAX_RUNS]
    living = _living_runs(store)
    return [describe_run(store, uses, is_alive=_lives(uses, living)) for uses in listed]


def describe_run(store: Path, uses: Sequence[StageUse], *, is_alive: bool) -> dict[str, str]:
    """A run's line in the list."""
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(uses[0].used_at))
    state = describe_run_state(store, uses, is_alive=is_alive)
    return {"key": uses[0].run, "name": uses[0].run, "stage": _stage_name(uses[-1]), "state": state, "began": began}


def describe_run_state(store: Path, uses: Sequence[StageUse], *, is_alive: bool) -> str:
    """Whether a run is under way, or what it left; its stages may be those of other runs, too."""
    if is_alive:
        return "running"
    report = report_path(store, uses)
    if report.is_file():
        return "has a report"
    if report.with_name(EVALUATION_FILE).is_file():
        return "has its scores"
    last = store / "stages" / uses[-1].stage
    _, ended = ("", "") if RunDirectory(last).result.is_file() else describe_end(last)
    return ended or "not running, no report"


def load_run(store: Path, uses: Sequence[StageUse]) -> LiveRun:
    """A run as far as it has come."""
    is_followed = _lives(uses, _living_runs(store))
    path = report_path(store, uses)
    labels = labels_of(path.with_name(EVALUATION_FILE))
    stages = []
    for use in uses:
        run_dir = store / "stages" / use.stage
        ended_attempt, ended = describe_end(run_dir)
        stages.append(
            LiveStage(
                name=_stage_name(use),
                run_dir=run_dir,
                num_steps=use.num_steps,
                began_at=use.used_at,
                ended=ended,
                ended_attempt=ended_attempt,
                is_followed=is_followed,
                labels=labels,
            )
        )
    return LiveRun(
        name=uses[0].run,
        stages=tuple(stages),
        state=describe_run_state(store, uses, is_alive=is_followed),
        usd=_usd_of(store, uses),
        has_report=path.is_file(),
        verdict=verdict_of(path.with_name(RUN_FILE)),
    )


def describe_end(run_dir: Path) -> tuple[int, str]:
    """The last attempt of a stage that has an exit record, and how it ended in a few words; 0 and "" without one."""
    attempts = [int(path.stem[5:]) for path in run_dir.glob("exit-*.json") if path.stem[5:].isdecimal()]
    if not attempts:
        return 0, ""
    attempt = max(attempts)
    if (run_dir / ".job" / f"meta-{attempt + 1}.json").is_file():  # a later attempt is under way
        return 0, ""
    try:
        record = json.loads((run_dir / f"exit-{attempt}.json").read_text())
        at = datetime.fromisoformat(record["ended_at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        exit_record = JobExit(**{each.name: record[each.name] for each in fields(JobExit) if each.name in record})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return 0, ""
    if exit_record.cancelled:
        return attempt, f"cancelled at {at}{describe_saved(exit_record)}"
    return attempt, f"ended at {at}: {describe_exit(exit_record).rstrip('.')}"


def verdict_of(record: Path) -> str:
    """The verdict in a run.json; empty without a record or a verdict."""
    try:
        return str(json.loads(record.read_text(encoding="utf-8")).get("verdict", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def labels_of(record: Path) -> dict[str, str]:
    """The user's names of the models of an evaluation, by their names in its stage; empty without its record."""
    try:
        models = json.loads(record.read_text(encoding="utf-8"))["models"]
        return {name: str(model["named"]) for name, model in models.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def _living_runs(store: Path) -> Collection[str]:
    """The ids of living runs, asked for once: the look at each run locks the folder of all of them."""
    with Ledger(store / LEDGER_FILE) as ledger:
        return ledger.living_runs().keys()


def _lives(uses: Sequence[StageUse], living: Collection[str]) -> bool:
    """Whether a process lives of a run, whose stages may have been done by several attempts with ids of their own."""
    return any(use.run_id in living for use in uses)


def _stage_name(use: StageUse) -> str:
    return use.stage.rpartition("-")[0]


def _usd_of(store: Path, uses: Sequence[StageUse]) -> float | None:
    """The cost of the run's machines; None if it rented no machine."""
    ids = {use.run_id for use in uses}
    with Ledger(store / LEDGER_FILE) as ledger:
        if not any(rental.run_id in ids for rental in all_rentals(ledger)):
            return None
        return sum(usd_spent(ledger, run_id, time.time()) for run_id in ids)


def _listener(port: int) -> socket.socket:
    """A socket on the port, or on any where that is taken."""
    for candidate in (port, 0):
        listener = socket.socket(proto=socket.IPPROTO_TCP)  # named, or asyncio holds each answer back for 40 ms
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            listener.bind((LOOPBACK, candidate))
            listener.listen()  # before it is told to anybody
            return listener
        listener.close()
    raise OSError("no port is free on this machine")


def _last_port(home: Path) -> int:
    try:
        return int(json.loads((home / STATE_FILE).read_text())["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
