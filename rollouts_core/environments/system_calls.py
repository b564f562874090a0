"""Build the filter of system calls (Linux's seccomp) for programs in the sandbox.

    REFUSED, CHANGES_NOTHING, RULES --build_filter--> BPF instructions --sandbox_child.py--> the kernel

A system call is refused for one of three reasons: it allocates memory that no limit counts, it changes a limit, or it
reaches a rarely used part of the kernel, where bugs are more likely. System calls that Linux added after this list was
written are refused too.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass
from functools import cache

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED: dict[str, dict[str, int]] = {
    "x86_64": {
        # System V and POSIX queues, semaphores and memory
        **{"shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240},
        # anonymous memory files, pages kept by pipes, rings of asynchronous reads
        **{"memfd_create": 319, "memfd_secret": 447, "vmsplice": 278, "splice": 275, "tee": 276, "io_setup": 206},
        # sockets that wait for a connection or transfer open files use memory that no file descriptor counts
        **{"sendmsg": 46, "sendmmsg": 307, "setsockopt": 54, "bind": 49, "listen": 50},
        # the kernel does not limit the number of these watches and rules
        **{"inotify_init": 253, "inotify_init1": 294, "fanotify_init": 300, "landlock_create_ruleset": 444},
        # rarely used parts of the kernel
        **{"add_key": 248, "request_key": 249, "keyctl": 250, "perf_event_open": 298, "bpf": 321},
        **{"userfaultfd": 323, "io_uring_setup": 425},
        **{"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311},
        **{"unshare": 272, "setns": 308, "mount": 165, "modify_ldt": 154, "syslog": 103},
    },
    "aarch64": {
        **{"shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180},
        **{"memfd_create": 279, "memfd_secret": 447, "vmsplice": 75, "splice": 76, "tee": 77, "io_setup": 0},
        **{"sendmsg": 211, "sendmmsg": 269, "setsockopt": 208, "bind": 200, "listen": 201},
        **{"inotify_init1": 26, "fanotify_init": 262, "landlock_create_ruleset": 444},
        **{"add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "bpf": 280},
        **{"userfaultfd": 282, "io_uring_setup": 425},
        **{"ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271},
        **{"unshare": 97, "setns": 268, "mount": 40, "syslog": 116},
    },
}
"""Numbers of system calls that are always refused."""
CHECKED: dict[str, dict[str, int]] = {
    "x86_64": {
        "mmap": 9,
        "socket": 41,
        "socketpair": 53,
        "fcntl": 72,
        "prctl": 157,
        "setrlimit": 160,
        "prlimit64": 302,
    },
    "aarch64": {
        "mmap": 222,
        "socket": 198,
        "socketpair": 199,
        "fcntl": 25,
        "prctl": 167,
        "setrlimit": 164,
        "prlimit64": 261,
    },
}
"""Numbers of system calls that are refused only with some arguments."""
FIRST_UNKNOWN = 463
"""System calls from this number on are refused: they are newer than Linux 6.10, or belong to the x32 ABI on x86_64."""
RLIMIT_STACK = 3
"""The size limit of the stack. A program may change no other limit. Deeply recursive programs need a larger stack. The
limit of the address space also limits the stack."""
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000
F_SETPIPE_SZ, F_OFD_SETLK, F_OFD_SETLKW = 1031, 37, 38
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
ALL_BITS = 0xFFFFFFFF

LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
CALL_NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Byte offsets in the kernel's `struct seccomp_data`. Each argument has 8 bytes, the lower half first."""
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000

Instruction = tuple[int, int, int, int]
"""A BPF instruction: operation, instructions to skip if its test is true, instructions to skip if false, value."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A test of the lower half of an argument of a system call."""

    argument: int
    value: int
    mask: int = ALL_BITS
    is_equal: bool = True
    """True if the masked argument must equal the value; False if it must differ."""
    is_upper_half: bool = False


RULES: tuple[tuple[str, tuple[Condition, ...], int], ...] = (
    # Anonymous shared memory stays allocated after a part is unmapped, and then counts for no process.
    ("mmap", (Condition(3, MAP_SHARED | MAP_ANONYMOUS, MAP_SHARED | MAP_ANONYMOUS),), errno.EPERM),
    ("mmap", (Condition(3, MAP_HUGETLB, MAP_HUGETLB),), errno.EPERM),
    # Sockets of these families cannot leave the sandbox's empty network. Sockets of other families can: AF_VSOCK
    # connects a virtual machine with its host.
    ("socket", tuple(Condition(0, family, is_equal=False) for family in (AF_UNIX, AF_INET, AF_INET6)), errno.EPERM),
    ("socketpair", (Condition(0, AF_UNIX, is_equal=False),), errno.EPERM),
    ("fcntl", (Condition(1, F_SETPIPE_SZ),), errno.EPERM),
    # Open file description (OFD) locks belong to no process, so the locks of a sandbox could not be counted.
    ("fcntl", (Condition(1, F_OFD_SETLK),), errno.EPERM),
    ("fcntl", (Condition(1, F_OFD_SETLKW),), errno.EPERM),
    # These calls succeed without an effect, because harmless programs use them too. With an effect, a program could
    # lower a limit, be killed by the kernel at this limit, and look like a program that the machine killed.
    ("prctl", (Condition(0, PR_SET_PDEATHSIG),), 0),
    ("prctl", (Condition(0, PR_SET_DUMPABLE),), 0),  # non-dumpable processes hide their open files
    ("setrlimit", (Condition(0, RLIMIT_STACK, is_equal=False),), 0),
    ("prlimit64", (Condition(1, RLIMIT_STACK, is_equal=False), Condition(2, 0, is_equal=False)), 0),
    (
        "prlimit64",
        (Condition(1, RLIMIT_STACK, is_equal=False), Condition(2, 0, is_equal=False, is_upper_half=True)),
        0,
    ),
)
"""(system call, conditions on its arguments, error number that the program gets; 0 for success without effect)."""


@cache
def build_filter(machine: str) -> bytes:
    """Build the filter for a processor architecture, as bytes: an array of the kernel's `struct sock_filter`.

    Raises:
        KeyError: the architecture is not supported.
    """
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, FAIL_WITH | errno.EPERM),  # another architecture, as in 32-bit programs
        (LOAD, 0, 0, CALL_NUMBER),
        *_return_if((JUMP_IF_AT_LEAST, 0, 1, FIRST_UNKNOWN), errno.ENOSYS),
    ]
    for number in REFUSED[machine].values():
        program += _return_if((JUMP_IF_EQUAL, 0, 1, number), errno.EPERM)
    for call, conditions, error in RULES:
        program += _render_rule(CHECKED[machine][call], conditions, error)
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in program)


def _return_if(test: Instruction, error: int) -> list[Instruction]:
    """Instructions that return `error` for a system call if `test` of its number is true."""
    return [test, (RETURN, 0, 0, FAIL_WITH | error)]


def _render_rule(number: int, conditions: tuple[Condition, ...], error: int) -> list[Instruction]:
    """The instructions of a rule. The instructions are built from last to first, because a false condition skips all
    following instructions of the rule."""
    steps = [(RETURN, 0, 0, FAIL_WITH | error)]
    for condition in reversed(conditions):
        rest = len(steps)
        skips = (0, rest) if condition.is_equal else (rest, 0)
        place = FIRST_ARGUMENT + 8 * condition.argument + 4 * condition.is_upper_half
        masked = [(AND, 0, 0, condition.mask)] if condition.mask != ALL_BITS else []
        steps = [(LOAD, 0, 0, place), *masked, (JUMP_IF_EQUAL, *skips, condition.value), *steps]
    return [(LOAD, 0, 0, CALL_NUMBER), (JUMP_IF_EQUAL, 0, len(steps), number), *steps]
