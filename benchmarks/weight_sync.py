"""Publishing a version to the embedded engine in a process of its own: as a directory, in files, in memory, and sent.

    python benchmarks/weight_sync.py --size 20M [--rounds 15] [--out weight-sync.json]
    python benchmarks/weight_sync.py --compute          the bytes for models that this machine has no room for

Each publish ends when the engine serves the version and all its tensors were proved to be the published ones. They
alternate in one process, on the same weights:

    directory           a model directory, flushed to the disk, as SGLang and vLLM take it
    files               segments in files, as for an embedded engine on another machine
    memory              segments in memory
    memory, merged      the linear layers changed, as with merged adapters
    memory, adapters    the adapters of these layers changed, of rank 16
    memory, attention   the projections of attention changed alone
    memory, unchanged   nothing changed
    sent                through a process group over gloo
    sent, merged        the linear layers changed, as with merged adapters
    sent, adapters      the adapters of these layers changed, of rank 16
    sent, attention     the projections of attention changed alone
    sent, unchanged     nothing changed
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from inputs import SIZES, write_model
from safetensors.torch import load_file
from side_by_side import describe_machine, range_of, render_machine, render_table, write_results
from torch import Tensor

from rollouts_core.backends.protocol import ImmediateTrainFuture, TrainingBackend
from rollouts_core.config import WeightTransfer
from rollouts_core.embedded.adapters import DOWN, UP, is_adapter
from rollouts_core.embedded.server import serve
from rollouts_core.engines import PublishTarget, SGLangEngine, publish_weights
from rollouts_core.engines.protocol import SegmentAccess
from rollouts_core.engines.transfer.shared_memory import SegmentedWeights
from rollouts_core.engines.transfer.versions import SentWeights

if TYPE_CHECKING:
    from rollouts_core.engines.protocol import Weights

STEP = 1e-4
"""Change of each weight between two versions."""
RANK = 16
"""Rank of the adapters."""
LINEAR = re.compile(r"(self_attn|mlp)\.\w+_proj\.weight$")
"""Weights that have adapters."""
QWEN3 = {
    "Qwen3-0.6B": (1024, 28, 16, 8, 3072, True),
    "Qwen3-1.7B": (2048, 28, 16, 8, 6144, True),
    "Qwen3-4B": (2560, 36, 32, 8, 9728, True),
    "Qwen3-8B": (4096, 36, 32, 8, 12288, False),
}
"""Hidden size, layers, query heads, key-value heads, width of the feed-forward layer, and whether the head is tied, of
the models' config.json; all have heads of 128 and 151,936 tokens."""
QWEN3_HEAD, QWEN3_VOCABULARY = 128, 151_936


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
    adapters: dict[str, Tensor]
    weight_version: int = 0
    has_adapters: bool = False
    """Whether the adapters are published apart."""

    def get_weights(self) -> ImmediateTrainFuture[dict[str, Tensor]]:
        """The weights."""
        return ImmediateTrainFuture(self.weights)

    def get_adapters(self) -> ImmediateTrainFuture[dict[str, Tensor]]:
        """The adapters, if these are published."""
        return ImmediateTrainFuture(self.adapters if self.has_adapters else {})

    def get_base_weights(self) -> ImmediateTrainFuture[dict[str, Tensor]]:
        """The weights that the adapters belong to."""
        return self.get_weights()

    def step(self, is_changed: Callable[[str], bool]) -> None:
        """Change some tensors."""
        for name, tensor in {**self.weights, **self.adapters}.items():
            if is_changed(name):
                tensor += STEP
        self.weight_version += 1


def adapters_for(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters of all linear layers."""
    adapters: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if LINEAR.search(name):
            layer, (num_out, num_in) = name.removesuffix(".weight"), weight.shape
            adapters |= {layer + DOWN: torch.randn(RANK, num_in), layer + UP: torch.zeros(num_out, RANK)}
    return adapters


@dataclass(frozen=True)
class Contender:
    """One way to publish."""

    client: type[SGLangEngine]
    is_changed: Callable[[str], bool]
    transfer: WeightTransfer = "auto"
    has_adapters: bool = False


def is_linear(name: str) -> bool:
    """True for weights that have adapters."""
    return bool(LINEAR.search(name))


def is_of_attention(name: str) -> bool:
    """True for the projections of attention."""
    return "self_attn" in name and "_proj" in name


CONTENDERS = {
    "directory": Contender(DirectoryEngine, lambda name: True),
    "files": Contender(FileEngine, lambda name: True),
    "memory": Contender(SGLangEngine, lambda name: True),
    "memory, merged": Contender(SGLangEngine, is_linear),
    "memory, adapters": Contender(SGLangEngine, is_adapter, has_adapters=True),
    "memory, attention": Contender(SGLangEngine, is_of_attention),
    "memory, unchanged": Contender(SGLangEngine, lambda name: False),
    "sent": Contender(SGLangEngine, lambda name: True, "gloo"),
    "sent, merged": Contender(SGLangEngine, is_linear, "gloo"),
    "sent, adapters": Contender(SGLangEngine, is_adapter, "gloo", has_adapters=True),
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
    parser.add_argument("--compute", action="store_true", help="print the bytes for larger models, and end")
    options = parser.parse_args()
    if options.compute:
        rows = [[name, *compute_megabytes(*shape)] for name, shape in QWEN3.items()]
        print(
            render_table(["MB of a publication", "whole, bfloat16", "merged, float32", f"adapters, rank {RANK}"], rows)
        )
        return
    torch.set_num_threads(options.threads)
    machine = describe_machine(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model_dir = write_model(Path(folder) / "model", SIZES[options.size])
        num_bytes = (model_dir / "model.safetensors").stat().st_size
        seconds, sent_bytes = asyncio.run(measure_publishes(model_dir, Path(folder) / "weights", options))
    write_results(
        options.out,
        {
            "script": "weight_sync",
            "size": options.size,
            "machine": machine,
            "bytes": num_bytes,
            "seconds": seconds,
            "bytes_of_publication": sent_bytes,
        },
    )
    rows = [
        [
            name,
            f"{sent_bytes[name] / 2**20:.2f}",
            range_of(values).render(4),
            range_of([first / own for first, own in zip(seconds["directory"], values, strict=True)]).render(1),
        ]
        for name, values in seconds.items()
    ]
    print(render_machine(machine) + "\n")
    print(render_table([f"{num_bytes / 2**20:,.0f} MiB", "MiB written", "seconds", "directory / this"], rows))


def compute_megabytes(
    hidden: int, num_layers: int, num_heads: int, num_kv_heads: int, intermediate: int, is_tied: bool
) -> list[str]:
    """MB (10^6 bytes) of the whole model in bfloat16, of its linear layers in float32, and of their adapters."""
    queries, keys = num_heads * QWEN3_HEAD, num_kv_heads * QWEN3_HEAD
    attention = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    linear = num_layers * [*attention, (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    num_linear = sum(num_out * num_in for num_out, num_in in linear)
    num_others = QWEN3_VOCABULARY * hidden * (1 if is_tied else 2)  # norms are not worth counting
    num_adapters = sum(RANK * (num_out + num_in) for num_out, num_in in linear)
    return [f"{num / 1e6:,.0f}" for num in (2 * (num_linear + num_others), 4 * num_linear, 4 * num_adapters)]


def count_bytes(before: Weights | None, published: Weights | None) -> int:
    """Bytes of a version's tensors that are not shared with the version before."""
    if isinstance(published, SegmentedWeights):
        old = before.placed if isinstance(before, SegmentedWeights) else {}
        new = {name: placed for name, placed in published.placed.items() if old.get(name) is not placed}
        return sum(placed.segment.tensors[name].nbytes for name, placed in new.items())
    if isinstance(published, SentWeights):
        kept = before.tensors if isinstance(before, SentWeights) else {}
        return sum(tensor.nbytes for name, tensor in published.tensors.items() if kept.get(name) is not tensor)
    assert isinstance(published, Path), "each contender publishes in one of these ways"
    return (published / "model.safetensors").stat().st_size


async def measure_publishes(
    model_dir: Path, weights_dir: Path, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each kind of publish by name, over the rounds, and the bytes of the last one."""
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    process = get_context("spawn").Process(target=run_engine, args=(model_dir, options.threads, sender), daemon=True)
    process.start()
    url = receiver.recv()
    weights = load_file(model_dir / "model.safetensors")
    trainer = Trainer(weights, adapters_for(weights))
    backend = cast(TrainingBackend, trainer)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    sent_bytes: dict[str, int] = {}
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
                trainer.has_adapters = contender.has_adapters
                trainer.step(lambda _: False)
                await publish_weights(backend, [engine], targets[name])  # the engine has that of another contender
                before = targets[name].newest.weights
                trainer.step(contender.is_changed)
                began = time.perf_counter()
                await publish_weights(backend, [engine], targets[name])
            if round_number:
                seconds[name].append(time.perf_counter() - began)
            sent_bytes[name] = count_bytes(before, targets[name].newest.weights)
    process.terminate()
    return seconds, sent_bytes


def run_engine(model_dir: Path, num_threads: int, sender: Connection) -> None:
    """Serve the model until the measuring process ends."""
    serve(model_dir, port=0, num_threads=num_threads, max_running_requests=8, on_ready=sender.send)


if __name__ == "__main__":
    main()
