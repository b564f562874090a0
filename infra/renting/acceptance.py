"""Check a new machine: its GPUs must compute, alone and together, and its link and disk must be fast enough.

The driver of a rented machine may list GPUs that cannot compute. GPUs may hang when they compute together. The network
link may be so slow, often in only one direction, that copying a checkpoint takes an hour. Writing a checkpoint to a
network disk may take as long.

Not here: other properties of a machine (node_probe.py), the release of an unfit machine (provision.py).
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollouts.infra.errors import CommandFailedError, CommandTimeoutError, TransientInfraError, UnfitMachineError
from rollouts.infra.node_agent import ISOLATED
from rollouts.infra.offers import is_same_model
from rollouts.infra.renting import gpu_trial, peer_trial
from rollouts.infra.session import Session, last_line, read_answer

_LINK_BYTES = 4 << 20
_DISK_BYTES = 64 << 20
ALLOWANCE_S = 15.0
"""Seconds for starting an interpreter and for round trips, in addition to the time at the slowest allowed speed."""
_BITS_PER_MBIT, _BYTES_PER_MB, _BYTES_PER_GB = 1e6, 1e6, 1e9

_TAKE = "import sys; sys.stdin.buffer.read()"
_GIVE = "import os, sys; sys.stdout.buffer.write(os.urandom(int(sys.argv[1])))"
_WRITE = """
import os, sys, tempfile, time
os.makedirs(sys.argv[1], exist_ok=True)
piece = os.urandom(1 << 20)
with tempfile.TemporaryFile(dir=sys.argv[1]) as file:
    began = time.monotonic()
    for _ in range(int(sys.argv[2]) >> 20):
        file.write(piece)
    file.flush()
    os.fsync(file.fileno())
    print(time.monotonic() - began)
"""


GPU_TIMEOUT_S = 120.0
"""Time limit of the GPU test in seconds. Eight GPUs without persistence mode take a minute to initialize."""
PEER_TIMEOUT_S = 240.0
"""Time limit in seconds for importing torch and computing one sum over all GPUs. Importing torch from a cold disk takes
most of this time."""
_PEER_ALLOWANCE_S = 30.0
"""Seconds to wait for the peer test's answer after PEER_TIMEOUT_S, which the test itself enforces."""
NOT_READY = 802
"""CUDA_ERROR_SYSTEM_NOT_READY: the interconnect between the GPUs of a large machine is still starting."""


_MIN_MEMORY_SHARE = 0.9
"""Share of the offered memory that each GPU must have. The share is below 1, because the driver reserves some memory
and some providers use a GB other than 10^9 bytes."""


def require_gpus(session: Session, num_gpus: int, *, gpu_type: str = "", vram_gb: float = 0.0) -> str:
    """Test that every GPU of a machine can compute. Returns a description of the GPUs.

    Args:
        gpu_type: the offered type, as the provider calls it.
        vram_gb: the offered memory of each GPU; 0 if unknown.

    Raises:
        UnfitMachineError: fewer GPUs work than were offered, or the GPUs differ from the offer.
        TransientInfraError: the GPUs are not ready yet.
    """
    program = Path(gpu_trial.__file__).read_bytes()
    try:
        completed = session.run([session.python, ISOLATED, "-"], stdin=program, timeout_s=GPU_TIMEOUT_S)
    except CommandTimeoutError as error:
        raise UnfitMachineError(f"its GPUs did not answer within {GPU_TIMEOUT_S:.0f} s") from error
    except CommandFailedError as error:  # a crash of the driver also crashes the interpreter
        code = error.completed.exit_code
        raise UnfitMachineError(f"its GPUs cannot be tested (the test ended with code {code})") from error
    found = read_answer(completed)
    if not found["has_driver"] and found["listed"]:
        raise UnfitMachineError(
            f"its {num_gpus} GPUs cannot compute (nvidia-smi lists {found['listed']}, but {found['problem']})"
        )
    if not found["has_driver"]:
        return "no NVIDIA driver, so its GPUs were not tested"
    if found["code"] == NOT_READY:
        raise TransientInfraError(f"its GPUs are not ready ({found['problem']})")
    names = found["gpus"]
    if found["problem"] or len(names) < num_gpus:
        raise UnfitMachineError(
            f"{len(names)} of its {num_gpus} GPUs can compute ({found['problem'] or 'the driver has no more'})"
        )
    what = f"{len(names)}x {' and '.join(sorted(set(names)))}"
    others = [name for name in names if not is_same_model(gpu_type, name)]
    if others:
        raise UnfitMachineError(f"it has {what}, but {num_gpus}x {gpu_type} was offered")
    least_gb = min(found["memory"]) / _BYTES_PER_GB
    if least_gb < _MIN_MEMORY_SHARE * vram_gb:
        raise UnfitMachineError(
            f"its GPUs ({what}) have {least_gb:.0f} GB of memory, but {vram_gb:.0f} GB were offered"
        )
    return what


def require_peers(session: Session, python: str, num_gpus: int, *, backend: str = "nccl") -> str:
    """Test that the GPUs of a machine can compute a sum together. Returns a description of the result.

    Args:
        python: the training's interpreter. If torch is not installed for this interpreter yet, the test is skipped.
        backend: the backend of torch.distributed. gloo runs the test on the CPU.

    Raises:
        UnfitMachineError: the GPUs fail or hang while they compute the sum.
    """
    command = [python, "-", backend, str(num_gpus), str(PEER_TIMEOUT_S)]
    program = Path(peer_trial.__file__).read_bytes()
    try:
        found = read_answer(session.run(command, stdin=program, timeout_s=PEER_TIMEOUT_S + _PEER_ALLOWANCE_S))
        is_tried, problem = found["is_tried"], found["problem"]
    except (CommandFailedError, CommandTimeoutError) as error:
        is_tried, problem = True, str(error).strip().rpartition("\n")[2]
    if problem:
        raise UnfitMachineError(
            f"its {num_gpus} GPUs cannot compute together ({problem}): to use such machines at a lower speed, set "
            "NCCL_P2P_DISABLE=1, by `echo NCCL_P2P_DISABLE=1 >> /etc/nccl.conf` in node.setup"
        )
    if not is_tried:
        return f"torch cannot use its {num_gpus} GPUs yet, so they were not tested together"
    return f"its {num_gpus} GPUs compute together"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeed:
    """Lower bounds of the measured speeds. The real speeds are higher, because the measured times contain a round
    trip."""

    upload_mbit_s: float
    """Speed from this machine to the rented machine, in 10^6 bit per second."""
    download_mbit_s: float
    disk_mb_s: float
    """Speed of writing to the rented machine's disk, in 10^6 bytes per second."""

    def __str__(self) -> str:
        return (
            f"{self.upload_mbit_s:.0f} Mbit/s to it and {self.download_mbit_s:.0f} from it, its disk writes "
            f"{self.disk_mb_s:.0f} MB/s"
        )


def require_speed(session: Session, root: str, *, min_link_mbit_s: float, min_disk_mb_s: float) -> MachineSpeed:
    """Measure the speed of a machine's link and disk. On a fast machine, this takes a few seconds.

    Args:
        root: folder on the disk to measure. A missing folder is created.
        min_link_mbit_s: required speed in both directions, in 10^6 bit per second.
        min_disk_mb_s: required speed of writing to the disk, in 10^6 bytes per second.

    Raises:
        UnfitMachineError: the machine is slower than required.
        InfraError: the machine cannot be reached.
    """
    bits = 8 * _LINK_BYTES
    link_s = ALLOWANCE_S + bits / (min_link_mbit_s * _BITS_PER_MBIT)
    disk_s = ALLOWANCE_S + _DISK_BYTES / (min_disk_mb_s * _BYTES_PER_MB)
    payload = os.urandom(_LINK_BYTES)

    def take() -> float:
        began = time.monotonic()
        session.run([session.python, "-c", _TAKE], stdin=payload, timeout_s=link_s)
        return time.monotonic() - began

    def give() -> float:
        began = time.monotonic()
        session.run([session.python, "-c", _GIVE, str(_LINK_BYTES)], timeout_s=link_s)
        return time.monotonic() - began

    def write() -> float:
        completed = session.run([session.python, "-c", _WRITE, root, str(_DISK_BYTES)], timeout_s=disk_s)
        return float(last_line(completed))

    found = MachineSpeed(
        upload_mbit_s=_speed(take, bits / _BITS_PER_MBIT, link_s),
        download_mbit_s=_speed(give, bits / _BITS_PER_MBIT, link_s),
        disk_mb_s=_speed(write, _DISK_BYTES / _BYTES_PER_MB, disk_s),
    )
    if min(found.upload_mbit_s, found.download_mbit_s) < min_link_mbit_s or found.disk_mb_s < min_disk_mb_s:
        raise UnfitMachineError(
            f"it is too slow ({found}; node.min_link_mbit_s is {min_link_mbit_s:g}, "
            f"node.min_disk_mb_s {min_disk_mb_s:g})"
        )
    return found


def _speed(move: Callable[[], float], amount: float, timeout_s: float) -> float:
    """Time a call of `move` and return `amount` divided by its seconds. If `move` times out, return an upper bound of
    the speed."""
    try:
        return amount / max(move(), 1e-3)
    except CommandTimeoutError:
        return amount / timeout_s
