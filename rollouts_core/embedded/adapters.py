"""Low-rank adapters (LoRA) that a trainer publishes, for the matrices of the embedded engine.

Not here: the products (projection.py), training (model/lora.py).

    model.layers.0.self_attn.q_proj.lora_A.weight   [R, K]  The engine joins matrices with the same input (qkv), and
    model.layers.0.self_attn.q_proj.lora_B.weight   [N, R]  joins their adapters: A by rows, B block-diagonally.

Published adapters are already scaled: B (A x) is added to a layer's output. R rank, K inner dimension, N columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollouts_core.embedded.projection import Projection, SmallProducts, choose_library

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""Name endings of an adapter's two matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The position of one of the checkpoint's layers within a joined matrix: a range of rows."""

    projection: Projection
    begin: int
    end: int


def is_adapter(name: str) -> bool:
    return name.endswith((DOWN, UP))


def largest_rank(adapters: Mapping[str, Tensor]) -> int:
    return max(len(tensor) for name, tensor in adapters.items() if name.endswith(DOWN))


def adapter_shapes(adapters: Mapping[str, Tensor], places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """The required shape of each adapter tensor, by name. The result omits adapters of layers that the model lacks."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in _layers_of(adapters):
        down = adapters.get(layer + DOWN)
        if layer in places and down is not None and down.dim() == 2:
            num_in, rank = places[layer].projection.shape_NK[1], len(down)
            shapes |= {layer + DOWN: (rank, num_in), layer + UP: (places[layer].end - places[layer].begin, rank)}
    return shapes


def place_adapters(adapters: Mapping[str, Tensor], places: Mapping[str, Place]) -> None:
    """Set the adapters of all matrices, and remove the adapters of matrices without adapted layers."""
    parts: dict[int, list[tuple[Place, Tensor, Tensor]]] = {}
    for layer in _layers_of(adapters):
        place = places[layer]
        parts.setdefault(id(place.projection), []).append((place, adapters[layer + DOWN], adapters[layer + UP]))
    for projection in {id(place.projection): place.projection for place in places.values()}.values():
        projection.adapter = _join(projection, parts[id(projection)]) if id(projection) in parts else None


def adapter_projections(projections: Iterable[Projection]) -> list[Projection]:
    return [each for projection in projections if projection.adapter for each in projection.adapter]


def merge_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with their adapters merged in. Merged weights are float32; other weights stay unchanged."""
    merged = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for layer in _layers_of(tensors):
        delta = tensors[layer + UP].float() @ tensors[layer + DOWN].float()
        merged[f"{layer}.weight"] = merged[f"{layer}.weight"].float() + delta
    return merged


def _layers_of(adapters: Iterable[str]) -> list[str]:
    """The names of the layers that have adapters, in the order of the tensors."""
    return list(dict.fromkeys(name.removesuffix(DOWN).removesuffix(UP) for name in adapters if is_adapter(name)))


def _join(projection: Projection, parts: list[tuple[Place, Tensor, Tensor]]) -> SmallProducts:
    """Join the adapters of the layers of one matrix into one pair of matrices."""
    down_RK = torch.cat([down for _, down, _ in parts])
    up_NR = down_RK.new_zeros(projection.shape_NK[0], len(down_RK))
    first = 0
    for place, down, up in parts:
        up_NR[place.begin : place.end, first : first + len(down)] = up
        first += len(down)
    return SmallProducts(
        Projection(down_RK, None, choose_library(down_RK)), Projection(up_NR, None, choose_library(up_NR))
    )
