"""Keep one version of the weights in host memory, to send this version to engines that do not read the trainer's files.

backend.get_weights -> a copy in host memory -> bucket, bucket, ... -> each engine, and again after its restart
                         |                        ^
                         +- an unchanged tensor is the same object as in the previous version: an engine that has
                            proved the previous version does not get it again
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from rollouts_core.embedded.adapters import merge_published
from rollouts_core.engines.transfer.shared_memory import is_same

SentBy = Literal["gloo", "nccl", "tensors"]
"""The values of `rollout.engine.weight_transfer` with which weights are sent."""
BUCKET_BYTES = 512 * 2**20
"""Size of a bucket of tensors, bytes. A tensor above this size is sent alone. Trainer and engine each hold one bucket
besides the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """One published version of the weights, to send."""

    version: str
    model_dir: Path
    """Directory with the model's config.json."""
    tensors: Mapping[str, Tensor]
    """Tensors in host memory that never change, so that a restarted engine gets the published weights. A tensor that is
    equal in two versions is the same object in both."""
    transfer: SentBy
    """How the tensors are sent."""

    def write(self, directory: Path) -> None:
        """Make `directory` a model directory that holds the weights with merged adapters."""
        save_file(merge_published(self.tensors), directory / "model.safetensors")
        shutil.copyfile(self.model_dir / "config.json", directory / "config.json")


class HostCopies:
    """Copies in host memory of the newest version's tensors, from which this trainer sends them to engines."""

    def __init__(self) -> None:
        self._newest: Mapping[str, Tensor] = {}

    def take(self, weights: Mapping[str, Tensor], *, keeps_others: bool = False) -> Mapping[str, Tensor]:
        """Copy a new version's tensors. For an unchanged tensor, reuse the previous version's copy.

        Args:
            keeps_others: add the previous version's tensors that are not in `weights` to the new version.
        """
        copies = copy_to_host(weights, self._newest)
        self._newest = {**self._newest, **copies} if keeps_others else copies
        return self._newest


def copy_to_host(weights: Mapping[str, Tensor], before: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Copies of the weights in host memory. A tensor that equals its copy in `before` is not copied again."""
    return {name: _copy_tensor(tensor.detach(), (before or {}).get(name)) for name, tensor in weights.items()}


def _copy_tensor(tensor: Tensor, before: Tensor | None) -> Tensor:
    on_host = tensor.cpu().contiguous()
    if before is not None and is_same(on_host, before):
        return before
    return on_host.clone() if on_host.data_ptr() == tensor.data_ptr() else on_host


def find_kept(weights: SentWeights, held: SentWeights) -> frozenset[str]:
    """Names of tensors equal in both versions, which need not be sent again, or empty if the sets of names differ."""
    if weights.tensors.keys() != held.tensors.keys():
        return frozenset()
    return frozenset(name for name, tensor in weights.tensors.items() if held.tensors[name] is tensor)


def split_buckets(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Split tensors into buckets of at most `max_bytes`. Wide number formats come first, so that each tensor is
    aligned."""
    bucket: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if bucket and num_bytes + tensor.nbytes > max_bytes:
            yield bucket
            bucket, num_bytes = {}, 0
        bucket[name] = tensor
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def flatten(bucket: Mapping[str, Tensor], device: str = "cpu") -> Tensor:
    """The concatenated bytes of a bucket's tensors."""
    return torch.cat([tensor.to(device).reshape(-1).view(torch.uint8) for tensor in bucket.values()])
