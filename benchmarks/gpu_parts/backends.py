"""The backends with their checkpoints, and weights on their way from the trainer's GPU to another process.

Not here: how fast that is (speed.py), engines that take a minute to start (engines.py).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from side_by_side import worker_environment
from torch import Tensor

from gpu_parts.checking import Check, Place, hold, hold_close
from gpu_parts.correctness import TOLERANCE, hold_small_difference
from gpu_parts.engines import publish_to_engine
from gpu_parts.models import OPTIM, create_backend, sft_step, take_step, weights_of, write_small_model
from gpu_parts.receiver import digest
from gpu_parts.record import Figures
from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.backends.fsdp import create_fsdp_backend
from rollouts_core.backends.ranks import join_ranks
from rollouts_core.engines.transfer.cuda_ipc import render_handles, share
from rollouts_core.engines.transfer.group import WeightGroup
from rollouts_core.engines.transfer.group_sender import broadcast_bucket
from rollouts_core.engines.transfer.to_vllm import describe_tensor
from rollouts_core.engines.transfer.versions import BUCKET_BYTES, split_buckets
from rollouts_core.system.listening import bind_port


def restore_backend(place: Place) -> Figures:
    """A step after a checkpoint was loaded equals the step that the saved backend takes next."""
    model = write_small_model(place)
    backend = create_backend(model, place.device)
    take_step(backend, sft_step(0))
    checkpoint = place.folder / "step_1"
    asyncio.run(backend.save_checkpoint(checkpoint, {"step": 1}).result())
    restored = create_backend(model, place.device)
    asyncio.run(restored.load_checkpoint(checkpoint).result())
    for each in (backend, restored):
        take_step(each, sft_step(1))
    return hold_small_difference(weights_of(restored), weights_of(backend))


def compare_fsdp(place: Place) -> Figures:
    """Compare the steps of FSDP with one rank and of one process."""
    model = write_small_model(place)
    expected = create_backend(model, place.device)
    with launched_alone(), join_ranks(device=place.choose("cuda:0", "cpu")) as ranks:
        found = create_fsdp_backend(model, OPTIM, create_cross_entropy_loss(), ranks=ranks, num_steps=100)
        for seed in range(2):
            mine, other = take_step(found, sft_step(seed)), take_step(expected, sft_step(seed))
            for name in ("loss", "grad_norm"):
                hold_close(f"{name} of step {seed}", mine[name], other[name], tolerance=10 * TOLERANCE)
        checkpoint = place.folder / "step_2"
        asyncio.run(found.save_checkpoint(checkpoint, {"step": 2}).result())
        state = asyncio.run(found.load_checkpoint(checkpoint).result())
        hold(state == {"step": 2}, f"the checkpoint gave the state {state}")
    return {"transport": place.choose("nccl", "gloo"), "tolerance": 10 * TOLERANCE}


@contextmanager
def launched_alone() -> Iterator[None]:
    """The variables that torchrun gives its only process."""
    with closing(bind_port("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


class Receiver:
    """A process that takes tensors as engines do; used with `with`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu_parts.receiver"],
            cwd=Path(__file__).parents[1],
            env=worker_environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Give it handles of shared tensors; returns the digests of what it sees there."""
        self._order(handles=base64.b64encode(render_handles(tensors)).decode())
        return self._answer()

    def take_broadcast(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Send it tensors through a group, as to a worker of vLLM; returns the digests of what came."""
        group = WeightGroup("http://127.0.0.1:80", "gloo", num_ranks=1)
        buckets = list(split_buckets(tensors, BUCKET_BYTES))
        place = {"address": group.address, "port": group.port, "name": group.name, "backend": group.backend, "size": 2}
        try:
            described = [[describe_tensor(*named) for named in bucket.items()] for bucket in buckets]
            self._order(group=place, buckets=described)
            group.connect()
            for bucket in buckets:
                asyncio.run(broadcast_bucket(group, bucket))
            return self._answer()
        finally:
            group.close()

    def _order(self, **order: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, str]:
        assert self._process.stdout is not None
        answer: dict[str, str] = json.loads(self._process.stdout.readline() or "{}")
        return answer


def publish_to_process(place: Place) -> Figures:
    """Another process gets the trainer's weights, and sees the same bytes, also after an update.

    It maps them by handles, and takes them by our part inside vLLM. That goes by gloo: NCCL needs a second GPU.
    """
    backend = create_backend(write_small_model(place), place.device)
    with Receiver() as receiver:
        for seed in range(2):
            take_step(backend, sft_step(seed))
            weights = asyncio.run(backend.get_weights().result())
            shared = share(weights, place.device)
            own = {name: digest(tensor) for name, tensor in weights.items()}
            for way, seen in (("handles", receiver.take(shared)), ("gloo", receiver.take_broadcast(weights))):
                wrong = [name for name, expected in own.items() if seen.get(name) != expected]
                hold(not wrong, f"{len(wrong)} of {len(own)} tensors arrived otherwise by {way}: {wrong[:3]}")
    return {"tensors": float(len(own)), "memory": place.choose("CUDA IPC", "shared memory of the host")}


CHECKS = [
    Check(name="PyTorchTrainingBackend resumes from its checkpoint", run=restore_backend),
    Check(name="FSDPTrainingBackend with one rank equals one process", run=compare_fsdp),
    Check(name="another process gets published weights as SGLang and vLLM do", run=publish_to_process),
    Check(name="the embedded engine beside the trainer", run=partial(publish_to_engine, "embedded")),
]
