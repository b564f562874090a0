"""The process of a store's Prefect server, which runs until no process uses the server.

A server whose background services hang (scheduler_watchdog.py) is replaced in the same process, at the same socket.

Not here: the processes that use the server, and the meaning of the locks (lend.py). Only `lend._start_process` starts
this process.
"""

import asyncio
import fcntl
import gc
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import cast

from rollouts.flows.own_server.https import HOST, accept_both, server_context
from rollouts.flows.own_server.new_database import copy_template, is_database_missing, keep_template, template_path
from rollouts.flows.own_server.scheduler_watchdog import SchedulerWatchdog
from rollouts.infra.locks import open_lock, try_lock
from rollouts_core.system.files import write_json

STOP_TIMEOUT_S = 8.0
"""Seconds that Prefect's server has to end after SIGTERM. After that, this process kills it."""
POLL_S = 0.5
ASLEEP_S = 10.0
"""If a poll takes longer, this process was suspended or got no CPU time."""
UNUSED_S = 1.5
"""Seconds between the end of the last process that uses the server and the server's stop. Meanwhile, the last log lines
and events of that process arrive."""
MAX_LOG_BYTES = 8 * 1024 * 1024
EARLIER_EVENT_WAIT = timedelta(seconds=15)
"""Maximum time that automations, such as notifications, delay an event until its preceding event arrives.

Prefect's default is 15 minutes, because events may arrive out of order at several server processes. A store has only
one server process, so its events arrive in order. A restarted server does not know earlier events, so that later
events would be delayed for the full time.
"""


def base_url(port: int) -> str:
    """The server's URL for browsers. Clients use HTTPS at the same port."""
    return f"http://{HOST}:{port}"


def api_url(port: int) -> str:
    """The URL of the server's API for clients, with HTTPS, so that clients can verify the server's certificate."""
    return f"https://{HOST}:{port}/api"


def _write_address(home: Path, port: int) -> None:
    address = {"api_url": api_url(port), "ui_url": f"{base_url(port)}/v2", "pid": os.getpid()}
    write_json(home / "server.json", address)


def _keep(home: Path, listener: socket.socket) -> None:
    """Run Prefect's server until no process uses it, or until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))
    watchdog = SchedulerWatchdog()
    threading.Thread(target=_watch, args=(home, watchdog), daemon=True).start()
    _write_address(home, listener.getsockname()[1])
    try:
        _serve(home, listener, watchdog)
    finally:
        (home / "server.json").unlink(missing_ok=True)


def _serve(home: Path, listener: socket.socket, watchdog: SchedulerWatchdog) -> None:
    cores = _stay_on_one_core()
    gc.disable()  # saves 0.3 s of 3 s for the imports, and 1 s of 6 s for the migration of a new database
    import uvicorn
    from prefect import __version__
    from prefect.server.api.server import create_app
    from prefect.server.events.ordering import memory
    from prefect.settings import get_current_settings

    from rollouts.flows.own_server.middleware import asked_again_when_busy, with_browser_policy

    tls = server_context(home)
    database_url = get_current_settings().server.database.connection_url
    is_new = is_database_missing(home, database_url.get_secret_value() if database_url else "")
    template = template_path(__version__) if is_new else None
    is_copy = template is not None and copy_template(template, home)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup([])  # no sockets, because uvicorn itself accepts only one protocol
            if template is not None and not is_copy:
                keep_template(home, template)
            self._accepting = asyncio.create_task(accept_both(listener, self._make_protocol, tls))
            gc.collect()
            gc.freeze()
            gc.enable()
            _use_cores(cores)
            watchdog.begin()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            self._accepting.cancel()
            await super().shutdown(sockets)

        def _make_protocol(self) -> asyncio.Protocol:
            make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
            return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    memory.PRECEDING_EVENT_LOOKBACK = EARLIER_EVENT_WAIT  # type: ignore[attr-defined]  # `memory` imports it
    watchdog.register()
    app = with_browser_policy(asked_again_when_busy(create_app(final=True)))
    config = uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    Server(config).run(sockets=[listener])


def _stay_on_one_core() -> set[int]:
    """Bind this process to one core. Returns the process's former cores (empty on a system without core affinity).

    The migration of a new database has 34,000 statements. Each statement passes from the event loop's thread to
    SQLite's thread and back. The migration takes 6 to 7 s on several cores, but 3 s on one core.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return set()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice(sorted(cores))})
    return cores


def _use_cores(cores: set[int]) -> None:
    """Allow all threads of this process to run on all these cores again."""
    for thread in Path("/proc/self/task").iterdir() if cores else []:
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def _watch(home: Path, watchdog: SchedulerWatchdog) -> None:
    """End this process when no process uses the server. A failed check also ends this process, because no other process
    would end it."""
    try:
        _wait_until_unused(home, watchdog)
    except Exception:  # noqa: BLE001 - after any exception, the process must end
        with suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_TIMEOUT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_until_unused(home: Path, watchdog: SchedulerWatchdog) -> None:
    """Return after users.lock was free for UNUSED_S. If the background services hang meanwhile, restart the server."""
    users_lock = open_lock(home / "users.lock")
    start_lock = open_lock(home / "start.lock")
    used_at = looked_at = time.monotonic()
    while True:
        time.sleep(POLL_S)
        if time.monotonic() - looked_at > ASLEEP_S:
            watchdog.pardon()
        looked_at = time.monotonic()
        if os.fstat(sys.stderr.fileno()).st_size > MAX_LOG_BYTES:
            os.ftruncate(sys.stderr.fileno(), 0)
        if watchdog.has_stopped:
            _begin_anew(watchdog)
        if not try_lock(start_lock, fcntl.LOCK_EX):
            used_at = time.monotonic()
            continue
        if not try_lock(users_lock, fcntl.LOCK_EX):
            used_at = time.monotonic()
        elif time.monotonic() - used_at > UNUSED_S:
            return  # start.lock stays locked until this process is gone
        else:
            fcntl.flock(users_lock, fcntl.LOCK_UN)
        fcntl.flock(start_lock, fcntl.LOCK_UN)


def _begin_anew(watchdog: SchedulerWatchdog) -> None:
    """Replace this process's program by a new server. The locks and the socket stay open, so that new requests wait
    instead of failing."""
    with suppress(OSError):  # the disk may be full
        sys.stderr.write(
            f"the background services of Prefect's server hang: it restarts. Waiting tasks:\n{watchdog.describe()}\n"
        )
        sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)


def main() -> None:
    """Serve the Prefect home `sys.argv[1]` at the listening socket with the file descriptor `sys.argv[2]`."""
    home, listener = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    os.umask(0o077)  # the database contains encrypted secrets and the key to decrypt them
    if os.fork():
        os._exit(0)
    _keep(home, listener)
