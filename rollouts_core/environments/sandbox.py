"""Run a program that nobody has read: in a process of its own, without network, with little of everything.

Not here: what the program is and what its output means (code.py), how it is shut in (sandbox_child.py).

On Linux the program runs in namespaces of its own. It sees no network, no other process, a read-only file system of
the interpreter's folders alone, and a small temporary folder that vanishes with it. It has no privileges, limits on
memory, processor time, processes, open files and output, and none of the system calls that reach memory beyond those
limits or the kernel's rarely used parts. When its time is over, all its processes are gone.

This keeps a policy that explores from harming the machine. It is no defence against an attack on the kernel itself.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import site
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import anyio
from anyio.abc import Process

from rollouts_core.environments.memory_groups import find_group_parent
from rollouts_core.environments.protocol import Outcome
from rollouts_core.environments.system_calls import build_filter
from rollouts_core.errors import EnvironmentUnavailableError, RewardError
from rollouts_core.system.private_files import find_seen

CHILD = Path(__file__).with_name("sandbox_child.py")
SYSTEM_FOLDERS = (
    *("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/libexec"),
    *("/usr/local/lib", "/usr/local/lib64", "/usr/share/zoneinfo"),
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache"),
)
"""Programs, libraries and time zones; not all of /usr, where projects may lie, as in /usr/src."""
PREFIX_PARTS = ("bin", "lib", "lib64", "pyvenv.cfg")
"""Parts of an interpreter's folder that programs need."""
FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL)
"""What a system answers that allows no namespaces, or knows none of a kind."""
BEGUN = b"+"
"""What the process that shuts a program in writes before anything else could go wrong than the program."""
BEGIN_TIMEOUT_S = 120.0
"""How long the machine may take to shut a program in, which is a part of a second where it has a processor for it."""
DEFAULT_SOCKET_KB = 208
"""What the kernel keeps for a socket, if it does not say."""
END_TIMEOUT_S = 5.0
"""How long the end of all processes of a program may take before the process that watches them is killed as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What a program may use."""

    wall_s: float = 10.0
    """From its first instruction to its end."""
    cpu_s: int = 5
    memory_mb: int = 512
    """Address space of each process, and what all of them hold together."""
    file_mb: int = 16
    """The temporary folder."""
    num_processes: int = 16
    output_bytes: int = 1 << 20
    """Of each stream; a program that writes more is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """How a program ended."""

    outcome: Outcome
    """OK for exit code 0, TIMEOUT, or TOOL_ERROR for any other end."""
    exit_code: int
    """128 and the signal's number where one ended it; negative where it was stopped for its time or its output."""
    stdout: str
    stderr: str


async def run_in_sandbox(code: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """What a Python program does. Its time begins when it does: how long the machine takes to shut it in is apart.

    Raises:
        EnvironmentUnavailableError: the machine could not shut a program in, or ended it.
        RewardError: the machine allows no program to be shut in, or the program would see private files.
    """
    allowed = limits or SandboxLimits()
    if (problem := _find_too_large(code, stdin, allowed)) is not None:
        return problem
    process, read_status = await _start(allowed)
    program = json.dumps({"code": code, "stdin": stdin}).encode()
    streams = {"stdout": b"", "stderr": b""}
    status = b""
    is_too_much = False

    async def read(name: str) -> None:
        nonlocal is_too_much
        stream = process.stdout if name == "stdout" else process.stderr
        assert stream is not None
        async for chunk in stream:
            streams[name] += chunk
            if len(streams[name]) > allowed.output_bytes:
                is_too_much = True
                _end(process)
                return

    async def write() -> None:
        assert process.stdin is not None
        # It may end before it has read everything; its exit code says why.
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            await process.stdin.send(program)
            await process.stdin.aclose()

    async def wait_for_begin() -> None:
        nonlocal status
        while chunk := await _read_when_ready(read_status):
            status += chunk
        time.deadline = anyio.current_time() + allowed.wall_s

    try:
        with anyio.move_on_after(BEGIN_TIMEOUT_S) as time:
            async with anyio.create_task_group() as tasks:
                for each in (wait_for_begin, partial(read, "stdout"), partial(read, "stderr"), write):
                    tasks.start_soon(each)
            await process.wait()
    finally:
        os.close(read_status)
        exit_code = await _wait_until_gone(process)
    _check_machine(status, is_late=time.cancelled_caught, stderr=streams["stderr"])
    was_stopped = time.cancelled_caught or is_too_much
    if exit_code < 0 and not was_stopped:
        raise EnvironmentUnavailableError(
            f"a program was killed by this machine (signal {-exit_code}) and not by its limits: look for the "
            "out-of-memory killer in the machine's log, and give it more memory or fewer programs at a time"
        )
    # Nothing else kills the first process of a namespace from within; for its memory it ends with an exit code.
    is_late = time.cancelled_caught or exit_code == 128 + signal.SIGKILL
    failed = Outcome.TIMEOUT if is_late else Outcome.TOOL_ERROR
    return SandboxResult(
        outcome=Outcome.OK if exit_code == 0 and not is_too_much else failed,
        exit_code=exit_code,
        stdout=streams["stdout"][: allowed.output_bytes].decode(errors="replace"),
        stderr=streams["stderr"][: allowed.output_bytes].decode(errors="replace"),
    )


async def _start(limits: SandboxLimits) -> tuple[Process, int]:
    """The process that watches a program, and where problems are read: it ends when the program begins."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise RewardError(
            "this process ignores SIGCHLD, as whatever started it did, so it is not told how a program ended: call "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL) first"
        )
    read_status, write_status = os.pipe()
    os.set_blocking(read_status, False)
    folders = visible_folders()
    if (seen := find_seen(folders)) is not None:
        raise RewardError(
            f"{seen[0]} lies in {seen[1]}, where programs in the sandbox can read it: move it out of the folders of "
            "programs and libraries"
        )
    settings = {**asdict(limits), "folders": folders, "executable": sys.executable, **_describe_machine()}
    try:
        process = await anyio.open_process(
            [sys.executable, "-I", "-S", str(CHILD), json.dumps(settings), str(write_status), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(write_status,),
            start_new_session=True,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "OMP_NUM_THREADS": "1"},
        )
    except OSError as error:
        os.close(read_status)
        raise EnvironmentUnavailableError(f"no sandbox could be started: {error}") from error
    finally:
        os.close(write_status)
    return process, read_status


async def _read_when_ready(file: int) -> bytes:
    await anyio.wait_readable(file)
    return os.read(file, 1 << 16)


async def _wait_until_gone(process: Process) -> int:
    """The exit code of the process that watches a program, after it has ended it."""
    _end(process)
    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(END_TIMEOUT_S) as ending:
            await process.wait()
        if ending.cancelled_caught:
            _kill_group(process.pid)
        exit_code = await process.wait()
        await process.aclose()
    return exit_code


def _check_machine(status: bytes, *, is_late: bool, stderr: bytes) -> None:
    """Raise where no program was begun."""
    problem = status.removeprefix(BEGUN).decode(errors="replace")
    if problem:
        # What is not allowed now is not allowed later; a limit that is reached, or memory, may be free again.
        is_forbidden = any(os.strerror(number) in problem for number in FORBIDDEN)
        raise (RewardError if is_forbidden else EnvironmentUnavailableError)(
            f"this machine cannot shut a program in ({problem}): run where Linux namespaces are allowed, "
            "as root or with user namespaces"
        )
    if status:
        return
    if is_late:
        raise EnvironmentUnavailableError(
            f"no program was begun within {BEGIN_TIMEOUT_S:g} s: this machine has too much else to do"
        )
    said = stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise EnvironmentUnavailableError(f"what shuts a program in ended before it had begun: {said or 'it said nothing'}")


@cache
def visible_folders() -> tuple[str, ...]:
    """The parts of the machine's file system that a program sees, read-only: what Python needs to run."""
    prefixes = sorted({sys.prefix, sys.base_prefix, sys.exec_prefix})
    own = [f"{prefix}/{part}" for prefix in prefixes for part in PREFIX_PARTS]
    chosen: list[str] = []
    for path in map(Path, (*SYSTEM_FOLDERS, *own, *site.getsitepackages(), *_follow_links(Path(sys.executable)))):
        if path.exists() and not any(path.is_relative_to(other) for other in chosen):
            chosen.append(str(path))
    return tuple(chosen)


def _follow_links(path: Path) -> Iterator[str]:
    """A file and each file that its links lead to."""
    while path.is_symlink():
        yield str(path)
        path = path.parent / path.readlink()
    yield str(path)


@cache
def _describe_machine() -> dict[str, object]:
    """What each program is shut in by, as far as this machine decides it."""
    try:
        socket_kb = int(Path("/proc/sys/net/core/wmem_default").read_text(encoding="utf-8")) >> 10
    except (OSError, ValueError):
        socket_kb = DEFAULT_SOCKET_KB
    machine = os.uname().machine
    return {"filter": build_filter(machine).hex(), "group_parent": find_group_parent(), "socket_kb": socket_kb}


def _find_too_large(code: str, stdin: str, limits: SandboxLimits) -> SandboxResult | None:
    """The end of a program that does not fit into its temporary folder with its input; None if it fits."""
    num_bytes = len(code.encode(errors="replace")) + len(stdin.encode(errors="replace"))
    if num_bytes <= limits.file_mb << 20:
        return None
    said = f"MemoryError: the program and its input have {num_bytes:,} bytes, more than {limits.file_mb} MB\n"
    return SandboxResult(outcome=Outcome.TOOL_ERROR, exit_code=1, stdout="", stderr=said)


def _end(process: Process) -> None:
    """Have the process that watches the program kill it: a program may leave its process group, not its namespace."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
