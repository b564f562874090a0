"""Publishing a version to the embedded engine in a process of its own: as a directory, in files, in memory, and sent.

    python benchmarks/weight_sync.py --size 20M [--rounds 15] [--out weight-sync.json]

Each publish ends when the engine serves the version and all its tensors were proved to be the published ones. They
alternate in one process, on the same weights:

    directory           a model directory, flushed to the disk, as SGLang and vLLM take it
    files               segments in files, as for an embedded engine on another machine
    memory              segments in memory
    memory, attention   the projections of attention changed alone, as with LoRA
    memory, unchanged   nothing changed
    sent                through a process group over gloo
    sent, attention     the projections of attention changed alone
    sent, unchanged     nothing changed
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch
from inputs import SIZES, write_model
from safetensors.torch import load_file
from side_by_side import describe_machine, range_of, render_machine, render_table, write_results
from torch import Tensor

from rollouts_core.backends.protocol import ImmediateTrainFuture, TrainingBackend
from rollouts_core.config import WeightTransfer
from rollouts_core.embedded.server import serve
from rollouts_core.engines import PublishTarget, SGLangEngine, publish_weights
from rollouts_core.engines.protocol import SegmentAccess

STEP = 1e-4
"""What is added to the weights between two versions."""


class DirectoryEngine(SGLangEngine):
    """A client as of an engine that takes model directories alone."""

    async def segment_access(self) -> SegmentAccess:
        """None."""
        return SegmentAccess.NONE


class FileEngine(SGLangEngine):
    """A client as of an embedded engine on another machine."""

    async def segment_access(self) -> SegmentAccess:
        """Files."""
        return SegmentAccess.FILES


@dataclass
class Trainer:
    """As much of a backend as a publish asks for."""

    weights: dict[str, Tensor]
    weight_version: int = 0

    def get_weights(self) -> ImmediateTrainFuture[dict[str, Tensor]]:
        """The weights."""
        return ImmediateTrainFuture(self.weights)

    def step(self, is_changed: Callable[[str], bool]) -> None:
        """Change some tensors."""
        for name, tensor in self.weights.items():
            if is_changed(name):
                tensor += STEP
        self.weight_version += 1


@dataclass(frozen=True)
class Contender:
    """One way to publish."""

    client: type[SGLangEngine]
    is_changed: Callable[[str], bool]
    transfer: WeightTransfer = "auto"


def is_of_attention(name: str) -> bool:
    """True for the projections of attention."""
    return "self_attn" in name and "_proj" in name


CONTENDERS = {
    "directory": Contender(DirectoryEngine, lambda name: True),
    "files": Contender(FileEngine, lambda name: True),
    "memory": Contender(SGLangEngine, lambda name: True),
    "memory, attention": Contender(SGLangEngine, is_of_attention),
    "memory, unchanged": Contender(SGLangEngine, lambda name: False),
    "sent": Contender(SGLangEngine, lambda name: True, "gloo"),
    "sent, attention": Contender(SGLangEngine, is_of_attention, "gloo"),
    "sent, unchanged": Contender(SGLangEngine, lambda name: False, "gloo"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="20M")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="of the trainer and of the engine, which work in turns")
    parser.add_argument("--folder", type=Path, help="where files go (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = describe_machine(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model_dir = write_model(Path(folder) / "model", SIZES[options.size])
        num_bytes = (model_dir / "model.safetensors").stat().st_size
        seconds = asyncio.run(measure_publishes(model_dir, Path(folder) / "weights", options))
    write_results(
        options.out,
        {"script": "weight_sync", "size": options.size, "machine": machine, "bytes": num_bytes, "seconds": seconds},
    )
    rows = [
        [
            name,
            range_of(values).render(4),
            range_of([first / own for first, own in zip(seconds["directory"], values, strict=True)]).render(1),
        ]
        for name, values in seconds.items()
    ]
    print(render_machine(machine) + "\n")
    print(render_table([f"{num_bytes / 2**20:,.0f} MiB", "seconds", "directory / this"], rows))


async def measure_publishes(model_dir: Path, weights_dir: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each kind of publish by name, over the rounds."""
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    process = get_context("spawn").Process(target=run_engine, args=(model_dir, options.threads, sender), daemon=True)
    process.start()
    url = receiver.recv()
    trainer = Trainer(load_file(model_dir / "model.safetensors"))
    backend = cast(TrainingBackend, trainer)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    targets = {
        name: PublishTarget(
            weights_dir=weights_dir / name,
            model_config=model_dir / "config.json",
            prefix="bench",
            transfer=contender.transfer,
        )
        for name, contender in CONTENDERS.items()
    }
    for round_number in range(options.rounds + 1):
        for name, contender in CONTENDERS.items():
            async with contender.client(url) as engine:
                trainer.step(lambda _: False)
                await publish_weights(backend, [engine], targets[name])  # the engine has that of another contender
                trainer.step(contender.is_changed)
                began = time.perf_counter()
                await publish_weights(backend, [engine], targets[name])
            if round_number:
                seconds[name].append(time.perf_counter() - began)
    process.terminate()
    return seconds


def run_engine(model_dir: Path, num_threads: int, sender: Connection) -> None:
    """Serve the model until the measuring process ends."""
    serve(model_dir, port=0, num_threads=num_threads, max_running_requests=8, on_ready=sender.send)


if __name__ == "__main__":
    main()
