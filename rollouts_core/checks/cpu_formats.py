"""Warn if a training uses bfloat16 on a CPU that has no fast instructions for bfloat16.

Without AVX512-BF16 or AMX, bfloat16 is many times slower than float32. This module measures the slowdown, because torch
may not use all instructions that the CPU has (`ONEDNN_MAX_CPU_ISA`).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

import torch

from rollouts_core.config import Config, DeploymentConfig, PolicyConfig
from rollouts_core.findings import Caution

FAST_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names of bfloat16 instructions in /proc/cpuinfo, on x86 and ARM."""
SIZE = 512
NUM_TIMED = 3
MIN_FACTOR = 1.5


def warn_of_slow_bfloat16(config: Config, flags: Collection[str] | None = None) -> list[Caution]:
    """A warning for each training in bfloat16 on this machine's CPU, if float32 is faster there.

    Args:
        flags: instruction sets of the CPU; None reads /proc/cpuinfo.
    """
    found = [
        describe_slow_training(name, training.policy, config.deployment, flags=flags)
        for name, training in config.trainings.items()
    ]
    return [Caution(warning) for warning in found if warning]


def describe_slow_training(
    kind: str, policy: PolicyConfig, deployment: DeploymentConfig, *, flags: Collection[str] | None = None
) -> str:
    """A warning if a training uses bfloat16 on this machine's CPU and float32 is faster there; else "".

    Args:
        flags: instruction sets of the CPU; None reads /proc/cpuinfo.
    """
    is_on_gpu = torch.cuda.is_available() and not deployment.shares_cpu
    if policy.precision != "bfloat16" or policy.backend != "pytorch" or is_on_gpu:
        return ""
    setting = f"training.{kind}.policy.precision"
    return describe_slow_bfloat16(setting, 'set precision = "float32", or train on a GPU', flags=flags)


def describe_slow_bfloat16(setting: str, remedy: str, *, flags: Collection[str] | None = None) -> str:
    """A warning with the measured slowdown if bfloat16 is slower than float32 on this CPU; else "".

    Args:
        remedy: advice at the end of the warning.
        flags: instruction sets of the CPU; None reads /proc/cpuinfo.
    """
    factor = measure_factor()
    if factor < MIN_FACTOR:
        return ""
    lacks = FAST_FLAGS.isdisjoint(read_flags() if flags is None else flags)
    reason = "which has neither AVX512-BF16 nor AMX" if lacks else "although it has instructions for bfloat16"
    return f'{setting} "bfloat16" is about {factor:.0f} times slower than float32 on this CPU, {reason}: {remedy}'


def measure_factor() -> float:
    """Time of a bfloat16 matrix product on this machine divided by the time in float32. Takes a few milliseconds."""
    return _time_product(torch.bfloat16) / _time_product(torch.float32)


def _time_product(dtype: torch.dtype) -> float:
    matrix = torch.ones(SIZE, SIZE, dtype=dtype)
    times: list[float] = []
    for _ in range(NUM_TIMED + 1):  # the first product also prepares kernels
        began_at = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - began_at)
    return min(times[1:])


def read_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets of the first CPU; an empty set if the file `path` does not exist."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features")))
    return frozenset(next(found, []))
