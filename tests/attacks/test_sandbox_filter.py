"""The filter of the sandbox's system calls, computed as the kernel computes it, for both processors.

Without these tests nothing would try the filter of aarch64 where tests run on x86_64, and a wrong number in it would
leave a call open that an attack needs. The numbers are those of Linux's own tables (arch/x86/entry/syscalls/
syscall_64.tbl, scripts/syscall.tbl), written down again here.
"""

from __future__ import annotations

import errno
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts_core.environments.system_calls import AUDIT_ARCH, CHECKED, REFUSED, build_filter
from tests.kit.excuses import ExcusedSkip

INCLUDE = Path("/usr/include")
ALLOWED = -1
"""Instead of the error of a call."""
RETURN_ALLOW, RETURN_ERROR = 0x7FFF0000, 0x00050000
OTHER_ARCHITECTURES = {"i386": 0x40000003, "arm": 0x40000028, "riscv64": 0xC00000F3}
NUMBERS = {
    # name: (x86_64, aarch64); -1 where a processor has no such call
    **{"read": (0, 63), "write": (1, 64), "close": (3, 57), "openat": (257, 56), "exit_group": (231, 94)},
    **{"munmap": (11, 215), "brk": (12, 214), "mprotect": (10, 226), "clone": (56, 220), "clone3": (435, 435)},
    **{"execve": (59, 221), "wait4": (61, 260), "kill": (62, 129), "futex": (202, 98), "getrandom": (318, 278)},
    **{
        "pipe2": (293, 59),
        "epoll_create1": (291, 20),
        "eventfd2": (290, 19),
        "connect": (42, 203),
        "sendto": (44, 206),
    },
    **{"recvmsg": (47, 212), "recvfrom": (45, 207), "getrlimit": (97, 163), "newfstatat": (262, 79)},
    **{"shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75), "splice": (275, 76)},
    **{"tee": (276, 77), "io_setup": (206, 0), "sendmsg": (46, 211), "sendmmsg": (307, 269), "setsockopt": (54, 208)},
    **{"bind": (49, 200), "listen": (50, 201), "inotify_init": (253, -1), "inotify_init1": (294, 26)},
    **{"fanotify_init": (300, 262), "landlock_create_ruleset": (444, 444), "add_key": (248, 217)},
    **{"request_key": (249, 218), "keyctl": (250, 219), "perf_event_open": (298, 241), "bpf": (321, 280)},
    **{"userfaultfd": (323, 282), "io_uring_setup": (425, 425), "ptrace": (101, 117), "unshare": (272, 97)},
    **{"process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "setns": (308, 268), "mount": (165, 40)},
    **{"modify_ldt": (154, -1), "syslog": (103, 116), "mmap": (9, 222), "socket": (41, 198), "socketpair": (53, 199)},
    **{"fcntl": (72, 25), "prctl": (157, 167), "setrlimit": (160, 164), "prlimit64": (302, 261)},
}
PROGRAMS_NEED = (
    *("read", "write", "close", "openat", "exit_group", "munmap", "brk", "mprotect", "clone", "clone3", "execve"),
    *("wait4", "kill", "futex", "getrandom", "pipe2", "epoll_create1", "eventfd2", "connect", "sendto", "recvmsg"),
    *("recvfrom", "getrlimit", "newfstatat"),
)
NO_ARGUMENTS = (0, 0, 0, 0, 0, 0)
HIGH = 1 << 32
CALLS: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("mmap", (0, 4096, 3, 0x22), ALLOWED),  # private, without a file
    ("mmap", (0, 4096, 3, 0x01), ALLOWED),  # shared, of a file
    ("mmap", (0, 4096, 3, 0x21), errno.EPERM),  # shared, without a file
    ("mmap", (0, 4096, 3, HIGH | 0x21), errno.EPERM),
    ("mmap", (0, 4096, 3, 0x40022), errno.EPERM),  # huge pages
    ("socket", (1, 1, 0), ALLOWED),
    ("socket", (2, 1, 0), ALLOWED),
    ("socket", (10, 1, 0), ALLOWED),
    ("socket", (16, 3, 0), errno.EPERM),  # netlink
    ("socket", (17, 3, 0), errno.EPERM),  # packets
    ("socket", (40, 1, 0), errno.EPERM),  # to the host of a virtual machine
    ("socketpair", (1, 1, 0), ALLOWED),
    ("socketpair", (16, 3, 0), errno.EPERM),
    ("fcntl", (3, 1), ALLOWED),
    ("fcntl", (3, 6), ALLOWED),  # a lock of the process
    ("fcntl", (3, 1031, 1 << 20), errno.EPERM),  # a larger pipe
    ("fcntl", (3, HIGH | 1031, 1 << 20), errno.EPERM),
    ("fcntl", (3, 37), errno.EPERM),
    ("fcntl", (3, 38), errno.EPERM),
    ("prctl", (15,), ALLOWED),  # a name
    ("prctl", (1, 0), 0),  # succeeds, and changes nothing
    ("prctl", (4, 0), 0),
    ("setrlimit", (3,), ALLOWED),  # the stack
    ("setrlimit", (0,), 0),  # processor time
    ("setrlimit", (9,), 0),
    ("prlimit64", (0, 0, 0), ALLOWED),  # reads a limit
    ("prlimit64", (0, 0, 4096), 0),
    ("prlimit64", (0, 0, HIGH), 0),  # an address of which the lower half is 0
    ("prlimit64", (0, 3, 4096), ALLOWED),
)
"""Calls, their arguments, and the error that the program gets."""

both_processors = pytest.mark.parametrize(("machine", "place"), [("x86_64", 0), ("aarch64", 1)])


def run_filter(program: bytes, architecture: int, number: int, arguments: tuple[int, ...] = NO_ARGUMENTS) -> int:
    """What a filter says of a call: the error of it, or ALLOWED.

    An interpreter of classic BPF as far as seccomp has it; `told` is the kernel's struct seccomp_data.
    """
    padded = (*arguments, *NO_ARGUMENTS)[:6]
    told = struct.pack("<iIQ6Q", number, architecture, 0, *padded)
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator, place = 0, 0
    for _ in instructions:  # a filter jumps forwards alone
        operation, if_true, if_false, value = instructions[place]
        place += 1
        match operation:
            case 0x20:  # load a word
                assert value % 4 == 0
                (accumulator,) = struct.unpack_from("<I", told, value)
            case 0x54:  # and
                accumulator &= value
            case 0x15:  # jump if equal
                place += if_true if accumulator == value else if_false
            case 0x35:  # jump if not less
                place += if_true if accumulator >= value else if_false
            case 0x06:
                if value == RETURN_ALLOW:
                    return ALLOWED
                assert value & ~0xFFF == RETURN_ERROR, f"{value:#x} ends the program, or lets it be traced"
                return value & 0xFFF
            case _:
                raise AssertionError(f"{operation:#x} is no operation of these filters")
    raise AssertionError("the filter has no end")


@both_processors
def test_calls_that_attacks_need_are_refused(machine: str, place: int) -> None:
    program, architecture = build_filter(machine), AUDIT_ARCH[machine]
    for name, number in REFUSED[machine].items():
        assert number == NUMBERS[name][place], name
        assert run_filter(program, architecture, number, (1, 2, 3, 4, 5, 6)) == errno.EPERM, name
    assert {*REFUSED[machine]} | {*CHECKED[machine]} | {*PROGRAMS_NEED} | {"shmat"} == {
        name for name, numbers in NUMBERS.items() if numbers[place] >= 0
    }


@pytest.mark.parametrize(
    ("place", "header"), [(0, "asm/unistd_64.h"), (1, "asm-generic/unistd.h")], ids=["x86_64", "aarch64"]
)
def test_the_numbers_are_those_of_the_kernels_headers(place: int, header: str) -> None:
    """aarch64 has the generic table. Some systems keep the header of x86_64 in a folder of the processor."""
    found = [path for path in (INCLUDE / header, INCLUDE / "x86_64-linux-gnu" / header) if path.exists()]
    if not found:
        raise ExcusedSkip(f"the headers of the kernel ({header}) are not installed, or of another processor")
    defined = re.findall(r"^#define __NR(?:3264)?_(\w+) (\d+)$", found[0].read_text(), re.MULTILINE)
    numbers = {name: int(number) for name, number in defined}
    later = {"memfd_secret"} - numbers.keys()  # an old header lacks it
    expected = {name: pair[place] for name, pair in NUMBERS.items() if pair[place] >= 0 and name not in later}
    aliases = {"newfstatat": "fstatat"} if place else {}
    assert {name: numbers[aliases.get(name, name)] for name in expected} == expected


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
@pytest.mark.parametrize("machine", AUDIT_ARCH)
def test_the_kernel_takes_the_filter(machine: str) -> None:
    """Under the filter of another processor a process can do nothing, not even end; memory that it lacks ends it."""
    code = (
        "import ctypes\n"
        f"program = ctypes.create_string_buffer(bytes.fromhex('{build_filter(machine).hex()}'))\n"
        "class Described(ctypes.Structure): _fields_ = [('length', ctypes.c_ushort), ('program', ctypes.c_void_p)]\n"
        "described = Described(len(program) // 8, ctypes.addressof(program))\n"
        "libc = ctypes.CDLL(None)\n"
        "assert libc.prctl(38, 1, 0, 0, 0) == 0\n"
        "assert libc.prctl(22, 2, ctypes.byref(described), 0, 0) == 0\n"
        "ctypes.string_at(0)\n"
    )
    ended = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr


@both_processors
def test_calls_that_programs_need_are_allowed(machine: str, place: int) -> None:
    for name in PROGRAMS_NEED:
        assert run_filter(build_filter(machine), AUDIT_ARCH[machine], NUMBERS[name][place]) == ALLOWED, name


@both_processors
@pytest.mark.parametrize(("name", "arguments", "expected"), CALLS)
def test_arguments_decide(machine: str, place: int, name: str, arguments: tuple[int, ...], expected: int) -> None:
    number = NUMBERS[name][place]
    assert number == CHECKED[machine][name]
    assert run_filter(build_filter(machine), AUDIT_ARCH[machine], number, arguments) == expected


@both_processors
def test_calls_of_other_processors_and_of_later_kernels_are_refused(machine: str, place: int) -> None:
    program, architecture = build_filter(machine), AUDIT_ARCH[machine]
    others = {*OTHER_ARCHITECTURES.values(), *AUDIT_ARCH.values()} - {architecture}
    assert {run_filter(program, other, NUMBERS["read"][place]) for other in others} == {errno.EPERM}
    numbers = (463, 600, 0x40000000, 0x40000000 + 9, 0x7FFFFFFF)
    assert {run_filter(program, architecture, number) for number in numbers} == {errno.ENOSYS}
    assert run_filter(program, architecture, -1) == errno.ENOSYS
