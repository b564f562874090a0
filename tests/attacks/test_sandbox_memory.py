"""Programs in the sandbox that try to hold more memory than they may, most of it the kernel's.

Each attack says HELD once it holds more than its limit. Without these tests a policy that explores, or data of
strangers, could fill the memory of the machine that trains.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.environments.memory_groups import NAME, find_group_parent
from rollouts_core.environments.protocol import Outcome
from rollouts_core.environments.sandbox import SandboxLimits, SandboxResult, run_in_sandbox
from tests.kit.excuses import ExcusedSkip

MEMORY_MB = 96
MEMORY_OF_MANY_MB = 192
"""For attacks by 15 processes, of which each counts the pages that it shares with the others."""
NUM_TRIES = 3
KERNEL_MB = 250
"""How much more the kernel may hold meanwhile: the limit, and what others on the machine cause."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")

BEGIN = """
import ctypes, ctypes.util, fcntl, mmap, os, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
def check(result):
    if result in (-1, None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def own_memory():
    return sum(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(("RssA", "RssS")))
def hold(num_bytes):
    if num_bytes >= WANTED:
        time.sleep(1)
        print("HELD", flush=True)
        os._exit(0)
"""
SOCKETS_THAT_WAIT = """
listener = socket.socket(socket.AF_UNIX)
listener.bind("/tmp/listener")
listener.listen(4096)
held = 0
while True:
    client = socket.socket(socket.AF_UNIX)
    client.connect("/tmp/listener")
    client.setblocking(False)
    try:
        while True: held += client.send(bytes(1 << 16))
    except BlockingIOError: pass
    client.close()
    hold(held)
"""
FILLED_PAIRS = """
results, given = os.pipe()
for _ in range(15):
    if os.fork() == 0:
        kept, held = [], 0
        try:
            while True:
                kept.append(socket.socketpair(*KIND))
                for end in kept[-1]:
                    end.setblocking(False)
                    try:
                        while True: held += end.send(bytes(SIZE))
                    except BlockingIOError: pass
        except OSError: pass
        os.write(given, struct.pack("Q", held + own_memory()))
        time.sleep(60)
held = own_memory()
for _ in range(15):
    held += struct.unpack("Q", os.read(results, 8))[0]
    hold(held)
time.sleep(20)
"""
SOCKETS_UNDER_WAY = """
first, second = socket.socketpair()
held = 0
for _ in range(4000):
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
        try:
            while True: held += end.send(bytes(1 << 16))
        except BlockingIOError: pass
    try: socket.send_fds(first, [b"x"], [end.fileno() for end in pair])
    except PermissionError: sys.exit(1)
    except OSError: first, second = socket.socketpair()
    for end in pair: end.close()
    hold(held)
"""
SEMAPHORES = """
held = 0
while True:
    check(libc.semget(0, 32000, 0o1600))
    held += 32000 * 64
    hold(held)
"""
SHARED_MEMORY_WITHOUT_OWNER = """
held, kept = 0, []
while True:
    start = check(libc.mmap(None, ctypes.c_size_t(16 << 20), 3, FLAGS, FILE, 0))
    ctypes.memset(start, 1, 16 << 20)
    check(libc.munmap(ctypes.c_void_p(start + 4096), ctypes.c_size_t((16 << 20) - 4096)))
    held += 16 << 20
    hold(held)
"""
PAGES_IN_PIPES = """
held, size = 0, 2 << 20
class Part(ctypes.Structure): _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]
while True:
    read, write = os.pipe()
    for _ in range(16):
        start = check(libc.mmap(None, ctypes.c_size_t(2 * size), 3, 0x22, -1, 0))
        aligned = -(-start // size) * size
        check(libc.madvise(ctypes.c_void_p(aligned), ctypes.c_size_t(size), 14))
        ctypes.memset(aligned, 1, size)
        part = Part(aligned, 4096)
        check(libc.vmsplice(write, ctypes.byref(part), 1, 0))
        check(libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(2 * size)))
        held += size
        hold(held)
"""
LOCKS = """
results, given = os.pipe()
for child in range(15):
    if os.fork() == 0:
        held = own_memory()
        for number in range(56):
            file = os.open(f"/tmp/{child}_{number}", os.O_RDWR | os.O_CREAT)
            for place in range(400):
                fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * place)
            held += 400 * 256
        os.write(given, struct.pack("Q", held))
        time.sleep(60)
held = own_memory()
for _ in range(15):
    held += struct.unpack("Q", os.read(results, 8))[0]
    hold(held)
time.sleep(20)
"""
MAPPINGS = """
results, given = os.pipe()
size = 128 << 20
for _ in range(14):
    if os.fork() == 0:
        start = check(libc.mmap(None, ctypes.c_size_t(size), 0, 0x22, -1, 0))
        made = 0
        for place in range(start, start + size, 8192):
            if libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(4096), 1): break
            made += 2
        os.write(given, struct.pack("Q", made * 512 + own_memory()))
        time.sleep(60)
held = own_memory()
for _ in range(14):
    held += struct.unpack("Q", os.read(results, 8))[0]
    hold(held)
time.sleep(20)
"""
WATCHES = """
held = 0
while True:
    file = check(libc.inotify_init1(0))
    for number in range(4000):
        path = f"/tmp/{number}"
        if not os.path.exists(path): os.mkdir(path)
        check(libc.inotify_add_watch(file, path.encode(), 2))
        held += 1024
        hold(held * 8)
"""
RULES = """
class Attribute(ctypes.Structure): _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64)]
class Rule(ctypes.Structure): _fields_ = [("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64)]
held = 0
while True:
    attribute = Attribute(0, 3)
    file = check(libc.syscall(444, ctypes.byref(attribute), ctypes.sizeof(attribute), 0))
    for port in range(1 << 16):
        rule = Rule(1, port)
        check(libc.syscall(445, file, 2, ctypes.byref(rule), 0))
        held += 128
    hold(held)
"""
OWN_PAGES = """
for _ in range(15):
    if os.fork() == 0:
        kept = bytearray(40 << 20)
        time.sleep(20)
time.sleep(20)
"""
ATTACKS = {
    "sockets that wait to be accepted": (SOCKETS_THAT_WAIT, MEMORY_MB),
    "pairs of streams": (FILLED_PAIRS.replace("*KIND", "").replace("SIZE", "1 << 16"), MEMORY_OF_MANY_MB),
    "pairs of datagrams": (
        FILLED_PAIRS.replace("*KIND", "socket.AF_UNIX, socket.SOCK_DGRAM").replace("SIZE", "20000"),
        MEMORY_OF_MANY_MB,
    ),
    "sockets in messages": (SOCKETS_UNDER_WAY, MEMORY_MB),
    "semaphores": (SEMAPHORES, MEMORY_MB),
    "shared memory": (SHARED_MEMORY_WITHOUT_OWNER.replace("FLAGS, FILE", "0x21, -1"), MEMORY_MB),
    "shared memory of a device": (
        SHARED_MEMORY_WITHOUT_OWNER.replace("FLAGS, FILE", "1, os.open('/dev/zero', os.O_RDWR)"),
        MEMORY_MB,
    ),
    "pages in pipes": (PAGES_IN_PIPES, MEMORY_MB),
    "locks": (LOCKS, 144),
    "mappings": (MAPPINGS, MEMORY_OF_MANY_MB),
    "watches of files": (WATCHES, MEMORY_MB),
    "rules of landlock": (RULES, MEMORY_MB),
}
"""Programs, and the MB of memory that they may have."""


def run(code: str, **limits: Any) -> SandboxResult:
    return asyncio.run(run_in_sandbox(code, limits=SandboxLimits(**limits)))


@pytest.mark.parametrize("name", ATTACKS)
def test_no_program_holds_more_memory_than_it_may(name: str) -> None:
    code, memory_mb = ATTACKS[name]
    held: list[float] = []
    for _ in range(NUM_TRIES):  # the kernel's memory is that of all programs of the machine
        with measured_kernel() as measured:
            result = run(f"{BEGIN}WANTED = {memory_mb + 32} << 20\n{code}", memory_mb=memory_mb, wall_s=8)
        assert "HELD" not in result.stdout
        assert result.outcome is not Outcome.OK, "the attack was not tried"
        held.append(max(measured) - measured[0])
        if held[-1] < KERNEL_MB:
            break
    assert min(held) < KERNEL_MB


def has_delegated_memory() -> bool:
    """Whether the kernel has cgroups of version 2 here, with a memory controller that this process may pass on.

    The controller belongs to version 1 on some systems; `/proc/self/cgroup` then names it beside a number.
    """
    own = Path("/proc/self/cgroup").read_text().splitlines()
    if any("memory" in line.split(":")[1].split(",") for line in own):
        return False
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    tops = [Path(place) for _, place, kind, *_ in mounts if kind == "cgroup2"]
    names = [line.removeprefix("0::/") for line in own if line.startswith("0::/")]
    if not tops or not names or ".." in names[0]:
        return False
    folders = [tops[0] / names[0], *(tops[0] / parent for parent in Path(names[0]).parents)]
    return any(
        "memory" in (folder / "cgroup.subtree_control").read_text().split()
        and os.access(folder / "cgroup.procs", os.W_OK)
        for folder in folders
        if (folder / "cgroup.subtree_control").exists()
    )


@pytest.mark.parametrize("name", ["pairs of streams", "pages"])
def test_where_a_cgroup_can_be_made_the_kernel_ends_what_holds_too_much(name: str) -> None:
    """It counts exactly, also the memory of sockets, and says that it ended a process: the program is to blame."""
    if not has_delegated_memory():
        raise ExcusedSkip("no cgroup here has a limit of memory: run as root outside containers, or with Delegate=yes")
    assert (parent := find_group_parent()), "the system lets cgroups with a limit of memory be made"
    code = ATTACKS[name][0] if name in ATTACKS else OWN_PAGES
    result = run(f"{BEGIN}WANTED = 1 << 40\n{code}", memory_mb=MEMORY_MB, wall_s=60, cpu_s=30)
    assert result.outcome is Outcome.TOOL_ERROR
    assert f"all processes together used more than {MEMORY_MB} MB" in result.stderr
    assert not list(Path(parent).glob(NAME)), "its cgroup is left behind"


@pytest.mark.parametrize(
    "call",
    [
        "libc.semget(0, 1, 0o1600)",
        "libc.msgget(0, 0o1600)",
        "libc.shmget(0, 4096, 0o1600)",
        "libc.syscall(240 if X86 else 180, b'queue', 0o102, 0o600, None)",  # mq_open
        "libc.memfd_create(b'x', 0)",
        "libc.syscall(447, 0)",  # memfd_secret
        "libc.syscall(206 if X86 else 0, 1, ctypes.byref(ctypes.c_void_p()))",  # io_setup
        "libc.syscall(425, 8, bytes(120))",  # io_uring_setup
        "libc.inotify_init1(0)",
        "libc.fanotify_init(0, 0)",
        "libc.fcntl(os.pipe()[0], 1031, 1 << 20)",
        "libc.fcntl(os.open('/tmp/main.py', 0), 37, bytes(32))",  # F_OFD_SETLK
        "libc.setsockopt(socket.socket().fileno(), 1, 7, ctypes.byref(ctypes.c_int(1 << 20)), 4)",
        "libc.mmap(None, ctypes.c_size_t(4096), 3, 0x21, -1, 0)",
        "libc.mmap(None, ctypes.c_size_t(2 << 20), 3, 0x40022, -1, 0)",  # huge pages
        "libc.unshare(0x10000000)",
    ],
)
def test_a_call_whose_memory_no_limit_counts_is_refused(call: str) -> None:
    result = run(f"{BEGIN}\nX86 = os.uname().machine == 'x86_64'\ncheck({call})")
    assert "PermissionError: [Errno 1]" in result.stderr


def test_calls_that_linux_may_get_later_do_not_exist() -> None:
    result = run(
        f"{BEGIN}\nfor number in range(463, 600): assert libc.syscall(number) == -1\nprint(ctypes.get_errno())"
    )
    assert result.stdout == "38\n", result.stderr


def test_an_event_loop_threads_and_processes_work_as_before() -> None:
    code = (
        "import asyncio, concurrent.futures, mmap, multiprocessing, os, resource, sqlite3, subprocess, sys, tempfile\n"
        "async def add(): return await asyncio.to_thread(lambda: 1 + 1)\n"
        "assert asyncio.run(add()) == 2\n"
        "with concurrent.futures.ThreadPoolExecutor(4) as pool: assert sum(pool.map(int, '1234')) == 10\n"
        "assert subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True).stdout == b'7\\n'\n"
        "mine, theirs = multiprocessing.Pipe()\n"
        "child = multiprocessing.get_context('fork').Process(target=theirs.send, args=(5,))\n"
        "child.start()\n"
        "assert mine.recv() == 5\n"
        "sqlite3.connect('/tmp/base').execute('create table t (x)')\n"
        "with tempfile.TemporaryFile() as file:\n"
        "    file.write(b'abc')\n"
        "    file.flush()\n"
        "    assert mmap.mmap(file.fileno(), 0)[:] == b'abc'\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (64 << 20, -1))\n"
        "assert resource.getrlimit(resource.RLIMIT_STACK)[0] == 64 << 20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[0] >> 20, os.getpid())\n"
    )
    result = run(code)
    assert result.stdout == "512 1\n", result.stderr


@contextmanager
def measured_kernel() -> Iterator[list[float]]:
    """The memory in MB that the kernel holds for itself, and what it cannot give back, at times during the block."""
    is_over, measured = threading.Event(), [read_kernel_mb()]

    def measure() -> None:
        while not is_over.wait(0.02):
            measured.append(read_kernel_mb())

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield measured
    finally:
        is_over.set()
        thread.join()
        time.sleep(0.1)


def read_kernel_mb() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kb = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    others = ("MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "SReclaimable")
    return (kb["MemTotal"] - sum(kb[name] for name in others)) / 1024
