"""Multiply rows with a matrix so that a row's result does not depend, bit for bit, on how many rows there are.

Not here: what is multiplied (decoder.py), where weights come from (weights.py).

    weight changed -> forget_packed() -> first call packs it into BLAS's own order -> later calls use that

BLAS computes rows in blocks, and left-over rows with another kernel, which may round differently. Packed weights meet
one kernel for any number of rows on processors with AVX-512, and are read faster; elsewhere rows are a multiple of
`row_step`, which is found by trial because it depends on the processor.

Letters: B rows, K inner dimension, N columns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

ROW_STEPS = (1, 2, 4, 8, 16, 32)
TRIAL_ROWS, TRIAL_COLUMNS = 512, 256
TRIAL_COUNTS = (*range(1, 65), 96, 97, 127, 128, 160, 255, 256, 384)
"""Numbers of rows that are compared with TRIAL_ROWS: every small one, and some of the larger."""
PACKED_FOR_ROWS = 256
"""Rows that BLAS is told to expect. Any number can be computed, but small weights that were packed for fewer than 160
rows meet a single row with a kernel of its own."""


class Projection:
    """A matrix, its bias, and the packed copy that products are computed with.

    Args:
        weight_NK: the matrix; its owner may write into it, and then calls `forget_packed`.
        bias_N: added to each row's result.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N
        self._packed: Tensor | None = None
        self._can_pack = can_pack(weight_NK.dtype)

    @property
    def shape_NK(self) -> tuple[int, int]:
        """Columns and inner dimension."""
        return self.weight_NK.shape[0], self.weight_NK.shape[1]

    def forget_packed(self) -> None:
        """Pack the weights again before they are next used."""
        self._packed = None

    def __call__(self, rows: Tensor) -> Tensor:
        """rows @ weight.T + bias, over the last dimension."""
        if not self._can_pack:
            return F.linear(rows, self.weight_NK, self.bias_N)
        if self._packed is None:
            self._packed = torch.ops.mkl._mkl_reorder_linear_weight(self.weight_NK, PACKED_FOR_ROWS)
        num_rows = rows.numel() // rows.shape[-1]
        product: Tensor = torch.ops.mkl._mkl_linear(rows, self._packed, self.weight_NK, self.bias_N, num_rows)
        return product


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch multiplies with packed weights of this number format."""
    return dtype == torch.float32 and torch._C.has_mkl and hasattr(torch.ops.mkl, "_mkl_linear")


def find_row_step(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
    """The smallest of `ROW_STEPS` whose multiples meet the same arithmetic in products of all these (N, K)."""
    trials = {(min(columns, TRIAL_COLUMNS + columns % TRIAL_COLUMNS), inner) for columns, inner in shapes}
    return max(_exact_row_step(*trial, dtype, torch.get_num_threads()) for trial in trials)


@lru_cache
@torch.inference_mode()
def _exact_row_step(num_columns: int, inner: int, dtype: torch.dtype, num_threads: int) -> int:
    """The same for products of one shape, by trial."""
    generator = torch.Generator().manual_seed(0)
    rows_BK = torch.randn(TRIAL_ROWS, inner, generator=generator).to(dtype)
    project = Projection(torch.randn(num_columns, inner, generator=generator).to(dtype))
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
