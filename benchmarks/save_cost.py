"""What a checkpoint costs the training loop, against the time that writing it takes and against the bare disk.

    python benchmarks/save_cost.py [--size 20M] [--rounds 5] [--out save-cost.json]

Three things alternate in one process, on the same folder:

    whole      save_checkpoint and its result, nothing else going on: the synchronous time
    seen       the loop's share: the call, until it returns its future; training goes on while a thread writes
    raw        the same number of bytes in one file, written and flushed to the disk

Steps that run while the thread writes share the cores with it: `slower` is what they take beyond the same steps alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from inputs import PAD_ID, SIZES, as_samples, make_documents, write_model
from side_by_side import describe_machine, range_of, render_machine, render_table, write_results

from rollouts_core import PyTorchTrainingBackend, TrainBatch, build_batch, create_pytorch_backend
from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.config import ModelConfig, OptimConfig

DOCUMENTS_PER_STEP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="20M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = describe_machine(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds, num_bytes = asyncio.run(measure_saves(Path(folder), options))
    shares = [seen / whole for seen, whole in zip(seconds["seen"], seconds["whole"], strict=True)]
    results = {"script": "save_cost", "size": options.size, "machine": machine, "bytes": num_bytes, "seconds": seconds}
    write_results(options.out, {**results, "shares": shares})
    rows = [[name, range_of(values).render(3)] for name, values in seconds.items()]
    rows.append(["seen / whole", range_of(shares).render(3)])
    print(render_machine(machine) + "\n")
    print(render_table([f"{num_bytes / 2**20:,.0f} MiB", "seconds"], rows))


async def measure_saves(folder: Path, options: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Seconds of each thing by name, over the rounds, and the bytes of a checkpoint."""
    backend = create_pytorch_backend(
        ModelConfig(path=str(write_model(folder / "model", SIZES[options.size]))),
        OptimConfig(),
        create_cross_entropy_loss(),
        num_steps=1_000_000,
        device="cpu",
    )
    documents = as_samples(make_documents(SIZES[options.size].vocab_size, count=DOCUMENTS_PER_STEP))
    batch = build_batch([[sample] for sample in documents], pad_id=PAD_ID)
    checkpoint = folder / "step_1"
    await train_once(backend, batch)
    await backend.save_checkpoint(checkpoint, {"step": 1}).result()  # allocates the copy's memory
    num_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    seconds: dict[str, list[float]] = {"whole": [], "seen": [], "slower": [], "raw": []}
    for _ in range(options.rounds):
        shutil.rmtree(checkpoint)
        began = time.perf_counter()
        await backend.save_checkpoint(checkpoint, {"step": 1}).result()
        seconds["whole"].append(time.perf_counter() - began)
        shutil.rmtree(checkpoint)
        seen, slower = await save_while_training(backend, batch, checkpoint, whole_s=seconds["whole"][-1])
        seconds["seen"].append(seen)
        seconds["slower"].append(slower)
        seconds["raw"].append(write_raw(folder / "raw", num_bytes))
    return seconds, num_bytes


async def save_while_training(
    backend: PyTorchTrainingBackend, batch: TrainBatch, checkpoint: Path, *, whole_s: float
) -> tuple[float, float]:
    """Seconds that the call takes, and that the steps take longer than without a save."""
    alone = [await train_once(backend, batch) for _ in range(3)]
    num_steps = max(1, round(2 * whole_s / min(alone)))
    alone = [await train_once(backend, batch) for _ in range(num_steps)]
    began = time.perf_counter()
    saving = backend.save_checkpoint(checkpoint, {"step": 1})
    seen = time.perf_counter() - began
    beside = [await train_once(backend, batch) for _ in range(num_steps)]
    await saving.result()
    return seen, sum(beside) - sum(alone)


async def train_once(backend: PyTorchTrainingBackend, batch: TrainBatch) -> float:
    """One step; returns its seconds."""
    began = time.perf_counter()
    await backend.forward_backward(batch).result()
    await backend.optim_step().result()
    return time.perf_counter() - began


def write_raw(path: Path, num_bytes: int) -> float:
    """Seconds to write so many bytes and flush them to the disk."""
    block: Sequence[int] = os.urandom(1 << 20)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(num_bytes // len(block) + 1):
            file.write(bytes(block))
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


if __name__ == "__main__":
    main()
