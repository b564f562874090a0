"""Pins that an engine counts as ready when it generates, and that its end before that is explained.

Without it a pipeline waits for ever for an engine that died, or trains against one that only answers health checks.
"""

import json
import socket
import sys
import time
from functools import partial
from pathlib import Path

import httpx
import pytest

from rollouts.infra.engines import check_engine_installed, check_router_installed, wait_until_engine_ready
from rollouts.infra.errors import JobFailedError, PermanentInfraError, TransientInfraError
from rollouts.infra.jobs import cancel_job, start_or_attach
from rollouts.infra.ports import find_free_port, is_port_free
from rollouts.infra.session import LocalSession, Session
from rollouts.infra.supervisor.gpu_slots import GPU_LOCKS_VARIABLE
from tests.infra.shell_jobs import shell_spec, wait_for_end
from tests.kit.waiting import wait_until

PROBE = ("/generate", {"input_ids": [1]})
SERVER = """
import http.server, json, sys
class Engine(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open("asked.jsonl", "a") as asked:
            asked.write(json.dumps([self.path, body]) + "\\n")
        has_key = self.headers["Authorization"] in (None, "Bearer right")
        self.send_response(200 if has_key else 401)
        self.end_headers()
        self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Engine).serve_forever()
"""


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_free_port_is_free_until_somebody_listens(session: Session, host: str, family: socket.AddressFamily) -> None:
    port = find_free_port(session, host)
    assert is_port_free(session, host, port)
    with socket.create_server((host, port), family=family):
        assert not is_port_free(session, host, port)


@pytest.mark.slow
def test_an_engine_is_ready_when_it_has_generated(session: Session, run_dir: Path) -> None:
    port = find_free_port(session)
    run_dir.mkdir()
    (run_dir / "engine.py").write_text(SERVER)
    start_or_attach(session, shell_spec(run_dir, f"sleep 0.5; exec {sys.executable} -I engine.py {port}"))
    wait_until_engine_ready(session, probe=PROBE, resume_paths=(), port=port, run_dir=str(run_dir), timeout_s=20)
    asked = [json.loads(line) for line in (run_dir / "asked.jsonl").read_text().splitlines()]
    assert asked == [list(PROBE)]


@pytest.mark.slow
def test_an_engine_with_another_key_is_not_waited_for(session: Session, run_dir: Path) -> None:
    port = find_free_port(session)
    run_dir.mkdir()
    (run_dir / "engine.py").write_text(SERVER)
    start_or_attach(session, shell_spec(run_dir, f"exec {sys.executable} -I engine.py {port}"))
    wait = partial(
        wait_until_engine_ready, session, probe=PROBE, resume_paths=(), port=port, run_dir=str(run_dir), timeout_s=20
    )
    wait(api_key="right")
    with pytest.raises(PermanentInfraError, match=r"requires another key(.|\n)*rollout\.engine\.api_key_variable"):
        wait(api_key="another")


@pytest.mark.slow
def test_the_time_to_start_in_begins_when_the_engine_has_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPU_LOCKS_VARIABLE, str(tmp_path / "locks"))
    session, said = LocalSession(sys.executable), list[str]()
    port = find_free_port(session)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/engine.py").write_text(SERVER)
    first = shell_spec(tmp_path / "first", "sleep 12", gpus=("0",), run_name="earlier")
    second = shell_spec(tmp_path / "engine", f"exec {sys.executable} -I engine.py {port}", gpus=("0",), lease_s=120.0)
    start_or_attach(session, first)
    start_or_attach(session, second)
    try:
        wait_until_engine_ready(
            session, probe=PROBE, resume_paths=(), port=port, run_dir=second.run_dir, timeout_s=10, on_wait=said.append
        )
    finally:
        cancel_job(session, second.run_dir, grace_s=0.2)
    [sentence] = said
    assert sentence.startswith(f"waits for GPU 0, held by run earlier (job {first.run_dir})")


HANGING = """
import http.server, sys, time
class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("asked to generate", flush=True)
        time.sleep(60)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Engine).serve_forever()
"""


@pytest.mark.slow
def test_an_engine_that_calls_itself_healthy_and_hangs_is_not_ready(session: Session, run_dir: Path) -> None:
    port = find_free_port(session)
    run_dir.mkdir()
    (run_dir / "engine.py").write_text(HANGING)
    start_or_attach(session, shell_spec(run_dir, f"exec {sys.executable} -I engine.py {port}"))
    with session.forward(port) as local_port:
        wait_until(lambda: answers_health(local_port))
    started = time.monotonic()
    with pytest.raises(TransientInfraError, match=r"did not generate within 6 s.*asked to generate"):
        wait_until_engine_ready(session, probe=PROBE, resume_paths=(), port=port, run_dir=str(run_dir), timeout_s=6)
    assert time.monotonic() - started < 40


def answers_health(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_an_engine_that_answers_without_generating_is_not_ready(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "echo loading shard 3; sleep 60"))
    wait_until(lambda: (run_dir / "log.txt").read_text() == "loading shard 3\n")
    transport = httpx.MockTransport(lambda request: httpx.Response(503, json={"detail": "loading"}))
    with pytest.raises(TransientInfraError, match=r"did not generate within 0\.7 s.*'loading shard 3'"):
        wait_until_engine_ready(
            session, probe=PROBE, resume_paths=(), port=1, run_dir=str(run_dir), timeout_s=0.7, transport=transport
        )


def test_an_engine_that_ends_first_is_explained_from_its_log(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "echo 'OSError: [Errno 98] Address already in use'; exit 1"))
    wait_for_end(session, run_dir)
    transport = httpx.MockTransport(lambda request: httpx.Response(502))
    wait = partial(
        wait_until_engine_ready,
        session,
        probe=PROBE,
        resume_paths=(),
        port=1,
        run_dir=str(run_dir),
        timeout_s=10,
        transport=transport,
    )
    with pytest.raises(JobFailedError, match=r"code 1(.|\n)*Errno 98"):
        wait()
    with pytest.raises(JobFailedError, match=r"the port of OSError(.|\n)*Errno 98"):
        wait(explain_log=lambda log: f"the port of {log.partition(':')[0]}")


@pytest.mark.parametrize("python", ["", sys.executable])
def test_an_engine_that_is_not_installed_is_told_in_one_sentence(session: Session, python: str) -> None:
    with pytest.raises(
        PermanentInfraError, match=r"has no no_such_engine, which .* install it.* as rollout\.engine\.python$"
    ):
        check_engine_installed(session, "no_such_engine", python=python)
    check_engine_installed(session, "json", python="")


def test_a_router_that_is_not_installed_is_told_in_one_sentence(session: Session) -> None:
    with pytest.raises(PermanentInfraError, match=r"router_python is .*, which has no sglang_router: install"):
        check_router_installed(session, sys.executable)
    with pytest.raises(PermanentInfraError, match=r"router_python is '/nowhere', which is not a prog"):
        check_router_installed(session, "/nowhere")


@pytest.mark.parametrize("python", ["/nowhere/python", "no-such-python", "/etc/passwd"])
def test_an_interpreter_that_is_not_there_is_told_apart_from_a_missing_engine(session: Session, python: str) -> None:
    sentence = f"^rollout.engine.python is '{python}', which is not a program on the node: name the"
    with pytest.raises(PermanentInfraError, match=sentence):
        check_engine_installed(session, "json", python=python)
