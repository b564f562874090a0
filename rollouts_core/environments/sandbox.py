"""Run an untrusted Python program in a sandbox, without network and with limits on every resource.

The program runs in separate Linux namespaces, without privileges or network, and sees no other processes. The program
can read the folders of the interpreter, and write to a small temporary folder that is deleted at the end. Memory, CPU
time, processes, open files and output are limited. System calls are refused if they could exceed these limits or use
rarely used parts of the kernel. At the time limit, all processes of the program are killed.

The sandbox protects the machine from the programs that a policy tries, but not from attacks on the Linux kernel itself.
The child process that isolates itself: `sandbox_child.py`.
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
"""System folders that programs in the sandbox can read. /usr as a whole could contain private files, as in /usr/src."""
PREFIX_PARTS = ("bin", "lib", "lib64", "pyvenv.cfg")
"""Parts of a Python interpreter's folder that programs in the sandbox can read."""
FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL)
"""Error numbers that show that the system does not permit or support namespaces."""
BEGUN = b"+"
"""Mark that the child process writes before it starts the program. Failures after the mark belong to the program."""
BEGIN_TIMEOUT_S = 120.0
"""Time limit for starting the sandbox, seconds. Normally the start takes a fraction of a second."""
DEFAULT_SOCKET_KB = 208
"""Assumed limit of kernel memory per socket, kB, if the kernel does not report its limit."""
END_TIMEOUT_S = 5.0
"""Time limit for ending all processes of a program, seconds. After this time, the process that watches the program is
killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of the resources of a program in the sandbox."""

    wall_s: float = 10.0
    """Time limit in seconds, from the program's first instruction to its end."""
    cpu_s: int = 5
    memory_mb: int = 512
    """Limit in MB of the address space of each process, and of the memory of all processes together."""
    file_mb: int = 16
    """Limit of the files in the temporary folder, MB."""
    num_processes: int = 16
    output_bytes: int = 1 << 20
    """Limit of stdout and of stderr, bytes. A program that writes more is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The result of a program that ran in the sandbox."""

    outcome: Outcome
    """OK for exit code 0, TIMEOUT if the time limit was reached, TOOL_ERROR otherwise."""
    exit_code: int
    """Exit code of the program. 128 plus the signal's number if a signal ended the program; negative if the program
    exceeded its time or output limit."""
    stdout: str
    stderr: str


async def run_in_sandbox(code: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """Run a Python program in a sandbox. The time limit of the program begins when the program starts, not when the
    sandbox starts.

    Raises:
        EnvironmentUnavailableError: the machine could not start the sandbox, or killed the program.
        RewardError: the machine does not permit a sandbox, or a program in the sandbox could read private files.
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
        # A program may end before it has read all of its input.
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
            f"this machine killed a program (signal {-exit_code}) that was within its limits: look for the "
            "out-of-memory killer in the machine's log, and use more memory or fewer programs at a time"
        )
    # At the limit of CPU time the exit code is 128 + SIGKILL. Too much memory gives the exit code 1.
    is_late = time.cancelled_caught or exit_code == 128 + signal.SIGKILL
    failed = Outcome.TIMEOUT if is_late else Outcome.TOOL_ERROR
    return SandboxResult(
        outcome=Outcome.OK if exit_code == 0 and not is_too_much else failed,
        exit_code=exit_code,
        stdout=streams["stdout"][: allowed.output_bytes].decode(errors="replace"),
        stderr=streams["stderr"][: allowed.output_bytes].decode(errors="replace"),
    )


async def _start(limits: SandboxLimits) -> tuple[Process, int]:
    """Start the process that watches a program. Also returns a file descriptor, from which errors of the start can be
    read."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise RewardError(
            "this process ignores SIGCHLD (inherited from its parent), so it would not notice the end of a program: "
            "call signal.signal(signal.SIGCHLD, signal.SIG_DFL) first"
        )
    read_status, write_status = os.pipe()
    os.set_blocking(read_status, False)
    folders = visible_folders()
    if (seen := find_seen(folders)) is not None:
        raise RewardError(
            f"{seen[0]} is in {seen[1]}, where programs in the sandbox can read it: move it to a folder without "
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
    """End the process that watches a program, and wait for its end; returns its exit code."""
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
    """Raise an error if the program was not started."""
    problem = status.removeprefix(BEGUN).decode(errors="replace")
    if problem:
        # Missing permissions are permanent. Other causes, such as a lack of memory, may be temporary.
        is_forbidden = any(os.strerror(number) in problem for number in FORBIDDEN)
        raise (RewardError if is_forbidden else EnvironmentUnavailableError)(
            f"this machine cannot start a sandbox ({problem}): run where Linux namespaces are permitted, "
            "as root or with user namespaces"
        )
    if status:
        return
    if is_late:
        raise EnvironmentUnavailableError(
            f"the sandbox did not start within {BEGIN_TIMEOUT_S:g} s: this machine is overloaded"
        )
    said = stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise EnvironmentUnavailableError(f"the sandbox ended before it started the program: {said or 'without a message'}")


@cache
def visible_folders() -> tuple[str, ...]:
    """The folders and files that a program in the sandbox can read: those that Python needs."""
    prefixes = sorted({sys.prefix, sys.base_prefix, sys.exec_prefix})
    own = [f"{prefix}/{part}" for prefix in prefixes for part in PREFIX_PARTS]
    chosen: list[str] = []
    for path in map(Path, (*SYSTEM_FOLDERS, *own, *site.getsitepackages(), *_follow_links(Path(sys.executable)))):
        if path.exists() and not any(path.is_relative_to(other) for other in chosen):
            chosen.append(str(path))
    return tuple(chosen)


def _follow_links(path: Path) -> Iterator[str]:
    """Yield a path, and all paths to which its symbolic links lead."""
    while path.is_symlink():
        yield str(path)
        path = path.parent / path.readlink()
    yield str(path)


@cache
def _describe_machine() -> dict[str, object]:
    """The settings of the sandbox that depend on the machine."""
    try:
        socket_kb = int(Path("/proc/sys/net/core/wmem_default").read_text(encoding="utf-8")) >> 10
    except (OSError, ValueError):
        socket_kb = DEFAULT_SOCKET_KB
    machine = os.uname().machine
    return {"filter": build_filter(machine).hex(), "group_parent": find_group_parent(), "socket_kb": socket_kb}


def _find_too_large(code: str, stdin: str, limits: SandboxLimits) -> SandboxResult | None:
    """The failed result of a program that does not fit, with its input, into the temporary folder; None if it fits."""
    num_bytes = len(code.encode(errors="replace")) + len(stdin.encode(errors="replace"))
    if num_bytes <= limits.file_mb << 20:
        return None
    said = f"MemoryError: the program and its input have {num_bytes:,} bytes, more than {limits.file_mb} MB\n"
    return SandboxResult(outcome=Outcome.TOOL_ERROR, exit_code=1, stdout="", stderr=said)


def _end(process: Process) -> None:
    """Make the watching process kill the program, including processes that left the program's process group."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
