"""The child process of the sandbox: it isolates itself, then executes the program. `sandbox.py` runs this script.

argv: settings as JSON, file descriptor for errors at the start, process id of the parent
stdin: {"code": ..., "stdin": ...} as JSON

namespaces --> fork --> [1] new root, read-only folders, no privileges, limits --> exec python /tmp/main.py
                |
                +----- watcher: waits for [1] and ends with its exit code. It kills [1] on SIGTERM, when the parent
                       dies, when all processes in the sandbox together use too much memory, or when a process has
                       used up its CPU time. [1] is the first process of its namespace: if it is killed, the kernel
                       kills all processes of the namespace. If the machine kills [1], or if watching fails, the
                       watcher kills itself with a signal, so that the failure is not taken for the program's

If [1] ends by SIGKILL, the machine killed it: processes of a namespace cannot kill its first process, [1] has no limit
at which the kernel would kill it, and a program cannot change the limits.

Only the standard library is used. Each import delays every program by milliseconds, so files are read with `os`, not
with pathlib.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import signal
import struct
import sys

TYPE_CHECKING = False  # importing `typing` takes 3 ms
if TYPE_CHECKING:
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
"""Mount options that a process in a user namespace cannot remove, with their flags."""
MS_RELATIME = 1 << 21
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_SET_SECCOMP = 1, 38, 24, 22
SECCOMP_MODE_FILTER, BPF_INSTRUCTION_BYTES = 2, 8
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
NOBODY = 65534
NUM_CAPABILITIES = 64
ROOTS = ("/mnt", "/media", "/srv", "/opt", "/tmp")
"""Candidates for the mount point of the new root. Only in this mount namespace, the mount hides the folder's files."""
DEVICES = ("null", "urandom", "random", "full")
"""Devices in the sandbox. `zero` is missing, because its shared mappings use memory that no process is charged for."""
CHECK_S = 0.05
"""Seconds between two checks of a program's memory and CPU time."""
CPU_GRACE_S = 1.0
"""Extra CPU time before the watcher acts on processes besides [1], seconds. Normally the kernel ends these processes
earlier."""
CPU_LIMIT_SHARE = 0.5
"""Share of the machine's own limit of CPU time. If a program was killed before it used this share, that limit was not
the reason. The share allows for the kernel's two measures of CPU time, which differ by less than half."""
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PIPE_KB, MAPPING_KB = 64, 0.5
"""Highest kernel memory of a pipe and of a memory mapping, kB."""
MAX_LOCKS, MAX_LOCKS_BYTES = 2000, 256 << 10
"""Highest number of file locks of all processes together, and limit of the bytes read from the kernel's list of locks.
The kernel needs more time for each further part of the list."""
NUM_SIGNALS = 128
"""Highest number of pending signals and timers of all processes of a program."""

MEMORY = re.compile(rb"^(?:Rss(?:Anon|Shmem)|VmSwap|VmPTE|HugetlbPages):\s*(\d+) kB", re.MULTILINE)
"""Matches lines of /proc/PID/status with the memory of a process: resident, swapped out, and page tables."""
BEGUN = b"+"
"""Mark in the stream of errors at the start. The child process sends this mark just before it executes the program. If
the mark is missing, or an error follows, the program did not start."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError if `result` says that a call of the C library failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(libc.mount(*arguments), f"mount {target}")


def enter_namespaces() -> None:
    """Move this process into new namespaces for network, processes and mounts. Works for root and for other users."""
    uid, gid = os.getuid(), os.getgid()
    spaces = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if uid == 0:
        check(libc.unshare(spaces), "unshare")
        return
    check(libc.unshare(spaces | CLONE_NEWUSER), "unshare")
    for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        write_file(f"/proc/self/{name}", content.encode())


def build_root(folders: list[str], file_mb: int) -> None:
    """Build a root file system of read-only `folders` and a temporary folder, and make it this process's root."""
    os.umask(0o022)
    root = find_root(folders)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for name in ("dev", "proc", "tmp"):
        os.mkdir(f"{root}/{name}")
    mount("tmpfs", root + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={file_mb}m,mode=1777,nr_inodes=4096")
    for path in folders:
        inside = root + path
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
            continue
        if os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
        else:
            write_file(inside, b"")
        mount(path, inside, "", MS_BIND | MS_REC)
        make_read_only(inside)
    for name in DEVICES:
        write_file(f"{root}/dev/{name}", b"")
        mount(f"/dev/{name}", f"{root}/dev/{name}", "", MS_BIND)
    mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(root)
    check(libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/tmp")
    mount("none", "/", "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def make_read_only(folder: str) -> None:
    """Make a mount and all mounts below it read-only."""
    flags = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    arguments = (AT_FDCWD, folder.encode(), AT_RECURSIVE, attributes, len(attributes))
    if libc.syscall(SYS_MOUNT_SETATTR, *arguments) == 0:
        return
    if ctypes.get_errno() != errno.ENOSYS:
        raise OSError(ctypes.get_errno(), f"mount_setattr {folder}: {os.strerror(ctypes.get_errno())}")
    for place, options in list_mounts(folder):  # fallback for Linux before 5.12
        locked = sum(flag for name, flag in LOCKED_FLAGS.items() if name in options)
        access_time = MS_RELATIME * ("relatime" in options)
        flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | locked | access_time
        mount("none", place, "", flags)


def list_mounts(folder: str) -> list[tuple[str, list[str]]]:
    """The path and options of the mount at `folder` and of all mounts below it."""
    found = []
    for line in os.fsdecode(read_file("/proc/self/mountinfo")).splitlines():
        _, _, _, _, place, options, *_ = line.split(" ")
        place = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), place)  # a space is written as \040
        if place == folder or place.startswith(folder.rstrip("/") + "/"):
            found.append((place, options.split(",")))
    return found


def find_root(folders: list[str]) -> str:
    """The first existing folder of ROOTS that contains none of `folders`."""
    for root in ROOTS:
        if os.path.isdir(root) and not any(f"{folder}/".startswith(f"{root}/") for folder in folders):
            return root
    raise OSError(f"each of {', '.join(ROOTS)} is missing or contains a folder that the program needs")


def drop_privileges(settings: dict[str, Any]) -> None:
    """Change to an unprivileged user and set the resource limits. Neither can be undone."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # In this user namespace no id maps to a real user, so the program cannot create further user namespaces.
    check(libc.unshare(CLONE_NEWUSER), "unshare user")
    # Limits are set afterwards. In the parent namespace all programs of root run as the same unprivileged user, and
    # a limit of processes would count the processes of all of them.
    set_limits(settings)
    for number in range(NUM_CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    # Changing the user cleared this setting. The system call filter prevents the program from clearing it again.
    end_with_parent(signal.SIGKILL)
    put_filter_on(bytes.fromhex(settings["filter"]))


def put_filter_on(program: bytes) -> None:
    """Install a filter of system_calls.py, so that the kernel refuses system calls of this process and its children."""
    code = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HP", len(program) // BPF_INSTRUCTION_BYTES, ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0), "seccomp")


def set_limits(settings: dict[str, Any]) -> None:
    """Set the resource limits of this process, which its child processes inherit.

    At the limit of CPU time the kernel sends SIGXCPU. This signal does not end the first process of a namespace.
    """
    lower_limit(resource.RLIMIT_CPU, settings["cpu_s"], is_hard=False)
    for kind, limit in (
        (resource.RLIMIT_AS, settings["memory_mb"] << 20),
        (resource.RLIMIT_FSIZE, settings["file_mb"] << 20),
        (resource.RLIMIT_NPROC, settings["num_processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_SIGPENDING, NUM_SIGNALS),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        lower_limit(kind, limit, is_hard=True)


def lower_limit(kind: int, limit: int, *, is_hard: bool) -> None:
    """Lower a limit of this process. With `is_hard` the limit cannot be raised again. A limit that is already lower
    stays unchanged."""
    _, hard = resource.getrlimit(kind)
    lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)  # a hard limit cannot be raised
    resource.setrlimit(kind, (lower, lower if is_hard else hard))


def become_program(settings: dict[str, Any], program: dict[str, str], status: int) -> None:
    """Isolate this process and execute the program in it; never returns."""
    # In a separate session, signals to the program's process group do not reach the watcher.
    os.setsid()
    build_root(settings["folders"], settings["file_mb"])
    for name, content in (("main.py", program["code"]), ("stdin", program["stdin"])):
        # With `surrogatepass`, a lone surrogate is an error of the program, not of the sandbox.
        write_file(f"/tmp/{name}", content.encode("utf-8", "surrogatepass"))
    given = os.open("/tmp/stdin", os.O_RDONLY)
    os.dup2(given, 0)
    os.close(given)
    drop_privileges(settings)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.write(status, BEGUN)
    os.execv(settings["executable"], [settings["executable"], "-IXutf8", "/tmp/main.py"])


def end_with_parent(number: int) -> None:
    """Make the kernel send the signal `number` to this process when its parent dies."""
    check(libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "pdeathsig")


def kill_on_sigterm(child: int, group: MemoryGroup | None) -> None:
    """Make SIGTERM end all processes of the program, and then this process. Processes outside of the namespace, such as
    this watcher, can kill its first process.
    """

    def end(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # the program has just ended
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)  # returns when the whole namespace is gone
        if group is not None:
            group.remove()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)


class MemoryGroup:
    """A cgroup that limits the memory of a program, including kernel memory.

    Args:
        parent: folder of the cgroup in which the new cgroup is created.

    Raises:
        OSError: the cgroup cannot be created.
    """

    def __init__(self, parent: str, max_bytes: int) -> None:
        self.name = f"rollouts-{os.getpid()}"
        self._parent = os.open(parent, os.O_DIRECTORY)
        os.mkdir(self.name, dir_fd=self._parent)
        self._folder = os.open(self.name, os.O_DIRECTORY, dir_fd=self._parent)
        self._write("memory.max", str(max_bytes))
        for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
            with contextlib.suppress(OSError):  # these files exist only with swap, or from Linux 4.19 on
                self._write(name, value)
        self.members = os.open("cgroup.procs", os.O_WRONLY, dir_fd=self._folder)
        """File descriptor of the member list. A process joins the cgroup by writing 0 to it."""

    def _write(self, name: str, value: str) -> None:
        file = os.open(name, os.O_WRONLY, dir_fd=self._folder)
        try:
            os.write(file, value.encode())
        finally:
            os.close(file)

    def has_killed(self) -> bool:
        """True if the kernel killed processes because the cgroup reached its memory limit."""
        file = os.open("memory.events", os.O_RDONLY, dir_fd=self._folder)
        try:
            found = re.search(rb"^oom_kill (\d+)", os.read(file, 4096), re.MULTILINE)
        finally:
            os.close(file)
        return found is not None and int(found[1]) > 0

    def remove(self) -> None:
        """Remove the cgroup, which must have no processes."""
        with contextlib.suppress(OSError):
            os.rmdir(self.name, dir_fd=self._parent)


def wait_for_end(child: int, settings: dict[str, Any], group: MemoryGroup | None) -> int:
    """Wait for the program, and kill it if its processes exceed their limits; returns its exit code.

    SIGCHLD must be blocked. If the machine killed the program, this process kills itself instead of returning.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    hard_s = hard if hard != resource.RLIM_INFINITY else float("inf")
    memory_mb, cpu_s = settings["memory_mb"], min(settings["cpu_s"], hard_s)
    while True:
        signal.sigtimedwait([signal.SIGCHLD], CHECK_S)
        ended, waited, used = os.wait4(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(waited)
            if code == -signal.SIGKILL and group is not None and group.has_killed():
                return say_too_much(f"{memory_mb} MB")
            if code == -signal.SIGKILL and used.ru_utime + used.ru_stime < CPU_LIMIT_SHARE * hard_s:
                end_by_signal()
            return code if code >= 0 else 128 - code
        try:
            is_set_up = has_own_processes()
            num_locks = count_locks() if is_set_up else 0
            held_kb, is_late = measure_processes(cpu_s, settings["socket_kb"]) if is_set_up else (0.0, False)
        except BaseException:  # noqa: BLE001 - an unwatched program would have no limits
            kill_program(child)
            end_by_signal()
        if held_kb > memory_mb << 10 or num_locks > MAX_LOCKS:
            kill_program(child)
            return say_too_much(f"{memory_mb} MB" if num_locks <= MAX_LOCKS else f"{MAX_LOCKS:,} locks of files")
        if is_late:
            kill_program(child)
            return 128 + signal.SIGKILL


def kill_program(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)  # returns when the whole namespace is gone


def say_too_much(limit: str) -> int:
    """Write to the program's stderr that the program exceeded a limit of memory or locks; returns its exit code."""
    os.write(2, f"MemoryError: all processes together used more than {limit}\n".encode())
    return 1


def end_by_signal() -> NoReturn:
    """Kill this process with a signal, so that its exit code is not mistaken for the program's."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("no process survives SIGKILL")


def has_own_processes() -> bool:
    """True if /proc already shows the sandbox's processes. The sandbox's mount of /proc hides this process."""
    try:
        os.readlink("/proc/self")
    except FileNotFoundError:  # the sandbox's /proc does not show this process
        return True
    return False


def count_locks() -> int:
    """Number of file locks of the sandbox's processes. Counting stops a little above the limit."""
    file, listed = os.open("/proc/locks", os.O_RDONLY), b""
    try:
        while len(listed) < MAX_LOCKS_BYTES and (part := os.read(file, 1 << 16)):
            listed += part
    finally:
        os.close(file)
    # The list has the OFD locks of the whole machine. Programs in the sandbox cannot create OFD locks.
    return listed.count(b"\n") - listed.count(b": OFDLCK ")


def measure_processes(cpu_s: float, socket_kb: int) -> tuple[float, bool]:
    """Return the total memory of the sandbox's processes in kB, and True if a process has used up its CPU time.

    Pipes, sockets and mappings count with their highest possible kernel memory. Pages that several processes share
    count once for each process.
    """
    held_kb, is_late = 0.0, False
    opened: set[str] = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # the process has just ended
            used_s = read_cpu_s(pid)
            is_late = is_late or used_s >= (cpu_s if pid == "1" else cpu_s + CPU_GRACE_S)
            status = read_file(f"/proc/{pid}/status")  # begins with a name that the program can choose
            held_kb += sum(map(int, MEMORY.findall(status)))
            held_kb += MAPPING_KB * count_lines(f"/proc/{pid}/maps")
            opened.update(read_links(f"/proc/{pid}/fd"))
    num_sockets = sum(name.startswith("socket:") for name in opened)
    num_pipes = sum(name.startswith("pipe:") for name in opened)
    return held_kb + socket_kb * num_sockets + PIPE_KB * num_pipes, is_late


def read_cpu_s(pid: str) -> float:
    """CPU time of a process in seconds, without its children."""
    # The name before the last bracket may have arbitrary bytes.
    fields = read_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S


def read_links(folder: str) -> list[str]:
    targets = []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the process closed the file meanwhile
            targets.append(os.readlink(f"{folder}/{name}"))
    return targets


def count_lines(path: str) -> int:
    """Number of lines in a file of any size."""
    file, count = os.open(path, os.O_RDONLY), 0
    try:
        while part := os.read(file, 1 << 16):
            count += part.count(b"\n")
    finally:
        os.close(file)
    return count


def read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def write_file(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def create_group(settings: dict[str, Any]) -> MemoryGroup | None:
    """Create a cgroup for the program; None if this is not possible. Without a cgroup, only the watcher's measurements
    limit the program's memory."""
    if not settings["group_parent"]:
        return None
    try:
        # Files in the temporary folder count as memory of the cgroup.
        return MemoryGroup(settings["group_parent"], settings["memory_mb"] + settings["file_mb"] << 20)
    except OSError:
        return None


def main() -> int:
    """Run the program; returns its exit code, or 128 plus the number of the signal that ended it."""
    settings, status, starter = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(status, False)
    # The parent may have ignored or blocked these signals, which child processes inherit.
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    group = None
    try:
        program = json.load(sys.stdin)
        group = create_group(settings)
        enter_namespaces()
        end_with_parent(signal.SIGTERM)
        if os.getppid() != starter:  # the parent died before `end_with_parent`
            raise ProcessLookupError("the process that requested the program has ended")
        # SIGTERM is blocked until the child's id is known. SIGCHLD stays blocked, because `wait_for_end` polls for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])
        child = os.fork()
        if child == 0:
            if group is not None:
                with contextlib.suppress(OSError):  # not permitted: only the watcher limits the memory
                    os.write(group.members, b"0")
            become_program(settings, program, status)
    except BaseException as error:  # noqa: BLE001 - an unreported problem would be lost
        os.write(status, f"{type(error).__name__}: {error}".encode())
        if group is not None:
            group.remove()
        os._exit(1)
    kill_on_sigterm(child, group)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.close(status)
    code = wait_for_end(child, settings, group)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # another process may now get the child's process id
    if group is not None:
        group.remove()
    return code


if __name__ == "__main__":
    sys.exit(main())
