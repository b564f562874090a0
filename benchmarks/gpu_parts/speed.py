"""How fast training on the GPU is, what the GPU waits for, and what publications and saves cost.

Not here: what is computed (correctness.py). Nothing here can fail by being slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_parts.backends import Receiver
from gpu_parts.checking import Check, Place, is_installed
from gpu_parts.models import create_backend, packed_rows, take_step, write_sized_model
from gpu_parts.record import Figures
from rollouts_core import PyTorchTrainingBackend, TrainBatch
from rollouts_core.engines.transfer.cuda_ipc import share

ROW_LENGTH, NUM_ROWS = 2048, 4
NUM_STEPS = 3
PUBLISHED_BYTES = 10**9
SYNC_WARNING = "called a synchronizing"
"""In what torch warns of where the host waits for the GPU (torch.cuda.set_sync_debug_mode)."""
THREADS = 4
"""CPU threads of each contender on a GPU machine."""


def create_speed_backend(place: Place) -> PyTorchTrainingBackend:
    """0.5B in bfloat16, all weights trained."""
    model = write_sized_model(place, place.choose("0.5B", "0.16M"))
    return create_backend(model, place.device, precision=place.choose("bfloat16", "float32"))


def step_batches(place: Place) -> list[TrainBatch]:
    """A step of packed rows of 2,048 tokens."""
    return packed_rows(num_rows=place.choose(NUM_ROWS, 1), row_length=place.choose(ROW_LENGTH, 64), vocab_size=64)


def measure_idle(place: Place) -> Figures:
    """The share of some steps in which no kernel runs, by torch's profiler."""
    backend, batches = create_speed_backend(place), step_batches(place)
    take_step(backend, batches)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(NUM_STEPS):
            take_step(backend, batches)
        torch.cuda.synchronize()
    trace = place.folder / "trace.json"
    profiled.export_chrome_trace(str(trace))
    kernels = read_kernels(json.loads(trace.read_text()))
    return {"idle %": 100 * idle_share(kernels), "kernels per step": len(kernels) / NUM_STEPS}


def read_kernels(trace: Mapping[str, Any]) -> list[tuple[float, float]]:  # Any: JSON
    """Begin and end of all kernels and copies in a trace, in microseconds."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [event for event in trace["traceEvents"] if event.get("cat") in kinds]
    return [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events]


def idle_share(intervals: Sequence[tuple[float, float]]) -> float:
    """The share of the time from the first begin to the last end that no interval covers."""
    if not intervals:
        return 1.0
    covered, end = 0.0, min(begin for begin, _ in intervals)
    first = end
    for begin, until in sorted(intervals):
        covered += max(0.0, until - max(begin, end))
        end = max(end, until)
    return 1.0 - covered / (end - first)


def count_host_syncs(place: Place) -> Figures:
    """How often a step makes the host wait for the GPU."""
    backend, batches = create_speed_backend(place), step_batches(place)
    take_step(backend, batches)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            take_step(backend, batches * 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"waits of a step of 2 micro-batches": float(sum(SYNC_WARNING in str(each.message) for each in caught))}


def measure_publication(place: Place) -> Figures:
    """Seconds to hand 1 GB of the trainer's memory to another process, which maps it and digests it."""
    num_values = place.choose(PUBLISHED_BYTES, 10**6) // 2 // 20
    weights = {f"layer {i}": torch.randn(num_values, device=place.device).bfloat16() for i in range(20)}
    with Receiver() as receiver:
        receiver.take(share({"first": torch.ones(1)}, place.device))  # its imports
        began = time.perf_counter()
        shared = share(weights, place.device)
        shared_s = time.perf_counter() - began
        receiver.take(shared)
        seconds = time.perf_counter() - began
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    return {"GB": num_bytes / 1e9, "s to share": shared_s, "s with sha256 at the other end": seconds}


def measure_save(place: Place) -> Figures:
    """Measure the cost of a checkpoint to the loop: its call, and the slowdown of steps during the write."""
    backend, batches = create_speed_backend(place), step_batches(place)
    seconds = asyncio.run(_save_beside_steps(backend, batches, place.folder))
    return {"s to write": seconds["whole"], "s of the call": seconds["call"], "s lost by steps": seconds["lost"]}


async def _save_beside_steps(
    backend: PyTorchTrainingBackend, batches: Sequence[TrainBatch], folder: Path
) -> dict[str, float]:
    async def train(num_steps: int) -> float:
        began = time.perf_counter()
        for _ in range(num_steps):
            for batch in batches:
                await backend.forward_backward(batch).result()
            await backend.optim_step().result()
        return (time.perf_counter() - began) / num_steps

    await train(1)
    await backend.save_checkpoint(folder / "first", {"step": 1}).result()  # allocates the copy's memory
    alone = await train(NUM_STEPS)
    began = time.perf_counter()
    saving = backend.save_checkpoint(folder / "second", {"step": 1})
    call = time.perf_counter() - began
    lost = 0.0
    while not saving.done():
        lost += await train(1) - alone
    await saving.result()
    return {"whole": time.perf_counter() - began, "call": call, "lost": max(0.0, lost)}


def compare_sft(size: str, place: Place) -> Figures:
    """Trained tokens per second of SFT by sft_speed.py, in turns with a bare packed loop and TRL."""
    words = place.choose(
        ["--size", size, "--dtype", "bf16", "--row-length", str(ROW_LENGTH), "--rows", str(NUM_ROWS)],
        ["--size", "0.16M", "--rows", "2"],
    )
    contenders = ["ours", "bare packed", *(["trl bfd"] if is_installed("trl") else [])]
    told = run_benchmark("sft_speed", [*words, "--contenders", ",".join(contenders)], place)
    figures: Figures = {}
    for name, speeds in told["tokens_per_s"].items():
        figures[f"{name}, tokens/s"] = statistics.median(speeds)
        if name != "ours":
            ratios = [own / other for own, other in zip(told["tokens_per_s"]["ours"], speeds, strict=True)]
            figures[f"ours / {name}"] = statistics.median(ratios)
    if "mfu" in told:
        figures |= {"MFU %": 100 * told["mfu"]["ours"]} if math.isfinite(told["mfu"]["ours"]) else {}
        figures |= {"peak GiB": told["peak_gib"]["ours"]}
    return figures


def compare_grpo(place: Place) -> Figures:
    """Seconds of a GRPO step's training part by grpo_speed.py, in turns with TRL's, with completions given."""
    contenders = ["ours", *(["trl"] if is_installed("trl") else [])]
    words = place.choose(["--size", "0.5B", "--dtype", "bf16", "--given", "512"], ["--size", "0.16M", "--given", "8"])
    told = run_benchmark("grpo_speed", [*words, "--contenders", ",".join(contenders)], place)
    figures: Figures = {f"{name}, s": parts["train_s"] for name, parts in told["parts_s"].items()}
    return figures | ({"TRL / ours": told["trl_train_s / ours"]} if told["trl_train_s / ours"] else {})


def run_benchmark(script: str, words: Sequence[str], place: Place) -> dict[str, Any]:  # Any: JSON
    """Run one of the benchmarks for a few rounds; returns its figures. Its report goes to standard error."""
    if place.device == "cuda":
        torch.cuda.empty_cache()  # the contenders are other processes
    rounds = ["--rounds", place.choose("3", "1"), "--turn-s", place.choose("3", "0.1")]
    common = ["--threads", str(place.choose(THREADS, 1)), "--device", place.device]
    with contextlib.redirect_stdout(sys.stderr):
        told: dict[str, Any] = importlib.import_module(script).main([*words, *rounds, *common])
    return told


CHECKS = [
    Check(name="waits of the host per SFT step", run=count_host_syncs, needs_gpu=True, is_measurement=True),
    Check(name="idle share of the GPU in SFT of 0.5B", run=measure_idle, needs_gpu=True, is_measurement=True),
    Check(name="publication of 1 GB by handles", run=measure_publication, is_measurement=True),
    Check(name="SFT of 0.5B, packed rows of 2,048", run=partial(compare_sft, "0.5B"), is_measurement=True),
    Check(
        name="SFT of 1.5B, packed rows of 2,048", run=partial(compare_sft, "1.5B"), needs_gpu=True, is_measurement=True
    ),
    Check(name="training part of a GRPO step of 0.5B", run=compare_grpo, is_measurement=True),
    Check(name="a save of 0.5B beside training", run=measure_save, is_measurement=True),
]
