"""A process that maps tensors by their handles, as an engine does: python -m gpu_parts.receiver

It reads lines of base64, each a pickle of [(name, tensor), ...], from standard input, and answers each with a line of
JSON: the sha256 of every tensor's bytes. The sender must hold its tensors until the answer.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rollouts_core.engines.handles import DEVICE_INDEX

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


def main() -> None:
    for line in sys.stdin:
        tensors = HandleUnpickler(io.BytesIO(base64.b64decode(line))).load()
        answer = {name: digest(tensor) for name, tensor in tensors}
        del tensors
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
