"""Multiply rows with a matrix so that a row's result does not depend, bit for bit, on how many rows there are.

Not here: what is multiplied (decoder.py), where weights come from (weights.py).

    weight changed -> forget_packed() -> first call packs it into its library's own order -> later calls use that

Libraries compute rows in blocks, and left-over rows with another kernel, which may round differently. Packed weights
meet one kernel for (nearly) any number of rows, and are read faster: MKL's on Intel's processors with AVX-512, oneDNN's
on other makers'. Rows are a multiple of `row_step`, which is found by trial because it depends on the processor.

Letters: B rows, K inner dimension, N columns.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

Library = Literal["mkl", "onednn"]

ROW_STEPS = (1, 2, 4, 8, 16, 32)
TRIAL_ROWS, TRIAL_COLUMNS = 512, 256
TRIAL_COUNTS = (*range(1, 65), 96, 97, 127, 128, 160, 255, 256, 384)
"""Numbers of rows that are compared with TRIAL_ROWS: every small one, and some of the larger."""
PACKED_FOR_ROWS = 256
"""Rows that the library is told to expect. Any number can be computed, but small weights that were packed for MKL for
fewer than 160 rows meet a single row with a kernel of its own, as all do that were packed for oneDNN for one row."""
ONEDNN_MIN_WEIGHTS = 2**18
"""On other processors than Intel's, smaller matrices are multiplied sooner by MKL: a product of oneDNN costs about
12 us by itself."""


class SmallProducts(NamedTuple):
    """The two matrices of an adapter, which adds up(down(rows)) to a product."""

    down: Projection
    up: Projection


class Projection:
    """A matrix, its bias, and the packed copy that products are computed with.

    Args:
        weight_NK: the matrix; its owner may write into it, and then calls `forget_packed`.
        bias_N: added to each row's result.
        library: packs and multiplies; None leaves it to `torch.nn.functional.linear`.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, library: Library | None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N
        self.library = library
        self.adapter: SmallProducts | None = None
        """Added to each row's result, in the adapter's number format."""
        self._packed: Tensor | None = None

    @property
    def shape_NK(self) -> tuple[int, int]:
        """Columns and inner dimension."""
        return self.weight_NK.shape[0], self.weight_NK.shape[1]

    def forget_packed(self) -> None:
        """Pack the weights again before they are next used."""
        self._packed = None

    def __call__(self, rows: Tensor) -> Tensor:
        """rows @ weight.T + bias, over the last dimension, and what an adapter adds."""
        product = self._multiply(rows)
        if self.adapter is None:
            return product
        added = self.adapter.up(self.adapter.down(rows.to(self.adapter.down.weight_NK.dtype)))
        return product.add_(added.to(product.dtype))

    def _multiply(self, rows: Tensor) -> Tensor:
        if self.library is None:
            return F.linear(rows, self.weight_NK, self.bias_N)
        if self._packed is None:
            self._packed = self._pack()
        product: Tensor
        if self.library == "onednn":
            product = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias_N, "none", [], "")
        else:
            num_rows = rows.numel() // rows.shape[-1]
            product = torch.ops.mkl._mkl_linear(rows, self._packed, self.weight_NK, self.bias_N, num_rows)
        return product

    def _pack(self) -> Tensor:
        packed: Tensor
        if self.library == "onednn":
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight_NK, PACKED_FOR_ROWS)
        else:
            packed = torch.ops.mkl._mkl_reorder_linear_weight(self.weight_NK, PACKED_FOR_ROWS)
        return packed


def choose_library(weight_NK: Tensor) -> Library | None:
    """The fastest kind of product with this matrix. By rule and not by trial, because the libraries round
    differently."""
    if weight_NK.dtype != torch.float32 or not (torch._C.has_mkl and hasattr(torch.ops.mkl, "_mkl_linear")):
        return None
    is_for_mkl = read_vendor() in ("GenuineIntel", "") or weight_NK.numel() < ONEDNN_MIN_WEIGHTS
    return "mkl" if is_for_mkl or not torch._C._has_mkldnn else "onednn"


@lru_cache
def read_vendor() -> str:
    """Maker of the processor, in Linux's words ("GenuineIntel", "AuthenticAMD"); "" where that is not said."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^vendor_id\s*:\s*(\S+)", cpuinfo.read_text("utf-8"), re.M) if cpuinfo.exists() else None
    return found[1] if found else ""


def find_row_step(projections: Iterable[Projection]) -> int:
    """The smallest of `ROW_STEPS` whose multiples meet the same arithmetic in all these products."""
    trials = {
        (min(columns, TRIAL_COLUMNS + columns % TRIAL_COLUMNS), inner, project.weight_NK.dtype, project.library)
        for project in projections
        for columns, inner in [project.shape_NK]
    }
    return max(_exact_row_step(*trial, torch.get_num_threads()) for trial in trials)


@lru_cache
@torch.inference_mode()
def _exact_row_step(num_columns: int, inner: int, dtype: torch.dtype, library: Library | None, num_threads: int) -> int:
    """The same for products of one shape, by trial."""
    generator = torch.Generator().manual_seed(0)
    rows_BK = torch.randn(TRIAL_ROWS, inner, generator=generator).to(dtype)
    project = Projection(torch.randn(num_columns, inner, generator=generator).to(dtype), None, library)
    whole_BN = project(rows_BK)
    unlike = [count for count in TRIAL_COUNTS if not torch.equal(project(rows_BK[:count]), whole_BN[:count])]
    for step in ROW_STEPS:
        if all(count % step for count in unlike):
            return step
    logger.warning(
        "with %d threads, products of width %d are rounded differently with more rows: completions may differ in their "
        "last digits with what else runs; use one thread where they must not",
        num_threads,
        inner,
    )
    return ROW_STEPS[-1]
