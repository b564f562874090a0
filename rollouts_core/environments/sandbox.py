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
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
from anyio.abc import Process

from rollouts_core.environments.protocol import Outcome
from rollouts_core.errors import EnvironmentUnavailableError

CHILD = Path(__file__).with_name("sandbox_child.py")
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
END_TIMEOUT_S = 5.0
"""How long the end of all processes of a program may take before the process that watches them is killed as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What a program may use."""

    wall_s: float = 10.0
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
    """128 and the signal's number where one ended it; negative where the sandbox was ended."""
    stdout: str
    stderr: str


async def run_in_sandbox(code: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """What a Python program does.

    Raises:
        EnvironmentUnavailableError: the machine could not shut a program in.
    """
    allowed = limits or SandboxLimits()
    read_status, write_status = os.pipe()
    settings = {**asdict(allowed), "folders": visible_folders(), "executable": sys.executable}
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
    program = json.dumps({"code": code, "stdin": stdin}).encode()
    streams = {"stdout": b"", "stderr": b""}
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

    try:
        with anyio.move_on_after(allowed.wall_s) as time:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, "stdout")
                tasks.start_soon(read, "stderr")
                tasks.start_soon(write)
            await process.wait()
    finally:
        _end(process)
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(END_TIMEOUT_S) as ending:
                await process.wait()
            if ending.cancelled_caught:
                _kill_group(process.pid)
            exit_code = await process.wait()
            await process.aclose()
        with os.fdopen(read_status, "rb") as status:
            problem = status.read().decode(errors="replace")
    if problem and not time.cancelled_caught:
        raise EnvironmentUnavailableError(
            f"this machine cannot shut a program in ({problem}): run where Linux namespaces are allowed, "
            "as root or with user namespaces"
        )
    # Nothing but the limit of its processor time kills the first process of a namespace from within.
    is_late = time.cancelled_caught or exit_code == 128 + signal.SIGKILL
    failed = Outcome.TIMEOUT if is_late else Outcome.TOOL_ERROR
    return SandboxResult(
        outcome=Outcome.OK if exit_code == 0 and not is_too_much else failed,
        exit_code=exit_code,
        stdout=streams["stdout"][: allowed.output_bytes].decode(errors="replace"),
        stderr=streams["stderr"][: allowed.output_bytes].decode(errors="replace"),
    )


def visible_folders() -> list[str]:
    """What of the machine's file system a program sees, read-only: what Python needs to run."""
    own = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)}
    return [path for path in (*SYSTEM_FOLDERS, *sorted(own)) if Path(path).exists()]


def _end(process: Process) -> None:
    """Have the process that watches the program kill it: a program may leave its process group, not its namespace."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
