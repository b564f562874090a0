"""The GPUs of a node according to its driver: name, memory, driver version, and the programs on each GPU.

    nvidia-smi --query-gpu ..., --query-compute-apps ...  ──> GpuState per GPU; an empty list without the driver

Not here: whether torch can use the GPUs (node_probe.py), which job holds them (supervisor/gpu_slots.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.session import Session

ASK_TIMEOUT_S = 60.0
MIB = 1 << 20
GPU_FIELDS = "uuid,name,memory.total,memory.free,driver_version"
PROGRAM_FIELDS = "gpu_uuid,pid,process_name,used_memory"
FORMAT = "--format=csv,noheader,nounits"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProgram:
    pid: int
    name: str
    used_gb: float
    """GPU memory that the program uses, in GB, or 0 if the driver does not report this number, for example in a
    container."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}{f', {self.used_gb:.1f} GB' if self.used_gb else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """The state of one GPU. Its rank is its index in the result of `read_gpus`. Sizes are in GB of 10^9 bytes."""

    name: str
    total_gb: float
    free_gb: float
    driver: str
    programs: tuple[GpuProgram, ...] = ()


def read_gpus(session: Session) -> list[GpuState]:
    """Return the GPUs of a node, or an empty list if the node has no GPUs, or if nvidia-smi does not report them."""
    gpus = _ask(session, f"--query-gpu={GPU_FIELDS}")
    return parse_gpus(gpus, _ask(session, f"--query-compute-apps={PROGRAM_FIELDS}")) if gpus else []


def parse_gpus(gpus: str, programs: str) -> list[GpuState]:
    """Parse nvidia-smi's outputs about the GPUs and about the programs on the GPUs."""
    running: dict[str, list[GpuProgram]] = {}
    for uuid, pid, *name, used in _rows(programs, at_least=4):
        if pid.isdecimal():
            program = GpuProgram(pid=int(pid), name=", ".join(name).rpartition("/")[2], used_gb=_gb(used))
            running.setdefault(uuid, []).append(program)
    return [
        GpuState(
            name=name,
            total_gb=_gb(total),
            free_gb=_gb(free),
            driver=driver,
            programs=tuple(running.get(uuid, ())),
        )
        for uuid, name, total, free, driver in _rows(gpus, at_least=5)
    ]


def driver_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a driver's version, or () if the text is not a version."""
    parts = text.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def _ask(session: Session, query: str) -> str:
    try:
        done = session.run(["nvidia-smi", query, FORMAT], timeout_s=ASK_TIMEOUT_S, check=False, may_repeat=True)
    except PermanentInfraError:  # nvidia-smi is not installed
        return ""
    return done.stdout.decode(errors="replace") if done.exit_code == 0 else ""


def _rows(text: str, *, at_least: int) -> Sequence[list[str]]:
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) >= at_least]


def _gb(mib: str) -> float:
    try:
        return float(mib) * MIB / 1e9
    except ValueError:  # nvidia-smi prints [N/A]
        return 0.0
