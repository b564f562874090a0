"""Pins what a session over SSH adds to the contract of sessions: nothing in between changes, loses or repeats anything.

Without it a shell interprets what somebody wrote into a setting, a broken connection counts as the end of a job, or a
log has holes.
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollouts.infra.errors import (
    CommandTimeoutError,
    LoginShellError,
    NodeUnreachableError,
    PermanentInfraError,
    RequestCutError,
)
from rollouts.infra.jobs import JobState, cancel_job, follow_job, job_status, start_or_attach
from rollouts.infra.node_agent import END_OF_INPUT, FRAME_HEAD, REQUEST
from rollouts.infra.providers.ssh import expand_root
from rollouts.infra.ssh.agent_call import Agent
from rollouts.infra.ssh.ssh_session import SSHSession
from tests.infra.separate_node import separate_node
from tests.infra.shell_jobs import is_alive, read_pid, shell_spec, wait_for_end
from tests.infra.splitting import chunks_of
from tests.infra.ssh_server import SSHServer, find_sshd, running_server
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow

HOSTILE = [
    'it\'s "quoted"',
    "two\nlines\r\n",
    "$(touch x) `id` ${HOME} $$",
    "; rm -rf x && true | cat > y # no comment",
    "-rf",
    "--",
    "",
    " \t leading and trailing ",
    "ü 漢字 \U0001f600",
    "\\ \\\\ \\n \x01\x7f",
    "* ? [a-z] ~ {a,b} !x",
    "\udcff is no UTF-8",
]


@pytest.fixture(params=["openssh", "stand_in"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SSHServer]:
    """One that a test may disturb."""
    if request.param == "openssh" and find_sshd() is None:
        pytest.skip("there is no sshd on this machine: install openssh-server")
    with running_server(tmp_path / "own-sshd", stand_in=request.param == "stand_in") as server:
        yield server


@pytest.fixture
def fragile(server: SSHServer, tmp_path: Path) -> Iterator[SSHSession]:
    """A session on that server."""
    with SSHSession(server.access, python=sys.executable, programs_dir=str(tmp_path / "programs")) as session:
        yield session


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_every_argument_arrives_as_it_is(ssh_session: SSHSession, text: str) -> None:
    show = "import os, sys; sys.stdout.buffer.write(b'|'.join(map(os.fsencode, sys.argv[1:])))"
    completed = ssh_session.run([sys.executable, "-c", show, text, "end"], timeout_s=30)
    assert completed.stdout == os.fsencode(text) + b"|end"


@pytest.mark.parametrize("name", ["a b", "it's", "$(touch x)", "-rf", "ü\nx"])
def test_every_path_is_written_as_it_is(ssh_session: SSHSession, tmp_path: Path, name: str) -> None:
    ssh_session.write_file(str(tmp_path / name / name), b"content")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert ssh_session.read_file(str(tmp_path / name / name)) == b"content"


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_shell_that_prints_a_greeting_does_not_spoil_answers(tmp_path: Path, shell: str) -> None:
    force = f"""ForceCommand {shell} -c 'echo "Welcome!"; printf "\\\\0\\\\377"; eval "$SSH_ORIGINAL_COMMAND"'"""
    with (
        running_server(tmp_path / "sshd", more_config=force) as server,
        SSHSession(server.access, python=sys.executable, programs_dir=str(tmp_path)) as session,
    ):
        assert session.run(["cat"], stdin=b"answer", timeout_s=30).stdout == b"answer"


def test_a_login_that_shows_the_command_before_it_runs_it_does_not_spoil_answers(tmp_path: Path) -> None:
    force = """ForceCommand echo "recorded: $SSH_ORIGINAL_COMMAND"; eval "$SSH_ORIGINAL_COMMAND\""""
    with (
        running_server(tmp_path / "sshd", more_config=force) as server,
        SSHSession(server.access, python=sys.executable, programs_dir=str(tmp_path)) as session,
    ):
        assert session.run(["cat"], stdin=b"answer", timeout_s=30).stdout == b"answer"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            """echo 'Please login as the user "ubuntu" rather than the user "root".'; echo; exit 142""",
            "code 142: Please",
        ),
        ("echo 'This account is currently not available.' >&2; exit 1", "code 1: This account is currently not"),
        ("exit 3", "code 3: it printed nothing"),
    ],
)
def test_a_login_that_runs_nothing_is_not_taken_for_a_machine_that_does_not_answer(
    tmp_path: Path, command: str, said: str
) -> None:
    with (
        running_server(tmp_path / "sshd", more_config=f"ForceCommand {command}") as server,
        SSHSession(server.access, python="/usr/bin/python3", programs_dir=str(tmp_path)) as session,
        pytest.raises(LoginShellError, match=rf"lets us in and does not run /usr/bin/python3 \({said}.*: log in as"),
    ):
        session.run(["true"], timeout_s=30)


SHELLS = [shell for shell in ("sh", "dash", "bash", "ksh", "zsh", "fish", "tcsh") if shutil.which(shell)]


@pytest.mark.parametrize("shell", SHELLS)
def test_neither_the_login_shell_nor_a_home_with_spaces_changes_what_arrives(tmp_path: Path, shell: str) -> None:
    home = tmp_path / "the home of 'me' $HOME"
    home.mkdir()
    config = f'ForceCommand exec {shell} -c "$SSH_ORIGINAL_COMMAND"\nSetEnv "HOME={home}"'
    with (
        running_server(tmp_path / "sshd", more_config=config) as server,
        SSHSession(server.access, python=sys.executable, programs_dir=f"{home}/programs") as session,
    ):
        show = "import os, sys; sys.stdout.buffer.write(b'|'.join(map(os.fsencode, sys.argv[1:])))"
        argv = [sys.executable, "-c", show, *HOSTILE]
        assert session.run(argv, timeout_s=30).stdout == b"|".join(map(os.fsencode, HOSTILE))
        root = expand_root(session, sys.executable, "~/some runs")
        assert root == f"{home}/some runs"
        run_dir = Path(root) / "sft-0123"
        start_or_attach(session, shell_spec(run_dir, "pwd; exit 5"))
        status = wait_for_end(session, run_dir)
    assert status.exit is not None and status.exit.code == 5 and (run_dir / "log.txt").read_text() == f"{run_dir}\n"


def test_a_secret_on_standard_input_is_in_no_command_line(ssh_session: SSHSession) -> None:
    secret = b"canary-" + os.urandom(8).hex().encode()
    listing = ssh_session.run(["sh", "-c", "cat > /dev/null; ps -A -ww -o args="], stdin=secret, timeout_s=30).stdout
    assert b"ps -A" in listing and secret not in listing


def test_much_input_and_output_at_once_do_not_wait_for_each_other(ssh_session: SSHSession) -> None:
    content = os.urandom(12 << 20)
    assert ssh_session.run(["cat"], stdin=content, timeout_s=60).stdout == content


def test_a_command_that_prints_without_end_is_ended_and_the_next_one_answered(
    ssh_session: SSHSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts.infra.ssh.ssh_session.MAX_OUTPUT_BYTES", 1 << 20)
    began = time.monotonic()
    with pytest.raises(PermanentInfraError, match=r"sh on .* prints more than 1048576 bytes: it was ended"):
        ssh_session.run(["sh", "-c", f"echo $$ > {tmp_path}/pid; exec yes"], timeout_s=20)
    wait_until(lambda: not is_alive(read_pid(tmp_path / "pid")))
    assert time.monotonic() - began < 15 and ssh_session.run(["echo", "x"], timeout_s=10).stdout == b"x\n"


def test_a_port_of_the_node_is_reached_here(ssh_session: SSHSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(client.recv(100).upper())

        threading.Thread(target=answer, daemon=True).start()
        with ssh_session.forward(port) as local_port:
            assert local_port != port
            with socket.create_connection(("127.0.0.1", local_port), 10) as client:
                client.sendall(b"hello")
                assert client.recv(100) == b"HELLO" and client.recv(100) == b""
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", local_port), 10)


def test_a_port_where_nobody_listens_closes_the_connection(ssh_session: SSHSession) -> None:
    with ssh_session.forward(1) as local_port, socket.create_connection(("127.0.0.1", local_port), 10) as client:
        assert client.recv(1) == b""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["AllowTcpForwarding no", "DisableForwarding yes", "PermitOpen none", "restrict"])
def test_a_server_that_forwards_nothing_is_said_at_once(tmp_path: Path, by: str) -> None:
    """Its engines would be waited for until their time is over, as if they did not answer."""
    is_of_key = by == "restrict"
    with (
        running_server(tmp_path / "sshd", more_config="" if is_of_key else by) as server,
        SSHSession(server.access, python=sys.executable, programs_dir=str(tmp_path)) as session,
    ):
        if is_of_key:
            keys = server.folder / "authorized_keys"
            keys.write_text(f"{by} {keys.read_text()}")
        assert session.run(["echo", "there"], timeout_s=30).stdout == b"there\n"
        with pytest.raises(PermanentInfraError, match=r"does not forward connections.*AllowTcpForwarding"):
            session.forward(1).__enter__()


def test_a_session_that_was_left_does_not_connect_again(ssh_server: SSHServer, tmp_path: Path) -> None:
    with SSHSession(ssh_server.access, python=sys.executable, programs_dir=str(tmp_path)) as session:
        session.run(["true"], timeout_s=30)
    with pytest.raises(PermanentInfraError, match="is closed"):
        session.run(["true"], timeout_s=30)


def agent_of(session: SSHSession) -> int:
    """The process that answers, whose fork runs the command."""
    script = "read -r _ _ _ parent _ < /proc/$PPID/stat; echo $parent"
    return int(session.run(["sh", "-c", script], timeout_s=30).stdout)


def test_calls_one_after_the_other_are_answered_by_one_agent(ssh_session: SSHSession, tmp_path: Path) -> None:
    first = agent_of(ssh_session)
    ssh_session.write_file(str(tmp_path / "file"), b"content")
    assert ssh_session.read_file(str(tmp_path / "file")) == b"content"
    assert ssh_session.run(["cat"], stdin=b"input", timeout_s=30).stdout == b"input"
    assert ssh_session.run(["sh", "-c", "exit 3"], timeout_s=30, check=False).exit_code == 3
    with pytest.raises(PermanentInfraError):
        ssh_session.run(["/nowhere"], timeout_s=30)
    assert agent_of(ssh_session) == first


def test_a_program_of_ours_is_loaded_once_and_runs_as_if_it_were_alone(ssh_session: SSHSession, tmp_path: Path) -> None:
    program = tmp_path / "counting.py"
    text = PROGRAM.format(folder=str(tmp_path))
    program.write_text(text)
    for number in range(3):
        completed = ssh_session.run_program(program, ["a b", "$x"], stdin=b"in", timeout_s=30, check=False)
        assert completed.stdout.decode().splitlines() == ["['a b', '$x'] in 1", ""]
        assert (completed.exit_code, completed.stderr) == (7, b"to stderr")
        assert (tmp_path / "loaded").read_text() == "loaded\n", number
    program.write_text(text.replace("return 7", "return 8"))
    changed = ssh_session.run_program(program, ["a b", "$x"], stdin=b"in", timeout_s=30, check=False)
    assert changed.exit_code == 8


PROGRAM = """
import sys
from pathlib import Path

with (Path({folder!r}) / "loaded").open("a") as file:
    file.write("loaded\\n")
calls = []

def main(argv):
    calls.append(argv)
    print(argv[1:], sys.stdin.read(), len(calls))
    print()
    sys.stderr.write("to stderr")
    return 7
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def main(argv):\n    raise ValueError('why')", "ValueError: why"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("def main(argv:", "SyntaxError"),
    ],
)
def test_a_program_that_fails_or_cannot_be_loaded_says_why(
    ssh_session: SSHSession, tmp_path: Path, text: str, reason: str
) -> None:
    program = tmp_path / "failing.py"
    program.write_text(text)
    completed = ssh_session.run_program(program, [], timeout_s=30, check=False)
    assert completed.exit_code == 1 and reason in completed.stderr.decode()
    assert ssh_session.run(["echo", "next"], timeout_s=30).stdout == b"next\n"


def test_a_program_that_hangs_is_killed(ssh_session: SSHSession, tmp_path: Path) -> None:
    program = tmp_path / "hanging.py"
    program.write_text(
        "import os, pathlib, sys, time\n\n"
        "def main(argv):\n    pathlib.Path(argv[1]).write_text(f'{os.getpid()}\\n')\n    time.sleep(60)\n"
    )
    with pytest.raises(CommandTimeoutError):
        ssh_session.run_program(program, [str(tmp_path / "pid")], timeout_s=1.0)
    wait_until(lambda: not is_alive(read_pid(tmp_path / "pid")))
    assert ssh_session.run(["echo", "next"], timeout_s=30).stdout == b"next\n"


def test_input_that_a_command_leaves_is_no_request(ssh_session: SSHSession, tmp_path: Path) -> None:
    argv = ["touch", str(tmp_path / "forged")]
    forged = json.dumps({"verb": "run", "argv": argv, "timeout_s": 9, "keep_open": False})
    request = FRAME_HEAD.pack(REQUEST, len(forged)) + forged.encode() + FRAME_HEAD.pack(END_OF_INPUT, 0)
    for command in (["true"], ["head", "-c", "1000"], ["sh", "-c", "exec 0<&-; sleep 0.3"]):
        ssh_session.run(command, stdin=request * 20_000, timeout_s=30)
        assert ssh_session.run(["echo", "next"], timeout_s=30).stdout == b"next\n"
    assert not (tmp_path / "forged").exists()


def test_calls_at_the_same_time_do_not_wait_for_one_another(ssh_session: SSHSession, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with ssh_session.stream(["cat", str(tmp_path / "fifo")]) as lines:
        writers = [
            threading.Thread(target=ssh_session.run, args=(["sh", "-c", "sleep 0.2"],), kwargs={"timeout_s": 30})
            for _ in range(4)
        ]
        for writer in writers:
            writer.start()
        ssh_session.run(["sh", "-c", f"echo line > {tmp_path}/fifo"], timeout_s=30)
        assert next(lines) == b"line\n"
        for writer in writers:
            writer.join()


def test_an_agent_that_was_killed_while_it_waited_is_not_asked(ssh_session: SSHSession) -> None:
    agent = agent_of(ssh_session)
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not is_alive(agent))
    time.sleep(0.2)  # its end has to arrive here
    assert ssh_session.run(["echo", "again"], timeout_s=30).stdout == b"again\n"


# ── busy servers ──


def test_a_server_that_allows_no_more_channels_is_asked_again_until_one_is_free(tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "sshd", more_config="MaxSessions 1") as server,
        SSHSession(server.access, python=sys.executable, programs_dir=str(tmp_path)) as session,
        ThreadPoolExecutor(1) as pool,
    ):
        following = ["sh", "-c", "echo up; sleep 60"]
        with session.stream(following) as lines, session.stream(following) as more_lines:
            assert (next(lines), next(more_lines)) == (b"up\n", b"up\n")
            answer = pool.submit(session.run, ["echo", "there"], timeout_s=30)
            time.sleep(1.0)
            assert not answer.done()
        assert answer.result(30).stdout == b"there\n"


def test_a_server_that_allows_one_channel_answers_beside_a_log_that_is_followed(tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "sshd", more_config="MaxSessions 1") as server,
        SSHSession(server.access, python=sys.executable, programs_dir=str(tmp_path)) as session,
        session.stream(["sh", "-c", "echo up; sleep 60"]) as lines,
    ):
        assert next(lines) == b"up\n"
        for _ in range(2):
            assert session.run(["echo", "there"], timeout_s=30).stdout == b"there\n"


def test_a_server_that_takes_no_more_logins_is_asked_again_until_it_does(tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "sshd", more_config="MaxStartups 1") as server,
        SSHSession(server.access, python=sys.executable, programs_dir=str(tmp_path)) as session,
        ThreadPoolExecutor(1) as pool,
    ):
        with somebody_who_does_not_log_in(server):
            answer = pool.submit(session.run, ["echo", "there"], timeout_s=30)
            time.sleep(1.0)
            assert not answer.done()
        assert answer.result(30).stdout == b"there\n"
        assert "maxstartups" in (server.folder / "log").read_text().lower()


@contextmanager
def somebody_who_does_not_log_in(server: SSHServer) -> Iterator[None]:
    """A connection that the server counts among those that are about to log in."""
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", server.port)) as somebody:
            if somebody.recv(4) == b"SSH-":
                yield
                return
        time.sleep(0.05)  # who looked whether the server listens still counts
    raise AssertionError("the server takes nobody")


# ── broken connections ──


@pytest.mark.namespaces
def test_a_link_that_is_cut_amid_a_call_is_noticed_and_the_job_does_not_notice_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packets vanish, and nobody says so; the real limits are in test_ssh.py."""
    monkeypatch.setattr("rollouts.infra.ssh.connection.HEARTBEAT_INTERVAL_S", 0.5)
    monkeypatch.setattr("rollouts.infra.ssh.connection.HEARTBEAT_LIMIT_S", 2.0)
    with (
        separate_node(tmp_path / "node", hidden=[]) as node,
        SSHSession(node.access, python=sys.executable, programs_dir=f"{node.folder}/programs") as session,
        ThreadPoolExecutor(1) as pool,
    ):
        run_dir = node.folder / "sft-0123"
        spec = shell_spec(run_dir, "while true; do echo x; sleep 0.1; done")
        started = start_or_attach(session, spec)
        answer = pool.submit(session.run, ["sleep", "60"], timeout_s=100)
        time.sleep(0.5)  # it is under way by then
        with node.cut_off():
            cut_at = time.monotonic()
            with pytest.raises(NodeUnreachableError):
                answer.result(60)
            assert time.monotonic() - cut_at < 30
            [log] = node.files("sft-0123/log.txt")
            size = log.stat().st_size
            wait_until(lambda: log.stat().st_size > size)
        again = start_or_attach(session, spec)
        assert (again.state, again.attached, again.pid) == (JobState.RUNNING, True, started.pid)


@pytest.mark.parametrize("verb", ["read", "write", "run", "program"])
def test_a_harmless_request_that_is_cut_off_is_made_once_more(
    fragile: SSHSession, server: SSHServer, tmp_path: Path, verb: str
) -> None:
    file, program = tmp_path / "file", tmp_path / "program.py"
    file.write_bytes(b"content")
    program.write_text("def main(argv):\n    print('content', end='')\n")

    def write_and_read() -> bytes:
        fragile.write_file(str(tmp_path / "new"), b"content")
        return (tmp_path / "new").read_bytes()

    requests: dict[str, Callable[[], object]] = {
        "read": lambda: fragile.read_file(str(file)),
        "write": write_and_read,
        "run": lambda: fragile.run(["cat", str(file)], timeout_s=30, may_repeat=True).stdout,
        "program": lambda: fragile.run_program(program, [], timeout_s=30, may_repeat=True).stdout,
    }
    with ask_and_cut_off(fragile, server, requests[verb]) as answer:
        assert answer.result(30) == b"content"


def test_any_other_request_that_is_cut_off_is_not(fragile: SSHSession, server: SSHServer, tmp_path: Path) -> None:
    command = ["sh", "-c", f"echo once >> {tmp_path}/ran"]
    with (
        ask_and_cut_off(fragile, server, lambda: fragile.run(command, timeout_s=30)) as answer,
        pytest.raises(RequestCutError),
    ):
        answer.result(30)
    assert fragile.run(["echo", "next"], timeout_s=30).stdout == b"next\n"
    assert not (tmp_path / "ran").exists()


@contextmanager
def ask_and_cut_off(
    session: SSHSession, server: SSHServer, request: Callable[[], object]
) -> Iterator["Future[object]"]:
    """Ask over a connection that was used before and carries nothing any more, and then breaks."""
    session.run(["true"], timeout_s=30)
    is_asked, send = threading.Event(), Agent.send

    def send_and_tell(agent: Agent, *parts: bytes | memoryview) -> bool:
        is_taken = send(agent, *parts)
        is_asked.set()
        return is_taken

    server.signal_sessions(signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(Agent, "send", send_and_tell)
        answer = pool.submit(request)
        assert is_asked.wait(60)
        server.signal_sessions(signal.SIGKILL)
        yield answer


def test_a_command_whose_connection_breaks_is_unknown_and_killed_and_the_next_one_works(
    fragile: SSHSession, server: SSHServer, tmp_path: Path
) -> None:
    cut = threading.Thread(
        target=lambda: (read_pid(tmp_path / "pid"), server.signal_sessions(signal.SIGKILL)), daemon=True
    )
    cut.start()
    with pytest.raises(NodeUnreachableError, match="the connection broke"):
        fragile.run(["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60"], timeout_s=60)
    wait_until(lambda: not is_alive(read_pid(tmp_path / "pid")))
    assert fragile.run(["echo", "again"], timeout_s=30).stdout == b"again\n"


def test_a_log_is_whole_although_its_connection_is_cut_again_and_again(
    fragile: SSHSession, server: SSHServer, tmp_path: Path
) -> None:
    run_dir = tmp_path / "sft-0123"
    line = "x" * 200
    start_or_attach(fragile, shell_spec(run_dir, f"for i in $(seq 300); do echo $i {line}; sleep 0.01; done; exit 5"))
    log = b""
    num_cuts = 0
    ignored: list[object] = []

    def cut_now_and_then(piece: bytes) -> None:
        nonlocal log, num_cuts
        log += piece
        if len(log) > (num_cuts + 1) * 10_000 and num_cuts < 4:
            num_cuts += 1
            server.signal_sessions(signal.SIGKILL)

    status = follow_job(
        fragile, str(run_dir), on_metrics=ignored.append, on_event=ignored.append, on_log=cut_now_and_then
    )
    assert num_cuts == 4
    assert log.decode() == "".join(f"{i} {line}\n" for i in range(1, 301))
    assert (status.state, status.attempt) == (JobState.EXITED, 1) and status.exit is not None and status.exit.code == 5


def test_a_node_that_does_not_answer_is_not_the_end_of_its_job(
    fragile: SSHSession, server: SSHServer, tmp_path: Path
) -> None:
    run_dir = tmp_path / "sft-0123"
    started = start_or_attach(fragile, shell_spec(run_dir, "echo up; sleep 60"))
    server.signal_sessions(signal.SIGKILL)
    server.stop()
    with pytest.raises(NodeUnreachableError, match="Connection refused"):
        job_status(fragile, str(run_dir))
    server.start()
    again = start_or_attach(fragile, shell_spec(run_dir, "echo up; sleep 60"))
    assert (again.state, again.attached, again.pid) == (JobState.RUNNING, True, started.pid)
    assert cancel_job(fragile, str(run_dir), grace_s=0.2).state is JobState.EXITED


@pytest.mark.parametrize("client", ["openssh", "ours"])
def test_new_keys_in_the_middle_of_a_transfer_lose_nothing(
    tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts.infra.ssh.openssh.is_installed", lambda: client == "openssh")
    content = os.urandom(40 << 20)
    with (
        running_server(tmp_path / "sshd", more_config="RekeyLimit 8M\nLogLevel DEBUG") as server,
        SSHSession(server.access, python=sys.executable, programs_dir=str(tmp_path)) as session,
    ):
        started = time.monotonic()
        session.write_chunks(str(tmp_path), chunks_of(content, name="pushed"))
        with session.pipe(["cat", str(tmp_path / "pushed")]) as chunks:
            pulled = b"".join(chunks)
        assert time.monotonic() - started < 60
        assert (server.folder / "log").read_text().count("rekeying") > 4
    assert hashlib.sha256(pulled).digest() == hashlib.sha256(content).digest()


@pytest.mark.parametrize("reads", ["read -r line", "read -r a; read -r b", "head -c 3 > /dev/null"])
def test_a_bashrc_that_reads_what_is_meant_for_the_command_is_named(tmp_path: Path, reads: str) -> None:
    with session_of_bashrc(tmp_path, reads) as session, pytest.raises(PermanentInfraError) as raised:
        session.run(["true"], timeout_s=30)
    assert "a file that its shell runs at each login, such as .bashrc, reads the input of our command" in str(
        raised.value
    )


def test_a_bashrc_that_reads_all_input_is_suspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.infra.ssh.ssh_session.ANSWER_MARGIN_S", 1.0)
    with session_of_bashrc(tmp_path, "cat > /dev/null") as session, pytest.raises(NodeUnreachableError) as raised:
        session.run(["true"], timeout_s=4)
    assert "a .bashrc that reads all of standard input" in str(raised.value)


def test_a_bashrc_that_reads_nothing_of_a_session_is_no_obstacle(tmp_path: Path) -> None:
    with session_of_bashrc(tmp_path, "[[ $- == *i* ]] || return\nread -r line") as session:
        assert session.run(["echo", "here"], timeout_s=30).stdout == b"here\n"


@contextmanager
def session_of_bashrc(folder: Path, lines: str) -> Iterator[SSHSession]:
    """A session of a user whose shell runs these lines at each login."""
    (folder / ".bashrc").write_text(f"{lines}\n")
    bash = f"""ForceCommand HOME={folder} SHLVL=0 exec bash -c "source {folder}/.bashrc; $SSH_ORIGINAL_COMMAND\""""
    with (
        running_server(folder / "sshd", more_config=bash) as server,
        SSHSession(server.access, python=sys.executable, programs_dir=str(folder / "programs")) as session,
    ):
        yield session


@pytest.mark.matrix
def test_a_server_that_closes_silent_channels_does_not_end_what_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a job that says nothing for long, and of a command; the server's limit here is two beats of the agent."""
    monkeypatch.setattr("rollouts.infra.jobs.MAX_BROKEN_STREAMS", 1)
    with (
        running_server(tmp_path / "sshd", more_config="ChannelTimeout *=11s") as server,
        SSHSession(server.access, python=sys.executable, programs_dir=str(tmp_path / "programs")) as session,
    ):
        started = time.monotonic()
        start_or_attach(session, shell_spec(tmp_path / "job", "sleep 25"))
        status = follow_job(session, str(tmp_path / "job"), on_metrics=lambda _: None, on_event=lambda _: None)
        assert status.state is JobState.EXITED
        assert session.run(["sh", "-c", "sleep 15; echo end"], timeout_s=60).stdout == b"end\n"
        time.sleep(13)  # agents that wait are closed, and noticed
        assert session.run(["echo", "again"], timeout_s=60).stdout == b"again\n"
        assert time.monotonic() - started > 50
