"""Record the load and memory of a training's GPUs in gpu_use.jsonl while the training runs.

    nvidia-smi, every ten seconds, in a thread ──> gpu_use.jsonl
        {"time": ..., "attempt": 1, "gpus": [{"gpu": 0, "use_percent": 97.0, "memory_gib": 61.2, "total_gib": 79.6}]}

Values that a GPU does not report are omitted. On machines without nvidia-smi, the file is not written.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rollouts_core.engine_kinds import ENGINES
from rollouts_core.job import RLJob, TrainingJob
from rollouts_core.metrics import append_line, open_for_lines

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
TIMEOUT_S = 30.0
"""Timeout of nvidia-smi, which takes seconds if it must first load the driver."""
END_S = 5.0
QUERY = "--query-gpu=index,utilization.gpu,memory.used,memory.total"
MIB_PER_GIB = 1024.0


@contextmanager
def sampled_gpu_use(path: Path, gpus: Sequence[str], *, attempt: int, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Append the load and memory of GPUs to a file at regular intervals while the `with` block runs.

    Args:
        gpus: numbers or UUIDs, as nvidia-smi accepts them.
    """
    if not gpus or shutil.which("nvidia-smi") is None:
        yield
        return
    ended = threading.Event()
    sample = partial(_sample_until, ended, path, gpus, attempt=attempt, interval_s=interval_s)
    thread = threading.Thread(target=sample, name="use of GPUs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(END_S)


def _sample_until(ended: threading.Event, path: Path, gpus: Sequence[str], *, attempt: int, interval_s: float) -> None:
    has_failed = False
    with open_for_lines(path) as file:
        while True:
            try:
                readings = query_gpu_use(gpus)
            except (OSError, subprocess.SubprocessError) as error:
                if not has_failed:
                    logger.warning("the load of GPUs %s cannot be read: %s", ",".join(gpus), error)
                has_failed, readings = True, []
            line = {"time": round(time.time(), 3), "attempt": attempt, "gpus": readings}
            try:
                if readings:
                    append_line(file, line)
            except OSError as error:
                logger.warning("%s cannot be written, so the load of GPUs is no longer recorded: %s", path, error)
                return
            if ended.wait(interval_s):
                return


def query_gpu_use(gpus: Sequence[str]) -> list[dict[str, float]]:
    """The current load and memory of GPUs, from nvidia-smi.

    Raises:
        OSError, SubprocessError: nvidia-smi cannot be started, or fails.
    """
    command = ["nvidia-smi", f"--id={','.join(gpus)}", QUERY, "--format=csv,noheader,nounits"]
    return parse_gpu_use(subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout)


def parse_gpu_use(text: str) -> list[dict[str, float]]:
    """Parse the output of nvidia-smi: per line a GPU's number, load in percent, used and total memory in MiB.

    Values such as [N/A] are omitted.
    """
    found = []
    for line in text.splitlines():
        gpu, *cells = (cell.strip() for cell in line.split(","))
        if not gpu.isdigit():
            continue
        reading: dict[str, float] = {"gpu": int(gpu)}
        for name, cell in zip(("use_percent", "memory_gib", "total_gib"), cells, strict=False):
            try:
                value = float(cell)
            except ValueError:
                continue
            reading[name] = value if name == "use_percent" else round(value / MIB_PER_GIB, 3)
        found.append(reading)
    return found


def gpus_in_use(job: TrainingJob) -> list[str]:
    """The GPUs of a training's process, and of the engines of an RL job if they run on this machine.

    Empty if the training computes on the CPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    gpus = [gpu.strip() for gpu in visible if gpu.strip() not in ("", "-1")]
    if isinstance(job, RLJob) and any(not ENGINES[each.kind].is_own and not each.lease_url for each in job.engines):
        gpus += [str(rank) for rank in job.deployment.engine_gpu_ranks or (0,)]
    return list(dict.fromkeys(gpus))
