"""Multiply rows with a matrix so that each row's result is bitwise independent of the number of rows.

Not here: the model (decoder.py), reading weights (weights.py).

    weight changed -> forget_packed() -> first call packs the weight -> later calls use the packed copy

Libraries multiply rows in blocks, and the remaining rows with another kernel that may round differently. For packed
weights the library uses one kernel for nearly every number of rows, which is also faster. The library is MKL on
processors of Intel, and oneDNN on other processors. Callers pad rows to a multiple of `row_step`, which depends on the
processor.

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
"""Numbers of rows to test. The result for each number must equal the first rows of a product with TRIAL_ROWS rows."""
PACKED_FOR_ROWS = 256
"""Expected number of rows, given to the library when it packs weights. Products may have another number of rows. With a
lower value (MKL: below 160 for small weights; oneDNN: 1) the library uses another kernel for a single row."""
ONEDNN_MIN_WEIGHTS = 2**18
"""On processors that are not from Intel, MKL multiplies smaller matrices than this, because each product of oneDNN has
an overhead of about 12 us."""


class SmallProducts(NamedTuple):
    """The two matrices of an adapter: up(down(rows)) is added to the result of the adapted matrix."""

    down: Projection
    up: Projection


class Projection:
    """A matrix with its bias, and a packed copy of the matrix that products use.

    Args:
        weight_NK: the matrix. After writing into it, call `forget_packed`.
        bias_N: added to each row's result.
        library: packs and multiplies; None for `torch.nn.functional.linear` without packing.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, library: Library | None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N
        self.library = library
        self.adapter: SmallProducts | None = None
        """The adapter of this matrix; None without an adapter. The adapter's result is computed in the adapter's
        dtype."""
        self._packed: Tensor | None = None

    @property
    def shape_NK(self) -> tuple[int, int]:
        """Shape of the matrix: number of columns of the result, inner dimension."""
        return self.weight_NK.shape[0], self.weight_NK.shape[1]

    def forget_packed(self) -> None:
        """Discard the packed copy after the matrix changed. The next product packs the matrix again."""
        self._packed = None

    def __call__(self, rows: Tensor) -> Tensor:
        """rows @ weight.T + bias over the last dimension, plus the result of the adapter, if any."""
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
    """The fastest library for this matrix. A fixed rule decides, because the libraries round differently, and
    measured times could change the choice from run to run."""
    if weight_NK.dtype != torch.float32 or not (torch._C.has_mkl and hasattr(torch.ops.mkl, "_mkl_linear")):
        return None
    is_for_mkl = read_vendor() in ("GenuineIntel", "") or weight_NK.numel() < ONEDNN_MIN_WEIGHTS
    return "mkl" if is_for_mkl or not torch._C._has_mkldnn else "onednn"


@lru_cache
def read_vendor() -> str:
    """The vendor of the processor from /proc/cpuinfo, for instance "GenuineIntel"; "" if the file does not name it."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^vendor_id\s*:\s*(\S+)", cpuinfo.read_text("utf-8"), re.M) if cpuinfo.exists() else None
    return found[1] if found else ""


def find_row_step(projections: Iterable[Projection]) -> int:
    """The smallest of `ROW_STEPS` whose multiples, as numbers of rows, give bitwise equal results per row in all these
    products."""
    trials = {
        (min(columns, TRIAL_COLUMNS + columns % TRIAL_COLUMNS), inner, project.weight_NK.dtype, project.library)
        for project in projections
        for columns, inner in [project.shape_NK]
    }
    return max(_exact_row_step(*trial, torch.get_num_threads()) for trial in trials)


@lru_cache
@torch.inference_mode()
def _exact_row_step(num_columns: int, inner: int, dtype: torch.dtype, library: Library | None, num_threads: int) -> int:
    """The row step for products of one shape, found by trial (`find_row_step`)."""
    generator = torch.Generator().manual_seed(0)
    rows_BK = torch.randn(TRIAL_ROWS, inner, generator=generator).to(dtype)
    project = Projection(torch.randn(num_columns, inner, generator=generator).to(dtype), None, library)
    whole_BN = project(rows_BK)
    unlike = [count for count in TRIAL_COUNTS if not torch.equal(project(rows_BK[:count]), whole_BN[:count])]
    for step in ROW_STEPS:
        if all(count % step for count in unlike):
            return step
    logger.warning(
        "with %d threads, matrix products of width %d are rounded differently for different numbers of rows: "
        "log-probs may depend slightly on the other requests in the batch; if they must not, use one thread",
        num_threads,
        inner,
    )
    return ROW_STEPS[-1]
