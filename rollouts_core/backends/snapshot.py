"""Copy tensors to host memory, so that training can continue while a checkpoint is written."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostSnapshot:
    """Host memory for copies of tensors. Later copies reuse the memory, because new memory is slow at its first use."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors. Tensors that share memory share it in the copy too. The next call of `take` overwrites the
        copy."""
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        if device is None:
            return self._copy(tensors)
        # On a separate stream, the copy does not wait for the training's kernels.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copied = self._copy(tensors)
        stream.synchronize()
        return copied

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        first_name: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
        copied: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if tensor.numel() and memory in first_name:
                copied[name] = copied[first_name[memory]]
                continue
            first_name[memory] = name
            copied[name] = _copy(tensor, self._buffer(name, tensor))
        return copied

    @torch.no_grad()
    def keep(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a single tensor, for callers that gather tensors one after another."""
        return self._buffer(name, tensor).copy_(tensor)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            # Copies from a GPU to pinned memory are several times faster.
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer


def _copy(source: Tensor, target: Tensor) -> Tensor:
    """Copy `source` into `target`.

    Copies on the CPU do not use torch, which would start OpenMP workers for this thread. With more workers than cores,
    every worker (of the training too) would sleep at each barrier until this thread ends.
    """
    if source.is_cuda or not source.is_contiguous():
        return target.copy_(source, non_blocking=True)
    np.copyto(_bytes_of(target), _bytes_of(source))
    return target


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The memory of a contiguous CPU tensor as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
