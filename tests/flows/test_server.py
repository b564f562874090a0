"""The lifetime of a store's Prefect server: one for all users, none without a user.

What breaks silently without these: servers that stay behind after a killed command and hold the port and the
database, a user who is handed a server that is going down, runs whose logs never arrive, and Prefect's lines in
the middle of the terminal display.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rollouts.flows.own_server.https import HOST, client_context
from rollouts.flows.own_server.lend import (
    OWN_API_URL,
    ServerAddress,
    ServerError,
    local_server,
    prefect_environment,
    run_url,
)
from rollouts.flows.own_server.password import own_password, password_file
from rollouts.flows.prefect_api import ask
from tests.kit.commands import copy_home
from tests.kit.mounts import fill, mounted_tmpfs
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[2]
GONE_TIMEOUT_S = 15.0

STAYING_USER = """
import sys, time
from pathlib import Path
from rollouts.flows.own_server.lend import local_server
with local_server(Path(sys.argv[1])) as address:
    print(address.api_url, flush=True)
    sys.stdin.read()
"""

STANDSTILL_S = 3.0
SOON_IMPATIENT = """
import datetime
from rollouts.flows.own_server import scheduler_watchdog, server_process
server_process.ASLEEP_S = 2.0
scheduler_watchdog.BEAT_EVERY, scheduler_watchdog.STANDSTILL_S = datetime.timedelta(seconds=0.5), 3.0
"""
STANDING_STILL = """
import asyncio, datetime, pathlib
from rollouts.flows.own_server import scheduler_watchdog
scheduler_watchdog.BEAT_EVERY, scheduler_watchdog.STANDSTILL_S = datetime.timedelta(seconds=0.5), 3.0
once = pathlib.Path({once!r})
if not once.exists():
    import burner_redis
    async def wait_for_ever(*arguments, **options):
        once.touch()
        await asyncio.Event().wait()
    burner_redis.BurnerRedis.xreadgroup = wait_for_ever
"""

FLOW_USER = """
import logging, os, sys
from pathlib import Path
from rollouts.flows.own_server.lend import local_server, prefect_environment
store = Path(sys.argv[1])
with local_server(store) as address:
    os.environ.update(prefect_environment(store, address))
    from prefect import flow, get_run_logger, task

    @task
    def add_one(number: int) -> int:
        logging.getLogger("rollouts.infra.ssh.connection").info("said by our own logger")
        logging.getLogger("rollouts.infra.ssh.connection").debug("too fine to keep")
        return number + 1

    @flow(name="counting")
    def counting() -> int:
        get_run_logger().info("said by the flow")
        return add_one(1)

    assert counting() == 2
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_") or name == OWN_API_URL]:
        monkeypatch.delenv(name)


@pytest.fixture
def store(prefect_home: Path, tmp_path: Path) -> Iterator[Path]:
    """A store whose database exists: making one takes most of a first start."""
    copy = tmp_path / "store"
    copy_home(prefect_home, copy)
    yield copy
    wait_until(lambda: not processes_of(copy))


def processes_of(store: Path) -> list[int]:
    """Return the living processes with the store on their command line; zombies have none."""
    listing = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True)
    lines = [line.split(None, 1) for line in listing.stdout.splitlines()]
    return [int(line[0]) for line in lines if len(line) == 2 and str(store) in line[1]]


def start_user(store: Path) -> tuple[subprocess.Popen[str], str]:
    """Return a process that uses the server until its standard input ends, and the URL it was given."""
    user = subprocess.Popen(
        [sys.executable, "-c", STAYING_USER, str(store)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert user.stdout is not None
    return user, user.stdout.readline().strip()


def is_healthy(address: ServerAddress) -> bool:
    try:
        tls = client_context(address.certificate) if address.certificate else None
        with urllib.request.urlopen(f"{address.api_url}/health", timeout=2, context=tls) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def keeper_pid(store: Path) -> int:
    return int(json.loads((store / "prefect" / "server.json").read_text())["pid"])


@pytest.mark.slow
def test_a_server_is_shared_stays_until_the_last_user_leaves_and_leaves_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with local_server(store) as address:
        assert f"TMPDIR={temporary}".encode() in Path(f"/proc/{keeper_pid(store)}/environ").read_bytes()
        second_user, second_url = start_user(store)
        first_pid = keeper_pid(store)
    assert second_url == address.api_url
    time.sleep(3)
    wait_until(lambda: is_healthy(address))
    assert keeper_pid(store) == first_pid
    second_user.communicate("")
    wait_until(lambda: not processes_of(store))
    assert not is_healthy(address)
    assert not (store / "prefect" / "server.json").exists()
    assert list(temporary.iterdir()) == []


@pytest.mark.matrix
@pytest.mark.slow
def test_a_server_starts_where_assertions_are_left_out(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    user, url = start_user(store)
    assert url.startswith(f"https://{HOST}:")
    user.communicate("")
    assert user.returncode == 0


@pytest.mark.slow
def test_kill_9_of_the_only_user_ends_the_server(store: Path) -> None:
    user, url = start_user(store)
    assert url.startswith(f"https://{HOST}:")
    user.kill()
    user.communicate()
    wait_until(lambda: not processes_of(store))


@pytest.mark.matrix
@pytest.mark.slow
def test_kill_9_of_a_user_during_the_start_ends_the_server(store: Path) -> None:
    user = subprocess.Popen([sys.executable, "-c", STAYING_USER, str(store)], cwd=ROOT, stdin=subprocess.PIPE)
    wait_until((store / "prefect" / "server.json").exists)
    user.kill()
    user.communicate()
    wait_until(lambda: not processes_of(store))


@pytest.mark.matrix
@pytest.mark.slow
def test_who_joins_while_the_server_stops_gets_one_that_stays(store: Path) -> None:
    with local_server(store) as address:
        pass
    wait_until(lambda: not is_healthy(address))  # from here on it is stopping, and may still be there
    with local_server(store) as joined:
        time.sleep(2.5)
        wait_until(lambda: is_healthy(joined))


@pytest.mark.matrix
@pytest.mark.slow
def test_the_address_left_by_a_killed_keeper_is_not_believed(store: Path) -> None:
    with local_server(store) as address:
        killed_pid = keeper_pid(store)
        os.kill(killed_pid, signal.SIGKILL)
        wait_until(lambda: not is_healthy(address))
        assert (store / "prefect" / "server.json").exists()
        with local_server(store) as fresh:
            wait_until(lambda: is_healthy(fresh))
            assert keeper_pid(store) != killed_pid


@pytest.mark.slow
def test_a_killed_server_comes_back_on_its_port_where_runs_look_for_it(store: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        own_port = taken.getsockname()[1]
    with local_server(store, port=own_port) as address:
        os.kill(keeper_pid(store), signal.SIGKILL)
        wait_until(lambda: not is_healthy(address))
        with local_server(store) as again:
            assert again.api_url == address.api_url


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.matrix)])
def test_a_server_that_ends_is_started_again_by_whoever_uses_it(store: Path, number: signal.Signals) -> None:
    """Otherwise no schedule fires until somebody gives a command, and runs end for want of an answer."""
    with local_server(store) as address:
        first = keeper_pid(store)
        os.kill(first, number)
        wait_until(lambda: not is_healthy(address))
        wait_until(lambda: is_healthy(address), timeout_s=60.0)
        assert keeper_pid(store) != first


@pytest.mark.matrix
@pytest.mark.slow
def test_what_a_server_said_before_it_ended_is_there_when_another_one_has_taken_its_place(store: Path) -> None:
    with local_server(store) as address:
        for words in ("the disk burns", ""):  # the second one ends without a word
            (store / "prefect/server.log").write_text(words)
            os.kill(keeper_pid(store), signal.SIGKILL)
            wait_until(lambda: not is_healthy(address))
            wait_until(lambda: is_healthy(address), timeout_s=60.0)
            assert "the disk burns" in (store / "prefect/server.log.1").read_text()
            assert "the disk burns" not in (store / "prefect/server.log").read_text()


@pytest.mark.matrix
@pytest.mark.slow
def test_a_server_whose_services_stand_still_begins_anew_at_its_address(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no schedule ever fires again, and nobody is told."""
    (tmp_path / "sitecustomize.py").write_text(STANDING_STILL.format(once=str(tmp_path / "once")))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT / 'src'}")
    with local_server(store) as address:
        first = keeper_pid(store)
        wait_until(lambda: keeper_pid(store) != first, timeout_s=60.0)
        wait_until(lambda: is_healthy(address), timeout_s=60.0)
        log = (store / "prefect/server.log").read_text()
        assert log.count("hang: it restarts. Waiting tasks:") == 1
        assert str(tmp_path / "sitecustomize.py") in log
        second = keeper_pid(store)
        time.sleep(3 * STANDSTILL_S)
        assert keeper_pid(store) == second, log


@pytest.mark.matrix
@pytest.mark.slow
def test_a_server_that_was_stopped_and_goes_on_is_no_server_that_stands_still(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was frozen, or had no processor left: all who are connected would lose the server."""
    (tmp_path / "sitecustomize.py").write_text(SOON_IMPATIENT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT / 'src'}")
    with local_server(store) as address:
        for _ in range(3):
            os.kill(keeper_pid(store), signal.SIGSTOP)
            time.sleep(2 * STANDSTILL_S)
            os.kill(keeper_pid(store), signal.SIGCONT)
            wait_until(lambda: is_healthy(address))
        assert "it restarts" not in (store / "prefect/server.log").read_text()


@pytest.mark.matrix
@pytest.mark.slow
def test_the_only_run_of_a_deployment_keeps_its_slot_when_the_server_is_killed(store: Path) -> None:
    """Otherwise Prefect ends a retraining at its next renewal: within four minutes, without a word of the server."""
    with local_server(store) as address:
        flow_id = ask(address, "POST", "/flows/", {"name": "retrain"})["id"]
        deployment = {"flow_id": flow_id, "name": "nightly", "concurrency_limit": 1}
        deployment_id = ask(address, "POST", "/deployments/", deployment)["id"]
        run_id = ask(address, "POST", f"/deployments/{deployment_id}/create_flow_run", {})["id"]
        pending = ask(address, "POST", f"/flow_runs/{run_id}/set_state", {"state": {"type": "PENDING"}})["state"]
        lease_id = pending["state_details"]["deployment_concurrency_lease_id"]
        assert lease_id
        os.kill(keeper_pid(store), signal.SIGKILL)
        with local_server(store) as again:
            ask(again, "POST", f"/v2/concurrency_limits/leases/{lease_id}/renew", {"lease_duration": 300})


@pytest.mark.matrix
@pytest.mark.slow
def test_a_flow_leaves_its_run_and_its_lines_on_the_server_and_none_on_the_terminal(store: Path) -> None:
    flow = subprocess.run(
        [sys.executable, "-c", FLOW_USER, str(store)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (flow.returncode, flow.stdout, flow.stderr) == (0, "", "")
    with local_server(store) as address:
        (run,) = ask(address, "POST", "/flow_runs/filter", {"flows": {"name": {"any_": ["counting"]}}})
        (task_run,) = ask(address, "POST", "/task_runs/filter", {})
        messages = [line["message"] for line in ask(address, "POST", "/logs/filter", {})]
        navigation = urllib.request.Request(run_url(address, run["id"]), headers={"Accept": "text/html"})
        page = urllib.request.urlopen(navigation, timeout=10).read().decode()
    assert (run["state_type"], task_run["state_type"]) == ("COMPLETED", "COMPLETED")
    assert {"said by the flow", "said by our own logger"} <= set(messages)
    assert "too fine to keep" not in messages
    assert "/v2/assets/" in page  # the V1 page has its assets elsewhere


@pytest.mark.slow
def test_the_environment_it_made_itself_is_not_taken_for_the_users_server(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ServerAddress(api_url=f"http://{HOST}:9/api", ui_url=f"http://{HOST}:9/v2")
    for name, value in prefect_environment(store, gone).items():
        monkeypatch.setenv(name, value)
    with local_server(store) as address:
        wait_until(lambda: is_healthy(address))
        assert address.api_url != gone.api_url


@pytest.mark.slow
def test_nobody_is_answered_without_the_password_which_only_the_owner_can_read(store: Path) -> None:
    with local_server(store) as address:
        assert address.password == own_password(store / "prefect")
        assert address.password not in repr(address)
        assert address.password not in (store / "prefect" / "server.json").read_text()
        for stranger in ("", "rollouts:guessed"):
            with pytest.raises(ServerError, match="401"):
                ask(dataclasses.replace(address, password=stranger), "POST", "/flow_runs/filter", {})
        assert ask(address, "POST", "/flow_runs/filter", {}) == []
    assert password_file(store / "prefect").stat().st_mode & 0o077 == 0


def test_of_many_that_make_a_password_at_once_all_have_the_same(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from rollouts.flows.own_server.password import own_password; "
    program += "print(own_password(Path(sys.argv[1])))"
    command = [sys.executable, "-c", program, str(tmp_path)]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    passwords = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert len(passwords) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["password"]


def test_an_explicit_port_that_is_taken_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} .* choose another"), local_server(tmp_path, port=port):
            pass
    assert not processes_of(tmp_path)


def test_a_server_named_by_the_user_that_does_not_answer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://{HOST}:9/api")
    with pytest.raises(ServerError, match=r"PREFECT_API_URL is set to .* no server answers"), local_server(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_another_password_or_address_for_the_server_named_by_the_user_is_said_at_once(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_server(store) as running:
        for url, password, said in (
            (running.api_url, "people:guessed", "refuses the password: set PREFECT_API_AUTH_STRING"),
            (running.api_url, "", "refuses the password: set PREFECT_API_AUTH_STRING"),
            (running.api_url.removesuffix("/api"), running.password, "API ends with /api"),
        ):
            monkeypatch.setenv("PREFECT_API_URL", url)
            monkeypatch.setenv("PREFECT_API_SSL_CERT_FILE", str(running.certificate))
            monkeypatch.setenv("PREFECT_API_AUTH_STRING", password)
            monkeypatch.setenv("PREFECT_HOME", str(store / "no profiles"))
            with pytest.raises(ServerError, match=said), local_server(store):
                pass
        monkeypatch.setenv("PREFECT_API_URL", running.api_url)
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", running.password)
        with local_server(store) as named:
            assert named.api_url == running.api_url


def test_a_server_that_redirects_to_another_one_has_that_told_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.append(self.headers["Authorization"])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    class Redirecting(Elsewhere):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{elsewhere.server_port}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

    with HTTPServer((HOST, 0), Elsewhere) as elsewhere, HTTPServer((HOST, 0), Redirecting) as named:
        for server in (elsewhere, named):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://{HOST}:{named.server_port}/api")
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "team:secret")
        with local_server(tmp_path):
            pass
        for server in (elsewhere, named):
            server.shutdown()
    assert told == [None, None]


def test_a_key_that_no_header_can_carry_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://{HOST}:9/api")
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    monkeypatch.setenv("PREFECT_API_KEY", "pnu_secret\nexport")
    with pytest.raises(ServerError, match="PREFECT_API_KEY is not a key") as refused, local_server(tmp_path):
        pass
    assert "secret" not in str(refused.value)


def test_a_fastapi_that_is_too_new_is_named_as_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "packages" / "prefect"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("""raise TypeError("got an unexpected keyword argument 'min_items'")""")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    with pytest.raises(ServerError, match="fastapi is too new"), local_server(tmp_path / "store"):
        pass
    assert not processes_of(tmp_path)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_full_disk_of_temporary_files_is_not_taken_for_that_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite writes there while a new database is migrated."""
    with mounted_tmpfs(tmp_path / "temporary", "size=16k") as disk:
        fill(disk)
        monkeypatch.setenv("TMPDIR", str(disk))
        with pytest.raises(ServerError, match=r"temporary files \(TMPDIR\), is full"), local_server(tmp_path / "store"):
            pass
        wait_until(lambda: not processes_of(tmp_path), what="the end of the server")


def test_a_store_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServerError, match="the store cannot be written"), local_server(tmp_path / "file"):
        pass


def test_the_module_does_not_import_prefect() -> None:
    command = "import rollouts.flows.own_server.lend, sys; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=False).returncode == 0


def test_a_preference_of_the_user_wins_and_the_home_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "INFO")
    monkeypatch.setenv("PREFECT_HOME", "/elsewhere")
    address = ServerAddress(api_url="http://127.0.0.1:4200/api", ui_url="http://127.0.0.1:4200/v2")
    environment = prefect_environment(tmp_path, address)
    assert environment["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] == "INFO"
    assert environment["PREFECT_INTERNAL_LOGGING_LEVEL"] == "CRITICAL"
    assert environment["PREFECT_HOME"] == str(tmp_path / "prefect")


def test_a_server_named_by_the_user_keeps_the_users_home(tmp_path: Path) -> None:
    address = ServerAddress(api_url="http://team:4200/api", ui_url="http://team:4200/v2", is_local=False)
    assert "PREFECT_HOME" not in prefect_environment(tmp_path, address)


def test_requests_to_this_machine_pass_by_the_users_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "intranet")
    address = ServerAddress(api_url="http://127.0.0.1:4200/api", ui_url="http://127.0.0.1:4200/v2")
    assert prefect_environment(tmp_path, address)["NO_PROXY"] == "intranet,127.0.0.1"


def test_the_page_of_a_run_is_the_one_of_the_second_ui() -> None:
    address = ServerAddress(api_url="http://127.0.0.1:4200/api", ui_url="http://127.0.0.1:4200/v2")
    assert run_url(address, "0b5e") == "http://127.0.0.1:4200/v2/runs/flow-run/0b5e"
