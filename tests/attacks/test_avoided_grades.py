"""Programs that try to end in the machine's name: a failure of the machine is not graded, and drops the whole group.

Without these tests a policy could avoid each bad grade, and a run would wait for a machine that has no fault.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from rollouts_core.environments.code import CodeEnvironment
from rollouts_core.environments.protocol import Outcome
from rollouts_core.environments.sandbox import SandboxLimits, SandboxResult, run_in_sandbox
from rollouts_core.types import Sample, Status

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
WORK = """
import ctypes, os, resource, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
while time.process_time() < 1.2: pass
"""
FOREVER = "\nwhile True: pass"
ATTACKS = {
    "a lower limit of time": "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))" + FOREVER,
    "a lower limit by the newer call": "resource.prlimit(0, resource.RLIMIT_CPU, (1, 1))" + FOREVER,
    "a lower limit by the call itself": (
        "libc.syscall(160 if os.uname().machine == 'x86_64' else 164, 0, (ctypes.c_ulong * 2)(1, 1))" + FOREVER
    ),
    "a lower limit from a child": (
        "if os.fork() == 0:\n    resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))\n    os._exit(0)" + FOREVER
    ),
    "a limit whose address looks like none": (
        "place = libc.mmap; place.restype = ctypes.c_void_p\n"
        "place.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]\n"
        "start = place(1 << 32, 4096, 3, 0x32, -1, 0)\n"
        "assert start == 1 << 32\n"
        "(ctypes.c_ulong * 2).from_address(start)[:] = [1, 1]\n"
        "libc.prlimit64(0, 0, ctypes.c_void_p(start), None)" + FOREVER
    ),
    "no address space": "resource.setrlimit(resource.RLIMIT_AS, (1, 1))\nos.execv(sys.executable, ['x', '/nowhere'])",
    "a signal to itself": "os.kill(os.getpid(), 9)\nos.kill(0, signal.SIGKILL)\nos.kill(-1, 9)\nsys.exit(1)",
    "a signal from a child": "if os.fork() == 0: os.kill(1, 9)\nelse: os.wait()\nsys.exit(1)",
    "the exit code of such a signal": "os._exit(128 + signal.SIGKILL)",
    "a filter of its own": (
        "libc.prctl(38, 1, 0, 0, 0)\n"
        "code = ctypes.create_string_buffer(b'\\x06' + bytes(3) + b'\\x00\\x00\\x00\\x80')\n"
        "place = ctypes.addressof(code).to_bytes(8, 'little')\n"
        "described = ctypes.create_string_buffer(bytes([1]) + bytes(7) + place)\n"
        "libc.prctl(22, 2, described, 0, 0)\nos.getppid()\nsys.exit(1)"
    ),
    "no end with its watcher": "libc.prctl(1, 0, 0, 0, 0)" + FOREVER,
    "a name that nothing can read": r"open('/proc/self/comm', 'wb').write(b') 1 (\n\xff 1')" + FOREVER,
}


def run(code: str, **limits: Any) -> SandboxResult:
    return asyncio.run(run_in_sandbox(code, limits=SandboxLimits(**limits)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_a_program_is_graded_for_each_end_that_it_brings_about(name: str) -> None:
    result = run(WORK + ATTACKS[name])
    assert result.outcome in (Outcome.TIMEOUT, Outcome.TOOL_ERROR)


@pytest.mark.slow
def test_processes_that_ignore_the_end_of_their_time_are_ended() -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n    while True: pass\n"
        "os.wait()\n"
    )
    assert run(code, cpu_s=1, wall_s=30).outcome is Outcome.TIMEOUT


@pytest.mark.parametrize(
    "response",
    [
        "print('\ud800')",
        "print('\0')",
        "# " + "x" * (17 << 20),
        "import os\nos._exit(137)",
        "exit(255)",
        "print('\udfff" + "x" * (2 << 20) + "')",
    ],
    ids=["half a character", "no character", "too long", "killed", "255", "half a character, and long"],
)
def test_no_text_of_a_policy_is_a_failure_of_the_machine(response: str) -> None:
    tests = [{"stdin": "x" * (15 << 20), "stdout": "7"}]
    sample = Sample(prompt="", response=response, metadata={"tests": tests}, status=Status.COMPLETED)
    assert asyncio.run(CodeEnvironment().grade(sample)) == 0.0
