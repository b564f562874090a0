"""Programs that try to get out, or to take everything: each attempt ends inside, and leaves nothing behind.

Without it a policy that explores could read the machine's files, call the network, or fill memory and disk.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.environments import sandbox
from rollouts_core.environments.protocol import Outcome
from rollouts_core.environments.sandbox import SandboxLimits, SandboxResult, run_in_sandbox
from rollouts_core.errors import EnvironmentUnavailableError, RewardError
from tests.kit.excuses import ExcusedSkip
from tests.kit.mounts import mounted_tmpfs
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[3]
SOMEBODY = 12345
"""A user whom nobody is."""
AS_SOMEBODY = ("setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups", "env")
"""`env`, because what setpriv itself starts is still looked up with the rights of root."""
MOUNT_VARIABLE = "ROLLOUTS_TEST_MOUNT"
"""Where the tests as a user find a mount that root made for them."""
FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
USER_CHANGE = ("check(libc.unshare(spaces | CLONE_NEWUSER)", "check(libc.unshare(-1)")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


def run(code: str, *, stdin: str = "", **limits: Any) -> SandboxResult:
    return asyncio.run(run_in_sandbox(code, stdin=stdin, limits=SandboxLimits(**limits)))


def change_child(monkeypatch: pytest.MonkeyPatch, folder: Path, *changes: tuple[str, str]) -> None:
    """Shut programs in by a changed script."""
    text = sandbox.CHILD.read_text()
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "child.py").write_text(text)
    monkeypatch.setattr(sandbox, "CHILD", folder / "child.py")


def test_a_program_reads_its_input_and_writes_its_output() -> None:
    result = run("import json\nprint(json.dumps(int(input()) + 1))", stdin="41\n")
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.OK, 0, "42\n")


def test_a_program_that_raises_is_no_failure_of_the_machine() -> None:
    result = run("raise ValueError('mine')")
    assert (result.outcome, result.exit_code) == (Outcome.TOOL_ERROR, 1)
    assert "ValueError: mine" in result.stderr


def test_there_is_no_network_not_even_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)")
        assert result.exit_code == 1
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_only_sockets_that_end_at_the_walls_of_its_network_can_be_made() -> None:
    code = (
        "import socket\n"
        "for family in range(46):\n"
        "    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):\n"
        "        try:\n"
        "            socket.socket(family, kind)\n"
        "        except OSError:\n"
        "            continue\n"
        "        print(socket.AddressFamily(family).name)\n"
    )
    assert set(run(code).stdout.split()) == {"AF_UNIX", "AF_INET", "AF_INET6"}


def test_the_machines_files_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    for path in (secret, Path("/etc/passwd"), Path(__file__), Path("/proc/1/root") / str(secret)[1:]):
        result = run(f"print(open({str(path)!r}).read())")
        assert (result.outcome, result.stdout) == (Outcome.TOOL_ERROR, ""), path
    assert not {"home", "var", "sys", "boot"} & set(run("import os\nprint(*os.listdir('/'))").stdout.split())


@pytest.mark.parametrize("folder", ["/", "/usr", sys.prefix, sys.base_prefix, "/dev"])
def test_nothing_can_be_written_but_the_temporary_folder(folder: str) -> None:
    result = run(f"open({folder!r} + '/left_behind', 'w')")
    assert result.outcome is Outcome.TOOL_ERROR
    assert not Path(folder, "left_behind").exists()


def test_the_temporary_folder_is_its_own_and_vanishes() -> None:
    assert run("open('/tmp/left_behind', 'w').write('x')").outcome is Outcome.OK
    assert not Path("/tmp/left_behind").exists()
    interpreter = {Path(prefix).parts[2] for prefix in (sys.prefix, sys.base_prefix) if prefix.startswith("/tmp/")}
    found = run("import os\nprint(*os.listdir('/tmp'))").stdout.split()
    assert sorted(set(found) - interpreter) == ["main.py", "stdin"]


def test_an_interpreter_in_the_temporary_folder_is_seen_and_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module.py").write_text("x = 7")
    tmp_path.chmod(0o755)
    (tmp_path / "module.py").chmod(0o644)
    folders = [*sandbox.visible_folders(), str(tmp_path)]
    monkeypatch.setattr(sandbox, "visible_folders", lambda: folders)
    assert run(f"print(open('{tmp_path}/module.py').read())").stdout == "x = 7\n"
    assert run(f"open('{tmp_path}/module.py', 'w')").outcome is Outcome.TOOL_ERROR
    assert (tmp_path / "module.py").read_text() == "x = 7"


OLD_KERNEL = ("SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442", "SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 9999")


@contextmanager
def mount_below(folder: Path) -> Iterator[Path]:
    """A file system below a folder, in which everybody may write."""
    if given := os.environ.get(MOUNT_VARIABLE):  # made by who may, for the test as a user who may not
        yield Path(given)
        return
    place = folder / "the visible" / "the mount"
    folder.chmod(0o755)
    with mounted_tmpfs(place, "mode=777", "nosuid", "nodev", "noexec", "noatime"):
        yield place


@pytest.mark.parametrize("changes", [[], [OLD_KERNEL]], ids=["mount_setattr", "before Linux 5.12"])
def test_a_mount_below_a_visible_folder_cannot_be_written_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]]
) -> None:
    change_child(monkeypatch, tmp_path, *changes)
    with mount_below(tmp_path) as below:
        (below / "given").write_text("x = 7")
        folders = [*sandbox.visible_folders(), str(below.parent)]
        monkeypatch.setattr(sandbox, "visible_folders", lambda: folders)
        assert run(f"print(open({str(below / 'given')!r}).read())").stdout == "x = 7\n"
        assert "Read-only file system" in run(f"open({str(below / 'left_behind')!r}, 'w')").stderr
        assert [path.name for path in below.iterdir()] == ["given"]


def test_links_lead_nowhere_outside() -> None:
    code = (
        "import os\n"
        "targets = ['/etc/passwd', '/proc/1/root/etc/passwd', '../' * 20 + 'etc/passwd', '/home']\n"
        "for number, target in enumerate(targets):\n"
        "    os.symlink(target, f'/tmp/{number}')\n"
        "    assert not os.path.exists(f'/tmp/{number}'), target\n"
        "print('nowhere')\n"
    )
    result = run(code)
    assert result.stdout == "nowhere\n", result.stderr


def test_nothing_of_the_starting_process_is_open_but_the_three_streams() -> None:
    with Path(__file__).open() as held:
        os.set_inheritable(held.fileno(), True)
        result = run("import os\nprint(*sorted(os.listdir('/proc/self/fd')), os.readlink('/proc/self/fd/0'))")
    assert result.stdout == "0 1 2 3 /tmp/stdin\n"  # 3 reads the folder


def test_other_processes_are_neither_seen_nor_reached() -> None:
    seen = run("import os\nprint(*[name for name in os.listdir('/proc') if name.isdigit()])")
    assert seen.stdout.split() == ["1"]
    assert run(f"import os\nos.kill({os.getpid()}, 9)").outcome is Outcome.TOOL_ERROR


def test_there_are_no_privileges_and_no_way_to_them() -> None:
    code = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "assert os.getuid() != 0\n"
        "assert 'CapEff:\\t0000000000000000' in open('/proc/self/status').read()\n"
        "assert libc.mount(b'none', b'/usr', b'', 4096 | 32, b'') == -1\n"
        "assert libc.setuid(0) == -1\n"
        "assert libc.unshare(0x20000) == -1\n"
        "print('shut in')\n"
    )
    result = run(code)
    assert result.stdout == "shut in\n", result.stderr


def test_secrets_of_the_environment_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    assert "s3cret" not in run("import os\nprint(dict(os.environ), open('/proc/self/environ').read())").stdout


def test_a_signal_to_everybody_reaches_nobody_outside() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time\ntime.sleep(60)"]) as bystander:
        run("import os\nassert os.getppid() == 0\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)")
        assert bystander.poll() is None
        bystander.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "limits"),
    [
        ("while True: pass", {"cpu_s": 1}),
        ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass", {}),
        (FORK_BOMB, {"wall_s": 1.0}),
        ("import time\ntime.sleep(60)", {"wall_s": 0.5}),
        ("import os, time\nos.setsid() if os.fork() == 0 else 0\ntime.sleep(60)", {"wall_s": 0.5}),
        ("import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(60)", {"wall_s": 0.5}),
    ],
)
def test_a_program_that_does_not_end_is_ended_with_all_its_processes(
    mark: str, code: str, limits: dict[str, Any]
) -> None:
    began = time.monotonic()
    assert run(code, **limits).outcome is Outcome.TIMEOUT
    assert time.monotonic() - began < 15
    wait_until_none_is_left(mark)


ESCAPE = (  # leaves its group and session, and forgets whose end was to be its own
    "import ctypes, os, time\nif os.getsid(0) != os.getpid(): os.setsid()\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (ESCAPE + "time.sleep(60)", Outcome.TIMEOUT),
        (ESCAPE + "os.fork()\nos.fork()\ntime.sleep(60)", Outcome.TIMEOUT),
        (ESCAPE + "os.kill(0, 9)\ntime.sleep(60)", Outcome.TIMEOUT),
        (ESCAPE + "print('x' * (5 << 20), flush=True)\ntime.sleep(60)", Outcome.TOOL_ERROR),
    ],
)
def test_a_program_that_leaves_its_session_is_ended_all_the_same(mark: str, code: str, outcome: Outcome) -> None:
    assert run(code, wall_s=2.0).outcome is outcome
    wait_until_none_is_left(mark)


@pytest.mark.slow
@pytest.mark.parametrize("escape", ["import time\n", ESCAPE])
def test_a_program_ends_with_the_process_that_started_it(mark: str, escape: str) -> None:
    # Its name says when it has done what it can to escape.
    code = escape + "open('/proc/self/comm', 'w').write('escaped')\ntime.sleep(60)"
    script = (
        "import asyncio, pathlib\n"
        "from rollouts_core.environments import sandbox\n"
        f"sandbox.CHILD = pathlib.Path({str(sandbox.CHILD)!r})\n"
        f"asyncio.run(sandbox.run_in_sandbox({code!r}, limits=sandbox.SandboxLimits(wall_s=60)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as trainer:
        try:
            wait_until(lambda: "escaped" in names_of_marked(mark), what="a program that has escaped")
        finally:
            trainer.kill()
    wait_until_none_is_left(mark)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A word in the command lines of this test's programs, and of all that they fork, and in no others."""
    word = f"{tmp_path}/marked"
    change_child(monkeypatch, tmp_path, ('"/tmp/main.py"]', f'"/tmp/main.py", {word!r}]'))
    assert run("import sys\nprint(sys.argv[1])").stdout == f"{word}\n"
    return word


def names_of_marked(mark: str) -> list[str]:
    """What the processes are called that have the word in their command lines."""
    processes = [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(path)]
    return [_read(process / "comm").decode(errors="replace").strip() for process in processes]


def wait_until_none_is_left(mark: str) -> None:
    wait_until(lambda: not names_of_marked(mark), what="the end of all processes of a program", timeout_s=20)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process ended meanwhile
        return b""


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(2 << 30)",
        "open('/tmp/big', 'wb').write(bytes(64 << 20))",
        "for i in range(100):\n    open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))",
        "files = [open('/tmp/main.py') for _ in range(100)]",
        "import os, time\nfor _ in range(50):\n    if os.fork() == 0: time.sleep(5); os._exit(0)",
        "print('x' * (5 << 20))",
    ],
)
def test_a_program_that_takes_too_much_is_refused_it(code: str) -> None:
    result = run(code)
    assert result.outcome is Outcome.TOOL_ERROR
    assert len(result.stdout) <= SandboxLimits().output_bytes


@pytest.mark.slow
def test_programs_that_run_at_once_do_not_take_each_others_processes() -> None:
    code = (
        "import os, time\n"
        "children = [os.fork() for _ in range(2)]\n"  # four processes
        "time.sleep(3)\n"
        "print('done' if all(children) else '', end='')\n"
    )
    allowed = SandboxLimits(wall_s=60, num_processes=8)

    async def run_all() -> list[SandboxResult]:
        return await asyncio.gather(*[run_in_sandbox(code, limits=allowed) for _ in range(24)])

    results = asyncio.run(run_all())
    assert [(result.outcome, result.stdout, result.stderr) for result in results] == [(Outcome.OK, "done", "")] * 24


def test_a_program_has_as_many_processes_as_its_limit_says() -> None:
    code = (
        "import os, time\n"
        "for number in range(50):\n"
        "    try:\n"
        "        if os.fork() == 0: time.sleep(60)\n"
        "    except OSError:\n"
        "        print(number + 1)\n"
        "        break\n"
    )
    assert run(code, num_processes=7).stdout == "7\n"


@pytest.mark.parametrize("name", ["", r"b'\xff\nRssAnon: 0 kB'"], ids=["named as it is", "of a name that is no text"])
def test_processes_that_hold_too_much_together_are_ended(mark: str, name: str) -> None:
    code = (
        "import os, time\n"
        f"if name := {name or None}:\n"
        "    open('/proc/self/comm', 'wb').write(name)\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        held = bytearray(b'x' * (60 << 20))\n"
        "        time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    result = run(code, memory_mb=256)
    assert result.outcome is Outcome.TOOL_ERROR
    assert "all processes together used more than 256 MB" in result.stderr
    assert time.monotonic() - began < 8
    wait_until_none_is_left(mark)


@pytest.mark.parametrize(
    "code",
    [
        "os.memfd_create('x')",
        "if libc.shmget(0, 64 << 20, 0o1600) == -1: raise OSError(ctypes.get_errno(), 'shmget')",
        "if libc.ptrace(0, 0, 0, 0) == -1: raise OSError(ctypes.get_errno(), 'ptrace')",
        "if libc.syscall(425, 8, bytes(120)) == -1: raise OSError(ctypes.get_errno(), 'io_uring')",
    ],
)
def test_memory_that_no_limit_counts_and_rarely_used_calls_are_refused(code: str) -> None:
    result = run(f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n{code}")
    assert result.outcome is Outcome.TOOL_ERROR
    assert "PermissionError: [Errno 1]" in result.stderr


def test_a_machine_that_cannot_shut_a_program_in_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change_child(monkeypatch, tmp_path, ("check(libc.unshare(spaces)", "check(libc.unshare(-1)"), USER_CHANGE)
    # Nothing that passes: whoever waited for the end of an outage would pay a machine meanwhile.
    with pytest.raises(RewardError, match=r"cannot start a sandbox .*unshare.*user namespaces"):
        run("print('free')")


IGNORES_CHILDREN = """
import asyncio, signal
from rollouts_core.__main__ import main
from rollouts_core.environments.sandbox import run_in_sandbox

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
try:
    asyncio.run(run_in_sandbox("print(1)"))
except Exception as error:
    print(type(error).__name__, error)
assert main(["sft", "nowhere/job.json"]) == 2
print(asyncio.run(run_in_sandbox("print(1)")).outcome)
"""


def test_a_process_that_ignores_how_others_end_grades_no_program_and_a_job_does_not_ignore_it() -> None:
    """Inherited from whatever started the process. The exit code is lost: every program would have failed."""
    ended = subprocess.run(
        [sys.executable, "-c", IGNORES_CHILDREN], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    refused, outcome = ended.stdout.splitlines()
    assert refused.startswith("RewardError this process ignores SIGCHLD")
    assert outcome == "ok", ended.stderr


def test_a_limit_of_the_machine_that_is_lower_holds() -> None:
    code = "import asyncio; from rollouts_core.environments.sandbox import run_in_sandbox as run; "
    code += "print(asyncio.run(run('import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))')).stdout)"
    limited = ["bash", "-c", 'ulimit -n 48; exec "$0" -c "$1"', sys.executable, code]
    ended = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "(48, 48)", ended.stderr


@pytest.mark.parametrize("which", ["the process that watches the program", "the program"])
def test_a_program_that_the_machine_killed_is_not_graded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: str
) -> None:
    change_child(monkeypatch, tmp_path)  # its path tells these processes from all others

    async def run_and_kill() -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(run_in_sandbox("import time\ntime.sleep(60)"))
            while (pids := find_watcher_and_program(tmp_path / "child.py")) is None:
                await asyncio.sleep(0.01)
            os.kill(pids[which == "the program"], signal.SIGKILL)

    with pytest.RaisesGroup(pytest.RaisesExc(EnvironmentUnavailableError, match="this machine killed")):
        asyncio.run(run_and_kill())


def find_watcher_and_program(script: Path) -> tuple[int, int] | None:
    """The number of the process of a script, and that of the program it watches once it has begun."""
    texts = {int(path.parent.name): _read(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
    watchers = [pid for pid, text in texts.items() if str(script).encode() in text]
    begun = [pid for pid, text in texts.items() if b"/tmp/main.py" in text]
    parents = {pid: re.search(rb"^PPid:\s*(\d+)", _read(Path(f"/proc/{pid}/status")), re.M) for pid in begun}
    pairs = [(int(found[1]), pid) for pid, found in parents.items() if found and int(found[1]) in watchers]
    return pairs[0] if pairs else None


SLOW_START = "    build_root(settings"


@pytest.mark.slow
def test_how_long_the_machine_takes_to_shut_a_program_in_is_not_the_programs_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change_child(monkeypatch, tmp_path, (SLOW_START, f"    import time; time.sleep(6)\n{SLOW_START}"))
    assert run("print('in time')", wall_s=5).stdout == "in time\n"


def test_a_program_is_not_graded_where_what_shuts_it_in_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where the interpreter's files lie on a disk of the network that is away, or memory is short."""
    change_child(monkeypatch, tmp_path, ("import ctypes\n", "import ctypes_that_cannot_be_read\n"))
    with pytest.raises(EnvironmentUnavailableError, match="before it started the program: ModuleNotFoundError"):
        run("print(1)")


@pytest.mark.slow
def test_a_machine_too_busy_to_begin_a_program_does_not_grade_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change_child(monkeypatch, tmp_path, (SLOW_START, f"    import time; time.sleep(60)\n{SLOW_START}"))
    monkeypatch.setattr(sandbox, "BEGIN_TIMEOUT_S", 1.0)
    with pytest.raises(EnvironmentUnavailableError, match="the sandbox did not start within 1 s"):
        run("print('never')")


@pytest.mark.slow
@pytest.mark.other_user
def test_all_of_this_holds_for_a_user_without_rights(tmp_path: Path) -> None:
    if os.getuid() != 0:
        raise ExcusedSkip("the other tests of this file ran as a user without rights")
    if (python := find_python_for_others()) is None:
        raise ExcusedSkip(f"no other user may run a Python of this version and read {ROOT}")
    paths = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    with tempfile.TemporaryDirectory() as own, mount_below(Path(own)) as mount:
        os.chown(own, SOMEBODY, SOMEBODY)
        options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", f"--basetemp={own}/tests"]
        variables = {"PATH": "/usr/bin:/bin", "HOME": own, "PYTHONPATH": os.pathsep.join(paths)}
        ended = subprocess.run(
            [*AS_SOMEBODY, python, "-m", "pytest", *options, __file__],
            cwd=ROOT,
            env={**variables, "PYTHONDONTWRITEBYTECODE": "1", MOUNT_VARIABLE: str(mount)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "skipped" not in ended.stdout


def find_python_for_others() -> str | None:
    """An interpreter of this version that another user may run, and that finds pytest and this file then."""
    if not shutil.which("setpriv"):
        pytest.skip("there is no setpriv on this machine: install util-linux")
    candidates = [sys.executable, shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")]
    is_readable = f"import os; assert all(os.access(path, os.R_OK) for path in {[__file__, pytest.__file__]!r})"
    for python in filter(None, candidates):
        if subprocess.run([*AS_SOMEBODY, python, "-c", is_readable], capture_output=True, check=False).returncode == 0:
            return python
    return None
