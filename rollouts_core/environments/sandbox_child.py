"""Shut this process in, then become the program: run by sandbox.py as a script, needs nothing but Python.

Not here: what is run, and what its end means (sandbox.py).

argv: settings as JSON, file descriptor for problems, who starts it      stdin: {"code": ..., "stdin": ...} as JSON

namespaces --> fork --> [1] new root, read-only folders, no privileges, limits --> exec python /tmp/main.py
                |
                +----- waits, ends with its exit code; on SIGTERM, when sandbox.py's process dies, or when all processes
                       in there hold too much memory together, it kills [1], and with the first process of its
                       namespace the kernel kills everything in there; where the machine kills [1], or it cannot watch
                       any longer, it ends by a signal itself
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import re
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2
LOCKED_FLAGS = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC, "noatime": 1024, "nodiratime": 2048}
"""What a mount has that a user namespace may not take from it."""
MS_RELATIME = 1 << 21
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_SET_SECCOMP = 1, 38, 24, 22
SECCOMP_MODE_FILTER = 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FORBIDDEN_CALLS = {
    # memory that no limit of a process counts: shmget, msgget, memfd_create, memfd_secret;
    # parts of the kernel that no program of a policy needs, and that attacks on it begin with:
    # add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd, io_uring_setup,
    # ptrace, process_vm_readv, process_vm_writev
    "x86_64": (29, 68, 319, 447, 248, 249, 250, 298, 321, 323, 425, 101, 310, 311),
    "aarch64": (194, 186, 279, 447, 217, 218, 219, 241, 280, 282, 425, 117, 270, 271),
}
SOCKET_CALL = {"x86_64": 41, "aarch64": 198}
SOCKET_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6, which end at the walls of the program's network. Of others some do not: AF_VSOCK leads
from a virtual machine to its host."""
X32_CALLS = 0x40000000
"""On x86_64 the same calls have second numbers from here on."""
NOBODY = 65534
NUM_CAPABILITIES = 64
ROOTS = ("/mnt", "/media", "/srv", "/opt", "/tmp")
"""Where the new root may be put together: covered in this mount namespace alone."""
DEVICES = ("null", "zero", "urandom", "random", "full")
CHECK_MEMORY_S = 0.05
CPU_LIMIT_SHARE = 0.5
"""A program that was killed before it had used this share of its processor time was not killed for that: the kernel's
two ways to count the time differ, by less than half."""

BEGUN = b"+"
"""What stands before problems, which are none, when the program begins: nothing stands for no beginning."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError where a call of the C library failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(libc.mount(*arguments), f"mount {target}")


def enter_namespaces() -> None:
    """Leave the machine's network, processes and mounts, with or without being root."""
    uid, gid = os.getuid(), os.getgid()
    spaces = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if uid == 0:
        check(libc.unshare(spaces), "unshare")
        return
    check(libc.unshare(spaces | CLONE_NEWUSER), "unshare")
    for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path(f"/proc/self/{name}").write_text(content, encoding="utf-8")


def build_root(folders: list[str], file_mb: int) -> None:
    """Make a file system of nothing but `folders`, read-only, and a temporary folder; it becomes the only one."""
    os.umask(0o022)
    root = find_root(folders)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for name in ("dev", "proc", "tmp"):
        Path(root, name).mkdir()
    mount("tmpfs", root + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={file_mb}m,mode=1777,nr_inodes=4096")
    for path in map(Path, folders):
        inside = Path(root + str(path))
        inside.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            inside.symlink_to(path.readlink())
            continue
        if path.is_dir():
            inside.mkdir(exist_ok=True)
        else:
            inside.touch()
        mount(str(path), str(inside), "", MS_BIND | MS_REC)
        make_read_only(str(inside))
    for name in DEVICES:
        Path(root, "dev", name).touch()
        mount(f"/dev/{name}", f"{root}/dev/{name}", "", MS_BIND)
    mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(root)
    check(libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/tmp")
    mount("none", "/", "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def make_read_only(folder: str) -> None:
    """Make a mount read-only with every mount below it; a plain remount leaves those as they are."""
    flags = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    arguments = (AT_FDCWD, folder.encode(), AT_RECURSIVE, attributes, len(attributes))
    if libc.syscall(SYS_MOUNT_SETATTR, *arguments) == 0:
        return
    if ctypes.get_errno() != errno.ENOSYS:
        raise OSError(ctypes.get_errno(), f"mount_setattr {folder}: {os.strerror(ctypes.get_errno())}")
    for place, options in list_mounts(folder):  # Linux before 5.12
        locked = sum(flag for name, flag in LOCKED_FLAGS.items() if name in options)
        access_time = MS_RELATIME * ("relatime" in options)
        flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | locked | access_time
        mount("none", place, "", flags)


def list_mounts(folder: str) -> list[tuple[str, list[str]]]:
    """The mount at `folder` and those below it, with their options."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        _, _, _, _, place, options, *_ = line.split(" ")
        place = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), place)  # a space is \040
        if place == folder or place.startswith(folder.rstrip("/") + "/"):
            found.append((place, options.split(",")))
    return found


def find_root(folders: list[str]) -> str:
    """A folder that exists and covers none of `folders`."""
    for root in ROOTS:
        if Path(root).is_dir() and not any(Path(folder).is_relative_to(root) for folder in folders):
            return root
    raise OSError(f"each of {', '.join(ROOTS)} is missing or holds a folder that the program needs")


def drop_privileges(settings: dict[str, Any]) -> None:
    """Become nobody under the limits of one program, without a way back."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # A user namespace of its own: nothing there maps to a real user, so the program can make no further one.
    check(libc.unshare(CLONE_NEWUSER), "unshare user")
    # Limits behind it: those of its processes hold for the users of the namespace that it was made in, too, and in that
    # one root's programs are all the same nobody.
    set_limits(settings)
    for number in range(NUM_CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    forbid_calls()


def forbid_calls() -> None:
    """Have the kernel refuse FORBIDDEN_CALLS, other sockets, and every call in the numbering of another processor."""
    machine = os.uname().machine
    load, jump_equal, jump_at_least, end = 0x20, 0x15, 0x35, 0x06  # BPF operations
    refuse, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
    forbidden, families = FORBIDDEN_CALLS[machine], SOCKET_FAMILIES
    refusal = 6 + len(forbidden) + len(families)  # its place; a jump counts from the next step
    program = [
        (load, 0, 0, 4),  # the processor whose numbering the call is in
        (jump_equal, 0, refusal - 2, AUDIT_ARCH[machine]),
        (load, 0, 0, 0),  # the call's number
        (jump_at_least, refusal - 4, 0, X32_CALLS),
        *((jump_equal, refusal - 5 - i, 0, number) for i, number in enumerate(forbidden)),
        (jump_equal, 0, len(families) + 2, SOCKET_CALL[machine]),
        (load, 0, 0, 16),  # its first argument
        *((jump_equal, len(families) - i, 0, family) for i, family in enumerate(families)),
        (end, 0, 0, refuse),
        (end, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    described = struct.pack("HP", len(program), ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0), "seccomp")


def set_limits(settings: dict[str, Any]) -> None:
    """What one process may use."""
    for kind, limit in (
        (resource.RLIMIT_AS, settings["memory_mb"] << 20),
        (resource.RLIMIT_CPU, settings["cpu_s"]),
        (resource.RLIMIT_FSIZE, settings["file_mb"] << 20),
        (resource.RLIMIT_NPROC, settings["num_processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)  # nobody may raise it
        resource.setrlimit(kind, (lower, lower))


def become_program(settings: dict[str, Any], program: dict[str, str], status: int) -> None:
    """Never returns: this process is the program from here on."""
    # A session of its own: a signal to its own group does not reach the process that must end it.
    os.setsid()
    build_root(settings["folders"], settings["file_mb"])
    for name, content in (("main.py", program["code"]), ("stdin", program["stdin"])):
        Path("/tmp", name).write_text(content, encoding="utf-8")
    given = os.open("/tmp/stdin", os.O_RDONLY)
    os.dup2(given, 0)
    os.close(given)
    drop_privileges(settings)
    # Last, because a change of user clears it. A second guard only: the program may clear it too.
    end_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.write(status, BEGUN)
    os.execv(settings["executable"], [settings["executable"], "-IXutf8", "/tmp/main.py"])


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the one that started it dies."""
    check(libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "pdeathsig")


def kill_on_sigterm(child: int) -> None:
    """From here on SIGTERM ends the program, with everything that it started, and then this process.

    Nothing in the namespace can prevent it: from outside even its first process can be killed.
    """

    def end(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it just ended by itself
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)  # returns when the whole namespace is gone
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)


def wait_for_end(child: int, *, memory_mb: int, cpu_s: float) -> int:
    """The exit code of the program, which is killed where its processes hold more memory together than one may.

    Needs SIGCHLD to be blocked. Does not return where neither the limits nor the program were its end.
    """
    while True:
        signal.sigtimedwait([signal.SIGCHLD], CHECK_MEMORY_S)
        ended, waited, used = os.wait4(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(waited)
            if code == -signal.SIGKILL and used.ru_utime + used.ru_stime < CPU_LIMIT_SHARE * cpu_s:
                end_by_signal()
            return code if code >= 0 else 128 - code
        cpu_s = min(cpu_s, read_cpu_limit())
        try:
            is_too_much = count_memory_kb() > memory_mb << 10
        except (OSError, MemoryError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            end_by_signal()
        if is_too_much:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.write(2, f"MemoryError: all processes together held more than {memory_mb} MB\n".encode())
            return 1


def read_cpu_limit() -> float:
    """The seconds of processor time that the program, which may lower its limit, has; else infinite."""
    with contextlib.suppress(OSError):
        limits = Path("/proc/1/limits").read_text(encoding="utf-8")
        if found := re.search(r"^Max cpu time +\d+ +(\d+)", limits, re.MULTILINE):
            return float(found[1])
    return math.inf


def end_by_signal() -> NoReturn:
    """End this process so that its exit code is not taken for the program's."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("no process survives SIGKILL")


def count_memory_kb() -> int:
    """What the processes of the sandbox hold together, where it is set up; pages that they share count for each."""
    try:
        Path("/proc/self").readlink()
    except FileNotFoundError:  # this process is none of those in the sandbox's /proc, which took the place of its own
        pass
    else:
        return 0
    total = 0
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            status = path.read_bytes()  # begins with a name that the program may choose, of any bytes
            total += sum(map(int, re.findall(rb"^Rss(?:Anon|Shmem):\s*(\d+) kB", status, re.MULTILINE)))
    return total


def main() -> int:
    """Run the program; returns its exit code, 128 and the signal's number for one."""
    settings, status, starter = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(status, False)
    # What the starting process ignores or blocks is inherited.
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        program = json.load(sys.stdin)
        enter_namespaces()
        end_with_parent(signal.SIGTERM)
        if os.getppid() != starter:  # it died before
            os._exit(1)
        # Blocked until it is known what to kill; the end of the program is asked for.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])
        child = os.fork()
        if child == 0:
            become_program(settings, program, status)
    except BaseException as error:  # noqa: BLE001 - what this does not report is lost
        os.write(status, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    kill_on_sigterm(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.close(status)
    code = wait_for_end(child, memory_mb=settings["memory_mb"], cpu_s=settings["cpu_s"])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # its number may be another's from here on
    return code


if __name__ == "__main__":
    sys.exit(main())
