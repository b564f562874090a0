"""Start the Prefect server of a store for the first process that needs a server, and stop it after the last process.

A process that uses the server is called a user process here. The keeper is the process of the server itself.

    user process A -- shared flock --.
    user process B -- shared flock -- <store>/prefect/users.lock     the kernel releases it, also after kill -9
                                       ^
                                       |  twice a second: if it is free, stop the server and exit
    keeper (server_process.py): runs in its own session, so that Ctrl-C in a terminal does not reach the keeper. User
             processes check once a second that the keeper lives, and start another keeper after a kill

    start.lock   held by a user process while it looks for or starts the keeper, and by the keeper from its decision
                 to stop until its process is gone, so that no process joins a server that is stopping
    keeper.lock  held by the keeper as long as its process lives; checked only under start.lock
    server.json  the address, written by the keeper; valid only while keeper.lock is held
    server.log   output of the current server; server.log.1: output of the last server that printed anything;
                 prefect.db, results/, ui/ are Prefect's own
    password     the server's password (password.py)

This module imports prefect only in `use_prefect` and for requests to a server of PREFECT_API_URL, because the
environment of `prefect_environment` must be set before the first import.
"""

import fcntl
import http.client
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rollouts.flows.own_server.https import HOST, client_context, own_certificate
from rollouts.flows.own_server.password import own_password
from rollouts.flows.own_server.server_log import describe_death, log_tail, set_log_aside
from rollouts.flows.own_server.server_process import base_url
from rollouts.infra.locks import lock_file, open_lock, try_lock
from rollouts.infra.ports import check_loopback
from rollouts.infra.repeating import repeating
from rollouts.infra.secret_file import open_own_log, own_folder
from rollouts_core.keys import SENDABLE

DEFAULT_PORT = 4200
"""Prefect's documented port, which users may have bookmarked. A server uses this port if it is free."""

LOG_FILE = "server.log"
PORT_FILE = "port"
"""File in the store's Prefect home with the port of the last `rollouts up --port`."""
START_TIMEOUT_S = 180.0
"""Timeout of a server's start. Creating a database takes 6 s on one core, and more than a minute on a busy machine."""
BUSY_SERVER_S = 10.0
"""Timeout in seconds of a health check, if the process that keeps the server is known to live."""
JOIN_TIMEOUT_S = 120.0
"""Timeout for taking start.lock. Another process may hold start.lock during a stop or a few failing starts, which take
a minute on a busy machine."""
LOOK_S = 1.0
"""Seconds between two checks that the server lives. The interval must be short, because Prefect's runner stops polling
for cancelled runs after ten seconds of refused connections. A restarted server accepts connections at once."""
AGAIN_S = 30.0
"""Pause between two restarts of a server, because the cause of its death may persist."""

ROOT = Path(__file__).absolute().parents[2]
SERVER_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); from rollouts.flows.own_server.server_process import main; main()"
)
"""Program of the keeper. The program adds the package's folder to sys.path, because the package may not be installed.
The folder is the last entry of sys.path, so that it hides no other module."""

OWN_LOGGERS = ("rollouts", "rollouts_core")
"""Prefect stores INFO lines of these loggers with the run, if a flow or a task logs the lines."""

NAMED_SERVER_RETRIES = "7"
"""Number of attempts at each request to a server of PREFECT_API_URL, 4 minutes in total. Prefect's default of five
attempts takes one minute, which is too short for an update of a shared server. A flow fails after one failed request, a
serving process after three."""

OWN_API_URL = "ROLLOUTS_OWN_API_URL"
"""Environment variable that `prefect_environment` sets together with PREFECT_API_URL. The variable shows this process
and its children that this module, and not the user, set PREFECT_API_URL."""

OF_RUNS = tuple(f"PREFECT_{group}_" for group in ("CLIENT", "FLOWS", "LOGGING", "RESULTS", "RUNNER", "TASKS", "WORKER"))
"""Prefixes of Prefect settings that take effect in commands and runs, but not in the server of a store."""
CUSTOM_HEADERS = "PREFECT_CLIENT_CUSTOM_HEADERS"

logger = logging.getLogger(__name__)


class ServerError(RuntimeError):
    """No Prefect server can be used. The message is a sentence for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """The address of a Prefect server."""

    api_url: str
    """URL of the API, for example https://127.0.0.1:4200/api, without a slash at the end."""
    ui_url: str
    """URL of the UI, for example http://127.0.0.1:4200/v2, without a slash at the end."""
    is_local: bool = True
    """True for a store's own server, False for a server of PREFECT_API_URL."""
    password: str = field(default="", repr=False)
    """The server's password, `user:token`. Empty for a server of PREFECT_API_URL, whose password is in the user's
    settings."""
    certificate: Path | None = None
    """The certificate of a store's own server. Clients verify the certificate before they send the password."""


def local_server(
    store: Path, *, port: int = 0, meanwhile: Callable[[ServerAddress], object] | None = None
) -> AbstractContextManager[ServerAddress]:
    """Return a context in which the Prefect server of `store` runs.

    A running server of this store is joined, with any port. While the block runs, a killed server is restarted on its
    port. The server stops about two seconds after the last process that uses it left the block or died. If
    PREFECT_API_URL is set, the server at that URL is used, and no server is started.

    Args:
        port: 0 takes 4200 if it is free, otherwise any free port.
        meanwhile: called once with the server's address, while the server may still be starting.

    Raises:
        ServerError: On entering: the store cannot be written, the port is in use, the server does not start, or the
            server of PREFECT_API_URL does not answer.
    """
    if named_url():
        return _used_server(named_server(store), meanwhile)
    check_path(store)
    check_loopback()
    _name_ignored(_home(store), tuple(ignored_settings(os.environ)))
    return _shared_server(_home(store), port, meanwhile)


def named_url() -> str:
    """The value of PREFECT_API_URL that the user set (empty if the variable is missing or this module set it)."""
    url = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    return "" if url == os.environ.get(OWN_API_URL) else url


def ignored_settings(environment: Mapping[str, str]) -> list[str]:
    """Names of Prefect's environment variables that the user set, but that have no effect on a store's own server."""
    if OWN_API_URL in environment:
        return []  # this module set the variables
    return sorted(
        name
        for name, value in environment.items()
        if value and _is_of_prefect(name) and (name.upper() == CUSTOM_HEADERS or not name.upper().startswith(OF_RUNS))
    )


@cache
def _name_ignored(home: Path, names: tuple[str, ...]) -> None:
    """Warn, once per process, about environment variables that have no effect."""
    if names:
        reason = "the Prefect server of a store takes its settings from the store alone"
        logger.warning("%s: ignored, because %s (%s)", ", ".join(names), reason, home)


def _is_of_prefect(name: str) -> bool:
    """Return whether Prefect reads the variable. Prefect ignores the case of names."""
    return name.upper().startswith("PREFECT_")


def check_path(store: Path) -> None:
    """Raise ServerError if the store's path contains a ?, which would end the path in the database's URL."""
    if "?" in str(store.resolve()) and not named_url():
        raise ServerError(
            f"the path of the store {store.resolve()} has a ?, which Prefect cannot have in its database's URL: "
            "choose another with --store"
        )


def running_server(store: Path) -> ServerAddress | None:
    """Return the address of the store's server if it answers now, else None. Nothing is started."""
    home = _home(store)
    address = _read_address(home) if home.is_dir() else None
    is_there = address is not None and _is_kept(home, address) and _is_healthy(address, timeout_s=BUSY_SERVER_S)
    return address if is_there else None


@contextmanager
def held_server() -> Iterator[None]:
    """While the block runs, keep the store's server running whose URL is in this process's environment (if any).

    Child processes that may outlive their parent use this, because the server stops when no process uses the server.
    """
    if OWN_API_URL not in os.environ:
        yield
        return
    home = Path(os.environ["PREFECT_HOME"])
    with lock_file(home / "users.lock") as users_lock:
        with _start_lock(home):
            _join_users(users_lock)
        yield


def prefect_environment(store: Path, address: ServerAddress) -> dict[str, str]:
    """Return environment variables with which Prefect uses the server at `address` and the store, and prints nothing.

    Set the variables before the first import of prefect. The values in `preferences` are defaults: a value that the
    user has set stays. For a server of PREFECT_API_URL, the user's PREFECT_HOME stays, because a profile there may
    have the server's key.
    """
    preferences = {
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(_home(store) / "results"),
        # Limits only the console. The handler that sends log lines to the server gets all lines.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_EXTRA_LOGGERS": ",".join(OWN_LOGGERS),
        # An extra logger gets Prefect's handler but no level, so the root logger's level applies.
        "PREFECT_LOGGING_ROOT_LEVEL": "INFO",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "DO_NOT_TRACK": "1",
    }
    if not address.is_local:
        preferences["PREFECT_CLIENT_MAX_RETRIES"] = NAMED_SERVER_RETRIES
    environment = {key: os.environ.get(key) or value for key, value in preferences.items()}
    environment |= {"PREFECT_API_URL": address.api_url, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    # Prefect's internal loggers would print 2,000 characters for each event that cannot be sent to a lost server.
    environment["PREFECT_INTERNAL_LOGGING_LEVEL"] = "CRITICAL"
    if address.is_local:
        environment |= {
            OWN_API_URL: address.api_url,
            "PREFECT_API_AUTH_STRING": address.password,
            "PREFECT_API_SSL_CERT_FILE": str(address.certificate or ""),
            # The caller's values for another server would replace the password, the certificate check and the headers.
            "PREFECT_API_TLS_INSECURE_SKIP_VERIFY": "false",
            CUSTOM_HEADERS: "{}",
            "PREFECT_UI_URL": address.ui_url,
        }
        environment |= _home_environment(_home(store)) | _without_proxy(os.environ)
    return environment


def use_prefect(store: Path, address: ServerAddress) -> None:
    """Set the environment for Prefect's client in this process, and set up Prefect's logging.

    Importing flows sets up the logging, but importing only blocks does not. Without Prefect's logging, Python would
    print Prefect's warnings on the terminal.
    """
    os.environ.update(prefect_environment(store.resolve(), address))
    from prefect.logging.configuration import setup_logging

    setup_logging()


def run_url(address: ServerAddress, flow_run_id: str) -> str:
    return f"{address.ui_url}/runs/flow-run/{flow_run_id}"


def _home(store: Path) -> Path:
    return store.resolve() / "prefect"


def _home_environment(home: Path) -> dict[str, str]:
    """Return variables that set Prefect's home to the store, so that the user's profiles and settings do not apply."""
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
        "PREFECT_PROFILE": "ephemeral",
    }


def _without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which requests to this machine bypass the user's proxy (empty without a proxy)."""
    if not any(environment.get(key) for name in ("http_proxy", "all_proxy") for key in (name, name.upper())):
        return {}
    excepted = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    value = ",".join([*filter(None, excepted.split(",")), HOST])
    return {"NO_PROXY": value, "no_proxy": value}


# --- a server of PREFECT_API_URL --------------------------------------------------------------------------


def named_server(store: Path) -> ServerAddress:
    """Check that the server of PREFECT_API_URL answers, set the environment for Prefect's client, and return the
    address.

    Raises:
        ServerError: the server does not answer, or it has another password.
    """
    api_url = named_url()
    address = ServerAddress(api_url=api_url, ui_url=_named_ui_url(api_url), is_local=False)
    _check_key()
    os.environ.update(prefect_environment(store, address))
    if (status := _named_status(api_url, "/health")) not in (200, 401, 403):
        raise ServerError(
            f"PREFECT_API_URL is set, but {api_url}/health answers {status}: unset or correct it; the URL of a "
            "Prefect server's API ends with /api"
        )
    if _named_status(api_url, "/admin/version") == 401:
        raise ServerError(
            f"the Prefect server at {api_url} refuses the password: set PREFECT_API_AUTH_STRING to the server's "
            "password (for Prefect Cloud, set PREFECT_API_KEY)"
        )
    return address


@contextmanager
def _used_server(
    address: ServerAddress, meanwhile: Callable[[ServerAddress], object] | None
) -> Iterator[ServerAddress]:
    if meanwhile:
        meanwhile(address)
    yield address


def _named_status(api_url: str, path: str) -> int:
    """Return the HTTP status of the response of the server of PREFECT_API_URL."""
    from rollouts.flows.prefect_api import FAILURES, describe_failure, request_named

    try:
        return request_named(api_url, "GET", path).status_code
    except FAILURES as error:
        raise ServerError(
            f"PREFECT_API_URL is set to {api_url}, where no server answers ({describe_failure(error)}): "
            "start the server, or unset the variable to use a server of this store"
        ) from error


def _check_key() -> None:
    """Raise ServerError if PREFECT_API_KEY cannot be sent in a header. The error of Prefect's client would print the
    key."""
    key = os.environ.get("PREFECT_API_KEY", "").strip()
    if key and not SENDABLE.fullmatch(key):
        raise ServerError("PREFECT_API_KEY is not a key, because it has spaces or accented letters: copy it again")


def _named_ui_url(api_url: str) -> str:
    if ui_url := os.environ.get("PREFECT_UI_URL", "").rstrip("/"):
        return ui_url
    if cloud := re.fullmatch(r"https://api\.(.+)/api/accounts/([^/]+)/workspaces/([^/]+)", api_url):
        return "https://app.{}/account/{}/workspace/{}".format(*cloud.groups())
    return f"{api_url.removesuffix('/api')}/v2"


# --- the server of the store, for user processes ----------------------------------------------------------


@contextmanager
def _shared_server(
    home: Path, port: int, meanwhile: Callable[[ServerAddress], object] | None
) -> Iterator[ServerAddress]:
    with ExitStack() as held:
        try:
            # Only the owner may read the database: it contains encrypted secrets and the key to decrypt them.
            own_folder(home)
            own_password(home)
            own_certificate(home)
            users_lock = held.enter_context(lock_file(home / "users.lock"))
            address = _join_or_start(home, users_lock, port=port, meanwhile=meanwhile)
        except OSError as error:
            raise ServerError(f"the store cannot be written ({error}): choose another one, or make room") from error
        with _started_again(home, address):
            yield address


def _join_users(users_lock: int) -> None:
    """Take a shared lock on users.lock. The server runs while any process holds it. The caller must hold start.lock."""
    is_taken = try_lock(users_lock, fcntl.LOCK_SH)
    # Only a keeper locks users.lock exclusively, and only with start.lock, which this process holds.
    assert is_taken, "users.lock held exclusively by a process without start.lock"


def _join_or_start(
    home: Path, users_lock: int, *, port: int, meanwhile: Callable[[ServerAddress], object] | None
) -> ServerAddress:
    """Return the address of a healthy server that will not stop while `users_lock` is open."""
    with _start_lock(home):
        _join_users(users_lock)
    has_started = False
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with _start_lock(home):
            if (keeper_lock := _abandoned_keeper_lock(home)) is not None:
                try:
                    if has_started:
                        raise ServerError(describe_death(f"the Prefect server of {home}", home / LOG_FILE))
                    _start_process(home, keeper_lock, port=port)
                    has_started = True
                finally:
                    os.close(keeper_lock)
        address = _read_address(home)
        if address is not None and meanwhile:
            meanwhile(address)
            meanwhile = None
        # A dead keeper may have left server.json, and another program may use that port, so the keeper is checked, too.
        if address is not None and _is_healthy(address) and _is_kept(home, address):
            return address
        time.sleep(0.05)
    raise ServerError(
        f"the Prefect server of {home} did not answer within {START_TIMEOUT_S:.0f} s; "
        f"its log ends with: {log_tail(home / LOG_FILE)}"
    )


@contextmanager
def _started_again(home: Path, address: ServerAddress) -> Iterator[None]:
    """While the block runs, replace a dead keeper by a new keeper at the same address, which other processes use."""
    port = urllib.parse.urlsplit(address.api_url).port or 0
    started_at = -AGAIN_S

    def look() -> None:
        nonlocal started_at
        if time.monotonic() - started_at < AGAIN_S:
            return
        with _start_lock(home):
            if (keeper_lock := _abandoned_keeper_lock(home)) is None:
                return
            started_at = time.monotonic()
            try:
                _start_process(home, keeper_lock, port=port)
            finally:
                os.close(keeper_lock)

    with repeating(look, interval_s=LOOK_S, thread_name=f"a look at the server of {home}"):
        yield


def _abandoned_keeper_lock(home: Path) -> int | None:
    """Take keeper.lock and return its file descriptor (None if a keeper lives). The caller must hold start.lock."""
    keeper_lock = open_lock(home / "keeper.lock")
    if try_lock(keeper_lock, fcntl.LOCK_EX):
        return keeper_lock
    os.close(keeper_lock)
    return None


def _is_kept(home: Path, address: ServerAddress) -> bool:
    """Return whether a living keeper wrote `address`."""
    with _start_lock(home):
        if (keeper_lock := _abandoned_keeper_lock(home)) is None:
            return _read_address(home) == address
        os.close(keeper_lock)
        return False


def _start_process(home: Path, keeper_lock: int, *, port: int) -> None:
    """Start the keeper. The keeper inherits keeper.lock and the listening socket, so that no other process can take the
    lock or the port meanwhile."""
    known_port = _port_of_killed(home) or remembered_port(home)
    (home / "server.json").unlink(missing_ok=True)
    set_log_aside(home / LOG_FILE)
    with _listen(port, preferred=known_port) as listener, open_own_log(home / LOG_FILE) as log:
        launcher = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER_PROGRAM, str(ROOT), str(home), str(listener.fileno())],
            cwd=home,
            env=_server_environment(home, listener.getsockname()[1]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(keeper_lock, listener.fileno()),
            start_new_session=True,
        )
        # The launcher forks and exits at once, so the keeper is no child of this process and leaves no zombie.
        launcher.wait()


def _server_environment(home: Path, port: int) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not _is_of_prefect(key)}
    return (
        kept
        | _home_environment(home)
        | {
            "PREFECT_SERVER_API_HOST": HOST,
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_SERVER_API_AUTH_STRING": own_password(home),
            "PREFECT_SERVER_UI_API_URL": f"{base_url(port)}/api",
            # Only pages of this server may read its responses. By default, Prefect allows pages of every site.
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"{base_url(port)},http://localhost:{port}",
            "PREFECT_UI_URL": f"{base_url(port)}/v2",  # links in notifications use this URL
            # By default, concurrency slots are in memory: a killed server would lose slots, and Prefect end their runs.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            # Prefect unpacks the UI into this folder, because the default, site-packages, may be read-only or shared.
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui"),
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
    )


def _port_of_killed(home: Path) -> int:
    """Return the port in the server.json that a killed keeper left (0 without this file).

    The next server must use the same port, because runs that outlived the server know only this port.
    """
    address = _read_address(home)
    return (urllib.parse.urlsplit(address.api_url).port or 0) if address else 0


def remember_port(home: Path, port: int) -> None:
    """Save the port for the store's next server, which uses it if it is free."""
    (home / PORT_FILE).write_text(f"{port}\n")


def remembered_port(home: Path) -> int:
    """The port of the last `rollouts up --port` (0 if the option was never used)."""
    with suppress(OSError, ValueError):
        return int((home / PORT_FILE).read_text())
    return 0


def _listen(port: int, *, preferred: int = 0) -> socket.socket:
    """Return a listening socket at `port`. If `port` is 0, try the preferred port, the default port, any free port."""
    for wanted in [port] if port else filter(None, (preferred, DEFAULT_PORT)):
        try:
            return _bind(wanted)
        except OSError as error:
            if port:
                raise ServerError(
                    f"port {port} is in use ({error}): choose another port with --port, or leave --port out"
                ) from error
    return _bind(0)


def _bind(port: int) -> socket.socket:
    if port and _is_answered(port):
        raise OSError("another program answers there")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def _is_answered(port: int) -> bool:
    """Return whether a program listens on the port. On macOS, `bind` alone does not show a program that listens on all
    addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


def _is_healthy(address: ServerAddress, *, timeout_s: float = 1) -> bool:
    # A starting server accepts the request, and responds when it is ready. Requests to this machine use no proxy.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if address.certificate is not None:
        handlers.append(urllib.request.HTTPSHandler(context=client_context(address.certificate)))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(f"{address.api_url}/health", timeout=timeout_s):
            return True
    except (OSError, http.client.HTTPException):
        return False


def _read_address(home: Path) -> ServerAddress | None:
    try:
        recorded = json.loads((home / "server.json").read_text())
        return ServerAddress(
            api_url=recorded["api_url"],
            ui_url=recorded["ui_url"],
            password=own_password(home),
            certificate=own_certificate(home),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _start_lock(home: Path) -> Iterator[None]:
    with lock_file(home / "start.lock") as lock:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while not try_lock(lock, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ServerError(
                    f"another process has been holding {home / 'start.lock'} for {JOIN_TIMEOUT_S:.0f} s: wait until "
                    "the other rollouts commands of the store have started or ended, then give the command again"
                )
            time.sleep(0.02)
        yield
