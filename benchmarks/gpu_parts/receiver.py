"""A process that takes tensors as engines do: python -m gpu_parts.receiver

It reads orders from standard input, each a line of JSON, and answers each with a line of JSON: the sha256 of every
tensor's bytes.

    {"handles": ...}                base64 of a pickle of [(name, tensor), ...], as SGLang gets it; the sender must hold
                                    its tensors until the answer
    {"group": ..., "buckets": ...}  what the trainer tells our part inside vLLM, which takes the tensors here, too
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rollouts_core.engines.in_vllm.rollouts_receiver import WeightReceiver
from rollouts_core.engines.transfer.cuda_ipc import DEVICE_INDEX

ALLOWED = ("torch", "collections")
"""First parts of the modules that rebuild tensors; a pickle of handles names no others."""


class HandleUnpickler(pickle.Unpickler):
    """Rebuilds tensors by torch's own functions, on the GPU that a handle names."""

    def find_class(self, module: str, name: str) -> Any:  # Any: pickle's protocol
        """torch's function of this name."""
        if module.partition(".")[0] not in ALLOWED:
            raise pickle.UnpicklingError(f"handles of tensors need no {module}.{name}")
        found = super().find_class(module, name)
        return on_named_gpu(found) if found is reductions.rebuild_cuda_tensor else found


def on_named_gpu(rebuild: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with the GPU's own name in place of its number, which may be another one in this process."""

    def rebuild_there(*arguments: Any) -> Tensor:  # Any: what torch packs
        gpu = find_gpu(str(arguments[DEVICE_INDEX]))
        return rebuild(*arguments[:DEVICE_INDEX], gpu, *arguments[DEVICE_INDEX + 1 :])

    return rebuild_there


def find_gpu(uuid: str) -> int:
    """The number of the GPU with this name in this process."""
    names = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    if uuid not in names:
        raise RuntimeError(f"the handle is of GPU {uuid}, this process has {', '.join(names) or 'none'}")
    return names.index(uuid)


def digest(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().data).hexdigest()


class Worker(WeightReceiver):
    """The attributes of a vLLM worker that `WeightReceiver` uses. Loading computes digests of the given tensors."""

    rank = 0
    parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1)
    digests: dict[str, str]
    """Of the last weights."""

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Take weights, one tensor at a time, as vLLM's own worker does."""
        self.digests = {name: digest(tensor) for name, tensor in weights_iterator}


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(map_handles(**order) if "handles" in order else take_broadcast(**order)), flush=True)


def map_handles(handles: str) -> dict[str, str]:
    """Digests of the tensors behind handles."""
    tensors = HandleUnpickler(io.BytesIO(base64.b64decode(handles))).load()
    return {name: digest(tensor) for name, tensor in tensors}


def take_broadcast(group: dict[str, Any], buckets: list[list[tuple[str, str, list[int]]]]) -> dict[str, str]:
    """Digests of the tensors that the other rank of a group sends."""
    worker = Worker()
    worker.join_weight_group(**group)
    worker.reload_sent_weights(buckets)
    worker.leave_weight_group()
    return worker.digests


if __name__ == "__main__":
    main()
