"""Convert tensors to handles that SGLang maps: handles of this machine's shared memory, or of a GPU's memory (CUDA
IPC).

Not here: the requests to the server (to_sglang.py).

    [(name, tensor), ...] -> pickle that has, for each tensor, the name of shared memory | the handle of a GPU's memory

SGLang unpickles only functions that rebuild tensors, so the pickle contains nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

DEVICE_INDEX = 6
"""Index of the GPU's number among the arguments of `rebuild_cuda_tensor`."""


def share(bucket: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    """Copy the tensors into memory that other processes can map as long as the copies are referenced."""
    if device != "cpu":
        return {name: tensor.to(device) for name, tensor in bucket.items()}
    num_bytes = sum(tensor.nbytes for tensor in bucket.values())
    storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    shared: dict[str, Tensor] = {}
    begin = 0
    for name, tensor in bucket.items():  # wide number formats first (sent.split_buckets), so each tensor is aligned
        place = memory[begin : begin + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
        shared[name] = place.copy_(tensor)
        begin += tensor.nbytes
    return shared


def render_handles(shared: Mapping[str, Tensor]) -> bytes:
    """The pickle for one rank of a server. Ranks cannot share a pickle, because shared memory counts its readers."""
    buffer = io.BytesIO()
    _HandlePickler(buffer).dump(list(shared.items()))
    return buffer.getvalue()


def forget(shared: Mapping[str, Tensor]) -> None:
    """Remove shared memory that a server did not map. Without the removal, the memory would stay until the machine
    restarts."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in shared.values()}
    for storage in storages.values():
        if storage.device.type == "cpu":
            name = storage._share_filename_cpu_()[1].decode()
            Path("/dev/shm", name.lstrip("/")).unlink(missing_ok=True)


class _HandlePickler(pickle.Pickler):
    """Pickles tensors by the functions of torch.multiprocessing, without changing settings of the whole process."""

    def reducer_override(self, value: Any) -> Any:  # Any: pickle's protocol
        if isinstance(value, Tensor):
            function, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
            if value.is_cuda:
                # The handle names the GPU by its UUID, because the GPU may have another number in the server.
                gpu = str(torch.cuda.get_device_properties(value.device).uuid)
                arguments = (*arguments[:DEVICE_INDEX], gpu, *arguments[DEVICE_INDEX + 1 :])
            return function, arguments
        if isinstance(value, torch.storage.TypedStorage):
            return reductions.reduce_typed_storage(value)  # type: ignore[no-untyped-call]
        if isinstance(value, torch.UntypedStorage):
            handle = value._share_filename_cpu_()
            value._shared_incref()  # type: ignore[no-untyped-call]  # the server decrements the count
            return reductions.rebuild_storage_filename, (type(value), *handle)
        return NotImplemented
