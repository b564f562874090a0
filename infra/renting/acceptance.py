"""Whether a fresh machine will do: its GPUs compute, also together, its disk and the link to it are fast enough.

Not here: what else the machine has (node_probe.py), giving it back when it will not do (provision.py).

On one of many machines that are rented out the driver lists GPUs and can use none of them, or they hang when they are
to compute together.

Machines that are rented out are now and then behind a link on which a checkpoint takes an hour, often in one direction
only, or have a disk of the network that writes as slowly.
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

LINK_BYTES = 4 << 20
DISK_BYTES = 64 << 20
ALLOWANCE_S = 15.0
"""For the start of an interpreter and round trips, on top of what the slowest speed that will do takes."""
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
"""Eight GPUs without persistence take a minute to wake up."""
PEER_TIMEOUT_S = 240.0
"""For importing torch from a cold disk, of which all but seconds is, and one sum over all GPUs."""
PEER_ALLOWANCE_S = 30.0
"""For the answer, on top of that."""
NOT_READY = 802
"""CUDA_ERROR_SYSTEM_NOT_READY: what joins the GPUs of a large machine is still being started."""


MIN_MEMORY_SHARE = 0.9
"""Of what was offered: the driver keeps a little, and some providers count in another GB."""


def require_gpus(session: Session, num_gpus: int, *, gpu_type: str = "", vram_gb: float = 0.0) -> str:
    """Have every GPU of a machine compute something; returns what was found, in words.

    Args:
        gpu_type: what was offered, in the provider's words.
        vram_gb: memory of each, as it was offered; 0 where nobody knows.

    Raises:
        UnfitMachineError: fewer of them can than were paid for, or they are others.
        TransientInfraError: they are not ready so far.
    """
    program = Path(gpu_trial.__file__).read_bytes()
    try:
        completed = session.run([session.python, ISOLATED, "-"], stdin=program, timeout_s=GPU_TIMEOUT_S)
    except CommandTimeoutError as error:
        raise UnfitMachineError(f"its GPUs did not answer within {GPU_TIMEOUT_S:.0f} s") from error
    except CommandFailedError as error:  # a driver that crashes takes the interpreter with it
        code = error.completed.exit_code
        raise UnfitMachineError(f"its GPUs cannot be tried (that ended with code {code})") from error
    found = read_answer(completed)
    if not found["has_driver"] and found["listed"]:
        raise UnfitMachineError(
            f"none of its {num_gpus} GPUs can compute (nvidia-smi lists {found['listed']}, but {found['problem']})"
        )
    if not found["has_driver"]:
        return "no driver of NVIDIA's, so no GPU was tried"
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
        raise UnfitMachineError(f"it has {what}, and {num_gpus}x {gpu_type} was offered")
    least_gb = min(found["memory"]) / _BYTES_PER_GB
    if least_gb < MIN_MEMORY_SHARE * vram_gb:
        raise UnfitMachineError(
            f"its GPUs ({what}) have {least_gb:.0f} GB of memory, and {vram_gb:.0f} GB were offered"
        )
    return what


def require_peers(session: Session, python: str, num_gpus: int, *, backend: str = "nccl") -> str:
    """Have the GPUs of a machine sum something up together; returns what was found, in words.

    Args:
        python: the interpreter that trains; where it has no torch so far, nothing is tried.
        backend: of torch.distributed; gloo does the same on the CPU.

    Raises:
        UnfitMachineError: they cannot, or hang.
    """
    command = [python, "-", backend, str(num_gpus), str(PEER_TIMEOUT_S)]
    program = Path(peer_trial.__file__).read_bytes()
    try:
        found = read_answer(session.run(command, stdin=program, timeout_s=PEER_TIMEOUT_S + PEER_ALLOWANCE_S))
        is_tried, problem = found["is_tried"], found["problem"]
    except (CommandFailedError, CommandTimeoutError) as error:
        is_tried, problem = True, str(error).strip().rpartition("\n")[2]
    if problem:
        raise UnfitMachineError(
            f"its {num_gpus} GPUs cannot compute together ({problem}): to take such machines, which are slower then, "
            "try NCCL_P2P_DISABLE=1, by `echo NCCL_P2P_DISABLE=1 >> /etc/nccl.conf` in node.setup"
        )
    if not is_tried:
        return f"no torch can use its {num_gpus} GPUs so far, so they were not tried together"
    return f"its {num_gpus} GPUs compute together"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeed:
    """What was measured, at least: small amounts, with the time of a round trip."""

    upload_mbit_s: float
    """From here to the machine, in 10^6 bit per second."""
    download_mbit_s: float
    disk_mb_s: float
    """Written to its disk, in 10^6 bytes per second."""

    def __str__(self) -> str:
        return (
            f"{self.upload_mbit_s:.0f} Mbit/s to it and {self.download_mbit_s:.0f} from it, its disk writes "
            f"{self.disk_mb_s:.0f} MB/s"
        )


def require_speed(session: Session, root: str, *, min_link_mbit_s: float, min_disk_mb_s: float) -> MachineSpeed:
    """Measure a machine, in seconds where it is fast enough.

    Args:
        root: folder on the disk that is measured; it is made where it is not there.
        min_link_mbit_s: 10^6 bit per second that have to get through, in either direction.
        min_disk_mb_s: 10^6 bytes per second that its disk has to write.

    Raises:
        UnfitMachineError: it is slower.
        InfraError: it cannot be asked.
    """
    bits = 8 * LINK_BYTES
    link_s = ALLOWANCE_S + bits / (min_link_mbit_s * _BITS_PER_MBIT)
    disk_s = ALLOWANCE_S + DISK_BYTES / (min_disk_mb_s * _BYTES_PER_MB)
    payload = os.urandom(LINK_BYTES)

    def take() -> float:
        began = time.monotonic()
        session.run([session.python, "-c", _TAKE], stdin=payload, timeout_s=link_s)
        return time.monotonic() - began

    def give() -> float:
        began = time.monotonic()
        session.run([session.python, "-c", _GIVE, str(LINK_BYTES)], timeout_s=link_s)
        return time.monotonic() - began

    def write() -> float:
        completed = session.run([session.python, "-c", _WRITE, root, str(DISK_BYTES)], timeout_s=disk_s)
        return float(last_line(completed))

    found = MachineSpeed(
        upload_mbit_s=_speed(take, bits / _BITS_PER_MBIT, link_s),
        download_mbit_s=_speed(give, bits / _BITS_PER_MBIT, link_s),
        disk_mb_s=_speed(write, DISK_BYTES / _BYTES_PER_MB, disk_s),
    )
    if min(found.upload_mbit_s, found.download_mbit_s) < min_link_mbit_s or found.disk_mb_s < min_disk_mb_s:
        raise UnfitMachineError(
            f"it is too slow ({found}; node.min_link_mbit_s is {min_link_mbit_s:g}, "
            f"node.min_disk_mb_s {min_disk_mb_s:g})"
        )
    return found


def _speed(move: Callable[[], float], amount: float, timeout_s: float) -> float:
    """Amount per second; of what did not end in time what it would have been at most."""
    try:
        return amount / max(move(), 1e-3)
    except CommandTimeoutError:
        return amount / timeout_s
