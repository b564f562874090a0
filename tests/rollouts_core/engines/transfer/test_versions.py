"""Pins which tensors of a version that is sent count as those of the version before.

Without it an engine that has them already would be sent the whole model each time, or keep one that changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollouts_core.engines.transfer.to_sglang import find_missing
from rollouts_core.engines.transfer.versions import HostCopies, SentWeights, find_kept


def publish(copies: HostCopies, weights: dict[str, Tensor]) -> SentWeights:
    return SentWeights(version="v", model_dir=Path(), tensors=copies.take(weights), transfer="gloo")


def test_what_has_the_same_bytes_is_kept_and_a_copy_stays_as_it_was_published() -> None:
    copies = HostCopies()
    trained, frozen = torch.ones(3), torch.ones(3)
    first = publish(copies, {"trained": trained, "frozen": frozen})
    trained += 1
    second = publish(copies, {"trained": trained, "frozen": frozen.clone()})
    assert find_kept(second, first) == {"frozen"}
    assert (first.tensors["trained"].tolist(), second.tensors["trained"].tolist()) == ([1.0] * 3, [2.0] * 3)


@pytest.mark.parametrize("other", [-torch.zeros(2), torch.zeros(2).double(), torch.zeros(2, 1), torch.zeros(3)])
def test_another_sign_of_zero_number_format_or_shape_is_a_change(other: Tensor) -> None:
    copies = HostCopies()
    first = publish(copies, {"w": torch.zeros(2)})
    assert find_kept(publish(copies, {"w": other}), first) == frozenset()


def test_a_version_with_other_names_keeps_nothing() -> None:
    copies, weight = HostCopies(), torch.ones(2)
    first = publish(copies, {"w": weight})
    assert find_kept(publish(copies, {"w": weight, "more": weight}), first) == frozenset()


@pytest.mark.parametrize(
    ("name", "server", "num_missing"),
    [
        ("layers.0.mlp.up_proj.weight", {"quantization": None}, 1),
        ("layers.0.mlp.up_proj.weight", {}, 1),
        ("layers.0.mlp.up_proj.weight", {"quantization": "fp8"}, 2),
        ("layers.0.mlp.experts.3.up_proj.weight", {"quantization": None}, 2),
    ],
)
def test_a_server_that_repacks_its_weights_is_sent_all(name: str, server: dict[str, Any], num_missing: int) -> None:
    tensors = {name: torch.ones(1), "changed": torch.ones(1)}
    assert len(find_missing(tensors, {name}, server)) == num_missing
